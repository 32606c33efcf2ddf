# SPDX-License-Identifier: Apache-2.0
"""Reports from users of KV caches that the pure core alone decides; the others are tested where they belong.

Each report's test has its chunk and block sizes (16 and 4 tokens), 64 chunks of room and 8 chunks of A.
"""

from __future__ import annotations

import itertools
import sys

import pytest

from kvgrpc.core import types as t
from kvgrpc.core.errors import Reason
from kvgrpc.core.types import Reader
from tests.core.desk import BLOCK, CHUNK, Desk, EngineDesk, key_of, refused

ROOM = 64


def desk_with(tiers: tuple[str, ...] = (), **limits: object) -> Desk:
    return Desk(ROOM, tiers, t.CoreLimits(pin_share=1.0, prefetch_share=1.0, **limits))  # type: ignore[arg-type]


def fill(e: EngineDesk) -> None:
    """The fill probe: unrelated chunks for twice the arena; what is not locked is gone."""
    for number in range(8):
        e.store(f"fill {e.desk.number()} {number}", 16)


# ---- 11 --------------------------------------------------------------------------------------------------------------


def free_all(e: EngineDesk, job: t.LookupAnswer) -> None:
    assert e.free(job) == 8


def close(e: EngineDesk, job: t.LookupAnswer) -> None:
    e.die(e.scheduler)
    e.desk.pass_time(e.desk.limits.reattach_grace_ns)
    e.attach(e.scheduler, t.Role.SCHEDULER, b"another process")


def load_partly(e: EngineDesk, job: t.LookupAnswer) -> None:
    e.free(job, start=0, end=3)
    assert e.retrieve(job, start=3 * CHUNK, end=8 * CHUNK) == "5 LOADED"


def wait(e: EngineDesk, job: t.LookupAnswer) -> None:
    e.desk.pass_time(e.desk.limits.lease_ns)


def end_request(e: EngineDesk, job: t.LookupAnswer) -> None:
    assert e.end("A") == t.Ended(1, 8)
    assert e.end("A") == t.Ended(0, 0)


@pytest.mark.parametrize("release", [free_all, close, load_partly, wait, end_request])
def test_locks_end_with_the_request_whatever_the_path(release):
    """Field report 11: locks of a lookup go when it is freed, aborted, partly loaded, or left alone."""
    desk = desk_with(lease_ns=5 * t.S)
    e = desk.engine()
    assert e.store("A", 8) == "8 STORED"
    job = e.lookup("A", 8, request="A")
    fill(e)
    assert e.hits("A", 8) == 8, "locked: it survives the fill"
    release(e, job)
    fill(e)
    assert e.hits("A", 8) == 0, "evictable at once"
    assert (desk.counts.pins, desk.arena.pinned_bytes) == (0, 0)


def test_a_lock_holds_until_its_time():
    """Field report 11: (d) nothing was done; the lock ends at its limit, not before."""
    desk = desk_with(lease_ns=5 * t.S)
    e = desk.engine()
    e.store("A", 8)
    e.lookup("A", 8)
    desk.pass_time(5 * t.S - 1)
    fill(e)
    assert e.hits("A", 8) == 8


# ---- 29 --------------------------------------------------------------------------------------------------------------


def test_tail_blocks_are_ignored_and_too_few_blocks_are_an_error():
    """Field report 29: 100 tokens with 25 blocks are 6 chunks; block 25 stays untouched; 23 blocks for 6 chunks are
    refused with nothing written, and the next good call works."""
    desk = desk_with()
    e = desk.engine()
    content = e.content("A", 6, tokens=100)
    blocks = (tuple(range(25)),)
    desk.book.store(0, e.worker(0), t.StoreCommand(e.engine_id, 1, e.space, content, t.TokenRange(0, 100), blocks))
    desk.step()
    (result,) = desk.ended[e.worker(0), 1]
    assert (result.count, result.outcome) == (6, t.ChunkOutcome.STORED)
    job = e.lookup("A", 6)
    target = (tuple(range(100, 125)),)
    desk.book.retrieve(0, e.worker(0), t.RetrieveCommand(e.engine_id, 2, job.job_id, t.TokenRange(0, 96), target))
    desk.step()
    written = [block for piece in desk.history[-1].pieces for block in piece.block_ids[0]]
    assert written == list(range(100, 124))
    copies = len(desk.history)
    with refused(Reason.BLOCK_IDS):
        short = (target[0][:23],)
        desk.book.retrieve(0, e.worker(0), t.RetrieveCommand(e.engine_id, 3, job.job_id, t.TokenRange(0, 96), short))
    desk.step()
    assert len(desk.history) == copies
    assert e.retrieve(job) == "6 LOADED"


