# SPDX-License-Identifier: Apache-2.0
"""What operators do and see, over the wire: taking an engine out, keeping a prefix, quotas, lists and numbers."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path

import pytest

from kvgrpc import api
from kvgrpc.core.types import MS, CoreLimits, LookupAnswer, PrefetchStatus, Role, S
from kvgrpc.runtime.clock import ManualClock
from kvgrpc.tiers.base import FaultReason
from kvgrpc.tiers.memory import MemoryTier
from tests.e2e.harness import CHUNK, local_server, outcomes, tokens_of, until
from tests.e2e.probes import TINY, fill_twice, keep_in_tier, polled, refused, spans

CHUNKS = 8
TOKENS = CHUNKS * CHUNK
BLOCKS = list(range(1, 64, 2))
OBJECT_BYTES = CHUNK * TINY.token_bytes
L1_BYTES = 64 * OBJECT_BYTES
LIMITS = CoreLimits(chunk_tokens=CHUNK, page_bytes=1024)


def fingerprint(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()[:16]


# ---- DrainEngine ----------------------------------------------------------------------------------------------------


async def test_drain_engine(tmp_path: Path) -> None:
    """Its running copy ends, its lookups end, whoever waits is told, new calls are refused; other engines go on."""
    tier = MemoryTier()
    async with local_server(tmp_path, l1_bytes=L1_BYTES, limits=LIMITS, tier=tier) as server:
        engine, other = await server.engine(kv=TINY), await server.engine(kv=TINY)
        admin = await server.admin()
        tokens = tokens_of(1, TOKENS)
        await engine.store(tokens, BLOCKS)
        await keep_in_tier(server, engine, tokens_of(2, TOKENS))
        tier.hang()
        pinned = await engine.lookup(tokens)
        assert pinned.status.hit_tokens == TOKENS
        pending = await engine.lookup(tokens_of(2, TOKENS), prefetch_wait_ms=60_000)
        polling = asyncio.ensure_future(engine.scheduler.query(engine.engine_id, pending.job_id, 30_000))
        gate = server.gates.hold(5, client_id=engine.worker.client_id)
        running = asyncio.ensure_future(engine.store(tokens_of(3, TOKENS), BLOCKS))
        assert await asyncio.to_thread(gate.wait_reached, 10)
        await polled(server, pending.job_id)

        started = time.monotonic()
        assert not await admin.drain_engine(fingerprint(engine.engine_id))
        assert not await admin.drain_engine(engine.engine_id, 100), "a copy of it runs"
        assert time.monotonic() - started >= 0.1
        for stream in engine.streams:
            await until(lambda stream=stream: stream.events[-1].draining, what="the news of the drain")
        assert (await refused(polling))[:2] == ("NOT_FOUND", "JOB_UNKNOWN")
        status = await admin.get_status()
        assert (status.pins, status.jobs, status.calls_in_flight) == (0, 0, 1)
        for call in (
            engine.lookup(tokens),
            engine.store(tokens_of(4, TOKENS), BLOCKS),
            engine.worker.register(engine.registration()),
        ):
            assert (await refused(call))[:2] == ("UNAVAILABLE", "ENGINE_DRAINING")
        retrieve = engine.worker.retrieve(engine.retrieve_request(pinned.job_id, BLOCKS))
        assert (await refused(retrieve))[:2] == ("UNAVAILABLE", "ENGINE_DRAINING")

        waiting = asyncio.ensure_future(admin.drain_engine(engine.engine_id, 20_000))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        gate.release()
        assert await waiting
        assert outcomes(await running) == ["STORED"] * CHUNKS
        tier.resume()
        assert await other.hits(tokens) == CHUNKS
        assert await other.hits(tokens_of(3, TOKENS)) == CHUNKS
        drained = {one.engine: one.draining for one in await admin.list_engines()}
        assert drained == {fingerprint(engine.engine_id): True, fingerprint(other.engine_id): False}

        await engine.stop()
        await until(lambda: len(server.book.sessions.engines) == 1, what="the end of the engine")
        assert (await refused(admin.drain_engine(engine.engine_id)))[:2] == ("NOT_FOUND", "ENGINE_UNKNOWN")
        await server.attach(server.client("new"), engine.engine_id, Role.WORKER)


async def test_end_of_a_request_wakes_who_waits_for_it(tmp_path: Path) -> None:
    """A long poll of a lookup that is ended is answered at once: it is gone."""
    tier = MemoryTier()
    async with local_server(tmp_path, l1_bytes=L1_BYTES, limits=LIMITS, tier=tier) as server:
        engine = await server.engine(kv=TINY)
        await keep_in_tier(server, engine, tokens_of(1, TOKENS))
        tier.hang()
        answer = await engine.lookup(tokens_of(1, TOKENS), request_id="r", prefetch_wait_ms=60_000)
        polling = asyncio.ensure_future(engine.scheduler.query(engine.engine_id, answer.job_id, 30_000))
        await polled(server, answer.job_id)
        started = time.monotonic()
        await engine.scheduler.end_request(engine.engine_id, "r")
        assert (await refused(polling))[:2] == ("NOT_FOUND", "JOB_UNKNOWN")
        assert time.monotonic() - started < 10


# ---- Pin and Unpin --------------------------------------------------------------------------------------------------


async def test_pin_keeps_a_prefix_for_its_time(tmp_path: Path) -> None:
    """A pinned prefix survives fills until it is unpinned or its time is over; then it is evictable, not gone."""
    clock = ManualClock()
    async with local_server(tmp_path, l1_bytes=L1_BYTES, limits=LIMITS, clock=clock) as server:
        engine, admin = await server.engine(kv=TINY), await server.admin()
        tokens = tokens_of(1, TOKENS)
        assert await admin.pin(engine.space, tokens, 60_000) == api.Held(b"", 0), "nothing of it is there"
        await engine.store(tokens, BLOCKS)
        held = await admin.pin(engine.space, tokens_of(1, 3 * CHUNK), 60_000)
        assert (len(held.pin_id), held.pinned_tokens) == (16, 3 * CHUNK)
        assert (await admin.get_status()).arena.held_bytes == 3 * OBJECT_BYTES
        await fill_twice(server, engine)
        assert await engine.hits(tokens) == 3
        assert await admin.unpin(held.pin_id) == 3
        assert (await refused(admin.unpin(held.pin_id)))[:2] == ("NOT_FOUND", "PIN_UNKNOWN")
        assert await engine.hits(tokens) == 3
        await fill_twice(server, engine)
        assert await engine.hits(tokens) == 0

        await engine.store(tokens, BLOCKS)
        held = await admin.pin(engine.space, tokens, 60_000)
        clock.advance(60 * S - MS)
        server.driver.tick()
        await fill_twice(server, engine)
        assert await engine.hits(tokens) == CHUNKS
        clock.advance(MS)
        server.driver.tick()
        assert (await refused(admin.unpin(held.pin_id)))[:2] == ("NOT_FOUND", "PIN_UNKNOWN")
        await fill_twice(server, engine)
        assert await engine.hits(tokens) == 0
        assert (await admin.get_status()).arena.held_bytes == 0


async def test_pins_have_a_byte_budget(tmp_path: Path) -> None:
    """Beyond a quarter of L1 a Pin is refused by name and holds nothing; Clear takes what is pinned."""
    async with local_server(tmp_path, l1_bytes=L1_BYTES, limits=LIMITS) as server:
        engine, admin = await server.engine(kv=TINY), await server.admin()
        for seed in (1, 2, 3):
            await engine.store(tokens_of(seed, TOKENS), BLOCKS)
        first = await admin.pin(engine.space, tokens_of(1, TOKENS), 60_000)
        again = await admin.pin(engine.space, tokens_of(1, TOKENS), 60_000)
        assert again.pin_id != first.pin_id
        await admin.pin(engine.space, tokens_of(2, TOKENS), 60_000)
        third = admin.pin(engine.space, tokens_of(3, TOKENS), 60_000)
        assert (await refused(third))[:2] == ("RESOURCE_EXHAUSTED", "HOLD_LIMIT")
        assert (await admin.get_status()).arena.held_bytes == L1_BYTES // 4
        await admin.unpin(first.pin_id)
        assert (await admin.get_status()).arena.held_bytes == L1_BYTES // 4, "the same chunks are pinned twice"
        await admin.unpin(again.pin_id)
        assert (await admin.pin(engine.space, tokens_of(3, TOKENS), 60_000)).pinned_tokens == TOKENS
        assert (await admin.clear(api.ClearTarget(all=True))).removed_chunks == 3 * CHUNKS
        assert await engine.hits(tokens_of(3, TOKENS)) == 0
        await until(lambda: server.book.arena_status().free_bytes == L1_BYTES, what="all memory back")


# ---- quotas ---------------------------------------------------------------------------------------------------------


async def test_quota_evicts_the_tenants_own(tmp_path: Path) -> None:
    """A tenant at its quota loses its own oldest chunks and nobody else's; what it has pinned counts, too."""
    async with local_server(tmp_path, l1_bytes=L1_BYTES, limits=LIMITS) as server:
        server.book.set_quota("tenant-a", 16 * OBJECT_BYTES)
        tenant, other = await server.engine(kv=TINY, salt="tenant-a"), await server.engine(kv=TINY, salt="tenant-b")
        await other.store(tokens_of(100, TOKENS), BLOCKS)
        for seed in range(6):
            assert outcomes(await tenant.store(tokens_of(seed, TOKENS), BLOCKS)) == ["STORED"] * CHUNKS
        assert [await tenant.hits(tokens_of(seed, TOKENS)) for seed in range(6)] == [0, 0, 0, 0, CHUNKS, CHUNKS]
        assert await other.hits(tokens_of(100, TOKENS)) == CHUNKS
        spaces = {space.salt_fingerprint: space for space in await (await server.admin()).list_spaces()}
        assert spaces[fingerprint("tenant-a")].bytes == 16 * OBJECT_BYTES

        pinned = [await tenant.lookup(tokens_of(seed, TOKENS)) for seed in (4, 5)]
        refusal = spans(await tenant.store(tokens_of(7, TOKENS), BLOCKS))
        assert refusal == [(0, CHUNKS, "REFUSED", "QUOTA")]
        assert outcomes(await other.store(tokens_of(101, TOKENS), BLOCKS)) == ["STORED"] * CHUNKS
        await tenant.free(pinned[0])
        assert outcomes(await tenant.store(tokens_of(7, TOKENS), BLOCKS)) == ["STORED"] * CHUNKS
        assert await tenant.hits(tokens_of(4, TOKENS)) == 0


