# SPDX-License-Identifier: Apache-2.0
"""``kvgrpc bench``."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvgrpc.bench.card import CardEngine
from kvgrpc.bench.processes import BenchError, unwind_at_sigterm
from kvgrpc.bench.results import Figure, Report, versions
from kvgrpc.bench.suite import CARD_NAMES, NAMES, measure


@click.command()
@click.argument("what", required=False, type=click.Choice(["gpu"]))
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="also write FILE, or DATE-KIND.json into it")
@click.option(
    "--only", multiple=True, type=click.Choice((*NAMES, *CARD_NAMES)), help="measure only this (may be repeated)"
)
@click.option("--quick", is_flag=True, help="few repetitions: shows that all runs, says little of speed")
@click.option("--strict", is_flag=True, help="exit with 1 when a goal is missed")
def bench(what: str | None, json_path: Path | None, only: tuple[str, ...], quick: bool, strict: bool) -> None:
    """Measure this machine: calls, lookups, copies.

    The core alone and starting, too; with GPU, copies of its card. Starts servers and clients of its own on private
    sockets and ends them. Needs 6 GiB of free memory. Each value is a median over repetitions; ratios are taken between
    things that alternate in one run.
    """
    known = CARD_NAMES if what == "gpu" else NAMES
    if strange := [name for name in only if name not in known]:
        place = "kvgrpc bench" if what == "gpu" else "kvgrpc bench gpu"
        raise click.UsageError(f"--only {strange[0]} is of {place}; here there are {', '.join(known)}")
    if json_path is not None and not (json_path.is_dir() or os.access(json_path.parent, os.W_OK)):
        raise click.BadParameter(f"{json_path.parent} is no folder that can be written to", param_hint="--json")
    unwind_at_sigterm()
    figures: list[Figure] = []
    names = [name for name in known if name in only] or list(known)
    columns = (TextColumn("measuring {task.description}"), BarColumn(), TimeElapsedColumn())
    # drawn between measurements only: a thread that redraws would be measured too
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        task = progress.add_task("", total=len(names))
        for name in names:
            progress.update(task, description=name, refresh=True)
            try:
                figures += measure(name, quick)
            except BenchError as error:
                raise click.ClickException(f"{name}: {error}") from None
            progress.advance(task)
    kind = "quick" if quick else what or "bench"
    report = Report(kind, tuple(figures), versions=card_versions() if what == "gpu" else versions())
    Console().print(as_table(report.figures))
    if json_path is not None:
        click.echo(f"written: {report.write(json_path)}")
    if strict and any(one.met is False for one in figures):
        raise SystemExit(1)


def card_versions() -> dict[str, str]:
    """The card, its driver, and what the server uses on it."""
    driver = Path("/proc/driver/nvidia/version")
    found = re.findall(r"\s(\d+\.\d+(?:\.\d+)?)\s", driver.read_text()) if driver.exists() else []
    card = CardEngine()
    facts = {"card": card.name, "cuda": card.driver, "driver": found[0] if found else "unknown"}
    return versions("cupy-cuda12x", "cupy-cuda13x", "torch") | facts


def as_table(figures: tuple[Figure, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("figure", "median", "spread", "goal", ""):
        table.add_column(column, justify="right" if column in {"median", "spread"} else "left", no_wrap=True)
    for one in figures:
        spread = "" if one.low is None or one.high is None else f"{_short(one.low)}..{_short(one.high)}"
        verdict = {None: "", True: "[green]met[/]", False: "[bold red]missed[/]"}[one.met]
        unit = "" if one.of else f" {one.unit}"
        table.add_row(one.name, _short(one.value) + unit, spread, one.goal or "", verdict)
    return table


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
