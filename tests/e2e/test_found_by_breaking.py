# SPDX-License-Identifier: Apache-2.0
"""Faults that were found by trying to break the server: each test states what must hold."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvgrpc import api
from kvgrpc.api import BlockForm
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import Direction, SpaceRef
from kvgrpc.transfer.gates import Gate
from kvgrpc.v1 import cache_pb2
from tests.e2e.harness import CHUNK, Engine, LocalServer, local_server, tokens_of, until
from tests.kvdata import BLOCKS_OUTERMOST_OPAQUE, LAYERS_OUTERMOST, Arrangement

BLOCKS = list(range(0, 16, 2))  # two chunks


async def held_retrieve(server: LocalServer) -> tuple[Engine, Gate, asyncio.Future[Any]]:
    """An engine, and its Retrieve that stands still in the middle of a copy until the gate is released."""
    engine = await server.engine()
    tokens = tokens_of(1, 2 * CHUNK)
    await engine.store(tokens, BLOCKS)
    hit = await engine.lookup(tokens)
    gate = server.gates.hold(2, Direction.RETRIEVE)
    running = asyncio.ensure_future(engine.retrieve(hit, BLOCKS))
    assert await asyncio.to_thread(gate.wait_reached, 30)
    return engine, gate, running


async def test_second_unregister_waits_for_the_copy_too(tmp_path: Path) -> None:
    """Unregister times out while a Retrieve is in flight; its repeat must not say "unmapped" before the copy ended."""
    async with local_server(tmp_path) as server:
        engine, gate, running = await held_retrieve(server)
        with pytest.raises(Refusal) as refused:
            await engine.worker.unregister(engine.engine_id, timeout_s=0.3)
        assert refused.value.reason is Reason.DEADLINE
        again = asyncio.ensure_future(engine.worker.unregister(engine.engine_id, timeout_s=5))
        await asyncio.wait((again,), timeout=0.5)
        told = again.done() and again.exception() is None
        before = engine.image.memory.copy()
        gate.release()
        await asyncio.wait((running, again))
        await asyncio.sleep(0.2)
        written = bool((engine.image.memory != before).any())
        assert not (told and written), "told that the memory is unmapped, and written afterwards"


async def test_register_with_another_layout_waits_for_the_copy(tmp_path: Path) -> None:
    """'With another: replaces the old one after its running copies have ended.'"""
    async with local_server(tmp_path) as server:
        engine, gate, running = await held_retrieve(server)
        request = engine.registration()
        (group,) = request.layout.groups
        smaller = replace(request, layout=replace(request.layout, groups=(replace(group, num_blocks=100),)))
        again = asyncio.ensure_future(engine.worker.register(smaller))
        await asyncio.wait((again,), timeout=0.5)
        told = again.done() and again.exception() is None
        before = engine.image.memory.copy()
        gate.release()
        await asyncio.wait((running, again))
        written = bool((engine.image.memory != before).any())
        assert not (told and written), "told that the old registration is replaced, and written to it afterwards"


FUSED = Arrangement("BPTLHD", "TLHD", BlockForm.TOKEN_MAJOR)
"""[N, 2, 16, layers, heads, dim]: all layers of a token in one run."""
SPLIT_OPAQUE = Arrangement("BLPTHD", "PTHD", BlockForm.OPAQUE)
"""The physical layout and the names of BLOCKS_OUTERMOST_OPAQUE, registered as a run a layer."""


@pytest.mark.parametrize(
    ("one", "other"), [(LAYERS_OUTERMOST, FUSED), (BLOCKS_OUTERMOST_OPAQUE, SPLIT_OPAQUE)], ids=["tokens", "opaque"]
)
async def test_one_stored_form_in_two_orders_is_refused(tmp_path: Path, one: Arrangement, other: Arrangement) -> None:
    """Objects of equal length and name whose runs follow each other differently would be read as each other's."""
    async with local_server(tmp_path) as server:
        engine = await server.engine(arrangement=one)
        await engine.store(tokens_of(1, 2 * CHUNK), BLOCKS)
        with pytest.raises(Refusal) as refused:
            await server.engine(arrangement=other)
        assert refused.value.reason is Reason.GEOMETRY_MISMATCH
        assert await engine.hits(tokens_of(1, 2 * CHUNK)) == 2


