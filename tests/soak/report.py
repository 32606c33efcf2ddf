# SPDX-License-Identifier: Apache-2.0
"""A soak as figures with goals."""

from __future__ import annotations

from kvgrpc.bench.results import Figure, Report
from tests.soak.run import Soaked
from tests.soak.watch import MIB

GROWTH_MIB = 4
"""By which the server's own memory may grow from the first quarter to the end; a leak of 100 bytes a call is more."""
SLOWEST_S = 1.0


def report(soaked: Soaked) -> Report:
    """The figures; one without a goal says how much the others have seen."""
    tally, watch = soaked.tally, soaked.watch
    calls = tally["stores"] + tally["lookups"] + tally["retrieves"]
    figures = (
        Figure("time", soaked.seconds, "s"),
        Figure("wrong places", tally["wrong_places"], "", "blocks that were loaded, stored or free", "<= 0"),
        Figure("bytes found right", tally["right_bytes"] / MIB, "MiB", "blocks that were loaded or stored"),
        Figure("loaded chunks", tally["loaded_chunks"], "chunks"),
        Figure("stored chunks", tally["stored_chunks"], "chunks"),
        Figure("evicted chunks", soaked.counters["evicted_chunks"], "chunks"),
        Figure("found", tally["found_chunks"] / max(tally["asked_chunks"], 1), "", "chunks asked for"),
        Figure("calls", calls, "calls"),
        Figure("calls a second", calls / soaked.seconds, "1/s"),
        Figure("copies that were cancelled", tally["cancelled_copies"], "copies"),
        Figure("copies whose deadline passed", tally["expired_copies"], "copies"),
        Figure("looks at all free blocks", tally["canary_looks"], "looks"),
        *(Figure(f"engines {kind}", count, "times") for kind, count in sorted(soaked.accidents.items())),
        Figure("counts left at the end", sum(soaked.left.values()), "", goal="<= 0"),
        Figure("complaints in the log", len(soaked.complaints), "lines", goal="<= 0"),
        Figure("own memory at the end", watch.own_bytes[-1] / MIB, "MiB"),
        Figure("growth of own memory", watch.growth_bytes() / MIB, "MiB", "the first quarter", f"<= {GROWTH_MIB}"),
        Figure("most open files", max(watch.files), "files"),
        Figure("most threads", max(watch.threads), "threads"),
        Figure("slowest GetStatus", soaked.slowest_status_s, "s", goal=f"<= {SLOWEST_S}"),
    )
    return Report("soak", figures)


def table(found: Report, soaked: Soaked) -> str:
    """For a terminal."""
    lines = [f"seed {soaked.seed}"]
    for figure in found.figures:
        goal = "" if figure.goal is None else f"  goal {figure.goal}: {'met' if figure.met else 'MISSED'}"
        lines.append(f"{figure.name:32} {figure.value:12.6g} {figure.unit}{goal}")
    return "\n".join([*lines, *(f"left: {item}" for item in soaked.left.items()), *soaked.complaints])
