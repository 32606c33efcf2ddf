# SPDX-License-Identifier: Apache-2.0
"""The arena as a book: pages, slabs, coalescing, and the table of states."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgrpc.core.slots import SLAB_ALIGN_BYTES, Slot, Slots
from kvgrpc.core.states import TRANSITIONS, SlotState

PAGE = 4096


def reserve(slots: Slots, size_bytes: int) -> Slot:
    (slot,) = slots.reserve(size_bytes, slots.cost_bytes(size_bytes))
    return slot


def free(slots: Slots, slot: Slot) -> None:
    slots.move(slot, SlotState.READY)
    slots.move(slot, SlotState.FREE)


def test_only_whole_pages_are_used():
    assert Slots(3 * PAGE + 1000, PAGE).total_bytes == 3 * PAGE


@pytest.mark.parametrize(
    ("size_bytes", "cost_bytes"),
    [(1, 64), (64, 64), (65, 128), (2048, 2048), (2049, 4096), (4096, 4096), (4097, 8192), (3 * PAGE, 3 * PAGE)],
)
def test_cost_of_an_object(size_bytes: int, cost_bytes: int):
    """Up to half a page an object costs itself, aligned; above, whole pages."""
    slots = Slots(16 * PAGE, PAGE)
    assert slots.cost_bytes(size_bytes) == cost_bytes
    slot = reserve(slots, size_bytes)
    assert slot.taken_bytes == cost_bytes == sum(length for _, length in slot.extents)
    assert slots.bytes_by_state[SlotState.WRITING] == cost_bytes


def test_an_object_gets_one_run_where_there_is_one():
    slots = Slots(8 * PAGE, PAGE)
    first, second, third = (reserve(slots, 2 * PAGE) for _ in range(3))
    assert [slot.extents for slot in (first, second, third)] == [((at * 2 * PAGE, 2 * PAGE),) for at in range(3)]
    free(slots, first)
    free(slots, third)
    assert reserve(slots, 4 * PAGE).extents == ((4 * PAGE, 4 * PAGE),), "the freed run merged with the free tail"


def test_an_object_is_spread_when_no_run_is_long_enough():
    slots = Slots(6 * PAGE, PAGE)
    held = [reserve(slots, PAGE) for _ in range(6)]
    for at in (0, 2, 4):
        free(slots, held[at])
    assert not slots.reserve(4 * PAGE, 4 * PAGE)
    spread = reserve(slots, 3 * PAGE)
    assert sorted(spread.extents) == [(0, PAGE), (2 * PAGE, PAGE), (4 * PAGE, PAGE)]
    free(slots, spread)
    for at in (1, 3, 5):
        free(slots, held[at])
    assert slots.pages.runs() == [(0, 6)], "everything merged again"


def test_small_objects_share_a_page_by_size():
    slots = Slots(2 * PAGE, PAGE)
    small = [reserve(slots, 1000) for _ in range(4)]
    assert len({slot.extents[0][0] // PAGE for slot in small}) == 1
    assert slots.pages.free == 1
    reserve(slots, 100)
    assert slots.pages.free == 0, "another size has a page of its own"
    assert not slots.reserve(1000, 1024)
    free(slots, small[0])
    assert reserve(slots, 1000).extents == small[0].extents


def test_a_page_of_small_objects_goes_back_with_its_last():
    slots = Slots(PAGE, PAGE)
    small = [reserve(slots, 1024) for _ in range(4)]
    for slot in small:
        assert not slots.reserve(PAGE, PAGE)
        free(slots, slot)
    assert reserve(slots, PAGE).extents == ((0, PAGE),)


def test_a_full_page_survives_that_the_last_other_page_of_its_size_went_back():
    slots = Slots(2 * PAGE, PAGE)
    full = [reserve(slots, 2048) for _ in range(2)]
    alone = reserve(slots, 2048)
    free(slots, alone)
    for slot in full:
        free(slots, slot)
    assert slots.pages.runs() == [(0, 2)]


# ---- the table of states ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), list(product(SlotState, SlotState)))
def test_a_state_changes_only_along_the_table(old: SlotState, new: SlotState):
    slots = Slots(4 * PAGE, PAGE)
    slot = reserve(slots, PAGE)
    slot.state = old
    slots.bytes_by_state = dict.fromkeys(SlotState, PAGE)
    if (old, new) in TRANSITIONS:
        slots.move(slot, new)
        assert slot.state is new
    else:
        with pytest.raises(AssertionError):
            slots.move(slot, new)


def test_an_abort_frees_or_settles():
    slots = Slots(4 * PAGE, PAGE)
    idle, busy = reserve(slots, PAGE), reserve(slots, PAGE)
    busy.in_flight = True
    slots.abort(idle)
    slots.abort(busy)
    assert (idle.state, busy.state) == (SlotState.FREE, SlotState.SETTLING)
    assert slots.pages.free == 3, "a settling slot keeps its memory"
    slots.settled((busy,))
    assert busy.state is SlotState.FREE
    assert slots.pages.free == 4


def test_a_finished_copy_alone_changes_no_state():
    slots = Slots(4 * PAGE, PAGE)
    slot = reserve(slots, PAGE)
    slot.in_flight = True
    slots.settled((slot,))
    assert (slot.state, slot.in_flight) == (SlotState.WRITING, False)


# ---- against a naive arena -------------------------------------------------------------------------------------------

SIZES = st.sampled_from([1, 64, 100, 700, 1365, 2048, 2049, PAGE, PAGE + 1, 3 * PAGE])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 1000)), max_size=60))
def test_nobody_shares_a_byte_and_nothing_leaks(num_pages: int, steps: list[tuple[bool, int, int]]):
    """A naive arena is a list of owned bytes by page: no overlap, refusals only when a naive first fit by pages would
    refuse as well, and all pages come back as one run."""
    slots = Slots(num_pages * PAGE, PAGE)
    live: list[Slot] = []
    for adds, size_bytes, pick in steps:
        if adds or not live:
            most = 1 + pick % 4
            reserved = slots.reserve(size_bytes, slots.cost_bytes(size_bytes), most)
            live += reserved
            if len(reserved) < most:
                used = {
                    offset // PAGE + at
                    for s in live
                    for offset, length in s.extents
                    for at in range(-(-length // PAGE))
                }
                assert num_pages - len(used) < -(-size_bytes // PAGE), "refused though there are free pages"
        else:
            free(slots, live.pop(pick % len(live)))
        taken = sorted(extent for slot in live for extent in slot.extents)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(taken)), "two owners of a byte"
        assert all(a % SLAB_ALIGN_BYTES == 0 and a + n <= slots.total_bytes for a, n in taken)
        assert sum(slots.bytes_by_state.values()) == slots.total_bytes
        assert slots.bytes_by_state[SlotState.WRITING] == sum(slot.taken_bytes for slot in live)
    for slot in live:
        free(slots, slot)
    assert slots.pages.runs() == [(0, num_pages)]
