# SPDX-License-Identifier: Apache-2.0
"""Ranks: who reads what under one lookup, and that a hit is what all ranks can load."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

import pytest

from kvgrpc import api
from kvgrpc.core.types import CoreLimits, Reader
from kvgrpc.tiers.memory import MemoryTier
from tests.e2e.harness import CHUNK, Engine, LocalServer, local_server, outcomes, tokens_of
from tests.e2e.probes import TINY, fill_twice, found, keep_in_tier, nothing_changes, refused
from tests.kvdata import Kv

MLA = Kv(layers=2, planes=1, heads=1, head_dim=32)
"""2 KiB a chunk, the same on every tensor-parallel rank."""
LIMITS = CoreLimits(chunk_tokens=CHUNK, page_bytes=4096, pin_share=0.5, prefetch_share=0.5)
EIGHT = tokens_of(1, 8 * CHUNK)
TARGET = list(range(95, 63, -1))


async def group(
    server: LocalServer, places: list[tuple[int, int, int, int]], kv: Kv = MLA, **facts: object
) -> list[Engine]:
    """An engine of a worker at each (kv_rank, tp_rank, tp_size, kv_tp_size); the first has the scheduler."""
    engine_id = f"group-{secrets.token_hex(8)}"
    return [
        await server.engine(kv=kv, num_blocks=96, engine_id=engine_id, parallel=place, scheduler=at == 0, **facts)
        for at, place in enumerate(places)
    ]


async def assert_loads(worker: Engine, job_id: bytes, count: int = 8) -> None:
    """This worker reads the job's chunks, byte for byte, and nothing else is written."""
    worker.image.memory[:] = 0xA5
    target = TARGET[: 4 * count]
    results = await worker.worker.retrieve(worker.retrieve_request(job_id, target))
    assert outcomes(results) == ["LOADED"] * count
    assert worker.image.wrong_tokens(target) == []
    assert worker.image.untouched(target)


# ---- 30: shared KV --------------------------------------------------------------------------------------------------

FOUR = [(0, rank, 4, 1) for rank in range(4)]
TWO_STAGES = [(stage, rank, 4, 1) for stage in range(2) for rank in range(4)]


@pytest.mark.parametrize("source", ["l1", "memory"])
async def test_locked_until_the_last_of_four_has_read(tmp_path: Path, source: str) -> None:
    """Field report 30: Lookup with tp_size 4; three ranks read; L1 is filled twice over; the fourth still reads; only
    then the chunks can go. The same for prefetched data."""
    tier = MemoryTier() if source == "memory" else None
    async with local_server(tmp_path, l1_bytes=64 * 2048, limits=LIMITS, tier=tier) as server:
        ranks = await group(server, FOUR)
        if tier is None:
            assert outcomes(await ranks[0].store(EIGHT, range(32))) == ["STORED"] * 8
        else:
            await keep_in_tier(server, ranks[0], EIGHT)
        job_id, status = await found(ranks[0], EIGHT)
        assert (status.hit_tokens, status.hit_chunks_by_tier) == (8 * CHUNK, {source: 8})
        assert server.counts()[0] == 32
        for rank, pins in ((0, 24), (2, 16), (1, 8)):
            await assert_loads(ranks[rank], job_id)
            assert server.counts()[0] == pins
        # a rank that reads again takes nobody else's turn
        await assert_loads(ranks[2], job_id)
        assert server.counts()[0] == 8
        await fill_twice(server, ranks[1])
        await assert_loads(ranks[3], job_id)
        assert server.counts() == (0, 0, 0)
        await fill_twice(server, ranks[1])
        assert (await found(ranks[0], EIGHT))[1].hit_chunks_by_tier == ({} if tier is None else {"memory": 8})


