# SPDX-License-Identifier: Apache-2.0
"""Retrieves: ranges, failures, their place between the slices of stores; and calls that are refused."""

from __future__ import annotations

import pytest

from kvgrpc.core import calls
from kvgrpc.core import types as t
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import SliceReport
from tests.core.desk import BLOCK, CHUNK, OBJECT, Desk, EngineDesk, block_ids, refused

FAILED = SliceReport(0, "MEMORY_GONE")
TORN = SliceReport(0, "MEMORY_GONE", torn=True)


def held(chunks: int = 64, slice_chunks: float = 100, **shape: int) -> tuple[Desk, EngineDesk]:
    """A desk whose copies wait for ``report``."""
    limits = t.CoreLimits(slice_bytes=int(slice_chunks * OBJECT), pin_share=1.0)
    desk = Desk(chunks=chunks, limits=limits, auto=False)
    return desk, desk.engine("e", **shape)


def test_a_range_may_begin_and_end_inside_a_chunk():
    desk, e = held()
    desk.auto = True
    e.store("a", 4)
    assert e.retrieve(e.lookup("a", 4), start=CHUNK - BLOCK, end=3 * CHUNK + 2 * BLOCK, block=100) == "4 LOADED"
    order = desk.history[-1]
    assert [(piece.chunk, piece.first_block, block_ids(piece)) for piece in order.pieces] == [
        (0, (3,), ((100,),)),
        (1, (0,), ((101, 102, 103, 104),)),
        (2, (0,), ((105, 106, 107, 108),)),
        (3, (0,), ((109, 110),)),
    ]


def test_a_range_inside_one_chunk():
    desk, e = held()
    desk.auto = True
    e.store("a", 2)
    assert e.retrieve(e.lookup("a", 2), start=CHUNK + BLOCK, end=CHUNK + 3 * BLOCK, block=9) == "1 LOADED"
    (piece,) = desk.history[-1].pieces
    assert (piece.chunk, piece.first_block, block_ids(piece)) == (1, (1,), ((9, 10),))


def test_an_empty_range_loads_nothing_and_releases_nothing():
    desk, e = held()
    desk.auto = True
    e.store("a", 2)
    job = e.lookup("a", 2)
    for at in (0, BLOCK, CHUNK, 2 * CHUNK):
        assert e.retrieve(job, start=at, end=at) == ""
    assert desk.counts.pins == 2


@pytest.mark.parametrize(("report", "outcome"), [(FAILED, "FAILED MEMORY_GONE"), (TORN, "TORN MEMORY_GONE")])
def test_a_failed_copy_ends_the_retrieve_and_leaves_the_pins_of_what_was_not_loaded(report: SliceReport, outcome: str):
    desk, e = held(slice_chunks=3)
    e.store("a", 8)
    desk.run_copies()
    job = e.lookup("a", 8)
    e.retrieve(job)
    desk.report()
    desk.report(report=t.SliceReport(1, report.reason, report.torn))
    assert e.ended() == f"4 LOADED, 1 {outcome}, 3 FAILED AFTER_FAILURE"
    assert desk.counts.pins == 4
    e.retrieve(job)
    desk.run_copies()
    assert (e.ended(), desk.counts.pins) == ("8 LOADED", 0)


def test_chunks_that_a_failed_copy_may_have_touched_are_all_torn():
    """A card's copies go in any order: nobody knows how far they came."""
    desk, e = held(slice_chunks=3)
    e.store("a", 8)
    desk.run_copies()
    e.retrieve(e.lookup("a", 8))
    desk.report(report=t.SliceReport(0, "CARD_FAILED", torn=3))
    assert e.ended() == "3 TORN CARD_FAILED, 5 FAILED AFTER_FAILURE"


def test_a_retrieve_goes_between_the_slices_of_a_store_when_its_blocks_are_others():
    desk, e = held(slice_chunks=1)
    e.store("a", 2, block=500)
    desk.run_copies()
    job = e.lookup("a", 2)
    e.store("b", 3, block=0)
    storing = e.last_call.call_id
    e.retrieve(job, block=100)
    order = []
    while desk.slices:
        order.append(desk.report().direction.value)
    assert order == ["store", "retrieve", "retrieve", "store", "store"]
    assert (e.ended(), e.ended(storing)) == ("2 LOADED", "3 STORED")


