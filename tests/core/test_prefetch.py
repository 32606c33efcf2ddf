# SPDX-License-Identifier: Apache-2.0
"""Prefetch: probe, plan, read, join, fail, run out of time or room, and stop when nobody wants it."""

from __future__ import annotations

import pytest

from kvgrpc.core import types as t
from kvgrpc.core.errors import Reason
from kvgrpc.core.types import PrefetchStatus, S
from tests.core.desk import CHUNK, Desk, EngineDesk, refused

FREE = "64 free"
WAIT = t.CoreLimits().prefetch_wait_ns


def tiered(chunks: int = 64, **shape: int) -> tuple[Desk, EngineDesk]:
    desk = Desk(chunks=chunks, tiers=("disk", "store"), limits=t.CoreLimits(pin_share=1.0, prefetch_share=1.0))
    return desk, desk.engine("e", **shape)


def status(hit: int, by_tier: dict[str, int], limited_by: str = "", pinned: bool = True) -> PrefetchStatus:
    return PrefetchStatus(True, hit * CHUNK, pinned, by_tier, limited_by)


def test_from_probe_to_pinned_hit():
    desk, e = tiered()
    job = e.lookup("a", 4)
    assert (job.status, e.query(job)) == (PrefetchStatus(False), PrefetchStatus(False))
    with refused(Reason.JOB_PENDING):
        e.retrieve(job, end=CHUNK)
    desk.answer_probe("disk", "disk", "store", "")
    assert [read.tier for read in desk.reads.values()] == ["disk", "disk", "store"]
    assert desk.states() == "61 free, 3 writing"
    desk.end_read()
    desk.end_read()
    assert not e.query(job).done
    desk.end_read()
    assert e.query(job) == status(3, {"disk": 2, "store": 1})
    assert desk.jobs_done == [job.job_id]
    assert (desk.counts.pins, e.retrieve(job)) == (3, "3 LOADED")
    assert desk.book.counters["prefetched_objects"] == 3
    desk.pass_time(6 * S)
    assert desk.states() == "61 free, 3 ready"


def test_what_was_there_counts_first():
    desk, e = tiered()
    e.store("a", 2)
    job = e.lookup("a", 4)
    assert desk.counts.pins == 2
    desk.answer_probe("disk")
    desk.end_reads()
    assert e.query(job) == status(4, {"l1": 2, "disk": 2})
    assert desk.book.counters["hit_tokens"] == 4 * CHUNK


def test_a_full_hit_asks_nobody():
    desk, e = tiered()
    e.store("a", 4)
    assert e.lookup("a", 4).status == status(4, {"l1": 4})
    assert not desk.probes


def test_tiers_that_have_nothing():
    desk, e = tiered()
    e.store("a", 1)
    partly, none = e.lookup("a", 4), e.lookup("b", 4)
    desk.answer_probe("")
    desk.answer_probe("")
    assert e.query(partly) == status(1, {"l1": 1})
    assert e.query(none) == status(0, {}, pinned=False), "the answer of a pending lookup stays readable"


def test_a_hole_in_a_tier_ends_the_prefix():
    desk, e = tiered()
    job = e.lookup("a", 5)
    desk.answer_probe("disk", "disk", "", "disk", "disk")
    assert len(desk.reads) == 2
    desk.end_reads()
    assert e.query(job) == status(2, {"disk": 2})


def test_what_is_resident_behind_a_hole_is_used():
    desk, e = tiered()
    e.store("a", 5, start=2 * CHUNK)
    job = e.lookup("a", 5)
    assert len(desk.probes[next(iter(desk.probes))].objects) == 2
    desk.answer_probe("disk")
    assert desk.counts.pins == 0
    desk.end_reads()
    assert e.query(job) == status(5, {"disk": 2, "l1": 3})
    assert desk.counts.pins == 5


def test_all_wanted_ranks_are_read_and_each_reader_gets_its_pin():
    desk, e = tiered(tp_size=4, kv_tp_size=2)
    e.store("a", 1, worker=0)
    job = e.lookup("a", 2)
    assert len(desk.probes[next(iter(desk.probes))].objects) == 3, "rank 0 of the first chunk is there"
    desk.answer_probe("disk")
    desk.end_reads()
    assert (e.query(job), desk.counts.pins) == (status(2, {"disk": 2}), 8)
    assert [e.retrieve(job, worker=worker) for worker in range(4)] == ["2 LOADED"] * 4
    assert desk.counts.pins == 0


def test_one_rank_that_no_tier_has_ends_the_prefix_and_reads_nothing_for_it():
    desk, e = tiered(tp_size=2, kv_tp_size=2)
    job = e.lookup("a", 2)
    desk.answer_probe("disk", "disk", "disk", "")
    desk.end_reads()
    assert e.query(job) == status(1, {"disk": 1})
    assert desk.states() == "62 free, 2 pinned"
    assert len(desk.cancelled) == 1


