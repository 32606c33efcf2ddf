# SPDX-License-Identifier: Apache-2.0
"""The arena as a book: which bytes are whose.

The arena is cut into pages. An object gets one run of pages where there is one long enough, else pages from several
runs; an object that fits twice into a page shares a page with others of its size (a slab). Freed runs merge with their
neighbours. Bytes are accounted by state as allocated, so that the states always add up to the whole.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from kvgrpc.core.states import TRANSITIONS, SlotState
from kvgrpc.core.types import Extent

SLAB_ALIGN_BYTES = 64


class Slot:
    """Memory for one object. ``extents`` add up to at least ``size_bytes``; ``taken_bytes`` is what it costs the arena."""

    __slots__ = ("extents", "in_flight", "pages", "size_bytes", "slab", "state", "taken_bytes")

    def __init__(self, size_bytes: int, taken_bytes: int, extents: tuple[Extent, ...]) -> None:
        self.size_bytes = size_bytes
        self.taken_bytes = taken_bytes
        self.extents = extents
        self.state = SlotState.FREE
        self.in_flight = False
        """A copy that fills this slot was launched and has not been reported."""
        self.pages: list[Extent] = []
        self.slab: _Slab | None = None


class _Slab:
    """One page cut into equal places."""

    __slots__ = ("free", "page", "size_bytes", "used")

    def __init__(self, page: int, page_bytes: int, size_bytes: int) -> None:
        self.page = page
        self.size_bytes = size_bytes
        self.free = [page * page_bytes + at * size_bytes for at in range(page_bytes // size_bytes)]
        self.used = 0


class _Pages:
    """Runs of free pages: (first page, count)."""

    def __init__(self, count: int) -> None:
        self.free = count
        self._length_of: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        self._starts: dict[int, dict[int, None]] = {}
        self._lengths: list[int] = []
        if count:
            self._add(0, count)

    def _add(self, start: int, length: int) -> None:
        self._length_of[start] = length
        self._start_of_end[start + length] = start
        starts = self._starts.get(length)
        if starts is None:
            starts = self._starts[length] = {}
            insort(self._lengths, length)
        starts[start] = None

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
        at = bisect_left(self._lengths, count)
        if at < len(self._lengths):
            return [self._cut(next(iter(self._starts[self._lengths[at]])), count)]
        out: list[Extent] = []
        while count:
            start = next(iter(self._starts[self._lengths[-1]]))
            run = self._cut(start, min(count, self._lengths[-1]))
            out.append(run)
            count -= run[1]
        return out

    def _cut(self, start: int, count: int) -> Extent:
        length = self._remove(start)
        if length > count:
            self._add(start + count, length - count)
        return (start, count)

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
        """All free runs, for invariants."""
        return sorted(self._length_of.items())


class Slots:
    """Reserves, commits and frees memory of ``arena_bytes`` (whole pages of it) and keeps the sums by state."""

    def __init__(self, arena_bytes: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.total_bytes = arena_bytes // page_bytes * page_bytes
        self.pages = _Pages(arena_bytes // page_bytes)
        self.bytes_by_state = dict.fromkeys(SlotState, 0)
        """PINNED stays 0 here: its bytes are a part of READY, counted by the index."""
        self.bytes_by_state[SlotState.FREE] = self.total_bytes
        self._slabs: dict[int, dict[_Slab, None]] = {}

    def cost_bytes(self, size_bytes: int) -> int:
        """What an object of this size takes."""
        rounded = -(-size_bytes // SLAB_ALIGN_BYTES) * SLAB_ALIGN_BYTES
        return rounded if rounded * 2 <= self.page_bytes else -(-size_bytes // self.page_bytes) * self.page_bytes

    def reserve(self, size_bytes: int) -> Slot | None:
        """A WRITING slot, or None when there is no room: evict something and try again."""
        cost = self.cost_bytes(size_bytes)
        slot = self._from_slab(size_bytes, cost) if cost * 2 <= self.page_bytes else self._from_pages(size_bytes, cost)
        if slot is not None:
            self.move(slot, SlotState.WRITING)
        return slot

    def _from_slab(self, size_bytes: int, rounded: int) -> Slot | None:
        slabs = self._slabs.setdefault(rounded, {})
        if slabs:
            slab = next(iter(slabs))
        else:
            pages = self.pages.take(1)
            if pages is None:
                return None
            slab = _Slab(pages[0][0], self.page_bytes, rounded)
            slabs[slab] = None
        slot = Slot(size_bytes, rounded, ((slab.free.pop(), rounded),))
        slot.slab = slab
        slab.used += 1
        if not slab.free:
            del slabs[slab]
        return slot

    def _from_pages(self, size_bytes: int, cost: int) -> Slot | None:
        size = self.page_bytes
        pages = self.pages.take(cost // size)
        if pages is None:
            return None
        slot = Slot(size_bytes, cost, tuple((start * size, length * size) for start, length in pages))
        slot.pages = pages
        return slot

    def move(self, slot: Slot, state: SlotState) -> None:
        """Changes a slot's state along the table."""
        assert (slot.state, state) in TRANSITIONS, f"{slot.state} -> {state}"
        self.bytes_by_state[slot.state] -= slot.taken_bytes
        self.bytes_by_state[state] += slot.taken_bytes
        slot.state = state
        if state is SlotState.FREE:
            self._give_back(slot)

    def abort(self, slot: Slot) -> bool:
        """Ends the writing of a slot that will not be committed; True when its memory is free now. While a copy is in
        flight it settles; ``settled`` ends that."""
        if slot.in_flight:
            if slot.state is not SlotState.SETTLING:
                self.move(slot, SlotState.SETTLING)
            return False
        self.move(slot, SlotState.FREE)
        return True

    def settled(self, slot: Slot) -> None:
        """The copy that filled this slot has been reported."""
        slot.in_flight = False
        if slot.state is SlotState.SETTLING:
            self.move(slot, SlotState.FREE)

    def _give_back(self, slot: Slot) -> None:
        slab = slot.slab
        if slab is None:
            for start, length in slot.pages:
                self.pages.give(start, length)
            return
        slab.free.append(slot.extents[0][0])
        slab.used -= 1
        slabs = self._slabs.setdefault(slab.size_bytes, {})
        if slab.used:
            slabs[slab] = None
            return
        slabs.pop(slab, None)
        if not slabs:
            del self._slabs[slab.size_bytes]
        self.pages.give(slab.page, 1)
