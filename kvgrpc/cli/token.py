# SPDX-License-Identifier: Apache-2.0
"""``kvgrpc token``: a new bearer token, and what stands for it in the file of tenants."""

from __future__ import annotations

import secrets

import click

from kvgrpc.service.access import token_hash

BYTES = 32


@click.command()
def token() -> None:
    """Make a bearer token.

    Prints the token alone on stdout, for the file that clients read (--token-file), and on stderr the hash that goes
    into the server's file of tenants (--access), which never holds the token itself.
    """
    made = secrets.token_urlsafe(BYTES)
    click.echo(made)
    click.echo(f"for the file of tenants: {token_hash(made)}", err=True)
