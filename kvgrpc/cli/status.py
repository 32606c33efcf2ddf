# SPDX-License-Identifier: Apache-2.0
"""``kvgrpc status``."""

from __future__ import annotations

import asyncio

import click

from kvgrpc.cli.connection import connection_options, credentials_of
from kvgrpc.cli.reached import target_of, told
from kvgrpc.cli.screen import Snapshot, as_json, as_screen, wide
from kvgrpc.client.aio import AioClient
from kvgrpc.client.channel import ChannelOptions
from kvgrpc.client.credentials import Credentials


@click.command()
@connection_options
@click.option("--json", "json_form", is_flag=True, help="print JSON for programs instead of a screen")
def status(address: str | None, json_form: bool, **credentials: str | None) -> None:
    """Show what a server holds and who uses it."""
    target = target_of(address)
    with told(target):
        snapshot = asyncio.run(take_snapshot(target, credentials_of(credentials)))
    if json_form:
        click.echo(as_json(snapshot))
    else:
        wide().print(as_screen(snapshot))


async def take_snapshot(address: str, credentials: Credentials) -> Snapshot:
    async with AioClient(address, options=ChannelOptions(credentials=credentials)) as client:
        return await snapshot_of(client)


async def snapshot_of(client: AioClient) -> Snapshot:
    return Snapshot(await client.get_status(), await client.list_engines(), await client.list_spaces())