def test_two_lookups_wait_for_one_read():
    desk, e = tiered()
    f = desk.engine("f")
    one, two = e.lookup("a", 3), f.lookup("a", 4)
    desk.answer_probe("disk")
    desk.answer_probe("disk")
    assert len(desk.reads) == 4
    desk.end_reads()
    assert (e.query(one).hit_tokens, f.query(two).hit_tokens, desk.counts.pins) == (3 * CHUNK, 4 * CHUNK, 7)


def test_the_end_of_one_lookup_leaves_the_other_its_reads():
    desk, e = tiered()
    one, two = e.lookup("a", 3), e.lookup("a", 2)
    desk.answer_probe("disk")
    desk.answer_probe("disk")
    e.free(one)
    assert len(desk.cancelled) == 1, "only the third chunk's read is nobody's"
    desk.end_reads()
    assert e.query(two) == status(2, {"disk": 2})
    assert desk.states() == "62 free, 2 pinned"


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_read_that_fails_ends_the_hit_before_it(bad: int):
    desk, e = tiered()
    job = e.lookup("a", 3)
    desk.answer_probe("disk")
    for at, read_id in enumerate(list(desk.reads)):
        desk.end_read(at != bad, read_id)
    assert e.query(job) == status(bad, {"disk": bad} if bad else {}, "PREFETCH_FAILED", pinned=bad > 0)
    assert desk.counts.chunks == 2, "what was read is there for others"
    assert desk.book.counters["failed_reads"] == 1
    assert desk.states() == ("62 free, 2 ready", "62 free, 1 ready, 1 pinned", "62 free, 2 pinned")[bad]


def test_at_the_deadline_what_is_ready_counts_and_late_reads_settle():
    desk, e = tiered()
    job = e.lookup("a", 4, wait_ns=S)
    desk.answer_probe("disk")
    desk.end_read()
    desk.end_read()
    desk.pass_time(S - 1)
    assert not e.query(job).done
    desk.pass_time(1)
    assert e.query(job) == status(2, {"disk": 2}, "PREFETCH_TIMEOUT")
    assert (len(desk.cancelled), desk.states()) == (2, "60 free, 2 pinned, 2 settling")
    desk.end_reads()
    assert desk.states() == "62 free, 2 pinned"
    assert desk.book.counters["cancelled_reads"] == 2


def test_a_later_read_that_is_in_before_an_earlier_one_does_not_count():
    desk, e = tiered()
    job = e.lookup("a", 3)
    desk.answer_probe("disk")
    first, second, third = desk.reads
    desk.end_read(True, third)
    desk.end_read(True, first)
    desk.pass_time(WAIT)
    assert e.query(job) == status(1, {"disk": 1}, "PREFETCH_TIMEOUT")
    assert second in desk.cancelled
    desk.end_reads()
    assert desk.states() == "62 free, 1 ready, 1 pinned"


def test_tiers_that_never_answer():
    desk, e = tiered()
    e.store("a", 1)
    job = e.lookup("a", 4)
    desk.pass_time(WAIT)
    assert e.query(job) == status(1, {"l1": 1}, "PREFETCH_TIMEOUT")
    desk.answer_probe("disk")
    assert not desk.reads, "a late answer starts nothing"


def test_deadlines_of_many_lookups():
    desk, e = tiered()
    jobs = [e.lookup(f"p{at}", 1, wait_ns=wait * S) for at, wait in enumerate((3, 1, 2))]
    e.free(jobs[1])
    seen = []
    for _ in range(3):
        desk.pass_time(S)
        seen.append([e.query(job).done for job in jobs])
    assert seen == [[False, True, False], [False, True, True], [True, True, True]]


@pytest.mark.parametrize("how", ["free", "free to the end", "end", "session", "drain"])
def test_nobody_wants_it_any_more(how: str):
    desk, e = tiered()
    e.store("a", 1)
    job = e.lookup("a", 4, request="r")
    desk.answer_probe("disk")
    desk.end_read()
    assert desk.states() == "60 free, 2 writing, 2 pinned"
    match how:
        case "free":
            assert e.free(job) == 2
        case "free to the end":
            assert e.free(job, start=0, end=4) == 2
        case "end":
            assert e.end("r") == t.Ended(1, 1)
        case "session":
            e.die(e.scheduler)
            desk.pass_time(desk.limits.reattach_grace_ns)
        case _:
            desk.book.drain_engine(desk.now, e.engine_id)
            desk.step()
    assert (desk.states(), len(desk.cancelled)) == ("60 free, 2 ready, 2 settling", 2)
    desk.end_reads()
    assert (desk.states(), desk.counts.pins) == ("62 free, 2 ready", 0)
    desk.pass_time(desk.limits.record_ns)
    assert desk.counts.jobs == 0


