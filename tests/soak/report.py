# SPDX-License-Identifier: Apache-2.0
"""A soak as figures with goals."""

from __future__ import annotations

from kvgrpc.bench.results import Figure, Report, figure
from tests.soak.run import Soaked
from tests.soak.watch import MIB

GROWTH_MIB = 4
"""By which the server's own memory may grow from the first quarter to the end; a leak of 100 bytes a call is more."""
STATUS_S = 0.1
"""Of the operator's calls in between: they wait for nothing but their turn."""


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
        *(Figure(what, count, "times") for what, count in sorted(soaked.accidents.items())),
        Figure("counts left at the end", sum(soaked.left.values()), "", goal="<= 0"),
        Figure("complaints in the log", len(soaked.complaints), "lines", goal="<= 0"),
        Figure("answers to clients that had given up", soaked.unawaited, "calls"),
        *(Figure(f"own memory at {at} %", watch.own_at(at / 100) / MIB, "MiB") for at in (10, 25, 50, 75, 100)),
        Figure("growth of own memory", watch.growth_bytes() / MIB, "MiB", "the first quarter", f"<= {GROWTH_MIB}"),
        Figure("most open files", max(watch.files), "files"),
        Figure("most threads", max(watch.threads), "threads"),
        figure("GetStatus", soaked.status_s, "s", goal=f"<= {STATUS_S}"),
    )
    return Report("soak", figures, commit=soaked.commit)


def table(found: Report, soaked: Soaked) -> str:
    """For a terminal."""
    lines = [f"seed {soaked.seed}"]
    for one in found.figures:
        goal = "" if one.goal is None else f"  goal {one.goal}: {'met' if one.met else 'MISSED'}"
        most = "" if one.high is None else f", at most {one.high:.3g}"
        lines.append(f"{one.name:36} {one.value:12.6g} {one.unit}{most}{goal}")
    return "\n".join([*lines, *(f"left: {item}" for item in soaked.left.items()), *soaked.complaints])
