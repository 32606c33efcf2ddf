# SPDX-License-Identifier: Apache-2.0
"""What keeps chunks beyond recency: retention wishes of requests and pins of operators, both for a bounded time and
under one byte budget. A hold that ends only makes its chunks evictable; Clear does not care for holds.

A chunk is retained once, until the latest time that anybody wished. The orders by time also have entries that are
over: of chunks whose time was put off, or that are gone; they are dropped when they outnumber the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.index import Chunk, Index
from kvgrpc.core.ledger import Ledger

_SPARE = 1024
"""Entries that are over and not worth a rebuild."""


class Holds:
    """All holds: retained chunks and when that ends, chunks of operators' pins by pin id."""

    def __init__(self, ledger: Ledger, index: Index) -> None:
        self._ledger = ledger
        self._index = index
        self.retained: dict[Chunk, int] = {}
        self.pins: dict[bytes, list[Chunk]] = {}
        self._pin_ends: list[tuple[int, bytes]] = []
        self._ends: list[tuple[int, int, Chunk]] = []
        """(when, id, chunk), a heap."""
        index.on_gone = self._gone

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

    def _hold(self, chunk: Chunk) -> None:
        """One more retention or operator pin keeps the chunk."""
        if not chunk.holds:
            self._index.held_bytes += chunk.ready_bytes
        chunk.holds += 1

    def _unhold(self, chunk: Chunk) -> None:
        """One less."""
        chunk.holds -= 1
        if not chunk.holds:
            self._index.held_bytes -= chunk.ready_bytes
            self._index.rest(chunk)

    def retain(self, chunks: Iterable[Chunk], until_ns: int) -> None:
        """Keeps as many of a prefix's chunks, heads first, as the budget has room for."""
        for chunk in self._fitting(chunks):
            known_ns = self.retained.get(chunk)
            if known_ns is None:
                self._hold(chunk)
            if known_ns is None or until_ns > known_ns:
                self.retained[chunk] = until_ns
            if known_ns is None:
                heapq.heappush(self._ends, (until_ns, self._ledger.next_id(), chunk))

    def _gone(self, chunk: Chunk) -> None:
        """The chunk is not there any more."""
        if self.retained.pop(chunk, None) is not None:
            chunk.holds -= 1
            if len(self._ends) > 2 * len(self.retained) + _SPARE:
                self._ends = [end for end in self._ends if end[2] in self.retained]
                heapq.heapify(self._ends)

    def pin(self, pin_id: bytes, chunks: list[Chunk], until_ns: int) -> None:
        """Keeps all of them or none. Refuses: HOLD_LIMIT, PIN_LIMIT."""
        if len(self._fitting(chunks)) < len(chunks):
            raise Refusal(Reason.HOLD_LIMIT, "the prefix does not fit the byte budget for holds", resource="holds")
        if len(self.pins) >= self._ledger.limits.pins:
            raise Refusal(Reason.PIN_LIMIT, f"{self._ledger.limits.pins} pins are in force", resource="pins")
        self.pins[pin_id] = chunks
        heapq.heappush(self._pin_ends, (until_ns, pin_id))
        for chunk in chunks:
            self._hold(chunk)

    def unpin(self, pin_id: bytes) -> int:
        """Ends an operator's pin; how many chunks it held. Refuses: PIN_UNKNOWN."""
        chunks = self.pins.pop(pin_id, None)
        if chunks is None:
            raise Refusal(Reason.PIN_UNKNOWN, "no such pin: it has ended or never was", field="pin_id", resource="pin")
        self._pin_ends = [end for end in self._pin_ends if end[1] != pin_id]
        heapq.heapify(self._pin_ends)
        for chunk in chunks:
            self._unhold(chunk)
        return len(chunks)

    def end_of(self, pin_id: bytes) -> int:
        """When an operator's pin ends."""
        return next(until_ns for until_ns, known in self._pin_ends if known == pin_id)

    def next_end(self) -> int | None:
        """No hold ends before this."""
        return min([ends[0][0] for ends in (self._ends, self._pin_ends) if ends], default=None)

    def tick(self, now: int) -> None:
        """Ends holds whose time is over."""
        while self._ends and self._ends[0][0] <= now:
            until_ns, number, chunk = self._ends[0]
            until_ns = self.retained.get(chunk, 0)
            if until_ns > now:
                heapq.heapreplace(self._ends, (until_ns, number, chunk))
                continue
            heapq.heappop(self._ends)
            if self.retained.pop(chunk, None) is not None:
                self._unhold(chunk)
        while self._pin_ends and self._pin_ends[0][0] <= now:
            self.unpin(self._pin_ends[0][1])
