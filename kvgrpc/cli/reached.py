# SPDX-License-Identifier: Apache-2.0
"""What a command says when the server cannot be asked."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import click

from kvgrpc.client.default import default_address
from kvgrpc.config.places import UntrustedSocketError
from kvgrpc.core.errors import Reason, Refusal


def target_of(address: str | None) -> str:
    """The address to ask. ClickException when there is no place that can be trusted."""
    try:
        return address or default_address()
    except (UntrustedSocketError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None


def problem(target: str, refusal: Refusal) -> str:
    if refusal.reason is not Reason.SERVER_UNREACHABLE:
        return f"the server at {target} did not answer: {refusal.message}"
    return f"no server answers at {target}; is one running (kvgrpc serve), and there?\n  {refusal.message}"


@contextmanager
def told(target: str) -> Generator[None, None, None]:
    """Turns what a server refuses, and what is wrong with an address, into the command's error."""
    try:
        yield
    except Refusal as refusal:
        raise click.ClickException(problem(target, refusal)) from None
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None