# ---- lists and numbers ----------------------------------------------------------------------------------------------


async def test_engines_and_spaces_as_an_operator_sees_them(tmp_path: Path) -> None:
    """Engine ids and salts only as fingerprints; clients with role, rank, memory and calls."""
    async with local_server(tmp_path, l1_bytes=L1_BYTES, limits=LIMITS) as server:
        admin = await server.admin()
        engine = await server.engine(kv=TINY, salt="secret-salt", lora="adapter@1")
        idle = await server.engine(kv=TINY, model="other-model", scheduler=False)
        await engine.store(tokens_of(1, TOKENS), BLOCKS)
        await engine.lookup(tokens_of(1, TOKENS))
        gate = server.gates.hold(0)
        held = asyncio.ensure_future(engine.store(tokens_of(2, TOKENS), BLOCKS))
        assert await asyncio.to_thread(gate.wait_reached, 10)
        first, second = await admin.list_engines()
        assert (first.engine, first.jobs, first.pins) == (fingerprint(engine.engine_id), 1, CHUNKS)
        assert (second.engine, second.jobs, second.pins) == (fingerprint(idle.engine_id), 0, 0)
        worker, scheduler = first.clients
        assert (worker.role, worker.attached, worker.registered, worker.calls_in_flight) == (Role.WORKER, True, True, 1)
        assert worker.memory_bytes == engine.image.size_bytes
        assert (scheduler.role, scheduler.registered, scheduler.memory_bytes) == (Role.SCHEDULER, False, 0)
        assert worker.thread != second.clients[0].thread
        gate.release()
        await held

        (space,) = await admin.list_spaces()
        assert (space.lora, space.salt_fingerprint) == ("adapter@1", fingerprint("secret-salt"))
        assert (space.chunks, space.bytes, space.pinned_chunks) == (2 * CHUNKS, 2 * CHUNKS * OBJECT_BYTES, CHUNKS)
        assert (space.space_base, space.generation) == (engine.space.space_base, 0)
        assert space.identity.model == "test-model"
        assert engine.engine_id not in repr((first, second, space))
        assert "secret-salt" not in repr((first, second, space))


