# SPDX-License-Identifier: Apache-2.0
"""WriteChunks over a socket: what a client without shared memory stores is what an engine loads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvgrpc import api
from kvgrpc.api import ChunkPart, ReadChunksRequest, WriteChunksRequest
from kvgrpc.client import stored_form
from kvgrpc.core.errors import Reason
from kvgrpc.core.types import MIB, MS, CoreLimits, Policy, Priority, Reader, Role, TokenRange, WritePolicy
from kvgrpc.tiers.memory import MemoryTier
from tests.e2e.harness import CHUNK, Engine, local_server, outcomes, tokens_of, until
from tests.e2e.written import BIG, PER_CHUNK, SMALL, WHOLE, chunks_of, nothing_left, parts_of, refused, sent, writing
from tests.kvdata import BLOCKS_OUTERMOST_OPAQUE, LAYERS_OUTERMOST, MHA, MLA, Arrangement, Kv


@pytest.mark.parametrize("page_bytes", [1024, 4096, 256 << 10])
@pytest.mark.parametrize(
    ("kv", "arrangement"), [(MHA, LAYERS_OUTERMOST), (MLA, LAYERS_OUTERMOST), (MHA, BLOCKS_OUTERMOST_OPAQUE)]
)
async def test_what_is_written_is_loaded_into_other_blocks_and_read_again(
    tmp_path: Path, kv: Kv, arrangement: Arrangement, page_bytes: int
) -> None:
    limits = CoreLimits(chunk_tokens=CHUNK, page_bytes=page_bytes)
    async with local_server(tmp_path, limits=limits) as server:
        engine = await server.engine(kv=kv, arrangement=arrangement)
        tokens, found = tokens_of(1, 6 * CHUNK + 3), chunks_of(engine, 0, 6)
        assert outcomes(await engine.scheduler.write_objects(writing(engine, tokens), found)) == ["STORED"] * 6
        await nothing_left(server)
        blocks = list(range(200, 200 - 6 * PER_CHUNK, -1))
        assert outcomes(await engine.retrieve(await engine.lookup(tokens), blocks)) == ["LOADED"] * 6
        assert engine.image.wrong_tokens(blocks) == []
        assert engine.image.untouched(blocks)
        answer = await engine.lookup(tokens)
        asked = ReadChunksRequest(engine.engine_id, answer.job_id, Reader(0, 0), TokenRange(0, 6 * CHUNK))
        assert (await engine.scheduler.read_objects(asked))[0] == found
        again = await engine.scheduler.write_objects(writing(engine, tokens), found)
        assert outcomes(again) == ["RESIDENT"] * 6


async def test_from_one_server_to_another(tmp_path: Path) -> None:
    """What is read, order and all, is what is written; the other server has never seen such an engine."""
    (tmp_path / "there").mkdir()
    async with local_server(tmp_path, limits=WHOLE) as here, local_server(tmp_path / "there", limits=WHOLE) as there:
        engine = await here.engine()
        tokens, blocks = tokens_of(1, 4 * CHUNK), list(range(40, 40 + 4 * PER_CHUNK))
        await engine.store(tokens, blocks)
        answer = await engine.lookup(tokens)
        asked = ReadChunksRequest(engine.engine_id, answer.job_id, Reader(0, 0), TokenRange(0, 4 * CHUNK))
        parts = [one async for one in engine.scheduler.read_chunks(asked) if isinstance(one, ChunkPart)]
        mover = there.client("mover")
        await there.attach(mover, "a-mover-of-chunks", Role.SCHEDULER)
        identity = replace(engine.identity, stored_form=stored_form(engine.image.layout("none").groups))
        base = (await mover.handshake(api.Hello(identity=identity))).space_base
        begin = WriteChunksRequest(
            "a-mover-of-chunks", api.SpaceRef(base), tokens, parts[0].object_bytes, parts[0].order
        )
        assert outcomes(await mover.write_chunks(begin, sent(parts))) == ["STORED"] * 4
        late = await there.engine()
        other = list(range(99, 99 - 4 * PER_CHUNK, -1))
        assert late.space == begin.space
        assert outcomes(await late.retrieve(await late.lookup(tokens), other)) == ["LOADED"] * 4
        assert late.image.wrong_tokens(other) == []


async def test_a_form_that_was_written_is_that_of_engines_to_come(tmp_path: Path) -> None:
    async with local_server(tmp_path, limits=WHOLE) as server:
        engine = await server.engine(kv=SMALL)
        begin = writing(engine, tokens_of(1, CHUNK))
        for changes in ({"order": "1x2x7"}, {"object_bytes": engine.object_bytes * 2}):
            asked = engine.scheduler.write_objects(replace(begin, **changes), {0: b"x"})
            assert await refused(asked) is Reason.GEOMETRY_MISMATCH
        await engine.stop()
        await until(lambda: not server.book.sessions.clients)
        mover = server.client("mover")
        await server.attach(mover, "a-mover-of-chunks", Role.WORKER)
        foreign = replace(begin, engine_id="a-mover-of-chunks", order="1x1x1", object_bytes=CHUNK)
        assert outcomes(await mover.write_objects(foreign, {0: bytes(CHUNK)})) == ["STORED"]
        late = Engine(server, kv=SMALL)
        assert await refused(late.start()) is Reason.GEOMETRY_MISMATCH
        await (await server.admin()).clear(api.ClearTarget(all=True))
        await until(lambda: not server.book.index.dead)
        await (await server.engine(kv=SMALL)).store(tokens_of(1, CHUNK), range(PER_CHUNK))
        assert await refused(mover.write_objects(foreign, {0: bytes(CHUNK)})) is Reason.GEOMETRY_MISMATCH


async def test_a_chunk_is_there_when_all_of_it_is(tmp_path: Path) -> None:
    async with local_server(tmp_path, l1_bytes=32 * MIB, limits=WHOLE) as server:
        engine = await server.engine(kv=BIG, num_blocks=2 * PER_CHUNK)
        tokens, found = tokens_of(1, 2 * CHUNK), chunks_of(engine, 0, 2)
        parts, gates = parts_of(found), asyncio.Queue[int]()
        assert len(parts) == 8

        async def slowly() -> AsyncIterator[ChunkPart]:
            for part in parts:
                await gates.get()
                yield part

        task = asyncio.create_task(engine.scheduler.write_chunks(writing(engine, tokens), slowly()))
        for number in range(8):
            gates.put_nowait(number)
            wanted = 4 * MIB if number % 4 < 3 else 0
            await until(lambda wanted=wanted: server.book.arena_status().writing_bytes == wanted)
            await until(lambda number=number: server.book.counts().chunks == (number + 1) // 4)
            assert await engine.hits(tokens) == (number + 1) // 4
            server.check()
        assert outcomes(await task) == ["STORED"] * 2
        blocks = list(reversed(range(2 * PER_CHUNK)))
        await engine.retrieve(await engine.lookup(tokens), blocks)
        assert engine.image.wrong_tokens(blocks) == []


async def test_a_stream_that_ends_early_says_what_did_not_come(tmp_path: Path) -> None:
    async with local_server(tmp_path, l1_bytes=32 * MIB, limits=WHOLE) as server:
        engine = await server.engine(kv=BIG, num_blocks=2 * PER_CHUNK)
        tokens, parts = tokens_of(1, 2 * CHUNK), parts_of(chunks_of(engine, 0, 2))
        for count in (0, 3, 4, 7):
            results = await engine.scheduler.write_chunks(writing(engine, tokens), sent(parts[:count]))
            assert outcomes(results) == ["STORED" if count == 4 else "RESIDENT"] * (count // 4) + ["FAILED"] * (
                2 - count // 4
            )
            assert results[-1].reason == "NOT_SENT"
            await nothing_left(server)


async def test_a_clear_in_the_middle(tmp_path: Path) -> None:
    async with local_server(tmp_path, l1_bytes=32 * MIB, limits=WHOLE) as server:
        engine = await server.engine(kv=BIG, num_blocks=3 * PER_CHUNK)
        tokens, parts, cleared = tokens_of(1, 3 * CHUNK), parts_of(chunks_of(engine, 0, 3)), asyncio.Event()

        async def around() -> AsyncIterator[ChunkPart]:
            for part in parts[:6]:
                yield part
            await cleared.wait()
            for part in parts[6:]:
                yield part

        task = asyncio.create_task(engine.scheduler.write_chunks(writing(engine, tokens), around()))
        await until(lambda: server.book.counts().chunks == 1 and server.book.arena_status().writing_bytes)
        await (await server.admin()).clear(api.ClearTarget(all=True))
        await engine.store(tokens_of(2, CHUNK), range(PER_CHUNK))
        server.check()
        cleared.set()
        results = await task
        assert [(one.count, one.outcome.value, one.reason) for one in results] == [
            (1, "STORED", ""),
            (2, "REFUSED", "CLEARED"),
        ]
        assert await engine.hits(tokens) == 0 and await engine.hits(tokens_of(2, CHUNK)) == 1
        await until(lambda: not server.book.index.dead)
        await nothing_left(server)


async def test_two_writers_of_one_chunk(tmp_path: Path) -> None:
    """The later one's bytes are dropped; an engine's store beside it does not wait."""
    async with local_server(tmp_path, l1_bytes=32 * MIB, limits=WHOLE) as server:
        engine = await server.engine(kv=BIG, num_blocks=2 * PER_CHUNK)
        tokens, found, go = tokens_of(1, CHUNK), chunks_of(engine, 0, 1), asyncio.Event()
        parts = parts_of(found)

        async def waits() -> AsyncIterator[ChunkPart]:
            yield parts[0]
            await go.wait()
            for part in parts[1:]:
                yield part

        first = asyncio.create_task(engine.scheduler.write_chunks(writing(engine, tokens), waits()))
        await until(lambda: server.book.arena_status().writing_bytes)
        other = {0: bytes(len(found[0]))}
        assert outcomes(await engine.worker.write_objects(writing(engine, tokens), other)) == ["BEING_WRITTEN"]
        assert outcomes(await engine.store(tokens, range(PER_CHUNK))) == ["BEING_WRITTEN"]
        go.set()
        assert outcomes(await first) == ["STORED"]
        answer = await engine.lookup(tokens)
        asked = ReadChunksRequest(engine.engine_id, answer.job_id, Reader(0, 0), TokenRange(0, CHUNK))
        assert (await engine.scheduler.read_objects(asked))[0] == found


async def test_room_quota_and_policy_are_those_of_store(tmp_path: Path) -> None:
    async with local_server(tmp_path, l1_bytes=8 * MIB, limits=replace(WHOLE, pin_share=1.0)) as server:
        engine = await server.engine(kv=BIG, num_blocks=PER_CHUNK)
        tokens, found, admin = tokens_of(1, CHUNK), chunks_of(engine, 0, 1), await server.admin()

        async def write(content: api.Content, **changes: Any) -> list[tuple[str, str]]:
            results = await engine.scheduler.write_objects(writing(engine, content, **changes), found)
            return [(one.outcome.value, one.reason) for one in results]

        assert await write(tokens, policy=Policy(no_store=True)) == [("REFUSED", "NO_STORE")]
        await admin.set_quota("", MIB)
        assert await write(tokens) == [("REFUSED", "QUOTA")]
        await admin.set_quota("", None)
        assert await write(tokens, policy=Policy(priority=Priority.HIGH)) == [("STORED", "")]
        for seed in (2, 3):
            assert await write(tokens_of(seed, CHUNK)) == [("STORED", "")]
        assert [await engine.hits(tokens_of(seed, CHUNK)) for seed in (1, 2, 3)] == [1, 0, 1]
        counters = server.book.counters
        assert (counters["stored_chunks"], counters["refused_quota"], counters["refused_no_store"]) == (3, 1, 1)
        for seed in (1, 3):
            assert (await engine.lookup(tokens_of(seed, CHUNK))).status.pinned
        assert await write(tokens_of(4, CHUNK)) == [("REFUSED", "NO_ROOM")]
        assert await write(tokens) == [("RESIDENT", "")]
        await nothing_left(server)


async def test_a_prompt_is_held_as_long_as_was_asked_for(tmp_path: Path) -> None:
    async with local_server(tmp_path, limits=WHOLE) as server:
        engine = await server.engine(kv=SMALL)
        begin = writing(engine, tokens_of(1, 3 * CHUNK), policy=Policy(retention_ns=60_000 * MS))
        await engine.scheduler.write_objects(begin, chunks_of(engine, 0, 3))
        assert server.book.arena_status().held_bytes >= 3 * engine.object_bytes


async def test_what_is_written_goes_to_lower_tiers_and_comes_back(tmp_path: Path) -> None:
    tier = MemoryTier("below")
    async with local_server(tmp_path, l1_bytes=16 * MIB, limits=WHOLE, tier=tier, writes=WritePolicy.THROUGH) as server:
        engine = await server.engine(kv=BIG, num_blocks=3 * PER_CHUNK)
        found = chunks_of(engine, 0, 1)
        for seed in range(6):
            begin = writing(engine, tokens_of(seed, CHUNK))
            assert outcomes(await engine.scheduler.write_objects(begin, found)) == ["STORED"]
            await until(lambda seed=seed: server.book.counters["written_objects"] == seed + 1)
        answer = await engine.lookup(tokens_of(0, CHUNK), prefetch_wait_ms=10_000)
        status = await engine.scheduler.query(engine.engine_id, answer.job_id, 10_000)
        assert status.hit_chunks_by_tier == {"below": 1}
        blocks = list(range(2 * PER_CHUNK, 3 * PER_CHUNK))
        assert outcomes(await engine.retrieve(answer, blocks)) == ["LOADED"]
        assert engine.image.wrong_tokens(blocks) == []


async def test_salts_are_apart(tmp_path: Path) -> None:
    async with local_server(tmp_path, limits=WHOLE) as server:
        one, other = await server.engine(salt="one"), await server.engine(salt="other")
        tokens = tokens_of(1, CHUNK)
        await one.scheduler.write_objects(writing(one, tokens), chunks_of(one, 0, 1))
        assert (await one.hits(tokens), await other.hits(tokens)) == (1, 0)


async def test_an_engine_that_is_drained_writes_no_further_chunk(tmp_path: Path) -> None:
    async with local_server(tmp_path, limits=WHOLE) as server:
        engine, drained = await server.engine(kv=SMALL), asyncio.Event()
        tokens, parts = tokens_of(1, 2 * CHUNK), parts_of(chunks_of(engine, 0, 2))

        async def around() -> AsyncIterator[ChunkPart]:
            yield parts[0]
            await drained.wait()
            yield parts[1]

        task = asyncio.create_task(engine.scheduler.write_chunks(writing(engine, tokens), around()))
        await until(lambda: server.book.counts().chunks == 1)
        admin = await server.admin()
        await admin.drain_engine((await admin.list_engines())[0].engine)
        drained.set()
        assert await refused(task) is Reason.ENGINE_DRAINING
        await nothing_left(server)
