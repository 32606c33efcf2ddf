# SPDX-License-Identifier: Apache-2.0
"""What keeps chunks beyond recency: retention wishes of requests and pins of operators, both for a bounded time and under
one byte budget. A hold that ends only makes its chunks evictable; Clear does not care for holds."""

from __future__ import annotations

import heapq

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.eviction import touch_order
from kvgrpc.core.index import Chunk, Index
from kvgrpc.core.ledger import Ledger


class Hold:
    """Chunks of a prefix, held until a time."""

    __slots__ = ("chunks", "until_ns")

    def __init__(self, chunks: list[Chunk], until_ns: int) -> None:
        self.chunks = chunks
        self.until_ns = until_ns


class Holds:
    """All holds, by time; those of operators also by pin id."""

    def __init__(self, ledger: Ledger, index: Index) -> None:
        self._ledger = ledger
        self._index = index
        self._by_time: list[tuple[int, int, Hold]] = []
        self.pins: dict[bytes, Hold] = {}
        self._pin_of: dict[Hold, bytes] = {}

    def _fits(self, chunks: list[Chunk]) -> bool:
        budget = self._index.slots.total_bytes * self._ledger.limits.hold_share
        return self._index.held_bytes + sum(c.ready_bytes for c in chunks if not c.holds) <= budget

    def _hold(self, chunks: list[Chunk], until_ns: int) -> Hold:
        hold = Hold(chunks, until_ns)
        for chunk in chunks:
            self._index.hold(chunk)
        heapq.heappush(self._by_time, (until_ns, self._ledger.next_id(), hold))
        return hold

    def retain(self, chunks: list[Chunk], until_ns: int) -> None:
        """Keeps as many of a prefix's chunks, heads first, as the budget has room for."""
        kept = list(chunks)
        while kept and not self._fits(kept):
            kept.pop()
        if kept and len(self._by_time) < self._ledger.limits.jobs_per_engine:
            self._hold(kept, until_ns)

    def pin(self, pin_id: bytes, chunks: list[Chunk], until_ns: int) -> None:
        """Keeps all of them or none. Refuses: HOLD_LIMIT, PIN_LIMIT."""
        if not self._fits(chunks):
            raise Refusal(Reason.HOLD_LIMIT, "the prefix does not fit the byte budget for holds", resource="holds")
        if len(self.pins) >= self._ledger.limits.pins:
            raise Refusal(Reason.PIN_LIMIT, f"{self._ledger.limits.pins} pins are in force", resource="pins")
        hold = self._hold(chunks, until_ns)
        self.pins[pin_id] = hold
        self._pin_of[hold] = pin_id

    def unpin(self, pin_id: bytes) -> int:
        """Ends an operator's pin; how many chunks it held. Refuses: PIN_UNKNOWN."""
        hold = self.pins.get(pin_id)
        if hold is None:
            raise Refusal(Reason.PIN_UNKNOWN, "no such pin: it has ended or never was", field="pin_id", resource="pin")
        count = len(hold.chunks)
        self._end(hold)
        return count

    def _end(self, hold: Hold) -> None:
        for chunk in touch_order(hold.chunks):
            self._index.unhold(chunk)
        hold.chunks = []
        pin_id = self._pin_of.pop(hold, None)
        if pin_id is not None:
            del self.pins[pin_id]

    def next_end(self) -> int | None:
        """When the next hold ends."""
        heap = self._by_time
        while heap and not heap[0][2].chunks:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def tick(self, now: int) -> None:
        """Ends holds whose time is over."""
        while (until_ns := self.next_end()) is not None and until_ns <= now:
            self._end(heapq.heappop(self._by_time)[2])

    def holds(self) -> list[Hold]:
        """Those in force, for invariants."""
        return [hold for _, _, hold in self._by_time if hold.chunks]
