# SPDX-License-Identifier: Apache-2.0
"""Locks of lookups: their time, their release, and the three answers about a job: pending, final, unknown."""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path

import pytest

from kvgrpc.core.types import CoreLimits, S, SpaceRef
from kvgrpc.runtime.clock import ManualClock
from kvgrpc.tiers.memory import MemoryTier
from tests.e2e.harness import CHUNK, Engine, LocalServer, local_server, outcomes, tokens_of
from tests.e2e.probes import TINY, fill_twice, found, keep_in_tier, nothing_changes, polled, refused

LIMITS = CoreLimits(chunk_tokens=CHUNK, page_bytes=4096, lease_ns=2 * S, record_ns=60 * S)
EIGHT = tokens_of(1, 8 * CHUNK)
TARGET = list(range(255, 223, -1))


def wait(server: LocalServer, clock: ManualClock, seconds: int) -> None:
    """Lets time pass on the server."""
    clock.advance(seconds * S)
    server.driver.tick()


async def four_ranks(server: LocalServer) -> list[Engine]:
    first = await server.engine(kv=TINY, parallel=(0, 0, 4, 1))
    facts = {"kv": TINY, "engine_id": first.engine_id, "scheduler": False}
    return [first, *[await server.engine(parallel=(0, rank, 4, 1), **facts) for rank in (1, 2, 3)]]


# ---- 31: time -------------------------------------------------------------------------------------------------------


async def test_resident_after_its_lease_loads(tmp_path: Path) -> None:
    """Field report 31 (a): limit 2 s, Lookup to 8, wait 3 s, Retrieve: 8 equal chunks."""
    clock = ManualClock()
    async with local_server(tmp_path, l1_bytes=64 * 2048, limits=LIMITS, clock=clock) as server:
        engine = await server.engine(kv=TINY)
        await engine.store(EIGHT, range(32))
        answer = await engine.lookup(EIGHT)
        assert (answer.status.hit_tokens, server.counts()[0]) == (8 * CHUNK, 8)
        wait(server, clock, 3)
        assert server.counts()[0] == 0
        assert outcomes(await engine.retrieve(answer, TARGET)) == ["LOADED"] * 8
        assert engine.image.wrong_tokens(TARGET) == [] and engine.image.untouched(TARGET)
        assert server.counts() == (0, 0, 0)
        await fill_twice(server, engine)
        assert await engine.hits(EIGHT) == 0


async def test_evicted_after_its_lease_is_a_clean_miss(tmp_path: Path) -> None:
    """Field report 31 (b): wait 3 s, fill twice L1, Retrieve: nothing is loaded, the destination is untouched."""
    clock = ManualClock()
    async with local_server(tmp_path, l1_bytes=64 * 2048, limits=LIMITS, clock=clock) as server:
        engine = await server.engine(kv=TINY)
        await engine.store(EIGHT, range(32))
        answer = await engine.lookup(EIGHT)
        wait(server, clock, 3)
        await fill_twice(server, engine)
        results = await engine.retrieve(answer, TARGET)
        assert outcomes(results) == ["MISSING"] + ["FAILED"] * 7
        assert engine.image.untouched()
        assert server.counts() == (0, 0, 0)


@pytest.mark.parametrize("filled", [False, True], ids=["resident", "filled between"])
async def test_four_readers_after_expiry(tmp_path: Path, filled: bool) -> None:
    """Field report 31 (c): tp_size 4, four Retrieves after expiry, a fill between the second and the third: each loads
    8 equal chunks or answers misses; never fewer bytes than claimed; afterwards evictable."""
    clock = ManualClock()
    async with local_server(tmp_path, l1_bytes=64 * 2048, limits=LIMITS, clock=clock) as server:
        ranks = await four_ranks(server)
        await ranks[0].store(EIGHT, range(32))
        answer = await ranks[0].lookup(EIGHT)
        assert server.counts()[0] == 32
        wait(server, clock, 3)
        for at, rank in enumerate(ranks):
            if at == 2 and filled:
                await fill_twice(server, ranks[0])
            results = await rank.retrieve(answer, TARGET)
            if at >= 2 and filled:
                assert outcomes(results) == ["MISSING"] + ["FAILED"] * 7
                assert rank.image.untouched()
            else:
                assert outcomes(results) == ["LOADED"] * 8
                assert rank.image.wrong_tokens(TARGET) == [] and rank.image.untouched(TARGET)
        assert server.counts() == (0, 0, 0)
        await fill_twice(server, ranks[0])
        assert await ranks[0].hits(EIGHT) == 0


async def test_one_leases_end_leaves_anothers(tmp_path: Path) -> None:
    """Field report 31: a lease that expires takes no pin of a later lookup of the same chunks."""
    clock = ManualClock()
    async with local_server(tmp_path, l1_bytes=64 * 2048, limits=LIMITS, clock=clock) as server:
        engine = await server.engine(kv=TINY)
        await engine.store(EIGHT, range(32))
        await engine.lookup(EIGHT)
        wait(server, clock, 1)
        second = await engine.lookup(EIGHT)
        assert server.counts()[0] == 16
        wait(server, clock, 1)
        assert server.counts()[0] == 8
        await fill_twice(server, engine)
        assert outcomes(await engine.retrieve(second, TARGET)) == ["LOADED"] * 8
        assert engine.image.wrong_tokens(TARGET) == []


