# SPDX-License-Identifier: Apache-2.0
"""Call ids: repeats join, results are remembered, fences and cancels end calls by evidence."""

from __future__ import annotations

import pytest

from kvgrpc.core import types as t
from kvgrpc.core.errors import Reason
from tests.core.desk import CHUNK, OBJECT, Desk, EngineDesk, refused

FREE = "64 free"


def held(**limits: object) -> tuple[Desk, EngineDesk]:
    desk = Desk(auto=False, limits=t.CoreLimits(pin_share=1.0, slice_bytes=2 * OBJECT, **limits))  # type: ignore[arg-type]
    return desk, desk.engine()


# ---- repeats ---------------------------------------------------------------------------------------------------------


def test_a_repeat_joins_the_running_call():
    desk, e = held()
    assert e.store("a", 4, call_id=7) == "waiting"
    assert e.store("a", 4, call_id=7) == "waiting"
    assert (desk.counts.calls_in_flight, len(desk.slices)) == (1, 1)
    desk.run_copies()
    assert e.ended(7) == "4 STORED"
    assert desk.book.counters["stores"] == 1


def test_a_repeat_of_an_ended_call_gets_its_recorded_result_and_copies_nothing():
    desk, e = held()
    e.store("a", 4, call_id=7)
    desk.run_copies()
    job = e.lookup("a", 4)
    e.retrieve(job, call_id=8)
    desk.run_copies()
    copies = len(desk.history)
    e.clear()
    assert e.store("a", 4, call_id=7) == "4 STORED", "the answer of then, whatever happened since"
    assert e.retrieve(job, call_id=8) == "4 LOADED"
    assert len(desk.history) == copies


def test_a_call_id_means_one_call():
    desk, e = held()
    e.store("a", 4, call_id=7)
    for change in (
        lambda: e.store("b", 4, call_id=7),
        lambda: e.store("a", 3, call_id=7),
        lambda: e.store("a", 4, call_id=7, block=1),
        lambda: e.retrieve(t.LookupAnswer(b"j", t.PrefetchStatus(True)), call_id=7, end=CHUNK),
    ):
        with refused(Reason.CALL_ID_REUSED):
            change()
    desk.run_copies()
    assert e.ended(7) == "4 STORED"


def test_call_ids_belong_to_their_client():
    desk = Desk()
    e = desk.engine(tp_size=2, kv_tp_size=2)
    assert e.store("a", 4, call_id=7, worker=0) == "4 STORED"
    assert e.store("a", 4, call_id=7, worker=1) == "4 STORED"


def test_records_go_after_their_time():
    desk, e = held()
    e.store("a", 4, call_id=7)
    desk.run_copies()
    desk.pass_time(desk.limits.call_record_ns - 1)
    desk.book.tick(desk.now)
    assert e.store("a", 4, call_id=7) == "4 STORED"
    desk.pass_time(1)
    desk.book.tick(desk.now)
    desk.step()
    assert e.store("a", 4, call_id=7) == "4 RESIDENT", "a new call"


def test_the_oldest_ended_record_makes_room_and_running_or_fenced_ones_never():
    desk, e = held(calls_per_client=3)
    e.store("a", 2, call_id=1)
    desk.run_copies()
    assert e.fence(2) == ()
    e.store("b", 2, call_id=3)
    e.store("c", 2, call_id=4, block=50)  # in place of 1
    with refused(Reason.CALL_LIMIT) as got:
        e.store("d", 2, call_id=5)
    assert got.refusal.retry_after_ms == 1000
    with refused(Reason.CALL_LIMIT):
        e.fence(6)
    desk.run_copies()
    assert e.store("a", 2, call_id=1) == "2 RESIDENT", "its record was gone"
    with refused(Reason.CALL_REVOKED):
        e.store("x", 2, call_id=2)


# ---- fence -----------------------------------------------------------------------------------------------------------


def test_a_fence_of_an_id_that_has_not_arrived_keeps_it_out():
    desk, e = held()
    assert e.fence(7) == ()
    for _ in range(2):
        with refused(Reason.CALL_REVOKED):
            e.store("a", 4, call_id=7)
    assert e.fence(7) == ()
    desk.pass_time(desk.limits.call_record_ns)
    desk.book.tick(desk.now)
    assert e.store("a", 4, call_id=7) == "waiting"


def test_a_fence_of_an_ended_call_changes_nothing():
    desk, e = held()
    e.store("a", 4, call_id=7)
    desk.run_copies()
    assert e.fence(7) == ()
    assert e.store("a", 4, call_id=7) == "4 STORED"
    assert e.hits("a") == 4


