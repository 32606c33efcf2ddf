# SPDX-License-Identifier: Apache-2.0
"""What was stored is there: at once, for everybody, also when many store at the same time and when L1 is full."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvgrpc.core.types import ChunkOutcome, CoreLimits, Direction, Policy, Priority
from tests.e2e.harness import CHUNK, local_server, outcomes, tokens_of, until
from tests.e2e.probes import TINY, counters, fill_twice, spans

EIGHT = tokens_of(1, 8 * CHUNK)
TARGET = list(range(231, 199, -1))
FULL = CoreLimits(chunk_tokens=CHUNK, page_bytes=4096, pin_share=1.0)
L1_BYTES = 64 * 2048
"""64 chunks of TINY."""


async def test_stored_is_found_at_once(tmp_path: Path) -> None:
    """Field report 72: 200 times a fresh chunk is stored and looked up at once, by the engine itself and from another
    connection: 0 misses, and the final status of each job is 1."""
    async with local_server(tmp_path) as server:
        writer, reader = await server.engine(kv=TINY), await server.engine(kv=TINY)
        writer.image.write(range(4))
        misses = 0
        for seed in range(200):
            tokens = tokens_of(seed, CHUNK)
            assert await reader.hits(tokens) == 0
            assert outcomes(await writer.worker.store(writer.store_request(tokens, range(4)))) == ["STORED"]
            answers = await asyncio.gather(reader.lookup(tokens), writer.lookup(tokens))
            misses += sum(answer.status.hit_tokens != CHUNK for answer in answers)
            for engine, answer in zip((reader, writer), answers, strict=True):
                status = await engine.scheduler.query(engine.engine_id, answer.job_id)
                assert status.done and status.hit_tokens == CHUNK
                assert await engine.free(answer) == 1
        assert misses == 0
        assert server.counts() == (0, 0, 0)


async def test_resident_and_no_store_are_told_apart_from_stored(tmp_path: Path) -> None:
    """Field report 72: an answer that stored nothing says so, and is not followed by a hit."""
    async with local_server(tmp_path) as server:
        engine = await server.engine(kv=TINY)
        nothing = await engine.store(EIGHT, range(32), policy=Policy(no_store=True))
        assert spans(nothing) == [(0, 8, "REFUSED", "NO_STORE")]
        assert await engine.hits(EIGHT) == 0
        assert spans(await engine.store(EIGHT, range(32))) == [(0, 8, "STORED", "")]
        assert spans(await engine.store(EIGHT, range(32))) == [(0, 8, "RESIDENT", "")]
        assert await engine.hits(EIGHT) == 8
        assert await engine.hits(EIGHT, policy=Policy(no_lookup=True)) == 0


# ---- several at once ------------------------------------------------------------------------------------------------


async def test_two_engines_store_one_chunk(tmp_path: Path) -> None:
    """Of two stores of one chunk exactly one copies; the other is told BEING_WRITTEN, and later RESIDENT."""
    async with local_server(tmp_path) as server:
        first, second = await server.engine(kv=TINY), await server.engine(kv=TINY)
        second.image.kv = replace(TINY, seed=99)
        tokens = tokens_of(1, CHUNK)
        first.image.write(range(4))
        gate = server.gates.hold(1, Direction.STORE, first.worker.client_id)
        storing = asyncio.create_task(first.worker.store(first.store_request(tokens, range(4))))
        assert await asyncio.to_thread(gate.wait_reached, 10)
        assert outcomes(await second.store(tokens, range(4))) == ["BEING_WRITTEN"]
        assert await second.hits(tokens) == 0
        gate.release()
        assert outcomes(await storing) == ["STORED"]
        assert outcomes(await second.store(tokens, range(4))) == ["RESIDENT"]
        answer = await second.lookup(tokens)
        assert outcomes(await second.retrieve(answer, TARGET[:4])) == ["LOADED"]
        second.image.kv = TINY
        assert second.image.wrong_tokens(TARGET[:4]) == [] and second.image.untouched(TARGET[:4])


async def test_many_engines_store_the_same_prompts(tmp_path: Path) -> None:
    """Four engines, 60 prompts, all at once: each chunk is STORED exactly once, and its bytes are one engine's."""
    async with local_server(tmp_path) as server:
        engines = [await server.engine(kv=TINY) for _ in range(4)]
        for at, engine in enumerate(engines):
            engine.image.memory[:] = at + 1
        for seed in range(60):
            tokens = tokens_of(seed, 2 * CHUNK)
            calls = [
                each.worker.store(each.store_request(tokens, range(at, at + 8))) for at, each in enumerate(engines)
            ]
            answers = [outcomes(results) for results in await asyncio.gather(*calls)]
            for chunk in range(2):
                said = sorted(answer[chunk] for answer in answers)
                assert said.count("STORED") == 1 and set(said) <= {"STORED", "BEING_WRITTEN", "RESIDENT"}
        reader = await server.engine(kv=TINY)
        for seed in range(60):
            answer = await reader.lookup(tokens_of(seed, 2 * CHUNK))
            assert outcomes(await reader.retrieve(answer, range(8))) == ["LOADED"] * 2
            for chunk in range(2):
                marks = set(reader.image.blocks[4 * chunk : 4 * chunk + 4].reshape(-1).tolist())
                assert len(marks) == 1 and marks <= {1, 2, 3, 4}
        assert server.counts() == (0, 0, 0)