# ---- 60: release ----------------------------------------------------------------------------------------------------


async def test_free_names_a_job_and_says_what_it_released(tmp_path: Path) -> None:
    """Field report 60: Free carries no salt. Its nearest wrong calls (another engine, a random job, another tp_size)
    are errors and leave all pins; then the right one releases 8, a repeat 0."""
    async with local_server(tmp_path, l1_bytes=64 * 2048, limits=LIMITS) as server:
        engine, other = await server.engine(kv=TINY, salt="t1"), await server.engine(kv=TINY, salt="")
        await engine.store(EIGHT, range(32))
        answer = await engine.lookup(EIGHT)
        async with nothing_changes(server, engine, other):
            unknown = ("NOT_FOUND", "JOB_UNKNOWN", "job_id")
            assert await refused(other.free(answer)) == unknown
            assert await refused(engine.free(answer, job_id=secrets.token_bytes(16))) == unknown
            assert await refused(engine.free(answer, job_id=b"")) == ("INVALID_ARGUMENT", "INVALID_FIELD", "job_id")
            mismatch = ("INVALID_ARGUMENT", "TP_SIZE_MISMATCH", "tp_size")
            assert await refused(engine.free(answer, tp_size=2)) == mismatch
        await fill_twice(server, engine)
        assert server.counts()[0] == 8, "still locked"
        assert outcomes(await engine.retrieve(answer, TARGET[:4])) == ["LOADED"]
        again = await engine.lookup(EIGHT)
        assert (await engine.free(answer), await engine.free(answer)) == (7, 0)
        assert server.counts()[0] == 8, "another job's pins stay"
        assert (await engine.free(again), await engine.free(again)) == (8, 0)
        await fill_twice(server, engine)
        assert await engine.hits(EIGHT) == 0


# ---- 61: three answers ----------------------------------------------------------------------------------------------


async def test_unknown_and_ended_jobs_are_final_at_once(tmp_path: Path) -> None:
    """Field report 61: status of a random id, of an ended job, of another engine's: NOT_FOUND on the first poll,
    also of a long one; Lookup in a space that nobody registered: FAILED_PRECONDITION."""
    async with local_server(tmp_path) as server:
        engine, other = await server.engine(kv=TINY), await server.engine(kv=TINY)
        await engine.store(EIGHT, range(32))
        ended = await engine.lookup(EIGHT, request_id="ended")
        assert (await engine.scheduler.end_request(engine.engine_id, "ended")).released_pins == 8
        theirs = await other.lookup(EIGHT)
        unknown = ("NOT_FOUND", "JOB_UNKNOWN", "job_id")
        started = time.monotonic()
        for job_id in (secrets.token_bytes(16), ended.job_id, theirs.job_id):
            for wait_ms in (0, 30_000):
                assert await refused(engine.scheduler.query(engine.engine_id, job_id, wait_ms)) == unknown
            assert await refused(engine.worker.retrieve(engine.retrieve_request(job_id, TARGET))) == unknown
        nowhere = await refused(engine.lookup(EIGHT, space=SpaceRef(b"m" * 16)))
        assert nowhere == ("FAILED_PRECONDITION", "SPACE_UNKNOWN", "space.space_base")
        empty = await engine.lookup(tokens_of(2, 8 * CHUNK))
        assert (empty.job_id, empty.status.done, empty.status.hit_tokens) == (b"", True, 0)
        assert time.monotonic() - started < 25, "some poll waited"


async def test_final_stays_readable_until_the_record_goes(tmp_path: Path) -> None:
    """Field report 61: pending, then final and unchanged however often it is asked, then unknown when its time is over;
    a long poll that waits when the job ends gets its answer."""
    clock, tier = ManualClock(), MemoryTier()
    async with local_server(tmp_path, limits=LIMITS, clock=clock, tier=tier) as server:
        engine = await server.engine(kv=TINY)
        await keep_in_tier(server, engine, EIGHT)
        tier.hang()
        answer = await engine.lookup(EIGHT, request_id="ends while pending")
        query = engine.scheduler.query
        assert [(await query(engine.engine_id, answer.job_id)).done for _ in range(3)] == [False] * 3
        call = engine.retrieve_request(answer.job_id, TARGET)
        assert (await refused(engine.worker.retrieve(call)))[:2] == ("FAILED_PRECONDITION", "JOB_PENDING")
        polling = asyncio.create_task(refused(query(engine.engine_id, answer.job_id, 30_000)))
        await polled(server, answer.job_id)
        assert (await engine.scheduler.end_request(engine.engine_id, "ends while pending")).ended_jobs == 1
        assert await asyncio.wait_for(polling, 20) == ("NOT_FOUND", "JOB_UNKNOWN", "job_id")
        tier.resume()
        job_id, status = await found(engine, EIGHT)
        assert status.hit_tokens == 8 * CHUNK
        assert [await query(engine.engine_id, job_id) for _ in range(3)] == [status] * 3
        wait(server, clock, 3)
        assert await query(engine.engine_id, job_id) == status
        wait(server, clock, 60)
        assert await refused(query(engine.engine_id, job_id)) == ("NOT_FOUND", "JOB_UNKNOWN", "job_id")