def test_a_fence_ends_a_queued_call_at_once():
    desk, e = held()
    e.store("a", 2, call_id=1)
    e.store("b", 4, call_id=2)
    assert e.fence(2) == ()
    assert (e.ended(2), e.ended(1)) == ("4 FAILED REVOKED", "waiting")
    desk.run_copies()
    assert [order.call_id for order in desk.history] == [1]
    assert e.store("b", 4, call_id=2) == "4 FAILED REVOKED"


def test_a_fence_waits_for_the_slice_in_flight_and_no_slice_follows():
    desk, e = held()
    e.store("a", 6, call_id=1)
    desk.report()
    assert e.fence(1, 2) == (1,)
    assert e.fence(1) == (1,)
    assert desk.states() == "60 free, 2 ready, 2 settling"
    desk.report()
    assert e.ended(1) == "2 STORED, 4 FAILED REVOKED"
    assert (len(desk.history), e.fence(1), e.hits("a", 6)) == (2, (), 2)
    assert desk.states() == "62 free, 2 ready"


def test_a_fenced_retrieve_tells_what_was_loaded():
    desk, e = held()
    e.store("a", 6)
    desk.run_copies()
    job = e.lookup("a", 6)
    e.retrieve(job, call_id=1000)
    desk.report()
    assert e.fence(1000) == (1000,)
    desk.report()
    assert e.ended(1000) == "4 LOADED, 2 FAILED REVOKED"
    assert (desk.counts.pins, desk.states()) == (2, "58 free, 4 ready, 2 pinned")


def test_a_settling_slot_is_nobodys_until_its_copy_is_reported():
    desk, e = held(settling_share=1.0)
    e.store("a", 2, call_id=1)
    old = desk.slices[next(iter(desk.slices))]
    e.fence(1)
    f = desk.engine("f")
    f.store("a", 64)
    others = [s for s in desk.slices.values() if s is not old]
    taken = {extent for order in others for piece in order.pieces for extent in piece.extents}
    assert not taken & {extent for piece in old.pieces for extent in piece.extents}
    desk.report(old)
    desk.run_copies()
    assert f.ended() == "64 STORED"


def test_too_much_that_settles_stops_new_work():
    desk, e = held(settling_share=0.05)
    f = desk.engine("f")
    for engine in (e, f):
        engine.store(engine.name, 2)
        engine.fence(engine.last_call.call_id)
    assert desk.states() == "60 free, 4 settling"
    g = desk.engine("g")
    assert g.store("g", 2) == "2 REFUSED SETTLING_LIMIT"
    desk.run_copies()
    g.store("g", 2)
    desk.run_copies()
    assert g.ended() == "2 STORED"


# ---- cancel ----------------------------------------------------------------------------------------------------------


def test_a_cancel_ends_a_call_as_a_fence_does():
    desk, e = held()
    e.store("a", 4, call_id=1)
    e.store("b", 4, call_id=2)
    e.revoke(2)
    e.revoke(1)
    e.revoke(1)
    e.revoke(99)
    desk.book.revoke(desk.now, "nobody", 1)
    assert (e.ended(2), e.ended(1)) == ("4 FAILED REVOKED", "waiting")
    desk.report()
    assert (e.ended(1), desk.states()) == ("4 FAILED REVOKED", FREE)
    e.store("a", 4, call_id=3)
    desk.run_copies()
    assert e.ended(3) == "4 STORED"


def test_a_cancelled_store_lets_another_take_over_the_chunk():
    desk, e = held()
    e.store("a", 2, call_id=1)
    e.revoke(1)
    f = desk.engine("f")
    f.store("a", 2)
    assert desk.states() == "60 free, 2 writing, 2 settling"
    old, new = desk.slices.values()
    desk.report(old)
    assert e.hits("a", 2) == 0
    desk.report(new)
    assert (f.ended(), e.hits("a", 2)) == ("2 STORED", 2)


def test_a_revoked_store_between_slices_lets_its_half_filled_chunk_go():
    limits = t.CoreLimits(pin_share=1.0, slice_bytes=OBJECT // 2)
    desk = Desk(auto=False, limits=limits)
    e = desk.engine()
    e.store("r", 1, block=500)
    desk.run_copies()
    job = e.lookup("r", 1)
    e.store("a", 2, call_id=1000)
    e.retrieve(job, block=100)
    desk.report()  # half a chunk is there; now the retrieve goes first
    assert e.fence(1000) == ()
    assert e.ended(1000) == "2 FAILED REVOKED"
    assert desk.states() == "63 free, 1 pinned"
    desk.run_copies()
    assert e.ended() == "1 LOADED"


@pytest.mark.parametrize("engines", [1, 3])
def test_calls_are_counted_while_they_run(engines: int):
    desk, _ = held()
    for number in range(engines):
        engine = desk.engine(f"x{number}")
        engine.store(f"p{number}", 3)
        engine.store(f"q{number}", 3)
    assert desk.counts.calls_in_flight == 2 * engines
    desk.run_copies()
    assert desk.counts.calls_in_flight == 0
