# SPDX-License-Identifier: Apache-2.0
"""What peers send in excess is refused or forgotten; it never stays in memory."""

from __future__ import annotations

import asyncio
import os
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvgrpc import api
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import MIB, CoreLimits, Direction, Policy, S, SpaceRef
from kvgrpc.tiers.memory import MemoryTier
from kvgrpc.v1 import cache_pb2, common_pb2
from tests.e2e.harness import CHUNK, Engine, LocalServer, local_server, tokens_of, until
from tests.e2e.probes import keep_in_tier
from tests.kvdata import Kv

BLOCKS = list(range(0, 16, 2))
TINY = Kv(layers=1, planes=1, heads=1, head_dim=1, itemsize=1)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def quiet(call: Awaitable[Any]) -> None:
    with suppress(grpc.RpcError, Refusal):
        await call


@asynccontextmanager
async def held_store(server: LocalServer, engine: Engine, blocks: Sequence[int] = BLOCKS) -> AsyncIterator[None]:
    """Another Store of the engine is being copied meanwhile."""
    gate = server.gates.hold(0, Direction.STORE)
    first = asyncio.ensure_future(engine.store(tokens_of(99, 2 * CHUNK), blocks))
    assert await asyncio.to_thread(gate.wait_reached, 30)
    try:
        yield
    finally:
        gate.release()
        await first


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def raw_store(engine: Engine, call_id: int, surplus: int) -> bytes:
    """A Store that names block 1 ``surplus`` times beyond its range, as it comes over the wire."""
    message = cache_pb2.StoreRequest(
        engine_id=engine.engine_id,
        call_id=call_id,
        space=common_pb2.SpaceRef(space_base=engine.space.space_base),
        blocks=[cache_pb2.BlockIds(ids=array("I", BLOCKS) + array("I", [1]) * surplus)],
    )
    message.content.tokens.ids.extend(range(2 * CHUNK))
    return message.SerializeToString()


async def test_waiting_calls_keep_only_what_they_need(tmp_path: Path) -> None:
    async with local_server(tmp_path, message_bytes=16 * MIB) as server:
        engine = await server.engine()
        call = engine.worker._stubs().channel.unary_unary("/kvgrpc.v1.KvCacheService/Store")  # pyright: ignore[reportPrivateUsage]
        async with held_store(server, engine):
            before, waiting = resident_bytes(), list[asyncio.Future[None]]()
            for number in range(40):
                raw = raw_store(engine, 1000 + number, MIB - len(BLOCKS))
                sent = call(raw, metadata=engine.worker._metadata, timeout=60)  # pyright: ignore[reportPrivateUsage]
                waiting.append(asyncio.ensure_future(quiet(sent)))
                await until(lambda: server.book.counts().calls_in_flight == len(waiting) + 1, 60)
            grown = resident_bytes() - before
        await asyncio.gather(*waiting)
        # sender and server are one process, and gRPC keeps the bytes on both sides; read, they are 4 MiB and more
        assert grown < 5 * 40 * MIB


