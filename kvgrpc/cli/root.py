# SPDX-License-Identifier: Apache-2.0
"""The command ``kvgrpc`` and its subcommands."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module

import click

from kvgrpc import __version__

_COMMANDS = {
    "serve": "kvgrpc.cli.serve",
    "status": "kvgrpc.cli.status",
    "top": "kvgrpc.cli.top",
    "inspect": "kvgrpc.cli.inspect",
    "trace": "kvgrpc.cli.trace.command",
    "clear": "kvgrpc.cli.clear",
    "quota": "kvgrpc.cli.limits",
    "write-policy": "kvgrpc.cli.limits",
    "healthcheck": "kvgrpc.cli.healthcheck",
    "token": "kvgrpc.cli.token",
    "demo": "kvgrpc.cli.demo.command",
    "bench": "kvgrpc.cli.bench",
    "doctor": "kvgrpc.cli.doctor",
}
"""Where each command is; loaded when it is asked for, so that a server does not wait for what it never uses."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = _COMMANDS.get(cmd_name)
        return None if place is None else getattr(import_module(place), cmd_name.replace("-", "_"))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's own, which sees no commands here that it could suggest."""
        name = args[0]
        if not name.startswith("-") and name not in _COMMANDS and (near := get_close_matches(name, _COMMANDS, 1)):
            raise click.UsageError(f"No such command '{name}'. Did you mean '{near[0]}'?", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="kvgrpc")
def main() -> None:
    """Keeps the KV cache of LLM inference engines, so that a prefix computed once is not computed again."""
