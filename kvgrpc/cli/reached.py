# SPDX-License-Identifier: Apache-2.0
"""What a command says when the server cannot be asked."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import click

from kvgrpc.client.address import parse_address
from kvgrpc.client.default import default_address
from kvgrpc.config.places import UntrustedSocketError
from kvgrpc.core.errors import Reason, Refusal

TLS_HINT = (
    " If it has TLS, name its CA with --ca-file; if you did, its certificate may be of another CA, or expired, or"
    " of another name, which --server-name says."
)
ACCESS_HINTS = {
    Reason.UNAUTHENTICATED: "\n  A command sends the token of --token-file.",
    Reason.NOT_ALLOWED: "\n  `may` and `salts` in the server's file of tenants (--access) say what is allowed.",
}


def target_of(address: str | None) -> str:
    """The address to ask. ClickException when there is no place that can be trusted."""
    try:
        return address or default_address()
    except (UntrustedSocketError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None


def problem(target: str, refusal: Refusal) -> str:
    if refusal.reason is Reason.SERVER_UNREACHABLE:
        tls = "" if parse_address(target).is_unix else TLS_HINT
        return f"no server answers at {target}; is one running (kvgrpc serve), and there?{tls}\n  {refusal.message}"
    if refusal.reason is Reason.DEADLINE:
        return f"the server at {target} did not answer: {refusal.message}"
    return f"the server at {target} refuses: {refusal.message}{ACCESS_HINTS.get(refusal.reason, '')}"


@contextmanager
def told(target: str) -> Generator[None, None, None]:
    """Turns what a server refuses, and what is wrong with an address, into the command's error."""
    try:
        yield
    except Refusal as refusal:
        raise click.ClickException(problem(target, refusal)) from None
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None