@pytest.mark.parametrize("source", ["l1", "memory"])
async def test_free_without_a_read(tmp_path: Path, source: str) -> None:
    """Field report 30: Free with tp_size 4 frees all, one named reader leaves three pins; tp_size 1 is an error."""
    tier = MemoryTier() if source == "memory" else None
    async with local_server(tmp_path, l1_bytes=64 * 2048, limits=LIMITS, tier=tier) as server:
        ranks = await group(server, FOUR)
        if tier is None:
            await ranks[0].store(EIGHT, range(32))
        else:
            await keep_in_tier(server, ranks[0], EIGHT)
        job_id, _ = await found(ranks[0], EIGHT)
        scheduler, engine_id = ranks[0].scheduler, ranks[0].engine_id
        all_readers = api.FreeRequest(engine_id, job_id, 4)
        async with nothing_changes(server, *ranks):
            mismatch = ("INVALID_ARGUMENT", "TP_SIZE_MISMATCH", "tp_size")
            assert await refused(scheduler.free(replace(all_readers, tp_size=1))) == mismatch
            unknown = ("INVALID_ARGUMENT", "READER_UNKNOWN", "readers")
            for reader in (Reader(0, 4), Reader(1, 0)):
                assert await refused(scheduler.free(replace(all_readers, readers=(reader,)))) == unknown
        assert await scheduler.free(replace(all_readers, readers=(Reader(0, 1),))) == 8
        assert await scheduler.free(replace(all_readers, readers=(Reader(0, 1),))) == 0
        assert server.counts()[0] == 24
        await fill_twice(server, ranks[1])
        assert server.counts()[0] == 24
        await assert_loads(ranks[0], job_id)
        assert await scheduler.free(all_readers) == 16
        assert await scheduler.free(all_readers) == 0
        assert server.counts() == (0, 0, 0)
        await fill_twice(server, ranks[1])
        assert (await found(ranks[0], EIGHT))[1].hit_chunks_by_tier == ({} if tier is None else {"memory": 8})


