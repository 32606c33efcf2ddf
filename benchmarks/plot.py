# SPDX-License-Identifier: Apache-2.0
"""Plots for the README, from the newest committed figures: ``python -m benchmarks.plot [FILE] [FOLDER]``.

The same figures give the same bytes: no date, fixed ids, text as text.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure as Canvas

from kvgrpc.bench.engine import KINDS, LENGTHS
from kvgrpc.bench.results import Report, read

ROOT = Path(__file__).resolve().parent
STYLE: dict[Any, Any] = {"svg.hashsalt": "kvgrpc", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False}
MET, MISSED, FLOOR = "#2a7f62", "#c0392b", "#888888"


def newest(kind: str, folder: Path = ROOT / "results") -> Report:
    paths = sorted(folder.glob(f"*-{kind}.json"))
    if not paths:
        raise SystemExit(f"{folder} has no result of kind {kind}: make bench-results")
    return read(paths[-1])


def draw_lookups(report: Report) -> Canvas:
    """Time to a lookup's answer against the prompt's length, above the empty call."""
    values = {one.name: one for one in report.figures}
    canvas = Canvas(figsize=(5.6, 3.2), layout="constrained")
    axes = canvas.subplots()
    for kind in KINDS:
        found = [values[f"lookup/{kind} {length}"] for length in LENGTHS]
        middle = [one.value / 1000 for one in found]
        spread = [
            [(one.value - (one.low or one.value)) / 1000 for one in found],
            [((one.high or one.value) - one.value) / 1000 for one in found],
        ]
        label = "token ids sent, hashed by the server" if kind == "tokens" else "hashes sent"
        axes.errorbar(list(LENGTHS.values()), middle, yerr=spread, marker="o", markersize=4, capsize=2, label=label)
    floor = values["lookup/empty call"].value / 1000
    axes.axhline(floor, color=FLOOR, linestyle="--", linewidth=1, label="empty call of the same server")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(LENGTHS.values()), list(LENGTHS))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of the prompt, all of them a hit")
    axes.set_ylabel("ms, median (least to most)")
    axes.legend(frameon=False)
    return canvas


def draw_goals(report: Report) -> Canvas:
    """Figures with a goal as shares of it. A bar of "at least" is turned over, so that short is good everywhere."""
    shown = [(one, one.share) for one in report.figures if one.goal is not None and one.share]
    canvas = Canvas(figsize=(7.2, 0.24 * len(shown) + 0.8), layout="constrained")
    axes = canvas.subplots()
    labels = [f"{one.name}: {one.value:.3g} {one.unit}, goal {one.goal}" for one, _ in shown]
    lengths = [1 / share if one.goal and one.goal.startswith(">=") else share for one, share in shown]
    axes.barh(labels, lengths, color=[MET if one.met else MISSED for one, _ in shown])
    axes.axvline(1, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("share of what the goal allows (up to 1: met)")
    return canvas


def draw_card(report: Report) -> Canvas:
    """GB/s of whole calls against their size, below what the bus gives."""
    values = {one.name: one for one in report.figures}
    sizes = {32: "32MiB", 64: "64MiB", 128: "128MiB", 256: "256MiB", 512: "512MiB", 1024: "1024MiB", 2048: "2GiB"}
    canvas = Canvas(figsize=(5.6, 3.2), layout="constrained")
    axes = canvas.subplots()
    for way in ("store", "retrieve"):
        found = [values[f"gpu/{way} 2M runs {size}"] for size in sizes.values()]
        spread = [
            [one.value - (one.low or one.value) for one in found],
            [(one.high or one.value) - one.value for one in found],
        ]
        middle = [one.value for one in found]
        axes.errorbar(list(sizes), middle, yerr=spread, marker="o", markersize=4, capsize=2, label=way)
    ceiling = values["gpu/ceiling store"].value
    axes.axhline(ceiling, color=FLOOR, linestyle="--", linewidth=1, label="the card's own copy, pinned memory")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(sizes), list(sizes.values()))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("size of the call, random blocks of 2 MiB")
    axes.set_ylabel("GB/s, median (least to most)")
    axes.legend(frameon=False, loc="lower right")
    return canvas


def main(file: str = "", folder: str = str(ROOT.parent / "docs")) -> None:
    report = read(Path(file)) if file else newest("bench")
    matplotlib.rcParams.update(STYLE)
    drawn = [("lookup-latency", draw_lookups(report)), ("goals", draw_goals(report))]
    if not file:
        drawn.append(("card-copies", draw_card(newest("gpu"))))
    for name, canvas in drawn:
        canvas.savefig(Path(folder) / f"{name}.svg", format="svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
