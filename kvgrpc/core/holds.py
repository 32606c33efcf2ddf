# SPDX-License-Identifier: Apache-2.0
"""What keeps chunks beyond recency: retention wishes of requests and pins of operators, both for a bounded time and
under one byte budget. A hold that ends only makes its chunks evictable; Clear does not care for holds."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.index import Chunk, Index
from kvgrpc.core.ledger import Ledger


@dataclass(order=True, slots=True)
class Hold:
    """Chunks of a prefix, held until a time. ``pin_id`` is empty for a request's retention."""

    until_ns: int
    hold_id: int
    chunks: list[Chunk]
    pin_id: bytes = b""


class Holds:
    """All holds, by time; those of operators also by pin id."""

    def __init__(self, ledger: Ledger, index: Index) -> None:
        self._ledger = ledger
        self._index = index
        self.by_time: list[Hold] = []
        self.pins: dict[bytes, Hold] = {}

    def _fitting(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """As many of a prefix's chunks, heads first, as the budget has room for."""
        room = self._index.slots.total_bytes * self._ledger.limits.hold_share - self._index.held_bytes
        fitting: list[Chunk] = []
        for chunk in chunks:
            room -= 0 if chunk.holds else chunk.ready_bytes
            if room < 0:
                break
            fitting.append(chunk)
        return fitting

    def _hold(self, chunks: list[Chunk], until_ns: int, pin_id: bytes = b"") -> Hold:
        hold = Hold(until_ns, self._ledger.next_id(), chunks, pin_id)
        for chunk in chunks:
            self._index.hold(chunk)
        heapq.heappush(self.by_time, hold)
        return hold

    def retain(self, chunks: Iterable[Chunk], until_ns: int) -> None:
        """Keeps as many of a prefix's chunks, heads first, as the budget has room for."""
        kept = self._fitting(chunks)
        if kept and len(self.by_time) - len(self.pins) < self._ledger.limits.jobs_per_engine:
            self._hold(kept, until_ns)

    def pin(self, pin_id: bytes, chunks: list[Chunk], until_ns: int) -> None:
        """Keeps all of them or none. Refuses: HOLD_LIMIT, PIN_LIMIT."""
        if len(self._fitting(chunks)) < len(chunks):
            raise Refusal(Reason.HOLD_LIMIT, "the prefix does not fit the byte budget for holds", resource="holds")
        if len(self.pins) >= self._ledger.limits.pins:
            raise Refusal(Reason.PIN_LIMIT, f"{self._ledger.limits.pins} pins are in force", resource="pins")
        self.pins[pin_id] = self._hold(chunks, until_ns, pin_id)

    def unpin(self, pin_id: bytes) -> int:
        """Ends an operator's pin; how many chunks it held. Refuses: PIN_UNKNOWN."""
        hold = self.pins.get(pin_id)
        if hold is None:
            raise Refusal(Reason.PIN_UNKNOWN, "no such pin: it has ended or never was", field="pin_id", resource="pin")
        self.by_time.remove(hold)
        heapq.heapify(self.by_time)
        self._end(hold)
        return len(hold.chunks)

    def _end(self, hold: Hold) -> None:
        for chunk in hold.chunks:
            self._index.unhold(chunk)
        self.pins.pop(hold.pin_id, None)

    def tick(self, now: int) -> None:
        """Ends holds whose time is over."""
        while self.by_time and self.by_time[0].until_ns <= now:
            self._end(heapq.heappop(self.by_time))
