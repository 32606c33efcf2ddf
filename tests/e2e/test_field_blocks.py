# SPDX-License-Identifier: Apache-2.0
"""Which bytes a copy reads and writes: blocks in use, tensors inside larger memory, tails, exact multiples."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgrpc import api
from kvgrpc.core.types import CoreLimits, Direction, SpaceRef, TokenRange
from tests.e2e.harness import CHUNK, LocalServer, loaded_chunks, local_server, outcomes, tokens_of, until
from tests.e2e.probes import TINY, assert_serving, nothing_changes, refused
from tests.kvdata import FILL, MHA, Bytes, shared_memory

# ---- 22: blocks in use ----------------------------------------------------------------------------------------------

OVERWRITTEN = 0xEE


async def cancelled(call: Coroutine[Any, Any, object], after_s: float) -> None:
    """Starts a call and cancels it, before it is sent, under way or after its end."""
    task = asyncio.create_task(call)
    await asyncio.wait((task,), timeout=after_s)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(("over", "rounds"), [("driver", 1000), ("socket", 200)])
async def test_source_is_free_when_store_returns_or_is_fenced(tmp_path: Path, over: str, rounds: int) -> None:
    """Field report 22: 1,000 rounds of two overlapping Stores of one request, the source overwritten the instant each
    returns; every third call is cancelled, fenced and overwritten. A hit has the bytes of its Store, 0 mixed chunks."""
    limits = CoreLimits(chunk_tokens=CHUNK, page_bytes=4096, slice_bytes=1500)
    async with local_server(tmp_path, limits=limits, l1_bytes=8 << 20) as server:
        engine = await server.engine(kv=TINY, num_blocks=24)
        cache: Any = engine.worker if over == "socket" else server.driver.client(engine.worker.client_id)
        blocks = engine.image.blocks
        calls = 0

        async def store(tokens: api.Tokens, first: int, ids: range, mark: int) -> None:
            """Blocks ``ids`` hold ``mark`` until the server is done with them."""
            nonlocal calls
            calls += 1
            revoked = calls % 3 == 0
            blocks[ids.start : ids.stop] = mark
            request = engine.store_request(tokens, ids, range=TokenRange(first, first + 2 * CHUNK))
            if revoked:
                await cancelled(cache.store(request), calls % 7 * 0.0004)
                await cache.fence(engine.engine_id, [request.call_id])
            else:
                await cache.store(request)
            blocks[ids.start : ids.stop] = OVERWRITTEN

        for round_ in range(rounds):
            tokens = tokens_of(round_, 3 * CHUNK)
            mark = 2 * (round_ % 100) + 1
            await asyncio.gather(store(tokens, 0, range(8), mark), store(tokens, CHUNK, range(8, 16), mark + 1))
        hits = mixed = 0
        for round_ in range(rounds):
            mark = 2 * (round_ % 100) + 1
            answer = await cache.lookup(engine.lookup_request(tokens_of(round_, 3 * CHUNK)))
            if not answer.job_id:
                continue
            count = answer.status.hit_tokens // CHUNK
            ids = range(12, 12 + 4 * count)
            results = await cache.retrieve(engine.retrieve_request(answer.job_id, ids))
            assert outcomes(results) == ["LOADED"] * count
            for at, right in enumerate(({mark}, {mark, mark + 1}, {mark + 1})[:count]):
                values = np.unique(blocks[12 + 4 * at : 16 + 4 * at])
                mixed += len(values) != 1 or int(values[0]) not in right
                hits += 1
        assert mixed == 0
        # two of three calls were not cancelled
        assert hits > rounds
        assert server.counts() == (0, 0, 0)


async def test_retrieve_waits_for_a_store_of_the_same_blocks(tmp_path: Path) -> None:
    """Field report 22: a Retrieve into blocks that a running Store still reads waits for its end, whatever slices the
    Store has left: the Store has the old bytes, the blocks have the new."""
    limits = CoreLimits(chunk_tokens=CHUNK, page_bytes=4096, slice_bytes=2048)
    async with local_server(tmp_path, limits=limits) as server:
        engine, other = await server.engine(kv=TINY), await server.engine(kv=replace(TINY, seed=7))
        await other.store(tokens_of(2, CHUNK), range(4))
        answer = await engine.lookup(tokens_of(2, CHUNK))
        tokens = tokens_of(1, 8 * CHUNK)
        engine.image.write(range(32))
        gate = server.gates.hold(1, Direction.STORE)
        storing = asyncio.create_task(engine.worker.store(engine.store_request(tokens, range(32))))
        assert await asyncio.to_thread(gate.wait_reached, 10)
        loading = asyncio.create_task(engine.worker.retrieve(engine.retrieve_request(answer.job_id, range(28, 32))))
        await until(lambda: server.counts()[1] == 2, what="both calls")
        gate.release()
        assert outcomes(await loading) == ["LOADED"]
        assert outcomes(await storing) == ["STORED"] * 8
        engine.image.kv = other.image.kv
        assert engine.image.wrong_tokens(range(28, 32)) == []
        engine.image.kv = TINY
        found = await engine.lookup(tokens)
        assert outcomes(await engine.retrieve(found, range(64, 96))) == ["LOADED"] * 8
        assert engine.image.wrong_tokens(range(64, 96)) == []


async def test_store_after_a_retrieve_into_its_blocks(tmp_path: Path) -> None:
    """Field report 22: calls of one worker keep their order where they share blocks: a Store behind a running Retrieve
    stores what was loaded."""
    async with local_server(tmp_path) as server:
        engine = await server.engine(kv=TINY)
        await engine.store(tokens_of(1, CHUNK), range(4))
        answer = await engine.lookup(tokens_of(1, CHUNK))
        engine.image.memory[:] = FILL
        gate = server.gates.hold(1, Direction.RETRIEVE)
        loading = asyncio.create_task(engine.worker.retrieve(engine.retrieve_request(answer.job_id, range(8, 12))))
        assert await asyncio.to_thread(gate.wait_reached, 10)
        again = engine.store_request(tokens_of(2, CHUNK), range(8, 12))
        storing = asyncio.create_task(engine.worker.store(again))
        await until(lambda: server.counts()[1] == 2, what="both calls")
        gate.release()
        assert (outcomes(await loading), outcomes(await storing)) == (["LOADED"], ["STORED"])
        found = await engine.lookup(tokens_of(2, CHUNK))
        assert outcomes(await engine.retrieve(found, range(4))) == ["LOADED"]
        assert engine.image.wrong_tokens(range(4)) == [] and engine.image.untouched(range(4))


# ---- 24: tensors inside larger memory -------------------------------------------------------------------------------

TENSOR_BYTES = 24 * 256
"""24 blocks of 4 tokens of 64 bytes."""


def three_tensors(name: str, third: int) -> tuple[api.Layout, list[int]]:
    """A layout of the second and third of three tensors in one segment, and where those two begin."""
    starts = [2 * 4096 + 64, third]
    memory = tuple(api.SharedMemory(name, start, TENSOR_BYTES) for start in starts)
    entry = api.Runs(
        memory_index=0,
        base_bytes=0,
        layers=1,
        layer_stride_bytes=0,
        planes=1,
        plane_stride_bytes=0,
        block_stride_bytes=256,
        run_bytes=256,
    )
    group = api.KvGroup(
        block_size=4,
        num_blocks=24,
        runs=(entry, replace(entry, memory_index=1)),
        form=api.BlockForm.TOKEN_MAJOR,
        heads=1,
        head_dim=32,
    )
    return api.Layout(memory, (group,)), starts


@pytest.mark.parametrize("third", [5 * 4096, 5 * 4096 + 1], ids=["odd page", "odd byte"])
async def test_tensor_inside_a_larger_segment(tmp_path: Path, third: int) -> None:
    """Field report 24: three tensors in one segment, the first at 0; the last two, at 2 pages + 64 and in page 5, are
    registered: right bytes at the right offsets, neighbours untouched; beyond the segment is refused."""
    size_bytes = third + TENSOR_BYTES + 100
    async with local_server(tmp_path) as server:
        engine = await server.engine()
        with shared_memory(size_bytes) as (name, mapped):
            memory: Bytes = np.frombuffer(mapped, np.uint8)
            layout, starts = three_tensors(name, third)
            answer = await engine.worker.register(replace(engine.registration(), layout=layout))
            assert answer.object_bytes == 2 * 4 * 256
            space = SpaceRef(answer.space_base)
            right = np.random.default_rng(1).integers(0, 256, (2, 8, 256), np.uint8)
            memory[:] = FILL
            for tensor, start in enumerate(starts):
                memory[start : start + 8 * 256] = right[tensor].reshape(-1)
            tokens = tokens_of(1, 2 * CHUNK)
            stored = await engine.worker.store(engine.store_request(tokens, range(8), space=space))
            assert outcomes(stored) == ["STORED"] * 2

            target = [23, 3, 17, 9, 21, 11, 15, 13]
            memory[:] = FILL
            found = await engine.lookup(tokens, space=space)
            loaded = await engine.worker.retrieve(engine.retrieve_request(found.job_id, target))
            assert outcomes(loaded) == ["LOADED"] * 2
            expected = np.full(size_bytes, FILL, np.uint8)
            for tensor, start in enumerate(starts):
                expected[start : start + TENSOR_BYTES].reshape(24, 256)[target] = right[tensor]
            assert (memory == expected).all()

            await assert_refused_beyond(server, engine.worker, replace(engine.registration(), layout=layout))
            assert (memory == expected).all()
            await engine.worker.unregister(engine.engine_id)
            del memory, expected


async def assert_refused_beyond(server: LocalServer, worker: Any, request: api.RegisterRequest) -> None:
    """Pieces that reach beyond the segment, and a stride that does not fit the piece, replace nothing."""
    layout = request.layout
    first, last = layout.memory
    assert isinstance(last, api.SharedMemory)
    end = last.offset_bytes + last.size_bytes + 100
    group = layout.groups[0]
    sparse = replace(group, runs=(replace(group.runs[0], block_stride_bytes=257), group.runs[1]))
    cases = [
        (replace(last, offset_bytes=end - last.size_bytes + 1), "MEMORY", "memory[1].shared.size_bytes"),
        (replace(last, offset_bytes=end), "MEMORY", "memory[1].shared.size_bytes"),
        (replace(last, offset_bytes=2**64 - 1), "LAYOUT", "memory[1].offset_bytes"),
        (replace(last, size_bytes=last.size_bytes + 101), "MEMORY", "memory[1].shared.size_bytes"),
    ]
    async with nothing_changes(server):
        for piece, reason, field in cases:
            bad = replace(request, layout=replace(layout, memory=(first, piece)))
            assert await refused(worker.register(bad)) == ("INVALID_ARGUMENT", reason, field)
        bad = replace(request, layout=replace(layout, groups=(sparse,)))
        assert await refused(worker.register(bad)) == ("INVALID_ARGUMENT", "LAYOUT", "groups[0].runs[0]")


# ---- 29: tails ------------------------------------------------------------------------------------------------------


async def test_partial_tail_is_ignored_and_too_few_blocks_are_refused(tmp_path: Path) -> None:
    """Field report 29: 100 tokens in 25 blocks: 6 chunks are stored, 24 blocks written; 23 blocks for 6 chunks are an
    error that writes nothing, and the server goes on."""
    async with local_server(tmp_path) as server:
        engine = await server.engine()
        tokens = tokens_of(1, 100)
        assert outcomes(await engine.store(tokens, range(25))) == ["STORED"] * 6
        target = list(range(225, 200, -1))
        answer = await engine.lookup(tokens)
        assert answer.status.hit_tokens == 96
        results = await engine.retrieve(answer, target, range=TokenRange(0, 100))
        assert outcomes(results) == ["LOADED"] * 6 + ["MISSING"]
        assert engine.image.wrong_tokens(target[:24]) == []
        assert engine.image.untouched(target[:24])

        again = await engine.lookup(tokens)
        engine.image.memory[:] = FILL
        async with nothing_changes(server, engine):
            for ids, end in ((target[:23], 96), (target[:24], 100), ([], 96)):
                call = engine.retrieve_request(again.job_id, ids, range=TokenRange(0, end))
                code = await refused(engine.worker.retrieve(call))
                assert code == ("INVALID_ARGUMENT", "BLOCK_IDS", "blocks[0].ids")
            code = await refused(engine.worker.store(engine.store_request(tokens_of(2, 96), range(23))))
            assert code == ("INVALID_ARGUMENT", "BLOCK_IDS", "blocks[0].ids")
            await assert_serving(server)
        # more ids than the range needs are ignored, whatever they are
        ids = [*target[:24], 255, 1 << 31]
        assert outcomes(await engine.retrieve(again, ids, range=TokenRange(0, 96))) == ["LOADED"] * 6
        assert engine.image.wrong_tokens(target[:24]) == [] and engine.image.untouched(target[:24])


# ---- 49: exact multiples --------------------------------------------------------------------------------------------


ONE_LAYER = replace(MHA, layers=1)


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("length", [16 * k + more for k in (1, 8, 121, 128) for more in (-1, 0, 1)])
async def test_every_boundary(tmp_path: Path, length: int, block_size: int) -> None:
    """Field report 49: lengths around multiples of the chunk: the hit is floor(length / 16), and a range writes exactly
    the blocks that it names, or is refused when it cuts a block."""
    async with local_server(tmp_path) as server:
        engine = await server.engine(kv=ONE_LAYER, block_size=block_size, num_blocks=2 * -(-length // block_size) + 64)
        whole = length // block_size
        tokens = tokens_of(length, length)
        chunks = length // CHUNK
        stored = await engine.store(tokens, range(whole))
        assert outcomes(stored) == ["STORED"] * chunks
        answer = await engine.lookup(tokens)
        assert answer.status.hit_tokens == chunks * CHUNK
        if not chunks:
            assert answer.job_id == b""
            return
        hit = chunks * CHUNK
        ends = [(0, hit), (0, hit - 1), (block_size, hit), (5 * block_size, hit - block_size), (1, hit), (hit, hit)]
        for start, end in (each for each in ends if each[0] <= each[1]):
            target = list(range(engine.image.num_blocks - 1, 0, -1))[: (end - start) // block_size]
            call = engine.retrieve_request(answer.job_id, target, range=TokenRange(start, end))
            engine.image.memory[:] = FILL
            if start % block_size or end % block_size:
                assert await refused(engine.worker.retrieve(call)) == ("INVALID_ARGUMENT", "RANGE", "range")
                assert engine.image.untouched()
                continue
            results = await engine.worker.retrieve(call)
            assert loaded_chunks(results) == list(range(start // CHUNK, -(-end // CHUNK)) if start < end else [])
            assert engine.image.wrong_tokens(target, start) == []
            assert engine.image.untouched(target)
        assert server.counts() == (0, 0, 0)
