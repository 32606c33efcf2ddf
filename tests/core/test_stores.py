# SPDX-License-Identifier: Apache-2.0
"""Stores: slices, blocks, outcomes, when bytes become visible; and chunks larger than a slice."""

from __future__ import annotations

import pytest

from kvgrpc.core import types as t
from kvgrpc.core.types import Policy, SliceReport
from tests.core import engine
from tests.core.desk import BLOCK, CHUNK, OBJECT, Desk, EngineDesk, block_ids
from tests.core.engine import key_of

FAILED = SliceReport(0, "MEMORY_GONE")
TORN = SliceReport(0, "MEMORY_GONE", torn=True)


def held(chunks: int = 64, slice_chunks: float = 100, **shape: int) -> tuple[Desk, EngineDesk]:
    """A desk whose copies wait for ``report``."""
    limits = t.CoreLimits(slice_bytes=int(slice_chunks * OBJECT), pin_share=1.0)
    desk = Desk(chunks=chunks, limits=limits, auto=False)
    return desk, desk.engine("e", **shape)


def pieces(desk: Desk) -> list[int]:
    """Chunks of the slice in flight."""
    return [piece.chunk for order in desk.slices.values() for piece in order.pieces]


# ---- store -----------------------------------------------------------------------------------------------------------


def test_a_store_is_visible_when_it_is_answered_and_not_before():
    desk, e = held()
    assert e.store("a", 4) == "waiting"
    assert e.hits("a") == 0
    desk.report()
    assert (e.ended(), e.hits("a")) == ("4 STORED", 4)
    assert desk.book.counters["stored_chunks"] == 4


def test_a_store_without_a_full_chunk_is_answered_at_once():
    desk, e = held()
    assert e.store("a", 4, start=BLOCK, end=CHUNK + BLOCK) == ""
    assert e.store("a", 4, start=CHUNK, end=CHUNK) == ""
    assert not desk.slices


def test_only_chunks_wholly_inside_the_range_are_stored():
    _, e = held()
    e.desk.auto = True
    assert e.store("a", 6, start=BLOCK, end=5 * CHUNK - BLOCK, block=7) == "3 STORED"
    (order,) = e.desk.history
    assert [piece.chunk for piece in order.pieces] == [1, 2, 3]
    assert block_ids(order.pieces[0]) == ((10, 11, 12, 13),), "the first whole chunk begins three blocks later"
    assert {piece.first_block for piece in order.pieces} == {(0,)}
    assert e.hits("a", 6) == 0, "without its head nothing is found"
    assert e.store("a", 6) == "1 STORED, 3 RESIDENT, 2 STORED"


def test_every_group_has_blocks_of_its_own():
    desk, e = held(groups=2)
    assert e.registration().geometry.object_bytes(CHUNK) == OBJECT
    command = t.StoreCommand(e.engine_id, 1, e.space, e.content("a", 2), t.TokenRange(0, 32), (range(8), range(50, 58)))
    assert desk.book.store(0, e.worker(0), command) is None
    desk.step()
    (order,) = desk.history
    assert [block_ids(piece) for piece in order.pieces] == [
        ((0, 1, 2, 3), (50, 51, 52, 53)),
        ((4, 5, 6, 7), (54, 55, 56, 57)),
    ]


def test_a_store_is_cut_into_slices_of_whole_chunks():
    desk, e = held(slice_chunks=2.5)
    e.store("a", 5)
    seen: list[list[int]] = []
    while desk.slices:
        seen.append(pieces(desk))
        assert e.ended() == "waiting"
        desk.report()
    assert (seen, e.ended()) == ([[0, 1], [2, 3], [4]], "5 STORED")


def test_slots_are_reserved_slice_by_slice():
    desk, e = held(slice_chunks=2)
    e.store("a", 5)
    assert desk.states() == "62 free, 2 writing"
    desk.report()
    assert desk.states() == "60 free, 2 writing, 2 ready"


def test_two_stores_of_one_chunk():
    desk, e = held()
    f = desk.engine("f")
    e.store("a", 4)
    f.store("a", 6)
    assert f.ended() == "waiting"
    one, two = list(desk.slices.values())
    desk.report(two)
    assert f.ended() == "4 BEING_WRITTEN, 2 STORED"
    assert e.hits("a", 6) == 0
    desk.report(one)
    assert e.ended() == "4 STORED"
    assert (e.hits("a", 6), f.store("a", 6)) == (6, "6 RESIDENT")


def test_the_same_key_twice_in_one_store():
    desk, e = held()
    content = t.ChunkKeys([b"same"] * 3, 3 * CHUNK)
    command = t.StoreCommand(e.engine_id, 1, e.space, content, t.TokenRange(0, 3 * CHUNK), (range(12),))
    desk.book.store(0, e.worker(0), command)
    desk.step()
    desk.report()
    assert [r.outcome.value for r in desk.ended[e.worker(0), 1]] == ["STORED", "BEING_WRITTEN"]


def test_a_store_larger_than_the_arena_keeps_its_head_and_says_so():
    desk, e = held(chunks=8, slice_chunks=3)
    e.store("a", 12)
    desk.run_copies()
    assert e.ended() == "8 STORED, 4 REFUSED NO_ROOM"
    assert e.hits("a", 12) == 8
    assert desk.book.counters["evicted_chunks"] == 0


def test_a_store_evicts_others_for_itself_slice_by_slice():
    desk, e = held(chunks=8, slice_chunks=2)
    e.store("a", 6)
    desk.run_copies()
    e.store("b", 8)
    desk.run_copies()
    assert (e.ended(), e.hits("a", 6), e.hits("b", 8)) == ("8 STORED", 0, 8)