async def test_status_adds_up_and_survives_a_sick_tier(tmp_path: Path) -> None:
    """Bytes by state add up at any time; a tier that fails is shown as unhealthy and takes nothing else away."""
    tier = MemoryTier()
    async with local_server(tmp_path, l1_bytes=L1_BYTES, limits=LIMITS, tier=tier) as server:
        engine, admin = await server.engine(kv=TINY), await server.admin()
        await engine.store(tokens_of(1, TOKENS), BLOCKS)
        await keep_in_tier(server, engine, tokens_of(2, TOKENS))
        tier.hang()
        pending = await engine.lookup(tokens_of(2, TOKENS), prefetch_wait_ms=60_000)
        answer = await engine.lookup(tokens_of(1, TOKENS))
        assert answer.status.pinned
        status = await admin.get_status()
        arena = status.arena
        assert (arena.writing_bytes, arena.pinned_bytes) == (CHUNKS * OBJECT_BYTES, CHUNKS * OBJECT_BYTES)
        assert arena.total_bytes == L1_BYTES == arena.free_bytes + arena.writing_bytes + arena.pinned_bytes
        assert (status.jobs, status.pins, status.chunks) == (2, CHUNKS, CHUNKS)
        assert [(t.name, t.healthy, t.reads_in_flight) for t in status.tiers] == [("memory", True, CHUNKS)]
        assert status.tiers[0].used_bytes > CHUNKS * OBJECT_BYTES
        assert (status.counters["stored_chunks"], status.counters["lookups"]) == (CHUNKS, 2)

        tier.fault = FaultReason.IO
        status = await admin.get_status()
        assert [(t.name, t.healthy, t.used_bytes) for t in status.tiers] == [("memory", False, 0)]
        assert status.arena == arena
        assert outcomes(await engine.retrieve(answer, BLOCKS)) == ["LOADED"] * CHUNKS
        tier.resume()
        done = await engine.scheduler.query(engine.engine_id, pending.job_id, 10_000)
        assert done == PrefetchStatus(True, 0, False, {}, "PREFETCH_FAILED")
        missed = await engine.lookup(tokens_of(3, TOKENS))
        told = missed.status
        if not told.done:
            told = await engine.scheduler.query(engine.engine_id, missed.job_id, 10_000)
        assert told == PrefetchStatus(True, limited_by="PREFETCH_FAILED"), "nobody knows whether it is there"
        await engine.free(LookupAnswer(pending.job_id, done))


@pytest.mark.parametrize("wait_ms", [0, 20_000])
async def test_drain_of_an_idle_engine_is_done_at_once(tmp_path: Path, wait_ms: int) -> None:
    async with local_server(tmp_path, l1_bytes=L1_BYTES, limits=LIMITS) as server:
        engine = await server.engine(kv=TINY)
        started = time.monotonic()
        assert await (await server.admin()).drain_engine(engine.engine_id, wait_ms)
        assert time.monotonic() - started < 10
