# SPDX-License-Identifier: Apache-2.0
"""The arena as a book: which bytes are whose.

The arena is cut into pages. An object gets one run of pages where there is one long enough, else pages from several
runs; an object that fits twice into a page shares a page with others of its size (a slab). Freed runs merge with their
neighbours. Bytes are accounted by state as allocated, so that the states always add up to the whole.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
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
    checksum: bytes = b""
    """Of its bytes and name, once there is a record of it (``kvgrpc.core.records``)."""


class _Slab:
    """One page cut into equal places."""

    __slots__ = ("free", "page", "places", "size_bytes")

    def __init__(self, page: Extent, size_bytes: int) -> None:
        self.page = page
        self.size_bytes = size_bytes
        self.places = page[1] // size_bytes
        self.free = [page[0] + at * size_bytes for at in range(self.places)]


class _Pages:
    """Runs of free pages: (first page, count)."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
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

    def take(self, count: int, most: int = 1) -> list[tuple[Extent, ...]]:
        """Extents of ``count`` pages each, up to ``most`` times: one run if any is long enough, else the longest first;
        fewer times only if there are not enough pages."""
        most, size = min(most, self.free // count), self._page_bytes
        self.free -= most * count
        taken: list[tuple[Extent, ...]] = []
        while len(taken) < most:
            if self._lengths[-1] >= count:
                start, used = self._cut(count, most - len(taken))
                taken += [((first * size, count * size),) for first in range(start, start + used, count)]
                continue
            parts, left = list[Extent](), count
            while left:
                start, used = self._cut(min(left, self._lengths[-1]), 1)
                parts.append((start * size, used * size))
                left -= used
            taken.append(tuple(parts))
        return taken

    def _cut(self, count: int, most: int) -> Extent:
        """Up to ``most`` times ``count`` pages of the shortest run that has as many once."""
        start = next(iter(self._starts[self._lengths[bisect_left(self._lengths, count)]]))
        length = self._remove(start)
        used = min(length // count, most) * count
        if used < length:
            self._add(start + used, length - used)
        return start, used

    def give(self, extents: Iterable[Extent]) -> None:
        """Takes them back; what touches becomes one run, also with what is free."""
        runs: list[Extent] = []
        start = end = -1
        for offset, length in sorted(extents):
            if offset != end:
                start = offset
                runs.append((start, 0))
            end = offset + length
            runs[-1] = (start, end - start)
        for offset, length in runs:
            start, count = offset // self._page_bytes, length // self._page_bytes
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
        self.pages = _Pages(page_bytes)
        self.bytes_by_state = dict.fromkeys(SlotState, 0)
        """PINNED stays 0 here: its bytes are a part of READY, counted by the index."""
        self.slabs: dict[int, dict[_Slab, None]] = {}
        """Slabs with a free place, by the size of their places."""
        self.grow(arena_bytes)

    def grow(self, arena_bytes: int) -> None:
        """More of the arena is there."""
        first, count = self.total_bytes // self.page_bytes, arena_bytes // self.page_bytes
        if count > first:
            self.pages.give(((self.total_bytes, (count - first) * self.page_bytes),))
            self.bytes_by_state[FREE] += (count - first) * self.page_bytes
            self.total_bytes = count * self.page_bytes

    def cost_bytes(self, size_bytes: int) -> int:
        """What an object of this size takes."""
        rounded = -(-size_bytes // SLAB_ALIGN_BYTES) * SLAB_ALIGN_BYTES
        return rounded if rounded * 2 <= self.page_bytes else -(-size_bytes // self.page_bytes) * self.page_bytes

    def lack_bytes(self, cost: int, most: int) -> int:
        """What has to be freed for so many; for those that share a page, something."""
        return cost * most - self.pages.free * self.page_bytes if cost * 2 > self.page_bytes else 1

    def reserve(self, size_bytes: int, cost: int, most: int = 1) -> list[Slot]:
        """WRITING slots that take ``cost_bytes(size_bytes)`` each, up to ``most``, as many as there is room for."""
        slots: list[Slot] = []
        if cost * 2 <= self.page_bytes:
            while len(slots) < most and (slot := self._from_slab(size_bytes, cost)) is not None:
                slots.append(slot)
        else:
            taken = self.pages.take(cost // self.page_bytes, most)
            slots = [Slot(size_bytes, cost, extents) for extents in taken]
        self.move_all(slots, WRITING)
        return slots

    def _from_slab(self, size_bytes: int, cost: int) -> Slot | None:
        slabs = self.slabs.get(cost)
        if slabs:
            slab = next(iter(slabs))
        else:
            pages = self.pages.take(1)
            if not pages:
                return None
            slab = _Slab(pages[0][0], cost)
            slabs = self.slabs[cost] = {slab: None}
        offset = slab.free.pop()
        if not slab.free:
            del slabs[slab]
        return Slot(size_bytes, cost, ((offset, cost),), slab)

    def move(self, slot: Slot, state: SlotState) -> None:
        """Changes a slot's state along the table."""
        self.move_all((slot,), state)

    def move_all(self, slots: Sequence[Slot], state: SlotState) -> None:
        """Changes the state of slots that are all in one."""
        if not slots:
            return
        before, taken_bytes = slots[0].state, 0
        assert (before, state) in TRANSITIONS, f"{before} -> {state}"
        for slot in slots:
            assert slot.state is before
            slot.state = state
            taken_bytes += slot.taken_bytes
        self.bytes_by_state[before] -= taken_bytes
        self.bytes_by_state[state] += taken_bytes
        if state is FREE:
            self._give_back(slots)

    def abort(self, slot: Slot) -> None:
        """Ends the writing of a slot that will not be committed: its memory is free now, or settles while a copy is in
        flight; ``settled`` ends that."""
        self.move(slot, SETTLING if slot.in_flight else FREE)

    def settled(self, slots: Iterable[Slot]) -> None:
        """The copy that filled these slots has been reported."""
        for slot in slots:
            slot.in_flight = False
            if slot.state is SETTLING:
                self.move(slot, FREE)

    def _give_back(self, slots: Sequence[Slot]) -> None:
        extents: list[Extent] = []
        for slot in slots:
            slab = slot.slab
            if slab is None:
                extents += slot.extents
                continue
            slab.free.append(slot.extents[0][0])
            slabs = self.slabs.setdefault(slab.size_bytes, {})
            if len(slab.free) < slab.places:
                slabs[slab] = None
            else:
                slabs.pop(slab, None)
                extents.append(slab.page)
        self.pages.give(extents)


class Claims:
    """Places in an arena that an earlier server left, until ``take``; then they are WRITING, and the rest is free.

    Used once, in a book without objects. What does not lie where such an object could, or where another claim lies, is
    no claim.
    """

    def __init__(self, slots: Slots) -> None:
        assert slots.pages.free * slots.page_bytes == slots.total_bytes, "objects are there already"
        self._slots = slots
        self._taken = bytearray(slots.total_bytes // slots.page_bytes)
        self._slabs: dict[int, _Slab] = {}
        self._claimed: list[Slot] = []

    def claim(self, size_bytes: int, extents: tuple[Extent, ...]) -> Slot | None:
        """The slot, FREE until ``take``; None where it cannot be."""
        slots = self._slots
        cost, page, slab = slots.cost_bytes(size_bytes), slots.page_bytes, None
        if sum(length for _, length in extents) != cost:
            return None
        if cost * 2 <= page:
            slab = self._place(cost, extents)
            if slab is None:
                return None
        elif not self._pages(extents):
            return None
        self._claimed.append(Slot(size_bytes, cost, extents, slab))
        return self._claimed[-1]

    def _place(self, cost: int, extents: tuple[Extent, ...]) -> _Slab | None:
        offset, page = extents[0][0], self._slots.page_bytes
        if len(extents) > 1 or not 0 <= offset < self._slots.total_bytes:
            return None
        start = offset // page * page
        slab = self._slabs.get(start)
        if slab is None:
            if not self._pages(((start, page),)):
                return None
            slab = self._slabs[start] = _Slab((start, page), cost)
        if slab.size_bytes != cost or offset not in slab.free:
            return None
        slab.free.remove(offset)
        return slab

    def _pages(self, extents: Sequence[Extent]) -> bool:
        """Takes whole pages that nobody has, all or none."""
        page, taken, total_bytes = self._slots.page_bytes, self._taken, self._slots.total_bytes
        mine: list[slice] = []
        for offset, length in extents:
            if offset % page or length % page or not 0 <= offset < offset + length <= total_bytes:
                break
            run = slice(offset // page, (offset + length) // page)
            if any(taken[run]):
                break
            taken[run] = bytes([1]) * (run.stop - run.start)
            mine.append(run)
        else:
            return True
        for run in mine:
            taken[run] = bytes(run.stop - run.start)
        return False

    def take(self) -> None:
        """What was claimed is reserved from now on."""
        slots, page = self._slots, self._slots.page_bytes
        slots.pages = _Pages(page)
        slots.pages.give([(at * page, page) for at, taken in enumerate(self._taken) if not taken])
        for slab in self._slabs.values():
            if slab.free:
                slots.slabs.setdefault(slab.size_bytes, {})[slab] = None
        slots.move_all(self._claimed, WRITING)
