# SPDX-License-Identifier: Apache-2.0
"""Loads, stores and prefetches that failed or came up short: never a hit, never a byte beyond what is answered."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvgrpc.core.types import CoreLimits, Direction, TokenRange
from kvgrpc.tiers.base import FaultReason
from kvgrpc.tiers.memory import Damage, MemoryTier
from tests.e2e.harness import CHUNK, Engine, LocalServer, loaded_chunks, local_server, outcomes, tokens_of, until
from tests.e2e.probes import TINY, counters, fill_twice, found, keep_in_tier, spans

LIMITS = CoreLimits(chunk_tokens=CHUNK, page_bytes=4096)
TARGET = list(range(200, 232))
"""Blocks of eight chunks."""


async def assert_first_four_only(server: LocalServer, engine: Engine, job_id: bytes) -> None:
    """Retrieves eight chunks of which four are there."""
    engine.image.memory[:] = 0xA5
    results = await engine.worker.retrieve(engine.retrieve_request(job_id, TARGET))
    assert loaded_chunks(results) == [0, 1, 2, 3]
    assert [(r.first_chunk, r.first_chunk + r.count) for r in results][-1][1] == 8, "every chunk is answered"
    assert all(outcome in ("MISSING", "FAILED") for outcome in outcomes(results)[4:])
    assert engine.image.wrong_tokens(TARGET[:16]) == []
    assert engine.image.untouched(TARGET[:16])
    server.check()


@pytest.mark.parametrize("damage", list(Damage), ids=lambda damage: damage.name.lower())
async def test_tier_object_damaged_between_probe_and_load(tmp_path: Path, damage: Damage) -> None:
    """Field report 1: the object of chunk 4 is missing, short, foreign or flipped when it is read."""
    tier = MemoryTier()
    async with local_server(tmp_path, tier=tier) as server:
        engine = await server.engine()
        tokens = tokens_of(1, 8 * CHUNK)
        names = await keep_in_tier(server, engine, tokens)
        tier.hang()
        answer = await engine.lookup(tokens, prefetch_wait_ms=10_000)
        assert not answer.status.done
        await until(lambda: tier.reads == 8, what="eight reads, after the probe")
        tier.damage(names[4], damage)
        tier.resume()
        status = await engine.scheduler.query(engine.engine_id, answer.job_id, 10_000)
        assert (status.hit_tokens, status.limited_by) == (4 * CHUNK, "PREFETCH_FAILED")
        assert status.hit_chunks_by_tier == {"memory": 4}
        await assert_first_four_only(server, engine, answer.job_id)
        counted = await counters(server)
        assert (counted["hit_tokens"], counted["loaded_chunks"]) == (4 * CHUNK, 4)
        assert counted["failed_reads"] == 1
        assert server.counts() == (0, 0, 0)


async def test_chunk_evicted_after_its_lock_was_freed(tmp_path: Path) -> None:
    """Field report 1: chunk 4 leaves L1 between the lookup and the load; its followers are there and are not loaded."""
    async with local_server(tmp_path, l1_bytes=64 * 2048, limits=LIMITS) as server:
        engine = await server.engine(kv=TINY)
        tokens = tokens_of(1, 8 * CHUNK)
        await engine.store(tokens, range(32))
        answer = await engine.lookup(tokens)
        assert answer.status.hit_tokens == 8 * CHUNK
        assert await engine.free(answer, range=TokenRange(4 * CHUNK, 5 * CHUNK)) == 1
        await fill_twice(server, engine)
        before = await counters(server)
        engine.image.memory[:] = 0xA5
        results = await engine.worker.retrieve(engine.retrieve_request(answer.job_id, TARGET))
        assert spans(results) == [(0, 4, "LOADED", ""), (4, 1, "MISSING", ""), (5, 3, "FAILED", "AFTER_FAILURE")]
        assert engine.image.wrong_tokens(TARGET[:16]) == []
        assert engine.image.untouched(TARGET[:16])
        after = await counters(server)
        assert after["loaded_chunks"] - before.get("loaded_chunks", 0) == 4
        assert after["failed_chunks"] - before.get("failed_chunks", 0) == 4
        assert await engine.free(answer) == 3
        assert server.counts() == (0, 0, 0)


async def test_unpinned_hit_that_was_evicted(tmp_path: Path) -> None:
    """Field report 1: beyond the pin budget a hit says that it is not pinned; a load of what has gone is a miss."""
    limits = replace(LIMITS, pin_share=0.125)
    async with local_server(tmp_path, l1_bytes=64 * 2048, limits=limits) as server:
        engine = await server.engine(kv=TINY)
        first, second = tokens_of(1, 8 * CHUNK), tokens_of(2, 8 * CHUNK)
        for tokens in (first, second):
            await engine.store(tokens, range(32))
        kept, loose, gone = await engine.lookup(first), await engine.lookup(second), await engine.lookup(second)
        assert [(each.status.hit_tokens, each.status.pinned) for each in (kept, loose, gone)] == [
            (8 * CHUNK, True),
            (8 * CHUNK, False),
            (8 * CHUNK, False),
        ]
        assert server.counts()[0] == 8
        assert outcomes(await engine.retrieve(loose, TARGET)) == ["LOADED"] * 8
        assert engine.image.wrong_tokens(TARGET) == []
        await fill_twice(server, engine)
        assert outcomes(await engine.retrieve(gone, TARGET)) == ["MISSING"] + ["FAILED"] * 7
        assert engine.image.untouched()
        assert outcomes(await engine.retrieve(kept, TARGET)) == ["LOADED"] * 8
        assert engine.image.wrong_tokens(TARGET) == [] and engine.image.untouched(TARGET)
        assert server.counts() == (0, 0, 0)


async def test_failed_store_is_never_found(tmp_path: Path) -> None:
    """Field report 23: a store whose source memory goes away in its second chunk; lookups of its keys before, during
    and after. The first chunk was copied whole and is kept."""
    async with local_server(tmp_path) as server:
        writer, reader = await server.engine(), await server.engine()
        tokens = tokens_of(1, 4 * CHUNK)
        writer.image.write(range(16))
        path = f"/dev/shm/{writer.memory_name}"
        gate = server.gates.hold(10, Direction.STORE, writer.worker.client_id)
        storing = asyncio.create_task(writer.worker.store(writer.store_request(tokens, range(16))))
        assert await asyncio.to_thread(gate.wait_reached, 10)
        assert await asyncio.gather(*(reader.hits(tokens) for _ in range(8))) == [0] * 8
        # a second store of the same keys is not told that they are there
        assert outcomes(await reader.store(tokens, range(16))) == ["BEING_WRITTEN"] * 4
        os.truncate(path, 0)
        looking = [asyncio.create_task(reader.hits(tokens)) for _ in range(8)]
        gate.release()
        results = await storing
        assert spans(results) == [
            (0, 1, "STORED", ""),
            (1, 1, "TORN", "MEMORY_TRUNCATED"),
            (2, 2, "FAILED", "AFTER_FAILURE"),
        ]
        assert set(await asyncio.gather(*looking)) <= {0, 1}
        os.truncate(path, writer.image.size_bytes)
        assert [await reader.hits(tokens) for _ in range(8)] == [1] * 8
        assert server.counts() == (0, 0, 0)
        assert server.book.counts().chunks == 1
        answer = await reader.lookup(tokens)
        assert outcomes(await reader.retrieve(answer, TARGET[:16])) == ["LOADED", *["MISSING"] * 3]
        assert reader.image.wrong_tokens(TARGET[:4]) == []
        assert reader.image.untouched(TARGET[:4])
        assert outcomes(await writer.store(tokens, range(16))) == ["RESIDENT", *["STORED"] * 3]
        assert await reader.hits(tokens) == 4


@pytest.mark.parametrize("fault", ["short", "io"])
async def test_failed_prefetch_is_never_found(tmp_path: Path, fault: str) -> None:
    """Field report 23: a prefetch that fails, under 20 lookups of its keys and a store of them; 0 hits always."""
    tier = MemoryTier()
    async with local_server(tmp_path, tier=tier) as server:
        engine = await server.engine(kv=TINY)
        tokens = tokens_of(1, 4 * CHUNK)
        names = await keep_in_tier(server, engine, tokens)
        tier.hang()
        waiting = [asyncio.create_task(found(engine, tokens)) for _ in range(20)]
        await until(lambda: server.book.counts().jobs == 20 and tier.reads_in_flight == 4)
        assert tier.reads == 4, "four reads for all lookups together"
        assert outcomes(await engine.store(tokens, range(16))) == ["BEING_WRITTEN"] * 4
        if fault == "short":
            for name in names:
                tier.damage(name, Damage.SHORT)
        else:
            tier.fault = FaultReason.IO
        tier.resume()
        for job_id, status in await asyncio.gather(*waiting):
            assert (status.hit_tokens, status.limited_by) == (0, "PREFETCH_FAILED")
            engine.image.memory[:] = 0xA5
            results = await engine.worker.retrieve(engine.retrieve_request(job_id, TARGET[:16]))
            assert outcomes(results) == ["MISSING"] * 4
            assert engine.image.untouched()
        for _ in range(4):
            assert (await found(engine, tokens))[1].hit_tokens == 0
        assert server.counts() == (0, 0, 0)
        # the keys are not spoilt: a store makes them whole
        assert outcomes(await engine.store(tokens, range(16))) == ["STORED"] * 4
        assert (await found(engine, tokens))[1].hit_chunks_by_tier == {"l1": 4}


async def test_prefetch_that_outlives_its_time_is_no_hit(tmp_path: Path) -> None:
    """Field report 23: at its deadline a lookup counts what is ready; a read that ends later changes nothing for it."""
    tier = MemoryTier()
    async with local_server(tmp_path, tier=tier) as server:
        engine = await server.engine(kv=TINY)
        tokens = tokens_of(1, 4 * CHUNK)
        await engine.store(tokens_of(1, 2 * CHUNK), range(8))
        await keep_in_tier(server, engine, tokens)
        tier.hang()
        job_id, status = await found(engine, tokens, prefetch_wait_ms=30)
        assert (status.hit_tokens, status.limited_by) == (2 * CHUNK, "PREFETCH_TIMEOUT")
        tier.resume()
        await until(lambda: tier.reads_in_flight == 0, what="the end of the reads")
        engine.image.memory[:] = 0xA5
        results = await engine.worker.retrieve(engine.retrieve_request(job_id, TARGET[:16]))
        assert loaded_chunks(results) == [0, 1]
        assert engine.image.wrong_tokens(TARGET[:8]) == []
        assert engine.image.untouched(TARGET[:8])
        assert server.counts() == (0, 0, 0)