# ---- 30 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetched", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
def test_shared_kv_is_locked_for_every_reader_of_every_stage(stages: int, prefetched: bool):
    """Field report 30: with tp_size 4 and one KV rank a stage, data is evictable only after the fourth reader; also
    prefetched data, and for each pipeline stage."""
    desk = desk_with(tiers=("disk",) if prefetched else ())
    e = desk.engine(tp_size=4, kv_tp_size=1, stages=stages)
    if not prefetched:
        e.store_all("A", 8)
    job = e.lookup("A", 8)
    if prefetched:
        desk.answer_probe("disk")
        desk.end_reads()
    assert (e.query(job).hit_tokens, desk.counts.pins) == (8 * CHUNK, 8 * 4 * stages)
    last = 4 * stages - 1
    for worker in range(last):
        assert e.retrieve(job, worker=worker) == "8 LOADED"
    fill(e)
    assert desk.counts.pins == 8
    assert e.retrieve(job, worker=last) == "8 LOADED"
    desk.book.writes.lanes.clear()
    fill(e)
    assert (e.hits("A", 8), desk.counts.pins) == (0, 0)


@pytest.mark.parametrize("prefetched", [False, True])
def test_a_free_counts_readers_as_the_lookup_did(prefetched: bool):
    """Field report 30: a free with tp_size 4 frees all; one named reader leaves three; another tp_size is refused."""
    desk = desk_with(tiers=("disk",) if prefetched else ())
    e = desk.engine(tp_size=4, kv_tp_size=1)
    if not prefetched:
        e.store_all("A", 8)
    job = e.lookup("A", 8)
    if prefetched:
        desk.answer_probe("disk")
        desk.end_reads()
    with refused(Reason.TP_SIZE_MISMATCH):
        e.free(job, tp_size=1)
    assert e.free(job, readers=[Reader(0, 1)]) == 8
    assert desk.counts.pins == 3 * 8
    desk.book.writes.lanes.clear()
    fill(e)
    assert e.lookup("A", 8, request="probe").status.hit_tokens == 8 * CHUNK, "still pinned: three are left"
    e.end("probe")
    assert e.free(job, tp_size=4) == 3 * 8
    fill(e)
    assert e.hits("A", 8) == 0


# ---- 31 --------------------------------------------------------------------------------------------------------------


def test_resident_data_loads_after_its_lock_has_expired():
    """Field report 31: (a) the lock ran out while the request waited; what is still there loads."""
    desk = desk_with(lease_ns=2 * t.S)
    e = desk.engine()
    e.store("A", 8)
    job = e.lookup("A", 8)
    desk.pass_time(3 * t.S)
    assert e.retrieve(job) == "8 LOADED"


def test_evicted_data_is_a_clean_miss_after_its_lock_has_expired():
    """Field report 31: (b) what was evicted meanwhile is missing, and no block is written."""
    desk = desk_with(lease_ns=2 * t.S)
    e = desk.engine()
    e.store("A", 8)
    job = e.lookup("A", 8)
    desk.pass_time(3 * t.S)
    fill(e)
    copies = len(desk.history)
    assert e.retrieve(job) == "1 MISSING, 7 FAILED AFTER_FAILURE"
    assert len(desk.history) == copies


