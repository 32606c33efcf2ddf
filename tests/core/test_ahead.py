# SPDX-License-Identifier: Apache-2.0
"""Slices that wait behind the one that is copied: what is planned, and what becomes of it when that one fails."""

from __future__ import annotations

import pytest

from kvgrpc.core import types as t
from kvgrpc.core.calls import SLICES_LAUNCHED
from kvgrpc.core.slicing import SKIPPED
from kvgrpc.core.types import SliceReport
from tests.core.desk import OBJECT, Desk, EngineDesk

LOST = SliceReport(0, "MEMORY_GONE")
TORN = SliceReport(0, "MEMORY_GONE", torn=True)
NOT_BEGUN = SliceReport(0, SKIPPED)


def held(slice_chunks: float = 2, chunks: int = 64) -> tuple[Desk, EngineDesk]:
    limits = t.CoreLimits(slice_bytes=int(slice_chunks * OBJECT), pin_share=1.0)
    desk = Desk(chunks=chunks, limits=limits, auto=False)
    return desk, desk.engine("e")


def ahead(desk: Desk, e: EngineDesk) -> list[t.RunSlice]:
    """What is in flight after there was time to plan."""
    desk.book.plan_ahead(desk.now, e.worker(0))
    desk.step()
    return list(desk.slices.values())


def chunks_of(order: t.RunSlice) -> list[int]:
    return [piece.chunk for piece in order.pieces]


def test_one_slice_of_the_same_call_waits_behind_the_first_and_knows_it():
    desk, e = held()
    e.store("a", 8)
    assert len(desk.slices) == 1, "the first is handed over before the second is planned"
    for first in (0, 2, 4):
        one, two = ahead(desk, e)
        assert (chunks_of(one), chunks_of(two)) == ([first, first + 1], [first + 2, first + 3])
        assert two.after == one.slice_id
        assert len(ahead(desk, e)) == 2, "not more"
        desk.report()
    desk.report()
    assert e.ended() == "8 STORED"
    assert desk.history[0].after == 0


def test_calls_do_not_overlap():
    """What the next call finds depends on what the one before it has stored."""
    desk, e = held()
    e.store("a", 2)
    e.store("a", 2, block=100)
    assert len(ahead(desk, e)) == 1
    desk.run_copies()
    assert e.ended() == "2 RESIDENT"


def test_a_retrieve_may_wait_behind_a_slice_of_a_store():
    desk, e = held()
    e.store("a", 2, block=500)
    desk.run_copies()
    job = e.lookup("a", 2)
    e.store("b", 6)
    storing = e.last_call.call_id
    e.retrieve(job, block=100)
    one, two = ahead(desk, e)
    assert (one.direction.value, two.direction.value, two.after) == ("store", "retrieve", 0)
    desk.report()
    assert len(ahead(desk, e)) == 1, "the retrieve is all ordered; the store goes on after it"
    desk.run_copies()
    assert (e.ended(), e.ended(storing)) == ("2 LOADED", "6 STORED")


@pytest.mark.parametrize(("report", "outcome"), [(LOST, "FAILED MEMORY_GONE"), (TORN, "TORN MEMORY_GONE")])
def test_a_failed_slice_of_a_store_takes_the_one_behind_it_along(report: SliceReport, outcome: str):
    desk, e = held()
    e.store("a", 8)
    ahead(desk, e)
    desk.report(report=SliceReport(1, report.reason, report.torn))
    assert desk.states() == "61 free, 1 ready, 2 settling"
    assert ahead(desk, e) == list(desk.slices.values()), "nothing more is ordered"
    desk.report(report=NOT_BEGUN)
    assert e.ended() == f"1 STORED, 1 {outcome}, 6 FAILED AFTER_FAILURE"
    assert desk.states() == "63 free, 1 ready"
    assert e.lookup("a", 8).status.hit_tokens == desk.limits.chunk_tokens


@pytest.mark.parametrize(("report", "outcome"), [(LOST, "FAILED MEMORY_GONE"), (TORN, "TORN MEMORY_GONE")])
def test_a_failed_slice_of_a_retrieve_takes_the_one_behind_it_along(report: SliceReport, outcome: str):
    desk, e = held()
    e.store("a", 8)
    desk.run_copies()
    job = e.lookup("a", 8)
    e.retrieve(job)
    ahead(desk, e)
    desk.report()
    ahead(desk, e)
    desk.report(report=SliceReport(1, report.reason, report.torn))
    assert ahead(desk, e) == list(desk.slices.values())
    desk.report(report=NOT_BEGUN)
    assert e.ended() == f"3 LOADED, 1 {outcome}, 4 FAILED AFTER_FAILURE"
    assert desk.counts.pins == 5
    e.retrieve(job)
    desk.run_copies()
    assert (e.ended(), desk.counts.pins) == ("8 LOADED", 0)