def test_a_retrieve_waits_for_the_stores_before_it_that_share_a_block():
    desk, e = held(slice_chunks=1)
    e.store("a", 2, block=500)
    desk.run_copies()
    job = e.lookup("a", 2)
    e.store("b", 2, block=0)
    e.store("c", 2, block=20)
    e.retrieve(job, block=27)  # the last block of c
    e.retrieve(job, block=40, end=CHUNK)  # none of them, nor of the retrieve before it
    e.retrieve(job, block=34, end=CHUNK)  # a block of the first retrieve: order is kept
    order = []
    while desk.slices:
        slice_ = desk.report()
        order.append((slice_.direction.value, slice_.pieces[0].block_ids[0][0]))
    assert order == [
        ("store", 0),
        ("retrieve", 40),
        ("store", 4),
        ("store", 20),
        ("store", 24),
        ("retrieve", 27),
        ("retrieve", 31),
        ("retrieve", 34),
    ]


def test_a_turn_compares_a_bounded_number_of_blocks(monkeypatch: pytest.MonkeyPatch):
    """A very large store is not passed; what one turn could not compare, the next one does."""
    monkeypatch.setattr(calls, "PASSING_BLOCKS", 8)
    monkeypatch.setattr(calls, "PASSED_BLOCKS", 12)
    desk, e = held(slice_chunks=1)
    e.store("a", 2, block=500)
    desk.run_copies()
    job = e.lookup("a", 2)
    for number, chunks in enumerate((2, 2, 2, 4)):
        e.store("bcde"[number], chunks, block=20 * number)
    e.retrieve(job, block=200)
    order = []
    while desk.slices:
        slice_ = desk.report()
        order.append((slice_.direction.value, slice_.pieces[0].block_ids[0][0]))
    assert order.index(("retrieve", 200)) == len(order) - 2, "the store of 16 blocks goes first"
    job = e.lookup("a", 2)
    for number in range(3):
        e.store("fgh"[number], 2, block=20 * number)
    e.retrieve(job, block=200)
    order = []
    while desk.slices:
        slice_ = desk.report()
        order.append(slice_.direction.value)
    assert order[:3] == ["store", "store", "retrieve"], "8 blocks a turn: two more turns"


def test_stores_keep_their_order_and_one_slice_is_in_flight_a_client():
    desk, e = held(slice_chunks=1, tp_size=2, kv_tp_size=2)
    e.store("a", 2, block=0)
    e.store("b", 2, block=100)
    e.store("a", 2, worker=1)
    assert len(desk.slices) == 2, "one for each client"
    mine = []
    while desk.slices:
        order = desk.report()
        if order.client_id == e.worker(0):
            mine.append(order.pieces[0].block_ids[0][0])
    assert mine == [0, 4, 100, 104]


