# SPDX-License-Identifier: Apache-2.0
"""What is counted where it happens: plain numbers that only grow, read by whoever shows them.

A figure is written by one thread and may be read by any: a reader sees it a moment old, never torn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from kvgrpc.core.types import LookupAnswer, PrefetchStatus

SECONDS = (0.0003, 0.001, 0.003, 0.01, 0.1, 1.0, 10.0)
"""Bounds of durations: from an empty call to a copy that is as good as lost. Few, since each is a series."""

ABSENT = "absent"
GIVEN_UP = "given_up"


class Spread:
    """How values fall between bounds: ``counts[i]`` of those up to ``bounds[i]``, the last of those beyond."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total: float = 0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


def added_up(spreads: Iterable[Spread], bounds: Sequence[float] = SECONDS) -> Spread:
    """One spread of all of them, which have the same bounds."""
    whole = Spread(bounds)
    for one in spreads:
        whole.counts = [a + b for a, b in zip(whole.counts, one.counts, strict=True)]
        whole.total += one.total
    return whole


class LookupFigures:
    """Chunks that lookups found, by the tier that had them, and did not find, by reason. Written by the event loop.

    Each chunk that a lookup asks for is counted once, when the lookup is final: in ``hit_chunks`` or in
    ``missed_chunks``. ``hit_bytes`` are the objects' of the ranks that were asked for.
    """

    def __init__(self) -> None:
        self.answers: Counter[str] = Counter()
        self.hit_chunks: Counter[str] = Counter()
        self.hit_bytes: Counter[str] = Counter()
        self.missed_chunks: Counter[str] = Counter()
        self.unpinned = 0
        self._pending: dict[bytes, tuple[int, int]] = {}

    @property
    def pending(self) -> int:
        """Lookups that wait for lower tiers."""
        return len(self._pending)

    def asked(self, answer: LookupAnswer, chunks: int, chunk_bytes: int) -> None:
        """A lookup of ``chunks`` chunks was answered, for now or for good."""
        if answer.status.done:
            self._count(answer.status, chunks, chunk_bytes)
        else:
            self._pending[answer.job_id] = (chunks, chunk_bytes)

    def ended(self, job_id: bytes, status: PrefetchStatus | None) -> None:
        """A lookup became final, or went (None). Harmless for one that was final before."""
        asked = self._pending.pop(job_id, None)
        if asked is None:
            return
        if status is None or not status.done:
            self.answers[GIVEN_UP] += 1
            self.missed_chunks[GIVEN_UP] += asked[0]
        else:
            self._count(status, *asked)

    def _count(self, status: PrefetchStatus, chunks: int, chunk_bytes: int) -> None:
        hits = 0
        for tier, count in status.hit_chunks_by_tier.items():
            hits += count
            self.hit_chunks[tier] += count
            self.hit_bytes[tier] += count * chunk_bytes
        self.answers["none" if not hits else "full" if hits == chunks else "part"] += 1
        if hits < chunks:
            self.missed_chunks[status.limited_by.lower() or ABSENT] += chunks - hits
        if hits and not status.pinned:
            self.unpinned += 1