def test_a_fence_waits_for_both():
    desk, e = held()
    e.store("a", 8)
    call = e.last_call.call_id
    ahead(desk, e)
    assert desk.book.fence(desk.now, e.worker(0), e.engine_id, [call]) == (call,)
    desk.report()
    assert (e.worker(0), call) not in desk.ended
    assert len(ahead(desk, e)) == 1, "nothing more is ordered"
    assert "settling" in desk.states()
    desk.report()
    assert e.ended(call) == "8 FAILED REVOKED"
    assert desk.states() == "64 free"


def test_memory_that_goes_waits_for_both():
    desk, e = held()
    e.store("a", 8)
    ahead(desk, e)
    desk.book.unregister(desk.now, e.worker(0), e.engine_id)
    desk.step()
    desk.report()
    assert not desk.unmapped
    desk.report()
    assert len(desk.unmapped) == 1


@pytest.mark.parametrize("failing", [None, 0, 1, 2])
@pytest.mark.parametrize("direction", ["store", "retrieve"])
def test_parts_of_a_chunk_that_is_larger_than_a_slice_wait_behind_each_other(direction: str, failing: int | None):
    """Three parts a chunk. The memory of a chunk stays taken until the last part that was ordered is reported."""
    desk, e = held(slice_chunks=0.4)
    if direction == "retrieve":
        e.store("a", 2)
        while ahead(desk, e):
            desk.report()
        e.retrieve(e.lookup("a", 2))
    else:
        e.store("a", 2)
    for part in range(6):
        in_flight = ahead(desk, e)
        assert len(in_flight) == (2 if part < 5 else 1)
        assert in_flight[0].pieces[0].chunk == part // 3
        if part == failing:
            desk.report(report=LOST)
            if direction == "store":
                assert "settling" in desk.states()
            desk.report(report=NOT_BEGUN)
            break
        desk.report()
    done = "LOADED" if direction == "retrieve" else "STORED"
    first = "TORN" if direction == "retrieve" and failing else "FAILED"
    wanted = f"2 {done}" if failing is None else f"1 {first} MEMORY_GONE, 1 FAILED AFTER_FAILURE"
    assert e.ended() == wanted
    if direction == "store" and failing is not None:
        assert desk.states() == "64 free"


def test_a_revoked_chunk_of_many_parts_settles_until_its_last_ordered_part_is_reported():
    desk, e = held(slice_chunks=0.4)
    e.store("a", 2)
    ahead(desk, e)
    desk.book.revoke(desk.now, e.worker(0), e.last_call.call_id)
    desk.step()
    assert desk.states() == "63 free, 1 settling"
    desk.report()
    assert desk.states() == "63 free, 1 settling", "the second part is still copied"
    desk.report()
    assert desk.states() == "64 free"
    assert e.ended() == "2 FAILED REVOKED"


def test_a_retrieve_of_other_groups_goes_before_what_its_registration_has_revoked():
    desk, e = held()
    e.store("a", 8, block=500)
    desk.run_copies()
    job = e.lookup("a", 8)
    e.store("b", 8)
    storing = e.last_call.call_id
    ahead(desk, e)
    e.groups = 2
    e.share()
    e.retrieve(job, block=100)
    desk.report()
    ahead(desk, e)
    desk.run_copies()
    assert (e.ended(storing), e.ended()) == ("8 FAILED REVOKED", "8 LOADED")
    assert len(desk.unmapped) == 1


def test_where_copies_run_by_themselves_two_wait_behind_the_one_that_is_copied():
    desk, e = held()
    e.store("a", 12)
    desk.book.plan_ahead(desk.now, e.worker(0), SLICES_LAUNCHED)
    desk.step()
    one, two, three = desk.slices.values()
    assert [chunks_of(order) for order in (one, two, three)] == [[0, 1], [2, 3], [4, 5]]
    assert (two.after, three.after) == (one.slice_id, two.slice_id)
