# SPDX-License-Identifier: Apache-2.0
"""The command ``kvgrpc`` and its subcommands."""

from __future__ import annotations

import click

from kvgrpc import __version__
from kvgrpc.cli.bench import bench
from kvgrpc.cli.demo.command import demo
from kvgrpc.cli.serve import serve
from kvgrpc.cli.status import status


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="kvgrpc")
def main() -> None:
    """Keeps the KV cache of LLM inference engines, so that a prefix computed once is not computed again."""


main.add_command(serve)
main.add_command(status)
main.add_command(demo)
main.add_command(bench)