def test_four_readers_after_expiry_with_an_eviction_between():
    """Field report 31: (c) each of four readers gets all of its bytes or a miss; afterwards the data is evictable."""
    desk = desk_with(lease_ns=2 * t.S)
    e = desk.engine(tp_size=4, kv_tp_size=1)
    e.store_all("A", 8)
    job = e.lookup("A", 8)
    desk.pass_time(3 * t.S)
    loads = [e.retrieve(job, worker=0), e.retrieve(job, worker=1)]
    fill(e)
    loads += [e.retrieve(job, worker=2), e.retrieve(job, worker=3)]
    assert loads == ["8 LOADED"] * 2 + ["1 MISSING, 7 FAILED AFTER_FAILURE"] * 2
    assert (desk.counts.pins, desk.arena.pinned_bytes) == (0, 0)


# ---- 32 --------------------------------------------------------------------------------------------------------------


def looked_up(e: EngineDesk, prompt: str, number: int, content: t.ChunkKeys) -> t.LookupAnswer:
    job_id = number.to_bytes(16, "big")
    command = t.LookupCommand(e.engine_id, f"{prompt} {number}", 0, e.space, content, 1, job_id)
    return e.desk.book.lookup(e.desk.now, e.scheduler, command)


def test_lookups_that_find_nothing_leave_nothing():
    """Field report 32: 100,000 lookups of random tokens, never polled, leave no record and no memory."""
    desk = desk_with()
    e = desk.engine()
    contents = [t.ChunkKeys((key_of(f"random {number}", 0),), CHUNK) for number in range(50)]
    blocks: list[int] = []
    for half in range(2):
        for number, content in zip(range(50_000), itertools.cycle(contents), strict=False):
            assert not looked_up(e, "miss", number + half * 50_000, content).job_id
        blocks.append(sys.getallocatedblocks())
    desk.step()
    assert desk.counts.jobs == desk.book.jobs.record_bytes == 0
    assert blocks[1] - blocks[0] < 1000, "allocated blocks of memory, not one a lookup"


def test_hits_that_are_never_polled_are_gone_after_their_time():
    """Field report 32: 10,000 lookups with hits, never polled: the limit answers JOB_LIMIT, and after the lease and the
    record time all is gone."""
    desk = desk_with()
    e = desk.engine()
    e.store("A", 8)
    content = e.content("A", 8)
    for number in range(desk.limits.jobs_per_engine):
        assert looked_up(e, "hit", number, content).status.hit_tokens == 8 * CHUNK
    for number in range(desk.limits.jobs_per_engine, 10_000):
        with refused(Reason.JOB_LIMIT):
            looked_up(e, "hit", number, content)
    assert desk.counts.jobs == 4096
    desk.step()
    desk.now = desk.limits.lease_ns
    desk.book.tick(desk.now)
    assert (desk.counts.jobs, desk.counts.pins) == (4096, 0)
    assert looked_up(e, "late", 10_000, content).job_id, "unpinned records make room"
    desk.now = 2 * desk.limits.record_ns
    desk.book.tick(desk.now)
    desk.step()
    assert desk.counts.jobs == desk.book.jobs.record_bytes == 0


# ---- 44 --------------------------------------------------------------------------------------------------------------


def test_a_hit_is_what_every_rank_can_load():
    """Field report 44: rank 0 has 8 chunks and rank 1 has 6: 6."""
    desk = desk_with()
    e = desk.engine(tp_size=2, kv_tp_size=2)
    e.store("A", 8, worker=0)
    e.store("A", 6, worker=1)
    assert e.hits("A", 8) == 6


def test_another_world_size_shares_nothing():
    """Field report 44: stored under tp 2, looked up under tp 4: 0."""
    desk = desk_with()
    two, four = desk.engine("two", tp_size=2, kv_tp_size=2), desk.engine("four", tp_size=4, kv_tp_size=4)
    two.store_all("A", 8)
    assert four.hits("A", 8) == 0


