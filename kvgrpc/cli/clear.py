# SPDX-License-Identifier: Apache-2.0
"""``kvgrpc clear``: what was stored for a model, for a tenant, or at all, is never found again."""

from __future__ import annotations

import click

from kvgrpc.api import ClearTarget
from kvgrpc.cli.connection import connection_options, credentials_of
from kvgrpc.cli.reached import target_of, told
from kvgrpc.client import Client
from kvgrpc.client.channel import ChannelOptions


@click.command()
@click.option("--model", metavar="NAME", help="what was stored for this model, as after new weights under its name")
@click.option("--salt", metavar="SALT", help="what was stored for this tenant; '' = by requests without a salt")
@click.option("--all", "everything", is_flag=True, help="everything")
@connection_options
def clear(
    model: str | None, salt: str | None, everything: bool, address: str | None, **credentials: str | None
) -> None:
    """Forget what was stored for a model, a tenant, or all.

    It is never found again, neither in L1 nor in lower tiers, also after a restart; nor is what lies in lower tiers and
    no engine has named since the server's start. Other servers that run keep what they have: clear each of them.
    """
    if (model is not None) + (salt is not None) + everything != 1:
        raise click.UsageError("say what to forget: one of --model, --salt and --all")
    if model == "":
        raise click.BadParameter("a model has a name", param_hint="--model")
    target = target_of(address)
    with told(target):
        with Client(target, options=ChannelOptions(credentials=credentials_of(credentials))) as client:
            cleared = client.clear(ClearTarget(model=model, cache_salt=salt, all=everything))
    used = f", {cleared.still_pinned_chunks} of them are still in use" if cleared.still_pinned_chunks else ""
    click.echo(f"{cleared.removed_chunks} chunks are forgotten{used}")