async def test_messages_of_waiting_calls_are_bounded_together(tmp_path: Path) -> None:
    async with local_server(tmp_path, message_bytes=16 * MIB) as server:
        engine = await server.engine()
        call = engine.worker._stubs().channel.unary_unary("/kvgrpc.v1.KvCacheService/Store")  # pyright: ignore[reportPrivateUsage]
        filler = cache_pb2.StoreRequest()  # as of a newer client, whose fields this server does not know
        filler.MergeFromString(bytes((0xF2, 0x07)) + varint(15 * MIB) + bytes(15 * MIB))
        raws = [raw_store(engine, 1000 + number, 0) + filler.SerializeToString() for number in range(9)]
        async with held_store(server, engine):
            sent = [call(raw, metadata=engine.worker._metadata, timeout=60) for raw in raws]  # pyright: ignore[reportPrivateUsage]
            waiting = [asyncio.ensure_future(one) for one in sent]
            done, _ = await asyncio.wait(waiting, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            (refused,) = done
            error = refused.exception()
            assert isinstance(error, grpc.aio.AioRpcError)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "the limit is 134217728" in (error.details() or "")
            assert server.book.counts().calls_in_flight == 9, "the others wait"
        await asyncio.gather(*waiting, return_exceptions=True)
        await engine.store(tokens_of(2, CHUNK), BLOCKS[:4])


async def test_more_block_ids_than_any_call_needs_are_refused(tmp_path: Path) -> None:
    async with local_server(tmp_path, message_bytes=16 * MIB) as server:
        engine = await server.engine()
        with pytest.raises(Refusal) as refused:
            await engine.worker.store(engine.store_request(tokens_of(1, CHUNK), [1] * (MIB + 1)))
        assert (refused.value.reason, refused.value.field) == (Reason.INVALID_FIELD, "blocks.ids")
        await engine.store(tokens_of(1, CHUNK), BLOCKS)


async def test_a_retrieve_finds_its_way_through_many_waiting_stores(tmp_path: Path) -> None:
    """300 waiting Stores of 8192 blocks: choosing the next call never stops the loop. What counts is what the loop's
    thread does between two of its turns: a machine with other work may keep it waiting for longer."""
    limits = CoreLimits(chunk_tokens=CHUNK, page_bytes=4096, slice_bytes=64)
    async with local_server(tmp_path, limits=limits) as server:
        engine = await server.engine(kv=TINY, block_size=1, num_blocks=1 << 20)
        tokens = tokens_of(1, 2 * CHUNK)
        await engine.store(tokens, list(range(2 * CHUNK)))
        hit = await engine.lookup(tokens)
        stores: list[asyncio.Future[None]] = []
        async with held_store(server, engine, range(2 * CHUNK)):
            for number in range(300):
                blocks = range(1000 + number * 3000, 1000 + number * 3000 + 8192)
                request = engine.store_request(tokens_of(100 + number, 8192), list(blocks))
                stores.append(asyncio.ensure_future(quiet(engine.worker.store(request, timeout_s=600))))
            await until(lambda: server.book.counts().calls_in_flight == 301, 60)
            target = list(range(950_000, 950_000 + 2 * CHUNK))
            request = engine.retrieve_request(hit.job_id, target)
            retrieve = asyncio.ensure_future(engine.worker.retrieve(request, timeout_s=600))
            await until(lambda: server.book.counts().calls_in_flight == 302, 60)
            longest, last = 0.0, time.thread_time()
        while not retrieve.done():
            await asyncio.sleep(0.002)
            now = time.thread_time()
            longest, last = max(longest, now - last), now
        assert server.book.counts().calls_in_flight > 250, "it went before nearly all of them"
        assert engine.image.wrong_tokens(target) == []
        await engine.worker.fence(engine.engine_id, range(2, 400))
        await asyncio.gather(*stores)
        assert longest < 0.25


async def test_identities_that_nobody_uses_are_forgotten(tmp_path: Path) -> None:
    limits = CoreLimits(chunk_tokens=CHUNK, page_bytes=4096, spaces=8)
    async with local_server(tmp_path, limits=limits) as server:
        engine = await server.engine()
        for number in range(20):
            request = engine.registration()
            await engine.worker.register(replace(request, identity=replace(request.identity, model=f"model-{number}")))
        await engine.worker.unregister(engine.engine_id)
        others = [await server.engine(model=f"engine {number}") for number in range(8)]
        with pytest.raises(Refusal) as refused:
            await server.engine(model="one more, while all are in use")
        assert refused.value.reason is Reason.SPACE_LIMIT
        await others[0].worker.unregister(others[0].engine_id)
        await server.engine(model="one more")


async def test_retention_is_one_hold_a_chunk(tmp_path: Path) -> None:
    limits = CoreLimits(chunk_tokens=CHUNK, page_bytes=4096, jobs_per_engine=8)
    async with local_server(tmp_path, limits=limits) as server:
        engine, operator = await server.engine(), await server.admin()
        wish = Policy(retention_ns=3600 * S)
        for _ in range(20):
            await engine.store(tokens_of(1, CHUNK), BLOCKS[:4], policy=wish)
        held = server.book.arena_status().held_bytes
        assert held
        await engine.store(tokens_of(2, CHUNK), BLOCKS[:4], policy=wish)
        assert server.book.arena_status().held_bytes == 2 * held
        for _ in range(3):
            await operator.clear(api.ClearTarget(all=True))
            await engine.store(tokens_of(1, CHUNK), BLOCKS[:4], policy=wish)
        await until(lambda: len(server.book.holds.retained) == 1)
        assert server.book.arena_status().held_bytes == held


@pytest.mark.parametrize("target", [api.ClearTarget(all=True), api.ClearTarget(cache_salt="")])
async def test_clear_reaches_spaces_that_were_forgotten(tmp_path: Path, target: api.ClearTarget) -> None:
    """An object in a tier is not found after Clear, although the server had no record of its space any more."""
    limits = CoreLimits(chunk_tokens=CHUNK, page_bytes=4096, spaces=3)
    async with local_server(tmp_path, limits=limits, tier=MemoryTier()) as server:
        engine, operator = await server.engine(), await server.admin()
        tokens = tokens_of(1, CHUNK)
        await keep_in_tier(server, engine, tokens)
        for salt in ("a", "b", "c", "d"):
            await engine.lookup(tokens_of(9, CHUNK), space=SpaceRef(engine.space.space_base, "", salt))
        await operator.clear(target)
        answer = await engine.lookup(tokens)
        status = (
            await engine.scheduler.query(engine.engine_id, answer.job_id, 10_000) if answer.job_id else answer.status
        )
        assert (status.done, status.hit_tokens) == (True, 0)