def test_new_chunks_between_those_that_are_there_go_into_one_slice(monkeypatch: pytest.MonkeyPatch):
    """What follows each other and is new is opened at once."""
    monkeypatch.setattr(engine, "key_of", lambda prompt, at: key_of("abbaa"[at] if prompt == "mixed" else prompt, at))
    desk, e = held()
    e.store("a", 5)
    desk.run_copies()
    e.store("mixed", 5)
    assert pieces(desk) == [1, 2]
    desk.run_copies()
    assert e.ended() == "1 RESIDENT, 2 STORED, 2 RESIDENT"


def test_a_key_that_a_store_names_twice_is_written_once():
    desk, e = held()
    keys = [key_of("a", at) for at in (0, 1, 0, 2)]
    content = t.ChunkKeys(keys, 4 * CHUNK)
    command = t.StoreCommand(e.engine_id, 1, e.space, content, t.TokenRange(0, 4 * CHUNK), (range(4 * CHUNK // BLOCK),))
    assert desk.book.store(0, e.worker(0), command) is None
    desk.step()
    assert pieces(desk) == [0, 1, 3]
    assert desk.states() == "61 free, 3 writing"
    desk.run_copies()
    results = desk.book.store(0, e.worker(0), command)
    assert results is not None
    assert [(r.count, r.outcome.name) for r in results] == [(2, "STORED"), (1, "BEING_WRITTEN"), (1, "STORED")]


def test_a_store_evicts_no_more_than_it_needs_and_the_oldest_first():
    desk, e = held(chunks=16)
    for prompt in "abc":
        e.store(prompt, 4)
        desk.run_copies()
    e.store("d", 9)
    desk.run_copies()
    assert (e.hits("a"), e.hits("b"), e.hits("c")) == (0, 3, 4), "tails first"
    assert desk.book.counters["evicted_chunks"] == 5


def test_no_store_takes_nothing():
    desk, e = held()
    assert e.store("a", 4, policy=Policy(no_store=True)) == "4 REFUSED NO_STORE"
    assert desk.states() == "64 free"
    assert desk.book.counters["refused_no_store"] == 4


@pytest.mark.parametrize(("report", "outcome"), [(FAILED, "FAILED MEMORY_GONE"), (TORN, "TORN MEMORY_GONE")])
def test_a_failed_copy_ends_the_store_and_its_chunk_is_never_found(report: SliceReport, outcome: str):
    desk, e = held(slice_chunks=3)
    e.store("a", 8)
    desk.report()
    desk.report(report=t.SliceReport(1, report.reason, report.torn))
    assert e.ended() == f"4 STORED, 1 {outcome}, 3 FAILED AFTER_FAILURE"
    assert (e.hits("a", 8), desk.states()) == (4, "60 free, 4 ready")


def test_what_was_resident_after_a_failure_in_the_same_slice_is_still_resident():
    desk, e = held()
    e.store("a", 6, start=3 * CHUNK, end=4 * CHUNK)
    desk.report()
    e.store("a", 6)
    desk.report(report=t.SliceReport(2, "X"))
    assert e.ended() == "2 STORED, 1 FAILED X, 1 RESIDENT, 2 FAILED AFTER_FAILURE"


# ---- chunks larger than a slice --------------------------------------------------------------------------------------


def test_a_chunk_larger_than_a_slice_is_cut_by_bytes():
    desk, e = held(slice_chunks=0.4)
    e.store("a", 2)
    spans: list[tuple[int, tuple[int, int]]] = []
    while desk.slices:
        (order,) = desk.slices.values()
        spans += [(piece.chunk, piece.span) for piece in order.pieces]
        assert len(order.pieces) == 1
        desk.report()
    assert spans == [(c, s) for c in (0, 1) for s in ((0, 409), (409, 818), (818, 1024))]
    assert (e.ended(), e.hits("a", 2)) == ("2 STORED", 2)


@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_large_chunk_that_fails_in_any_part_leaves_nothing(done: int):
    desk, e = held(slice_chunks=0.4)
    e.store("a", 2)
    for _ in range(done):
        desk.report()
    desk.report(report=FAILED)
    assert e.ended() == "1 FAILED MEMORY_GONE, 1 FAILED AFTER_FAILURE"
    assert desk.states() == "64 free"


@pytest.mark.parametrize(("done", "outcome"), [(0, "FAILED"), (1, "TORN"), (2, "TORN")])
def test_a_large_chunk_whose_later_part_fails_is_torn_in_the_engine(done: int, outcome: str):
    desk, e = held(slice_chunks=0.4)
    e.store("a", 3)
    desk.run_copies()
    e.retrieve(e.lookup("a", 3))
    for _ in range(3 + done):
        desk.report()
    desk.report(report=FAILED)
    assert e.ended() == f"1 LOADED, 1 {outcome} MEMORY_GONE, 1 FAILED AFTER_FAILURE"
    assert desk.counts.pins == 2


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_large_chunk_revoked_in_the_middle(after: int):
    desk, e = held(slice_chunks=0.4)
    e.store("a", 2)
    desk.run_copies()
    e.retrieve(e.lookup("a", 2))
    for _ in range(after):
        desk.report()
    assert e.fence(e.last_call.call_id) == (e.last_call.call_id,)
    desk.report()
    torn = "1 LOADED, 1 FAILED REVOKED" if after == 2 else "1 TORN REVOKED, 1 FAILED REVOKED"
    assert e.ended() == torn