async def test_retrieve_goes_between_the_slices_of_a_store(tmp_path: Path) -> None:
    """A Retrieve of the same worker waits for two slices of a long Store whose blocks it does not touch, not for its
    end."""
    limits = replace(FULL, slice_bytes=2048)
    async with local_server(tmp_path, limits=limits) as server:
        engine = await server.engine(kv=TINY)
        await engine.store(tokens_of(2, CHUNK), range(4))
        answer = await engine.lookup(tokens_of(2, CHUNK))
        engine.image.write(range(128))
        gate = server.gates.hold(2, Direction.STORE)
        storing = asyncio.create_task(engine.worker.store(engine.store_request(tokens_of(3, 32 * CHUNK), range(128))))
        assert await asyncio.to_thread(gate.wait_reached, 10)
        loading = asyncio.create_task(engine.worker.retrieve(engine.retrieve_request(answer.job_id, TARGET[:4])))
        await until(lambda: server.counts()[1] == 2)
        after = server.gates.hold(2048 // 512 + 1, Direction.STORE)  # the slice that waited already, and a run more
        gate.release()
        assert outcomes(await loading) == ["LOADED"]
        assert not storing.done()
        after.release()
        assert outcomes(await storing) == ["STORED"] * 32
        assert engine.image.wrong_tokens(TARGET[:4]) == []
        assert await engine.hits(tokens_of(3, 32 * CHUNK)) == 32


# ---- a full L1 ------------------------------------------------------------------------------------------------------


async def test_full_l1_evicts_the_oldest(tmp_path: Path) -> None:
    """Stores into a full L1 always store: what was used longest ago goes, tails before heads; LOW before NORMAL."""
    async with local_server(tmp_path, l1_bytes=L1_BYTES, limits=FULL) as server:
        engine = await server.engine(kv=TINY)
        old, kept = tokens_of(1, 8 * CHUNK), tokens_of(2, 8 * CHUNK)
        await engine.store(old, range(32))
        await engine.store(kept, range(32), policy=Policy(priority=Priority.HIGH))
        for seed in range(3, 10):
            assert outcomes(await engine.store(tokens_of(seed, 8 * CHUNK), range(32))) == ["STORED"] * 8
        arena = server.book.arena_status()
        assert arena.free_bytes == 0
        assert await engine.hits(old) == 0
        # the next victim is the tail of the oldest, never its head
        assert outcomes(await engine.store(tokens_of(10, CHUNK), range(4))) == ["STORED"]
        assert await engine.hits(tokens_of(3, 8 * CHUNK)) == 7
        await fill_twice(server, engine)
        assert await engine.hits(kept) == 8
        assert (await counters(server))["evicted_chunks"] > 64
        answer = await engine.lookup(kept)
        assert outcomes(await engine.retrieve(answer, TARGET)) == ["LOADED"] * 8
        assert engine.image.wrong_tokens(TARGET) == []


@pytest.mark.parametrize("chunks", [1, 8])
async def test_all_pinned_is_refused_quickly(tmp_path: Path, chunks: int) -> None:
    """With all of L1 pinned a Store answers REFUSED, NO_ROOM in under 100 ms and writes nothing; a later one stores."""
    async with local_server(tmp_path, l1_bytes=L1_BYTES, limits=FULL) as server:
        engine = await server.engine(kv=TINY)
        pinned = tokens_of(1, 64 * CHUNK)
        engine.image.write(range(256))
        stored = await engine.worker.store(engine.store_request(pinned, range(256)))
        assert outcomes(stored) == ["STORED"] * 64
        answer = await engine.lookup(pinned)
        assert answer.status.pinned and server.book.arena_status().pinned_bytes == L1_BYTES
        tokens = tokens_of(2, chunks * CHUNK)
        times: list[float] = []
        for _ in range(5):
            started = time.perf_counter()
            results = await engine.worker.store(engine.store_request(tokens, range(4 * chunks)))
            times.append(time.perf_counter() - started)
            assert spans(results) == [(0, chunks, "REFUSED", "NO_ROOM")]
        assert min(times) < 0.1
        assert await engine.hits(tokens) == 0
        assert await engine.free(answer) == 64
        assert outcomes(await engine.store(tokens, range(4 * chunks))) == ["STORED"] * chunks
        assert await engine.hits(tokens) == chunks
        assert server.counts() == (0, 0, 0)


async def test_object_larger_than_l1_is_refused(tmp_path: Path) -> None:
    """A chunk that can never fit says so, and evicts nothing for it."""
    async with local_server(tmp_path, l1_bytes=4 * 4096, limits=FULL) as server:
        large = await server.engine(kv=replace(TINY, head_dim=256))
        small = await server.engine(kv=TINY)
        await small.store(tokens_of(1, 4 * CHUNK), range(16))
        results = await large.store(EIGHT, range(32))
        assert spans(results) == [(0, 8, ChunkOutcome.REFUSED.value, "OBJECT_TOO_LARGE")]
        assert await large.hits(EIGHT) == 0
        assert await small.hits(tokens_of(1, 4 * CHUNK)) == 4


async def test_partly_pinned_store_says_what_it_stored(tmp_path: Path) -> None:
    """A store that finds room for a part stores that part from its head on; the rest is REFUSED and no hit."""
    async with local_server(tmp_path, l1_bytes=L1_BYTES, limits=FULL) as server:
        engine = await server.engine(kv=TINY)
        pinned = tokens_of(2, 60 * CHUNK)
        engine.image.write(range(240))
        await engine.worker.store(engine.store_request(pinned, range(240)))
        await engine.lookup(pinned)
        assert spans(await engine.store(EIGHT, range(32))) == [(0, 4, "STORED", ""), (4, 4, "REFUSED", "NO_ROOM")]
        assert await engine.hits(EIGHT) == 4
        assert spans(await engine.store(EIGHT, range(32))) == [(0, 4, "RESIDENT", ""), (4, 4, "REFUSED", "NO_ROOM")]
