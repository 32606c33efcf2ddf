# SPDX-License-Identifier: Apache-2.0
"""The curve as a picture. Needs matplotlib, an extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvgrpc.cli.trace.replay import Point
from kvgrpc.config.values import format_size


def draw(points: Sequence[Point], recorded_rate: float | None, path: Path) -> None:
    """ImportError without matplotlib; OSError."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(7, 4), layout="constrained")
    axes: Any = figure.subplots()
    sizes = [point.size_bytes for point in points]
    axes.plot(sizes, [100 * point.hit_rate for point in points], marker="o")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [format_size(size) for size in sizes], rotation=45, ha="right")
    axes.minorticks_off()
    if recorded_rate is not None:
        axes.axhline(100 * recorded_rate, color="gray", linestyle="--", linewidth=1, label="as recorded")
        axes.legend()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("L1")
    axes.set_ylabel("hits, % of whole chunks")
    axes.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=120)
