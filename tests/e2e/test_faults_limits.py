# SPDX-License-Identifier: Apache-2.0
"""Everything is bounded: lookups that nobody takes back, long prompts, big registrations, messages beyond the limit."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest

from kvgrpc import api
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import MIB, CoreLimits
from kvgrpc.runtime.clock import ManualClock
from kvgrpc.tiers.memory import MemoryTier
from kvgrpc.wire.cache import encode_lookup_request
from tests.e2e.harness import CHUNK, Engine, LocalServer, local_server, outcomes, tokens_of
from tests.e2e.probes import TINY, assert_serving, refused
from tests.kvdata import LAYERS_OUTERMOST, Kv
from tests.service.asks import Details

LOOKUPS = 10_000
MISSES = 100_000
CHUNKS = 8
TOKENS = CHUNKS * CHUNK
LIMITS = CoreLimits(chunk_tokens=CHUNK, page_bytes=1024)


def resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


async def ask_in_process(server: LocalServer, engine: Engine, requests: range, tokens: api.Tokens) -> list[str]:
    """Lookups straight at the cache, as the service would make them; nobody queries or frees. Reasons of refusals."""
    session = server.driver.client(engine.scheduler.client_id)
    reasons: list[str] = []
    for number in requests:
        try:
            await session.lookup(engine.lookup_request(tokens, request_id=f"request-{number}"))
        except Refusal as refusal:
            reasons.append(refusal.reason.value)
    return reasons


async def test_lookups_never_queried_and_never_freed(tmp_path: Path) -> None:
    """Field report 32, and the limit: 4,096 lookups of an engine pin, the rest are refused by name; memory stays, and
    all is gone after the lease and the record's time."""
    clock = ManualClock()
    async with local_server(tmp_path, limits=LIMITS, clock=clock) as server:
        engine, other = await server.engine(kv=TINY), await server.engine(kv=TINY)
        tokens = tokens_of(1, TOKENS)
        await engine.store(tokens, range(32))
        refusals = await ask_in_process(server, engine, range(LOOKUPS // 2), tokens)
        half = resident_bytes()
        refusals += await ask_in_process(server, engine, range(LOOKUPS // 2, LOOKUPS), tokens)
        assert resident_bytes() - half < 20 * MIB
        assert refusals == ["JOB_LIMIT"] * (LOOKUPS - LIMITS.jobs_per_engine)
        assert server.book.counts().jobs == LIMITS.jobs_per_engine
        assert server.book.counts().pins == LIMITS.jobs_per_engine * CHUNKS
        for _ in range(20):
            assert (await refused(engine.lookup(tokens)))[:2] == ("RESOURCE_EXHAUSTED", "JOB_LIMIT")
        assert await other.hits(tokens) == CHUNKS, "another engine has its own limit"

        clock.advance(LIMITS.lease_ns)
        server.driver.tick()
        assert server.book.counts().pins == 0
        assert await engine.hits(tokens) == CHUNKS, "records without pins make room"
        clock.advance(LIMITS.record_ns)
        server.driver.tick()
        assert server.book.counts().jobs == 0
        server.check()


async def test_records_of_all_engines_have_a_limit_too(tmp_path: Path) -> None:
    """Engines without end, each within its own limit, run into the limit of all records."""
    limits = CoreLimits(chunk_tokens=CHUNK, page_bytes=1024, records_bytes=1 * MIB)
    async with local_server(tmp_path, limits=limits) as server:
        engines = [await server.engine(kv=TINY) for _ in range(3)]
        tokens = tokens_of(1, TOKENS)
        await engines[0].store(tokens, range(32))
        refusals: list[str] = []
        for engine in engines:
            refusals += await ask_in_process(server, engine, range(300), tokens)
        assert set(refusals) == {"RECORD_LIMIT"}
        assert (await refused(engines[0].lookup(tokens)))[:2] == ("RESOURCE_EXHAUSTED", "RECORD_LIMIT")
        server.check()


async def test_lookups_that_find_nothing(tmp_path: Path) -> None:
    """Field report 32: 100,000 lookups of unknown tokens leave no record and no memory, in process and, for a part of
    them, over the wire."""
    async with local_server(tmp_path, limits=LIMITS) as server:
        engine = await server.engine(kv=TINY)
        session = server.driver.client(engine.scheduler.client_id)
        half = 0
        for number in range(MISSES):
            answer = await session.lookup(engine.lookup_request(tokens_of(number, CHUNK), request_id=f"r-{number}"))
            assert not answer.job_id
            if number == MISSES // 2:
                half = resident_bytes()
        assert resident_bytes() - half < 50_000_000
        before = resident_bytes()
        for number in range(2000):
            assert not (await engine.lookup(tokens_of(number, CHUNK))).job_id
        assert resident_bytes() - before < 20 * MIB
        counts = server.book.counts()
        assert (counts.jobs, counts.pins, counts.spaces) == (0, 0, 0)


async def test_lookups_that_no_tier_knows(tmp_path: Path) -> None:
    """Field report 32, with a tier to ask: each lookup gets a job, so records stay within their limit; then they go."""
    clock = ManualClock()
    limits = replace(LIMITS, jobs_per_engine=256)
    async with local_server(tmp_path, limits=limits, clock=clock, tier=MemoryTier()) as server:
        engine = await server.engine(kv=TINY)
        session = server.driver.client(engine.scheduler.client_id)
        half = 0
        for number in range(2000):
            request = engine.lookup_request(tokens_of(number % 50, TOKENS), request_id=f"r-{number}")
            answer = await session.lookup(replace(request, prefetch_wait_ms=60_000))
            status = await session.query(engine.engine_id, answer.job_id, 10_000)
            assert (status.done, status.hit_tokens) == (True, 0)
            if number == 1000:
                half = resident_bytes()
        assert resident_bytes() - half < 20 * MIB
        assert server.book.counts().jobs == 256
        clock.advance(LIMITS.record_ns)
        server.driver.tick()
        assert server.book.counts().jobs == 0


# ---- field report 27 ------------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def padded(message: bytes, size: int) -> bytes:
    """The message with one more field, unknown to the server, that makes it exactly ``size`` bytes long."""
    key = varint(1000 << 3 | 2)
    for width in range(1, 6):
        filling = size - len(message) - len(key) - width
        if len(varint(filling)) == width:
            return message + key + varint(filling) + bytes(filling)
    raise AssertionError("no padding fits")


async def test_two_million_tokens(tmp_path: Path) -> None:
    """Field report 27: a prompt of 2,000,000 token ids is looked up, under the default limits."""
    async with local_server(tmp_path, limits=CoreLimits(page_bytes=4096)) as server:
        engine = await server.engine(kv=Kv(layers=1, planes=1, heads=1, head_dim=1, itemsize=1), block_size=256)
        answer = await engine.lookup(tokens_of(1, 2_000_000))
        assert answer.status.done
        assert answer.status.hit_tokens == 0
        assert outcomes(await engine.store(tokens_of(1, 256), [0])) == ["STORED"]
        answer = await engine.lookup(tokens_of(1, 2_000_000))
        assert answer.status.hit_tokens == 256


async def test_many_layers_in_many_pieces(tmp_path: Path) -> None:
    """Field report 27: 200 layers in 4 pieces of memory each are registered, and work."""
    kv = Kv(layers=800, planes=1, heads=1, head_dim=8)
    async with local_server(tmp_path, limits=LIMITS) as server:
        engine = await server.engine(kv=kv, arrangement=LAYERS_OUTERMOST, num_blocks=32)
        assert len(engine.registration().layout.memory) == 800
        tokens = tokens_of(1, 4 * CHUNK)
        blocks = list(range(1, 32, 2))
        assert outcomes(await engine.store(tokens, blocks)) == ["STORED"] * 4
        assert outcomes(await engine.retrieve(await engine.lookup(tokens), blocks)) == ["LOADED"] * 4
        assert engine.image.wrong_tokens(blocks) == []


@pytest.mark.parametrize("message_bytes", [1 * MIB, 16 * MIB])
async def test_one_byte_beyond_the_message_limit(tmp_path: Path, message_bytes: int) -> None:
    """Field report 27: refused by the limit's name and number; the connection and other clients go on."""
    limits = CoreLimits(page_bytes=4096)
    async with local_server(tmp_path, limits=limits, message_bytes=message_bytes) as server:
        engine = await server.engine(kv=Kv(1, 1, 1, 1, 1), block_size=256)
        lookup = encode_lookup_request(engine.lookup_request(tokens_of(1, 256))).SerializeToString()
        named = (("kvgrpc-client-id", engine.scheduler.client_id),)
        async with grpc.aio.insecure_channel(server.address, options=[("grpc.max_send_message_length", -1)]) as channel:
            call: Any = channel.unary_unary("/kvgrpc.v1.KvCacheService/Lookup")
            await call(padded(lookup, message_bytes), metadata=named)
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await call(padded(lookup, message_bytes + 1), metadata=named)
            details = Details(refusal.value)
            assert (details.code, details.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
            assert str(message_bytes) in details.text
            with pytest.raises(grpc.aio.AioRpcError) as beyond:
                await call(padded(lookup, message_bytes + 2 * MIB), metadata=named)
            assert beyond.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await call(lookup, metadata=named)
            assert channel.get_state() is grpc.ChannelConnectivity.READY
        assert len(server.book.sessions.clients) == 2
        assert await engine.hits(tokens_of(1, 256)) == 0


async def test_the_client_keeps_the_limit_before_it_sends(tmp_path: Path) -> None:
    """Field report 27: what the client itself would send beyond the limit is refused by the same name."""
    async with local_server(tmp_path, limits=CoreLimits(page_bytes=4096)) as server:
        engine = await server.engine(kv=Kv(1, 1, 1, 1, 1), block_size=256)
        with pytest.raises(Refusal) as refusal:
            await engine.lookup(api.Tokens(bytes(20_000_000)))
        assert refusal.value.reason is Reason.MESSAGE_TOO_LARGE
        assert await engine.hits(tokens_of(1, 256)) == 0
        await assert_serving(server)
