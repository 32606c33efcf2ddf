# SPDX-License-Identifier: Apache-2.0
"""``kvgrpc serve``."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvgrpc import __version__
from kvgrpc.app import Choices
from kvgrpc.app import serve as serve_settings
from kvgrpc.cli.options import settings_options
from kvgrpc.config.places import UntrustedSocketError, claim_default_socket
from kvgrpc.config.settings import SettingsError, load_settings, strange_variables
from kvgrpc.config.values import format_size
from kvgrpc.service.access import AccessError
from kvgrpc.service.listeners import ListenError
from kvgrpc.telemetry.log import configure, logger
from kvgrpc.telemetry.running import TelemetryError
from kvgrpc.transfer.arena import ArenaError


@click.command()
@settings_options
def serve(**flags: Any) -> None:
    """Run the server of this node.

    Needs no option: it listens on a Unix socket of this user and takes half of the available memory, at most 4 GiB.
    Each option has a variable, KVGRPC_ and its name in capitals (KVGRPC_L1_SIZE for --l1-size); an option wins.
    SIGTERM drains: new calls are refused, running ones end.
    """
    keep_standard_files()
    try:
        settings = load_settings(**flags)
        if settings.socket is None:
            claim_default_socket()
        configure(settings.log_level, settings.log_format)
        for sentence in strange_variables():
            logger("serve").warning(sentence)
        asyncio.run(serve_settings(settings, announce))
    except (SettingsError, UntrustedSocketError, ListenError, ArenaError, TelemetryError, AccessError) as error:
        raise click.ClickException(str(error)) from None


def keep_standard_files() -> None:
    """One that the process began without would be the number of the first file that it opens, as L1's, and libraries
    write to it."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)


def announce(choices: Choices) -> None:
    """Says what the server runs with: a table for a person, one log line for a machine."""
    place = "" if choices.arena_path is None else f", in {choices.arena_path}"
    rows = {
        "listens": ", ".join(choices.addresses) + f" (socket mode {choices.socket_mode:04o})",
        "L1": f"{format_size(choices.l1_bytes)} of {format_size(choices.available_bytes)} available{place}",
        "below L1": ", ".join(choices.tiers) or "nothing",
        "chunk": f"{choices.chunk_tokens} tokens",
        "threads": f"{choices.gpu_workers} for copies, {choices.cpu_workers} for hashing and tiers",
        "cards": str(choices.cards) if choices.cards else "none: engines in host memory only",
        "reflection": "on" if choices.reflection else "off",
    }
    rows["access"] = _access(choices)
    if choices.health:
        rows["health"] = choices.health
    if choices.metrics:
        rows["metrics"] = f"http://{choices.metrics}/metrics"
    console = Console()
    if not console.is_terminal:
        logger("serve").info("started", version=__version__, **rows)
        return
    console.print(f"[bold green]kvgrpc {__version__}[/]  (Ctrl-C drains and stops)")
    console.print(as_table(rows))


def as_table(rows: dict[str, str]) -> Table:
    """In a narrow terminal an address goes on in the next line; none of it is left out."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows.items():
        table.add_row(name, escape(text))
    return table


def _access(choices: Choices) -> str:
    who = "tenants of the file" if choices.tenants else "whoever can connect"
    return f"{who}, with TLS over TCP" if choices.tls else who
