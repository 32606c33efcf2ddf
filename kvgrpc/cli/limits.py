# SPDX-License-Identifier: Apache-2.0
"""``kvgrpc quota`` and ``kvgrpc write-policy``: what is set for one tenant, and for one model, while a server runs."""

from __future__ import annotations

from typing import cast

import click

from kvgrpc.cli.connection import connection_options, credentials_of
from kvgrpc.cli.reached import target_of, told
from kvgrpc.client import Client
from kvgrpc.client.channel import ChannelOptions
from kvgrpc.config.values import format_size, parse_size
from kvgrpc.core.types import WritePolicy

NO_QUOTA, NO_OWN = "none", "default"


@click.command()
@click.argument("salt")
@click.argument("size", required=False)
@connection_options
def quota(salt: str, size: str | None, address: str | None, **credentials: str | None) -> None:
    """Show or set what one tenant may hold in L1.

    The tenant is that of SALT. Without SIZE it is shown only. SIZE is for example 16GiB, or "none" for no quota; what
    is too much goes at once. SALT '' stands for requests without one. It lasts until the server ends.
    """
    try:
        wanted = None if size in (None, NO_QUOTA) else cast(int, parse_size(size))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="SIZE") from None
    if wanted == 0:
        raise click.BadParameter(f"a quota is more than 0 bytes; {NO_QUOTA!r} takes it away", param_hint="SIZE")
    target = target_of(address)
    with told(target):
        with Client(target, options=ChannelOptions(credentials=credentials_of(credentials))) as client:
            now = client.get_quota(salt) if size is None else client.set_quota(salt, wanted)
    most = "no quota" if now.size_bytes is None else f"a quota of {format_size(now.size_bytes)}"
    click.echo(f"{salt!r} has {most} and holds {format_size(now.used_bytes)}")


@click.command("write-policy")
@click.argument("policy", type=click.Choice([*(policy.value for policy in WritePolicy), NO_OWN]))
@click.option(
    "--model", default="", metavar="NAME", help="of this model only; default: of all that have none of theirs"
)
@connection_options
def write_policy(policy: str, model: str, address: str | None, **credentials: str | None) -> None:
    """Set what is copied down to lower tiers.

    For what is stored from now on. "default" takes a model's own policy away; without --model it is "through". It lasts
    until the server ends.
    """
    target = target_of(address)
    with told(target):
        with Client(target, options=ChannelOptions(credentials=credentials_of(credentials))) as client:
            now = client.set_write_policy(model, None if policy == NO_OWN else WritePolicy(policy))
    click.echo(f"{f'model {model!r}' if model else 'models without one of their own'}: {now.value}")
