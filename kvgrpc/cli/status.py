# SPDX-License-Identifier: Apache-2.0
"""``kvgrpc status``."""

from __future__ import annotations

import asyncio

import click
from rich.console import Console

from kvgrpc.cli.screen import Snapshot, as_json, as_screen
from kvgrpc.client.aio import AioClient
from kvgrpc.client.default import default_address
from kvgrpc.config.places import UntrustedSocketError
from kvgrpc.core.errors import Reason, Refusal


@click.command()
@click.option("--address", metavar="ADDRESS", help="unix:/path or host:port; default: the socket that `serve` chooses")
@click.option("--json", "json_form", is_flag=True, help="print JSON for programs instead of a screen")
def status(address: str | None, json_form: bool) -> None:
    """Show what a server holds and who uses it."""
    try:
        snapshot = asyncio.run(take_snapshot(address or default_address()))
    except (UntrustedSocketError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None
    except Refusal as refusal:
        hint = "; is one running? (kvgrpc serve)" if refusal.reason is Reason.SERVER_UNREACHABLE else ""
        raise click.ClickException(f"the server did not answer: {refusal.message}{hint}") from None
    if json_form:
        click.echo(as_json(snapshot))
    else:
        Console().print(as_screen(snapshot))


async def take_snapshot(address: str) -> Snapshot:
    async with AioClient(address) as client:
        return Snapshot(await client.get_status(), await client.list_engines(), await client.list_spaces())