@pytest.mark.parametrize("how", ["free", "end"])
def test_nobody_wants_it_before_the_tiers_have_answered(how: str):
    desk, e = tiered()
    job = e.lookup("a", 4, request="r")
    if how == "free":
        assert e.free(job) == 0
        assert e.query(job).done
        desk.pass_time(desk.limits.read_record_ns)
        assert desk.counts.jobs == 0
    else:
        e.end("r")
    desk.answer_probe("disk")
    assert (desk.reads, desk.states()) == ({}, FREE)


def test_freeing_the_head_of_a_pending_lookup_leaves_its_prefetch():
    desk, e = tiered()
    e.store("a", 2)
    job = e.lookup("a", 4)
    desk.answer_probe("disk")
    assert e.free(job, start=0, end=2) == 2
    desk.end_reads()
    assert (e.query(job).hit_tokens, desk.counts.pins) == (4 * CHUNK, 2)
    assert e.retrieve(job, start=2 * CHUNK) == "2 LOADED"


def test_what_is_wanted_again_while_the_cancelled_read_runs_is_read_anew():
    desk, e = tiered()
    unwanted = e.lookup("a", 1)
    desk.answer_probe("disk")
    (old,) = desk.reads
    e.free(unwanted)
    job = e.lookup("a", 1)
    desk.answer_probe("disk")
    new = next(read for read in desk.reads if read != old)
    assert not set(desk.reads[old].extents) & set(desk.reads[new].extents)
    desk.end_read(True, old)
    assert not e.query(job).done
    desk.end_read(True, new)
    assert e.query(job) == status(1, {"disk": 1})


@pytest.mark.parametrize("when", ["probing", "reading", "read"])
@pytest.mark.parametrize("reclaimed", [False, True])
def test_a_clear_during_prefetch(when: str, reclaimed: bool):
    desk, e = tiered()
    e.store("a", 1)
    job = e.lookup("a", 3)
    if when != "probing":
        desk.answer_probe("disk")
    if when == "read":
        desk.end_read()
    e.clear()
    if reclaimed:
        desk.pass_time(t.MS)
    if when == "probing":
        desk.answer_probe("disk")
        assert not desk.reads
    desk.end_reads()
    assert e.query(job).hit_tokens == CHUNK, "only what was pinned before"
    assert e.retrieve(job) == "1 LOADED"
    desk.pass_time(t.MS)
    assert desk.states() == FREE
    e.lookup("a", 3, request="again")
    assert desk.probes


def test_a_store_and_a_prefetch_of_one_chunk():
    desk, e = tiered()
    desk.auto = False
    e.store("a", 1)
    job = e.lookup("a", 2)
    desk.answer_probe("disk")
    assert e.query(job) == status(0, {}, pinned=False), "a chunk that a store writes is not waited for"
    desk.run_copies()
    again = e.lookup("a", 3)
    desk.answer_probe("disk")
    e.store("a", 3)
    assert e.ended() == "1 RESIDENT, 2 BEING_WRITTEN"
    desk.end_reads()
    assert e.query(again) == status(3, {"l1": 1, "disk": 2})


def warm(desk: Desk, e: EngineDesk, chunks: int, wait_ns: int = S) -> t.Warmed | None:
    warmed = desk.book.lookups.warm(desk.now, e.space, e.content("a", chunks).keys, wait_ns, b"w" * 16)
    desk.step()
    return warmed


def test_warm_fills_the_arena_and_pins_nothing():
    desk, e = tiered()
    e.store("a", 1)
    assert warm(desk, e, 4) is None
    desk.answer_probe("disk", "disk", "")
    desk.end_reads()
    assert desk.jobs_done == [b"w" * 16]
    assert desk.book.lookups.warmed(b"w" * 16) == t.Warmed(3 * CHUNK)
    assert (desk.counts.pins, desk.counts.jobs, desk.states()) == (0, 0, "61 free, 3 ready")
    assert e.lookup("a", 3).status == status(3, {"l1": 3})
    assert desk.book.counters["warmed_tokens"] == 2 * CHUNK


def test_warm_ends_in_its_time_and_gives_everything_back():
    desk, e = tiered()
    assert warm(desk, e, 4) is None
    desk.answer_probe("disk")
    desk.end_read()
    desk.pass_time(S)
    assert desk.book.lookups.warmed(b"w" * 16) == t.Warmed(CHUNK, "PREFETCH_TIMEOUT")
    desk.settle()
    assert desk.states() == "63 free, 1 ready"


def test_warm_that_nobody_waits_for_is_ended():
    desk, e = tiered()
    assert warm(desk, e, 4) is None
    desk.answer_probe("disk")
    desk.book.lookups.warmed(b"w" * 16)
    desk.step()
    assert len(desk.cancelled) == 4
    desk.settle()
    assert (desk.states(), desk.counts.jobs) == (FREE, 0)


def test_warm_of_what_is_there_or_without_tiers_is_answered_at_once():
    desk, e = tiered()
    e.store("a", 2)
    assert warm(desk, e, 2) == t.Warmed(2 * CHUNK)
    desk = Desk()
    e = desk.engine()
    assert warm(desk, e, 2) == t.Warmed(0)
