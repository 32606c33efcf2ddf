# SPDX-License-Identifier: Apache-2.0
"""Leases: reader sets, frees, expiry, and the pin budget."""

from __future__ import annotations

import pytest

from kvgrpc.core import types as t
from kvgrpc.core.errors import Reason
from kvgrpc.core.types import Reader
from tests.core.desk import CHUNK, Desk, EngineDesk, refused

SHAPES = [(1, 1), (4, 4), (4, 1), (8, 2)]


def stored(tp_size: int = 1, kv_tp_size: int = 1, chunks: int = 4) -> tuple[Desk, EngineDesk]:
    desk = Desk(chunks=64, limits=t.CoreLimits(pin_share=1.0))
    engine = desk.engine(tp_size=tp_size, kv_tp_size=kv_tp_size)
    engine.store_all("a", chunks)
    return desk, engine


@pytest.mark.parametrize(("tp_size", "kv_tp_size"), SHAPES)
def test_each_reader_reads_once_and_the_last_one_releases(tp_size: int, kv_tp_size: int):
    desk, e = stored(tp_size, kv_tp_size)
    job = e.lookup("a", 4)
    assert desk.counts.pins == 4 * tp_size
    for worker in range(tp_size):
        assert desk.arena.pinned_bytes > 0, "pinned until the last reader has read"
        assert e.retrieve(job, worker=worker) == "4 LOADED"
        assert desk.counts.pins == 4 * (tp_size - worker - 1)
    assert desk.arena.pinned_bytes == 0


@pytest.mark.parametrize(("tp_size", "kv_tp_size"), SHAPES)
def test_a_reader_that_repeats_takes_nobody_elses_pin(tp_size: int, kv_tp_size: int):
    desk, e = stored(tp_size, kv_tp_size)
    job = e.lookup("a", 4)
    for _ in range(3):
        assert e.retrieve(job, worker=0) == "4 LOADED"
    assert desk.counts.pins == 4 * (tp_size - 1)


@pytest.mark.parametrize(("tp_size", "kv_tp_size"), SHAPES)
def test_free_says_how_many_pins_it_released_and_repeats_change_nothing(tp_size: int, kv_tp_size: int):
    desk, e = stored(tp_size, kv_tp_size)
    job = e.lookup("a", 4)
    assert e.free(job, start=1, end=3) == 2 * tp_size
    assert e.free(job, start=1, end=3) == 0
    assert e.free(job) == 2 * tp_size
    assert e.free(job) == 0
    assert desk.counts.pins == desk.arena.pinned_bytes == 0


@pytest.mark.parametrize(("tp_size", "kv_tp_size"), SHAPES)
def test_readers_of_each_object_are_where_the_arithmetic_says(tp_size: int, kv_tp_size: int):
    desk, e = stored(tp_size, kv_tp_size)
    job = e.lookup("a", 4)
    size = tp_size // kv_tp_size
    for kv_rank in range(kv_tp_size):
        for tp_rank in range(tp_size):
            if kv_rank * size <= tp_rank < (kv_rank + 1) * size:
                assert e.free(job, readers=[Reader(kv_rank, tp_rank)]) == 4
            else:
                with refused(Reason.READER_UNKNOWN) as got:
                    e.free(job, readers=[Reader(kv_rank, tp_rank)])
                assert got.refusal.field == "readers"
    assert desk.counts.pins == 0


def test_a_free_by_range_frees_only_whole_chunks_inside():
    desk, e = stored()
    job = e.lookup("a", 4)
    command = t.FreeCommand(e.engine_id, job.job_id, 1, t.TokenRange(1, 3 * CHUNK + 15))
    assert desk.book.free(desk.now, e.scheduler, command) == 2  # chunks 1 and 2
    command = t.FreeCommand(e.engine_id, job.job_id, 1, t.TokenRange(CHUNK + 1, 2 * CHUNK - 1))
    assert desk.book.free(desk.now, e.scheduler, command) == 0
    command = t.FreeCommand(e.engine_id, job.job_id, 1, t.TokenRange(0, 1 << 31))
    assert desk.book.free(desk.now, e.scheduler, command) == 2


def test_a_free_touches_no_other_jobs_pins():
    desk, e = stored(4, 1)
    one, two = e.lookup("a", 4), e.lookup("a", 2)
    assert e.free(one) == 16
    assert desk.counts.pins == 8
    assert desk.arena.pinned_bytes == desk.arena.total_bytes * 2 // 64
    assert e.free(two) == 8


def test_a_free_with_another_tp_size_is_refused_and_frees_nothing():
    desk, e = stored(4, 1)
    job = e.lookup("a", 4)
    for tp_size in (0, 1, 8):
        with refused(Reason.TP_SIZE_MISMATCH):
            e.free(job, tp_size=tp_size)
    assert desk.counts.pins == 16


