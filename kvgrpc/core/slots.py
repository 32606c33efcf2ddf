# SPDX-License-Identifier: Apache-2.0
"""The arena as a book: which bytes are whose.

The arena is cut into pages. An object gets one run of pages where there is one long enough, else pages from several
runs; an object that fits twice into a page shares a page with others of its size (a slab). Freed runs merge with their
neighbours. Bytes are accounted by state as allocated, so that the states always add up to the whole.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from kvgrpc.core.states import FREE, SETTLING, TRANSITIONS, WRITING, SlotState
from kvgrpc.core.types import Extent

SLAB_ALIGN_BYTES = 64


@dataclass(eq=False, slots=True)
class Slot:
    """Memory for one object; its extents add up to ``taken_bytes``, which is at least the object's ``size_bytes``."""

    size_bytes: int
    taken_bytes: int
    extents: tuple[Extent, ...]
    slab: _Slab | None = None
    state: SlotState = FREE
    in_flight: bool = False
    """A copy that fills this slot was launched and has not been reported."""


class _Slab:
    """One page cut into equal places."""

    __slots__ = ("free", "page", "places", "size_bytes")

    def __init__(self, page: int, page_bytes: int, size_bytes: int) -> None:
        self.page = page
        self.size_bytes = size_bytes
        self.places = page_bytes // size_bytes
        self.free = [page * page_bytes + at * size_bytes for at in range(self.places)]


class _Pages:
    """Runs of free pages: (first page, count)."""

    def __init__(self) -> None:
        self.free = 0
        self._length_of: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        self._starts: dict[int, dict[int, None]] = {}
        self._lengths: list[int] = []

    def _add(self, start: int, length: int) -> None:
        self._length_of[start] = length
        self._start_of_end[start + length] = start
        if length not in self._starts:
            self._starts[length] = {}
            insort(self._lengths, length)
        self._starts[length][start] = None

    def _remove(self, start: int) -> int:
        length = self._length_of.pop(start)
        del self._start_of_end[start + length]
        starts = self._starts[length]
        del starts[start]
        if not starts:
            del self._starts[length]
            del self._lengths[bisect_left(self._lengths, length)]
        return length

    def take(self, count: int) -> list[Extent] | None:
        """Runs that add up to ``count`` pages: one if any is long enough, else the longest first; None if there are
        not enough pages."""
        if count > self.free:
            return None
        self.free -= count
        out: list[Extent] = []
        while count:
            at = min(bisect_left(self._lengths, count), len(self._lengths) - 1)
            start = next(iter(self._starts[self._lengths[at]]))
            length = self._remove(start)
            if length > count:
                self._add(start + count, length - count)
            out.append((start, min(length, count)))
            count -= out[-1][1]
        return out

    def give(self, start: int, count: int) -> None:
        """Takes a run back and merges it with its neighbours."""
        self.free += count
        before = self._start_of_end.get(start)
        if before is not None:
            count += self._remove(before)
            start = before
        if start + count in self._length_of:
            count += self._remove(start + count)
        self._add(start, count)

    def runs(self) -> list[Extent]:
        """All free runs, in order."""
        return sorted(self._length_of.items())


class Slots:
    """Reserves, commits and frees memory of ``arena_bytes`` (whole pages of it) and keeps the sums by state."""

    def __init__(self, arena_bytes: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.total_bytes = 0
        self.pages = _Pages()
        self.bytes_by_state = dict.fromkeys(SlotState, 0)
        """PINNED stays 0 here: its bytes are a part of READY, counted by the index."""
        self._slabs: dict[int, dict[_Slab, None]] = {}
        """Slabs with a free place, by the size of their places."""
        self.grow(arena_bytes)

    def grow(self, arena_bytes: int) -> None:
        """More of the arena is there."""
        first, count = self.total_bytes // self.page_bytes, arena_bytes // self.page_bytes
        if count > first:
            self.pages.give(first, count - first)
            self.bytes_by_state[FREE] += (count - first) * self.page_bytes
            self.total_bytes = count * self.page_bytes

    def cost_bytes(self, size_bytes: int) -> int:
        """What an object of this size takes."""
        rounded = -(-size_bytes // SLAB_ALIGN_BYTES) * SLAB_ALIGN_BYTES
        return rounded if rounded * 2 <= self.page_bytes else -(-size_bytes // self.page_bytes) * self.page_bytes

    def reserve(self, size_bytes: int, cost: int) -> Slot | None:
        """A WRITING slot that takes ``cost_bytes(size_bytes)``, or None when there is no room: evict something and try
        again."""
        size = self.page_bytes
        if cost * 2 <= size:
            slot = self._from_slab(size_bytes, cost)
        else:
            pages = self.pages.take(cost // size)
            extents = None if pages is None else tuple((start * size, count * size) for start, count in pages)
            slot = None if extents is None else Slot(size_bytes, cost, extents)
        if slot is not None:
            self.move(slot, WRITING)
        return slot

    def _from_slab(self, size_bytes: int, cost: int) -> Slot | None:
        slabs = self._slabs.get(cost)
        if slabs:
            slab = next(iter(slabs))
        else:
            pages = self.pages.take(1)
            if pages is None:
                return None
            slab = _Slab(pages[0][0], self.page_bytes, cost)
            slabs = self._slabs[cost] = {slab: None}
        offset = slab.free.pop()
        if not slab.free:
            del slabs[slab]
        return Slot(size_bytes, cost, ((offset, cost),), slab)

    def move(self, slot: Slot, state: SlotState) -> None:
        """Changes a slot's state along the table."""
        assert (slot.state, state) in TRANSITIONS, f"{slot.state} -> {state}"
        self.bytes_by_state[slot.state] -= slot.taken_bytes
        self.bytes_by_state[state] += slot.taken_bytes
        slot.state = state
        if state is FREE:
            self._give_back(slot)

    def abort(self, slot: Slot) -> None:
        """Ends the writing of a slot that will not be committed: its memory is free now, or settles while a copy is in
        flight; ``settled`` ends that."""
        self.move(slot, SETTLING if slot.in_flight else FREE)

    def settled(self, slot: Slot) -> None:
        """The copy that filled this slot has been reported."""
        slot.in_flight = False
        if slot.state is SETTLING:
            self.move(slot, FREE)

    def _give_back(self, slot: Slot) -> None:
        slab = slot.slab
        if slab is None:
            for start, length in slot.extents:
                self.pages.give(start // self.page_bytes, length // self.page_bytes)
            return
        slab.free.append(slot.extents[0][0])
        slabs = self._slabs.setdefault(slab.size_bytes, {})
        if len(slab.free) < slab.places:
            slabs[slab] = None
        else:
            slabs.pop(slab, None)
            self.pages.give(slab.page, 1)
