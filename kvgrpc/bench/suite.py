# SPDX-License-Identifier: Apache-2.0
"""What is measured, in this order. Importing it costs nothing: a measurement loads what it needs in its own process."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict, dataclass
from importlib import import_module

from kvgrpc.bench.processes import BenchError, answer, running, say, unwind_at_sigterm
from kvgrpc.bench.results import Figure


@dataclass(frozen=True, slots=True)
class Effort:
    """How often things are repeated, how many calls are in a repetition, how long a client asks."""

    repetitions: int
    calls: int
    seconds: float


FULL = Effort(15, 40, 0.5)
QUICK = Effort(2, 8, 0.05)

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
_CARD_PLACES = dict.fromkeys(("gpu_copies", "gpu_movers", "gpu_calls", "gpu_start", "gpu_beside"), "gpu")
CARD_NAMES = tuple(_CARD_PLACES)
"""Those that need a card; the names of their figures begin with ``gpu/``."""


def measure(name: str, quick: bool) -> list[Figure]:
    """One measurement, in a process of its own: what was loaded or measured before has no part in it. BenchError when
    something does not run."""
    with running("kvgrpc.bench.suite", name, "quick" if quick else "full") as process:
        return [Figure(**one) for one in json.loads(answer(process))]


def main(name: str, effort: str) -> None:
    unwind_at_sigterm()
    act = getattr(import_module(f"kvgrpc.bench.{(_PLACES | _CARD_PLACES)[name]}"), name)
    try:
        figures: list[Figure] = act(QUICK if effort == "quick" else FULL)
    except BenchError as error:
        sys.exit(f"{name}: {error}")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # who has the answer ends this, which ends by itself
    say(json.dumps([asdict(one) for one in figures]))


if __name__ == "__main__":
    main(*sys.argv[1:])