def test_one_refused_reader_among_good_ones_frees_nothing():
    desk, e = stored(4, 1)
    job = e.lookup("a", 4)
    with refused(Reason.READER_UNKNOWN):
        e.free(job, readers=[Reader(0, 1), Reader(1, 1)])
    assert desk.counts.pins == 16


def test_a_job_is_its_engines_alone():
    desk, e = stored()
    other = desk.engine("other")
    job = e.lookup("a", 4)
    for call in (lambda: other.free(job), lambda: other.query(job), lambda: other.retrieve(job, end=CHUNK)):
        with refused(Reason.JOB_UNKNOWN):
            call()
    assert desk.counts.pins == 4
    assert other.hits("a") == 4, "the data is shared, the job is not"


def test_lookup_names_the_ranks_that_it_wants():
    desk, e = stored(4, 4)
    job = e.lookup("a", 4, kv_ranks=(1, 3))
    assert desk.counts.pins == 8
    assert e.retrieve(job, worker=3) == "4 LOADED"
    with refused(Reason.READER_UNKNOWN):
        e.retrieve(job, worker=0)
    for ranks in ((4,), (-1, 2), (1, 1)):
        with refused(Reason.RANK):
            e.lookup("a", 4, kv_ranks=ranks)


def test_without_any_registration_an_object_has_one_reader():
    desk = Desk()
    e = desk.engine(tp_size=4, kv_tp_size=4)
    e.store_all("a", 4)
    quiet = desk.engine("quiet", tp_size=4, kv_tp_size=4, register=False)
    quiet.lookup("a", 4)
    assert desk.counts.pins == 16


# ---- expiry ----------------------------------------------------------------------------------------------------------


def test_a_lease_ends_at_its_time_and_the_record_stays():
    desk, e = stored(4, 1)
    job = e.lookup("a", 4)
    desk.pass_time(desk.limits.lease_ns - 1)
    assert desk.counts.pins == 16
    desk.pass_time(1)
    assert (desk.counts.pins, desk.counts.jobs) == (0, 1)
    assert e.query(job) == job.status, "the answer stays readable, unchanged"
    assert e.free(job) == 0


def test_a_lease_that_expires_under_a_running_copy_leaves_the_pin_until_it_is_reported():
    desk, e = stored()
    desk.auto = False
    job = e.lookup("a", 4)
    assert e.retrieve(job) == "waiting"
    desk.pass_time(desk.limits.lease_ns)
    assert desk.counts.pins == 0
    assert desk.states() == "60 free, 4 pinned"
    assert e.store("b", 64) == "waiting"
    desk.report()
    assert e.ended(e.last_call.call_id - 1) == "4 LOADED"
    desk.auto = True
    desk.run_copies()
    assert e.ended() == "64 STORED", "nobody held anything any more"


def test_after_expiry_what_is_still_there_is_loaded():
    desk, e = stored()
    job = e.lookup("a", 4)
    desk.pass_time(desk.limits.lease_ns)
    assert e.retrieve(job) == "4 LOADED"
    assert e.retrieve(job) == "4 LOADED"


def test_after_expiry_what_was_evicted_is_missing_and_nothing_after_it_is_tried():
    desk, e = stored(chunks=8)
    job = e.lookup("a", 8)
    desk.pass_time(desk.limits.lease_ns)
    e.store("b", 61)  # evicts a's tail
    before = len(desk.history)
    assert e.retrieve(job) == "3 LOADED, 1 MISSING, 4 FAILED AFTER_FAILURE"
    assert [piece.chunk for order in desk.history[before:] for piece in order.pieces] == [0, 1, 2]
    assert e.retrieve(job, start=4 * CHUNK, end=8 * CHUNK) == "1 MISSING, 3 FAILED AFTER_FAILURE"


def test_chunks_past_the_hit_are_missing():
    _, e = stored()
    job = e.lookup("a", 6)
    assert e.retrieve(job, end=6 * CHUNK) == "4 LOADED, 2 MISSING"
    assert e.retrieve(job, start=5 * CHUNK, end=6 * CHUNK) == "1 MISSING"


# ---- the pin budget --------------------------------------------------------------------------------------------------


def test_beyond_the_pin_budget_hits_are_answered_unpinned():
    desk = Desk(chunks=16, limits=t.CoreLimits(pin_share=0.5))
    e = desk.engine()
    e.store("a", 8)
    e.store("b", 4)
    first, second, again = e.lookup("a", 8), e.lookup("b", 4), e.lookup("a", 8)
    assert (first.status.pinned, second.status.pinned) == (True, False)
    assert again.status.pinned, "what is pinned already costs the budget nothing"
    assert (second.status.hit_tokens, desk.counts.pins) == (4 * CHUNK, 16)
    assert e.retrieve(second) == "4 LOADED"
    e.store("c", 8)
    assert e.retrieve(second) == "1 MISSING, 3 FAILED AFTER_FAILURE"
    assert (e.free(first), e.free(again)) == (8, 8)
    assert e.lookup("c", 4).status.pinned