async def test_each_pipeline_stage_has_its_own_four(tmp_path: Path) -> None:
    """Field report 30: pp = 2: one writer and four readers a stage, each stage with its own data."""
    async with local_server(tmp_path, l1_bytes=128 * 2048, limits=LIMITS) as server:
        ranks = await group(server, TWO_STAGES, kv_world_size=2)
        for at, rank in enumerate(ranks):
            rank.image.kv = replace(MLA, seed=at // 4)
        assert outcomes(await ranks[0].store(EIGHT, range(32))) == ["STORED"] * 8
        assert await ranks[0].hits(EIGHT) == 0, "the second stage is missing"
        assert outcomes(await ranks[4].store(EIGHT, range(32))) == ["STORED"] * 8
        # only the first rank of a group stores: others find it there
        assert outcomes(await ranks[6].store(EIGHT, range(32))) == ["RESIDENT"] * 8
        job_id, status = await found(ranks[0], EIGHT)
        assert status.hit_tokens == 8 * CHUNK and server.counts()[0] == 64
        for at in (7, 0, 5, 2, 4, 1, 6):
            await assert_loads(ranks[at], job_id)
        assert server.counts()[0] == 8
        await fill_twice(server, ranks[0])
        await assert_loads(ranks[3], job_id)
        assert server.counts()[0] == 0
        await fill_twice(server, ranks[0])
        assert await ranks[0].hits(EIGHT) == 0


# ---- 44: world size -------------------------------------------------------------------------------------------------


async def test_the_smallest_prefix_of_all_ranks(tmp_path: Path) -> None:
    """Field report 44: of two ranks one has 8 chunks and the other 6: the hit is 6, and both load 6."""
    async with local_server(tmp_path) as server:
        ranks = await group(server, [(0, 0, 2, 2), (1, 1, 2, 2)], kv=TINY, kv_world_size=2)
        ranks[1].image.kv = replace(TINY, first_head=1)
        await ranks[0].store(EIGHT, range(32))
        await ranks[1].store(tokens_of(1, 6 * CHUNK), range(24))
        answer = await ranks[0].lookup(EIGHT)
        assert answer.status.hit_tokens == 6 * CHUNK
        assert server.counts()[0] == 12
        for rank in ranks:
            await assert_loads(rank, answer.job_id, 6)
        assert server.counts() == (0, 0, 0)
        # each node of an engine that spans two asks for its own ranks, and the engine takes the least
        assert await ranks[0].hits(EIGHT, kv_ranks=(0,)) == 8
        assert await ranks[0].hits(EIGHT, kv_ranks=(1,)) == 6
        assert await refused(ranks[0].lookup(EIGHT, kv_ranks=(2,))) == ("INVALID_ARGUMENT", "RANK", "kv_ranks")


async def test_other_tensor_parallel_size_is_not_found(tmp_path: Path) -> None:
    """Field report 44: stored under tp 2, looked up under tp 4: 0. A tp_size that is not the engine's is refused."""
    async with local_server(tmp_path) as server:
        two = await group(server, [(rank, rank, 2, 2) for rank in range(2)], kv=TINY, kv_world_size=2)
        four = await group(server, [(rank, rank, 4, 4) for rank in range(4)], kv=TINY, kv_world_size=4)
        for rank in two:
            await rank.store(EIGHT, range(32))
        assert [await ranks[0].hits(EIGHT) for ranks in (two, four)] == [8, 0]
        for rank in four[:3]:
            await rank.store(EIGHT, range(32))
        assert await four[0].hits(EIGHT) == 0
        await four[3].store(EIGHT, range(32))
        assert await four[0].hits(EIGHT) == 8
        mismatch = ("INVALID_ARGUMENT", "TP_SIZE_MISMATCH", "tp_size")
        assert await refused(two[0].lookup(EIGHT, tp_size=4)) == mismatch


@pytest.mark.parametrize(
    ("place", "reason", "field"),
    [
        ((2, 0, 2, 2), "RANK", "kv_rank"),
        ((0, 2, 2, 2), "RANK", "tp_rank"),
        ((1, 0, 2, 2), "RANK", "kv_rank"),
        ((0, 0, 3, 2), "TP_SIZE_MISMATCH", "kv_tp_size"),
        ((0, 0, 4, 4), "TP_SIZE_MISMATCH", "kv_tp_size"),
        ((0, 0, 2, 0), "INVALID_FIELD", "kv_tp_size"),
        ((0, 0, 0, 1), "INVALID_FIELD", "tp_size"),
        ((0, 0, 129, 1), "INVALID_FIELD", "tp_size"),
    ],
    ids=str,
)
async def test_impossible_rank_is_refused(
    tmp_path: Path, place: tuple[int, int, int, int], reason: str, field: str
) -> None:
    """Field report 44: rank 2 of 2, a KV rank of another place, sizes that do not divide: refused at Register."""
    async with local_server(tmp_path) as server:
        engine = await server.engine(kv=TINY, kv_world_size=2, parallel=(0, 0, 2, 2))
        await engine.worker.unregister(engine.engine_id)
        kv_rank, tp_rank, tp_size, kv_tp_size = place
        good = engine.registration()
        bad = replace(good, kv_rank=kv_rank, tp_rank=tp_rank, tp_size=tp_size, kv_tp_size=kv_tp_size)
        async with nothing_changes(server, engine):
            assert await refused(engine.worker.register(bad)) == ("INVALID_ARGUMENT", reason, field)
        await engine.worker.register(good)


async def test_missing_stage_is_a_miss_and_replicas_share(tmp_path: Path) -> None:
    """Field report 44: pp 2 with one stage missing: 0. Data-parallel replicas of one rank each share: 8."""
    async with local_server(tmp_path) as server:
        stages = await group(server, [(0, 0, 1, 1), (1, 0, 1, 1)], kv=TINY, kv_world_size=2)
        await stages[0].store(EIGHT, range(32))
        assert await stages[0].hits(EIGHT) == 0
        replicas = [await server.engine(kv=TINY) for _ in range(3)]
        await replicas[0].store(EIGHT, range(32))
        for replica in replicas:
            answer = await replica.lookup(EIGHT)
            assert answer.status.hit_tokens == 8 * CHUNK
            await assert_loads(replica, answer.job_id)
        assert server.counts() == (0, 0, 0)