def test_a_rank_past_the_world_is_refused():
    """Field report 44: rank 2 of 2 is an error, at registration and in a lookup."""
    desk = desk_with()
    e = desk.engine(tp_size=2, kv_tp_size=2)
    with refused(Reason.RANK):
        e.share(1, kv_rank=2)
    with refused(Reason.RANK):
        e.lookup("A", 8, kv_ranks=(2,))


def test_a_missing_stage_is_a_miss():
    """Field report 44: pp 2 with one stage's data missing: 0."""
    desk = desk_with()
    e = desk.engine(tp_size=1, stages=2)
    e.store("A", 8, worker=0)
    assert e.hits("A", 8) == 0
    e.store("A", 8, worker=1)
    assert e.hits("A", 8) == 8


def test_data_parallel_replicas_share():
    """Field report 44: replicas of tp 1 find each other's 8 chunks."""
    desk = desk_with()
    one, two = desk.engine("one"), desk.engine("two")
    one.store("A", 8)
    assert two.hits("A", 8) == 8


# ---- 49 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 8, 121, 128])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_asked_and_written_ranges_agree_at_every_boundary(chunks: int, more: int):
    """Field report 49: for lengths around a multiple of the chunk size, hits are floor(length / 16), and a range covers
    exactly the asked blocks or is refused, never widened."""
    desk = Desk(160, limits=t.CoreLimits(pin_share=1.0))
    e = desk.engine(num_blocks=2048)
    length = chunks * CHUNK + more
    whole, blocks = length // CHUNK, length // BLOCK
    content = e.content("A", whole, tokens=length)
    ids = (tuple(range(blocks)),)
    stored = t.StoreCommand(e.engine_id, 1, e.space, content, t.TokenRange(0, blocks * BLOCK), ids)
    desk.book.store(0, e.worker(0), stored)
    desk.step()
    assert e.hits("A", chunks + 1) == whole
    if not whole:
        return
    job = e.lookup("A", whole)
    assert e.retrieve(job, block=600) == f"{whole} LOADED"
    with refused(Reason.RANGE):
        e.retrieve(job, end=whole * CHUNK - 1)
    skipped = BLOCK * (3 if whole == 1 else 5)
    for start, end in ((0, whole * CHUNK - BLOCK), (skipped, whole * CHUNK)):
        before = len(desk.history)
        e.retrieve(job, start=start, end=end, block=600)
        written = [block for o in desk.history[before:] for piece in o.pieces for block in piece.block_ids[0]]
        assert written == list(range(600, 600 + (end - start) // BLOCK))


# ---- 60 --------------------------------------------------------------------------------------------------------------


def test_a_free_that_names_nothing_of_it_says_so():
    """Field report 60: a free by another tenant's engine or of an unknown job frees nothing and says so; the right one
    frees all 8."""
    desk = desk_with()
    e, other = desk.engine("e", salt="t1"), desk.engine("other", salt="")
    e.store("A", 8)
    job = e.lookup("A", 8)
    with refused(Reason.JOB_UNKNOWN):
        other.free(job)
    with refused(Reason.JOB_UNKNOWN):
        e.free(t.LookupAnswer(b"made up", job.status))
    fill(other)
    assert desk.counts.pins == 8
    assert e.free(job) == 8
    fill(other)
    assert e.hits("A", 8) == 0


# ---- 61 --------------------------------------------------------------------------------------------------------------


def test_the_status_of_an_unknown_job_is_final_at_once():
    """Field report 61: a random id, an ended job, and a lookup on a model that nobody registered are never pending."""
    desk = desk_with(tiers=("disk",))
    e = desk.engine()
    e.store("A", 8)
    with refused(Reason.JOB_UNKNOWN):
        e.query(t.LookupAnswer(b"random", t.PrefetchStatus(False)))
    job = e.lookup("A", 8, request="r")
    e.end("r")
    with refused(Reason.JOB_UNKNOWN):
        e.query(job)
    unserved = desk.engine("unserved", model="nobody serves it", register=False)
    assert unserved.lookup("A", 8).status == t.PrefetchStatus(True)
    e.base = b"nobody's"
    with refused(Reason.SPACE_UNKNOWN):
        e.lookup("A", 8)
