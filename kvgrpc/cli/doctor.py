# SPDX-License-Identifier: Apache-2.0
"""``kvgrpc doctor``."""

from __future__ import annotations

import sys

import click
from rich.console import Console
from rich.table import Table

from kvgrpc.cli.checks import Finding, Verdict, card_findings, host_findings

_COLOURS = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}


@click.command()
def doctor() -> None:
    """Look at this machine: cards, memory, limits.

    Each line is OK, WARN or FAIL, with what to do. Takes some hundred MiB of each card for some seconds. Ends with 1
    when anything fails. Run it where the server runs, in the same container: what it may not see there, the server does
    not see either.
    """
    findings: list[Finding] = []
    table = Table(box=None, pad_edge=False, show_header=False)
    for one in (*host_findings(), *card_findings()):
        findings.append(one)
        table.add_row(f"[{_COLOURS[one.verdict]}]{one.verdict.value}[/]", one.what, one.text)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    if any(one.verdict is Verdict.FAIL for one in findings):
        raise SystemExit(1)