@pytest.mark.parametrize("what", ["content", "salt"])
async def test_request_id_reused_for_another_prompt(tmp_path: Path, what: str) -> None:
    """The EndRequest of the first got lost. The second question must not be answered with the first one's data."""
    async with local_server(tmp_path) as server:
        engine = await server.engine()
        tokens = tokens_of(1, 2 * CHUNK)
        await engine.store(tokens, BLOCKS)
        first = await engine.lookup(tokens, request_id="same")
        assert first.status.hit_tokens == 2 * CHUNK
        space = SpaceRef(engine.space.space_base, "", "another tenant") if what == "salt" else engine.space
        other = tokens_of(2, 2 * CHUNK) if what == "content" else tokens
        with pytest.raises(Refusal) as refused:
            await engine.lookup(other, request_id="same", space=space)
        assert (refused.value.reason, refused.value.field) == (Reason.INVALID_FIELD, "request_id")
        assert await engine.lookup(tokens, request_id="same") == first


async def test_huge_sparse_memory_does_not_break_list_engines(tmp_path: Path) -> None:
    async with local_server(tmp_path) as server:
        engine = await server.engine()
        os.truncate(f"/dev/shm/{engine.memory_name}", 2**62)
        request = engine.registration()
        huge = tuple(api.SharedMemory(engine.memory_name, 0, 2**62) for _ in range(5))
        request = replace(request, layout=replace(request.layout, memory=huge))
        with pytest.raises(Refusal) as refused:
            await engine.worker.register(request)
        assert refused.value.reason is Reason.LAYOUT
        operator = await server.admin()
        await operator.list_engines()


async def test_drained_means_no_copy_runs(tmp_path: Path) -> None:
    async with local_server(tmp_path) as server:
        engine = await server.engine()
        tokens = tokens_of(1, 2 * CHUNK)
        gate = server.gates.hold(2, Direction.STORE)
        running = asyncio.ensure_future(engine.store(tokens, BLOCKS))
        assert await asyncio.to_thread(gate.wait_reached, 30)
        await engine.streams[0].close()  # the worker is killed
        await until(lambda: server.book.sessions.ending)
        operator = await server.admin()
        drained = await operator.drain_engine(engine.engine_id)
        copying = server.book.counts().calls_in_flight
        gate.release()
        await asyncio.wait((running,))
        assert not (drained and copying), "drained, it says, and a copy of the engine runs"


async def test_one_message_does_not_stop_the_loop(tmp_path: Path) -> None:
    """FreeLookupLocks with all the readers that a message holds; what the loop's own thread does between two turns
    counts, and not how long a machine with other work keeps it waiting."""
    async with local_server(tmp_path) as server:
        engine = await server.engine()
        tokens = tokens_of(1, 2 * CHUNK)
        await engine.store(tokens, BLOCKS)
        hit = await engine.lookup(tokens)

        raw = cache_pb2.FreeLookupLocksRequest(
            engine_id=engine.engine_id, job_id=hit.job_id, tp_size=1
        ).SerializeToString()
        raw += b"\x2a\x00" * (15 << 19)  # 7.8 million empty readers in 15 MiB
        channel = engine.scheduler._stubs().channel
        call = channel.unary_unary("/kvgrpc.v1.KvCacheService/FreeLookupLocks")
        longest, last = 0.0, time.thread_time()

        async def beat() -> None:
            nonlocal longest, last
            while True:
                await asyncio.sleep(0.01)
                now = time.thread_time()
                longest, last = max(longest, now - last), now

        beating = asyncio.ensure_future(beat())
        await asyncio.sleep(0.05)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(raw, metadata=engine.scheduler._metadata, timeout=60)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        beating.cancel()
        assert longest < 1.0
