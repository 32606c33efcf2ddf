# SPDX-License-Identifier: Apache-2.0
"""Records of lookups: how long they last, what makes room, and that a repeat gets the same answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvgrpc.core import types as t
from kvgrpc.core.errors import Reason
from kvgrpc.core.jobs import KEY_BYTES, RECORD_BYTES
from kvgrpc.core.types import Ended, Policy, S
from tests.core.desk import CHUNK, Desk, EngineDesk, refused


def stored(limits: t.CoreLimits | None = None, chunks: int = 4) -> tuple[Desk, EngineDesk]:
    desk = Desk(chunks=64, limits=limits or t.CoreLimits(pin_share=1.0))
    engine = desk.engine()
    engine.store("a", chunks)
    return desk, engine


def test_a_lookup_without_a_hit_keeps_no_record():
    desk, e = stored()
    assert e.lookup("nothing", 8) == t.LookupAnswer(b"", t.PrefetchStatus(True))
    assert e.lookup("a", 0).job_id == b""
    assert e.lookup("a", 4, policy=Policy(no_lookup=True)).job_id == b""
    assert desk.counts.jobs == 0


def test_a_repeat_gets_the_same_job_and_answer_whatever_happened_since():
    desk, e = stored()
    first = e.lookup("a", 8, request="r")
    e.store("a", 8)
    assert e.lookup("a", 8, request="r") == first
    assert desk.counts.pins == 4
    fresh = e.lookup("a", 8, request="r", attempt=1)
    assert (fresh.job_id != first.job_id, fresh.status.hit_tokens) == (True, 8 * CHUNK)
    assert e.end("r") == Ended(2, 12)
    assert e.end("r") == Ended(0, 0)
    assert e.end("never") == Ended(0, 0)
    assert e.lookup("a", 8, request="r").job_id not in (first.job_id, fresh.job_id)


def test_a_repeat_that_asks_for_another_prompt_is_refused():
    desk, e = stored()
    ask = t.LookupCommand(e.engine_id, "r", 0, e.space, e.content("a", 4), 1, b"j" * 16, fingerprint=1)
    first = desk.book.lookup(0, e.scheduler, ask)
    with refused(Reason.INVALID_FIELD):
        desk.book.lookup(0, e.scheduler, replace(ask, fingerprint=2))
    assert desk.book.lookup(0, e.scheduler, ask) == first


def test_request_ids_belong_to_their_engine():
    desk, e = stored()
    other = desk.engine("other")
    assert e.lookup("a", request="r").job_id != other.lookup("a", request="r").job_id
    assert other.end("r") == Ended(1, 4)
    assert desk.counts.pins == 4


@pytest.mark.parametrize("how", ["retrieve", "free"])
def test_a_record_whose_readers_are_done_goes_five_seconds_later(how: str):
    desk, e = stored()
    job = e.lookup("a", 4)
    desk.pass_time(10 * S)
    if how == "retrieve":
        e.retrieve(job)
    else:
        e.free(job)
    desk.pass_time(5 * S - 1)
    assert e.query(job) == job.status
    desk.pass_time(1)
    with refused(Reason.JOB_UNKNOWN):
        e.query(job)
    assert job.job_id in desk.jobs_done


def test_a_record_that_nobody_read_goes_after_its_time():
    desk, e = stored()
    job = e.lookup("a", 4)
    desk.pass_time(600 * S - 1)
    assert e.query(job) == job.status
    desk.pass_time(1)
    with refused(Reason.JOB_UNKNOWN):
        e.retrieve(job, end=CHUNK)
    assert desk.counts.jobs == desk.book.jobs.record_bytes == 0
    assert desk.book.next_wake(desk.now) is None


def test_at_the_limit_the_oldest_unpinned_record_makes_room_and_pinned_ones_never():
    desk, e = stored(t.CoreLimits(pin_share=1.0, jobs_per_engine=3))
    pinned, first, second = (e.lookup("a", 4) for _ in range(3))
    with refused(Reason.JOB_LIMIT) as got:
        e.lookup("a", 4)
    assert got.refusal.retry_after_ms == 1000
    e.free(first)
    e.free(second)
    third = e.lookup("a", 4)
    with refused(Reason.JOB_UNKNOWN):
        e.query(first)
    assert e.query(second).done
    e.lookup("a", 4)
    with refused(Reason.JOB_UNKNOWN):
        e.query(second)
    assert (e.query(pinned), e.query(third)) == (pinned.status, third.status)
    with refused(Reason.JOB_LIMIT):
        e.lookup("a", 4)
    assert e.lookup("nothing", 4).job_id == b"", "a miss needs no record"
    other = desk.engine("other")
    assert other.lookup("a", 4).job_id, "the limit is each engine's own"


def test_expired_and_unpinned_records_make_room_too():
    desk, e = stored(t.CoreLimits(pin_share=0.05, jobs_per_engine=2))
    unpinned = e.lookup("a", 4)
    assert not unpinned.status.pinned
    pinned = e.lookup("a", 3)
    e.lookup("a", 4)
    with refused(Reason.JOB_UNKNOWN):
        e.query(unpinned)
    e.lookup("a", 3)
    with refused(Reason.JOB_LIMIT):
        e.lookup("a", 3)
    desk.pass_time(60 * S)
    e.lookup("a", 4)
    with refused(Reason.JOB_UNKNOWN):
        e.query(pinned)


def test_records_have_a_byte_budget():
    _, e = stored(t.CoreLimits(pin_share=1.0, records_bytes=2 * (RECORD_BYTES + 4 * KEY_BYTES)))
    first, second = e.lookup("a", 4), e.lookup("a", 4)
    with refused(Reason.RECORD_LIMIT):
        e.lookup("a", 4)
    e.free(second)
    e.lookup("a", 4)
    with refused(Reason.JOB_UNKNOWN):
        e.query(second)
    assert e.query(first).done


def test_a_record_that_can_never_fit_costs_nobody_theirs():
    _, e = stored(t.CoreLimits(pin_share=1.0, records_bytes=RECORD_BYTES + 8 * KEY_BYTES), chunks=16)
    small = e.lookup("a", 2)
    e.free(small)
    with refused(Reason.RECORD_LIMIT):
        e.lookup("a", 16)
    assert e.query(small).done


def test_a_record_keeps_only_the_keys_of_the_hit():
    desk, e = stored()
    e.lookup("a", 1000)
    assert desk.book.jobs.record_bytes == RECORD_BYTES + 4 * KEY_BYTES


def test_the_answer_counts_hits_by_where_they_were():
    _, e = stored()
    status = e.lookup("a", 8).status
    assert status == t.PrefetchStatus(True, 4 * CHUNK, True, {"l1": 4})


def test_a_hit_needs_all_wanted_ranks():
    desk = Desk()
    e = desk.engine(tp_size=2, kv_tp_size=2)
    e.store("a", 8, worker=0)
    e.store("a", 6, worker=1)
    assert e.hits("a", 8) == 6
    job = e.lookup("a", 8, kv_ranks=(0,))
    assert job.status.hit_tokens == 8 * CHUNK


def test_lookup_checks_what_it_is_told():
    desk, e = stored()
    base, e.base = e.base, b"0" * 16
    with refused(Reason.SPACE_UNKNOWN):
        e.lookup("a")
    e.base = base
    for tp_size in (0, 2, 129):
        with refused(Reason.TP_SIZE_MISMATCH):
            e.lookup("a", tp_size=tp_size)
    big = desk.limits.keys_per_call + 1
    content = t.ChunkKeys([b"k"] * big, big * CHUNK)
    with refused(Reason.INVALID_FIELD):
        desk.book.lookup(0, e.scheduler, t.LookupCommand(e.engine_id, "r", 0, e.space, content, 1, b"j"))
    content = t.ChunkKeys([b"k", b"l"], 2 * CHUNK - 1)
    with refused(Reason.INVALID_FIELD):
        desk.book.lookup(0, e.scheduler, t.LookupCommand(e.engine_id, "r", 0, e.space, content, 1, b"j"))
    content = t.ChunkKeys([b"k"], 2 * CHUNK, first_chunk=1)
    with refused(Reason.INVALID_FIELD):
        desk.book.lookup(0, e.scheduler, t.LookupCommand(e.engine_id, "r", 0, e.space, content, 1, b"j"))
    assert desk.counts.jobs == 0


def test_a_client_that_is_not_there_is_refused_by_name():
    desk, e = stored()
    with refused(Reason.NOT_ATTACHED):
        e.lookup("a", client="nobody")
    with refused(Reason.ENGINE_UNKNOWN):
        desk.book.query(0, e.scheduler, "another", b"job")
