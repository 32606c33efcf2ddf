# SPDX-License-Identifier: Apache-2.0
"""What is measured, in this order. Importing it costs nothing; a measurement is loaded when it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import cast

from kvgrpc.bench.results import Figure


@dataclass(frozen=True, slots=True)
class Effort:
    """How often things are repeated, how many calls are in a repetition, how long a client asks."""

    repetitions: int
    calls: int
    seconds: float


FULL = Effort(15, 40, 0.5)
QUICK = Effort(3, 8, 0.05)

_PLACES = {
    "core": "core",
    "imports": "start",
    "start": "start",
    "health": "calls",
    "lookup": "calls",
    "lookups": "calls",
    "turn": "calls",
    "copies": "copies",
}
NAMES = tuple(_PLACES)
"""The names of measurements; the names of their figures begin with them and a slash."""


def measure(name: str, effort: Effort) -> list[Figure]:
    """Starts what is needed, measures, ends it. BenchError when something does not run."""
    module = import_module(f"kvgrpc.bench.{_PLACES[name]}")
    return cast("Callable[[Effort], list[Figure]]", getattr(module, name))(effort)