def test_two_clients_read_one_chunk_at_once():
    desk, e = held(tp_size=2, kv_tp_size=1)
    desk.auto = True
    e.store("a", 4)
    desk.auto = False
    job = e.lookup("a", 4)
    e.retrieve(job, worker=0)
    e.retrieve(job, worker=1)
    first, second = list(desk.slices.values())
    desk.report(second)
    assert desk.counts.pins == 4
    desk.report(first)
    assert desk.counts.pins == desk.arena.pinned_bytes == 0


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_bad_calls_are_refused_and_leave_no_trace():
    desk, e = held()
    desk.auto = True
    e.store("a", 4)
    job = e.lookup("a", 4)
    before = (desk.states(), desk.counts)
    blocks = (tuple(range(16)),)
    bad_store = [
        (Reason.RANGE, e.content("x", 4), t.TokenRange(32, 16), blocks),
        (Reason.RANGE, e.content("x", 4), t.TokenRange(1, 16), blocks),
        (Reason.RANGE, e.content("x", 4), t.TokenRange(0, 18), blocks),
        (Reason.RANGE, e.content("x", 4), t.TokenRange(-16, 16), blocks),
        (Reason.RANGE, e.content("x", 4), t.TokenRange(0, 5 * CHUNK), blocks),
        (Reason.RANGE, e.content("x", 2, 4 * CHUNK), t.TokenRange(0, 4 * CHUNK), blocks),
        (Reason.RANGE, t.ChunkKeys([b"k"], 4 * CHUNK, 3), t.TokenRange(32, 4 * CHUNK), blocks),
        (Reason.RANGE, e.content("x", 4, 1 << 40), t.TokenRange(0, 1 << 32), blocks),
        (Reason.BLOCK_IDS, e.content("x", 4), t.TokenRange(0, 64), (tuple(range(15)),)),
        (Reason.BLOCK_IDS, e.content("x", 4), t.TokenRange(0, 64), ((*range(15), 1024),)),
        (Reason.BLOCK_IDS, e.content("x", 4), t.TokenRange(0, 64), ((*range(15), -1),)),
        (Reason.BLOCK_IDS, e.content("x", 4), t.TokenRange(0, 64), ()),
        (Reason.BLOCK_IDS, e.content("x", 4), t.TokenRange(0, 64), (*blocks, *blocks)),
        (Reason.INVALID_FIELD, e.content("x", 4, 3 * CHUNK), t.TokenRange(0, 48), blocks),
    ]
    for reason, content, tokens, ids in bad_store:
        with refused(reason):
            desk.book.store(0, e.worker(0), t.StoreCommand(e.engine_id, 77, e.space, content, tokens, ids))
        desk.step()
    for reason, tokens, ids in [
        (Reason.RANGE, t.TokenRange(2, 16), blocks),
        (Reason.RANGE, t.TokenRange(16, 0), blocks),
        (Reason.BLOCK_IDS, t.TokenRange(0, 64), (tuple(range(15)),)),
        (Reason.BLOCK_IDS, t.TokenRange(0, 64), ((*range(15), 5000),)),
    ]:
        with refused(reason):
            desk.book.retrieve(0, e.worker(0), t.RetrieveCommand(e.engine_id, 77, job.job_id, tokens, ids))
        desk.step()
    for call_id in (0, -1, 1 << 64):
        with refused(Reason.INVALID_FIELD):
            e.store("x", 1, call_id=call_id)
        with refused(Reason.INVALID_FIELD):
            e.retrieve(job, call_id=call_id)
    assert (desk.states(), desk.counts) == before
    assert e.retrieve(job, call_id=77) == "4 LOADED", "the next good call works, also under that id"


def test_too_long_a_range_is_refused():
    desk = Desk(limits=t.CoreLimits(keys_per_call=4))
    e = desk.engine()
    with refused(Reason.RANGE):
        desk.book.retrieve(0, e.worker(0), t.RetrieveCommand(e.engine_id, 1, b"j", t.TokenRange(0, 80), (range(20),)))


def test_blocks_past_the_range_are_ignored_whatever_they_are():
    desk, e = held()
    desk.auto = True
    ids = ((*range(8), 99999, -5),)
    command = t.StoreCommand(e.engine_id, 1, e.space, e.content("a", 2), t.TokenRange(0, 32), ids)
    desk.book.store(0, e.worker(0), command)
    desk.step()
    assert e.hits("a", 2) == 2


def test_another_space_than_the_registered_one_is_refused():
    desk, e = held()
    desk.auto = True
    other = desk.engine("other", model="another")
    other.store("a", 4)
    e.store("a", 4)
    e.base, base = other.base, e.base
    with refused(Reason.SPACE_MISMATCH):
        e.store("b", 4)
    desk.book.unregister(desk.now, e.worker(0), e.engine_id)
    job = e.lookup("a", 4)
    e.share(0)
    with refused(Reason.SPACE_MISMATCH):
        e.retrieve(job)
    e.base = b"nobody's"
    with refused(Reason.SPACE_UNKNOWN):
        e.store("b", 4)
    e.base = base


def test_a_block_outside_the_pool_is_named():
    desk, e = held()
    with pytest.raises(Refusal, match=f"block ids of group 0 are 1 to {t.NULL_BLOCK}, not all below num_blocks 1024"):
        desk.book.store(
            0,
            e.worker(0),
            t.StoreCommand(e.engine_id, 1, e.space, e.content("a", 1), t.TokenRange(0, 16), ([1, 2, 3, t.NULL_BLOCK],)),
        )


def test_lists_of_blocks_are_as_good_as_tuples():
    desk, e = held()
    desk.auto = True
    command = t.StoreCommand(e.engine_id, 1, e.space, e.content("a", 1), t.TokenRange(0, 16), ([0, 1, 2, 3],))
    desk.book.store(0, e.worker(0), command)
    desk.step()
    assert desk.book.store(0, e.worker(0), command) == desk.ended[e.worker(0), 1]
