# SPDX-License-Identifier: Apache-2.0
"""WriteChunks from those who lie, stall, leave or want too much: whole chunks stay, and nothing else."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvgrpc import api
from kvgrpc.api import ChunkPart, WriteChunksRequest
from kvgrpc.core.errors import Reason
from kvgrpc.core.keys import OWN_HASH_ALGORITHM
from kvgrpc.core.types import MIB, Role, TokenRange
from kvgrpc.wire.streams import encode_write_begin, encode_write_part
from tests.e2e.harness import CHUNK, local_server, outcomes, tokens_of, until
from tests.e2e.written import BIG, PER_CHUNK, SMALL, WHOLE, chunks_of, nothing_left, parts_of, refused, sent, writing


def spoiled(parts: list[ChunkPart]) -> dict[str, list[ChunkPart]]:
    """Wrong from the sixth part on: the second chunk's second."""
    right, wrong = parts[:5], parts[5]
    return {
        "out of order": [*right, parts[6]],
        "twice": [*right, parts[4]],
        "a chunk back": [*right, parts[0]],
        "a chunk ahead": [*right, replace(wrong, chunk=2)],
        "another size": [*right, replace(wrong, object_bytes=wrong.object_bytes + 1)],
        "a checksum of something else": [*right, replace(wrong, checksum=wrong.checksum ^ 1)],
        "a bit is another": [*right, replace(wrong, data=wrong.data[:-1] + bytes([wrong.data[-1] ^ 1]))],
        "short": [*right, replace(wrong, data=wrong.data[:-1], checksum=zlib.crc32(wrong.data[:-1]))],
        "long": [*right, replace(wrong, data=wrong.data + b"x", checksum=zlib.crc32(wrong.data + b"x"))],
        "empty": [*right, replace(wrong, data=b"", checksum=0)],
        "past the end": [*parts, replace(parts[0], chunk=2)],
    }


async def test_who_lies_leaves_nothing_but_whole_chunks(tmp_path: Path) -> None:
    async with local_server(tmp_path, l1_bytes=32 * MIB, limits=WHOLE) as server:
        engine = await server.engine(kv=BIG, num_blocks=2 * PER_CHUNK)
        parts = parts_of(chunks_of(engine, 0, 2))
        for number, (what, lie) in enumerate(spoiled(parts).items()):
            tokens = tokens_of(number, 2 * CHUNK)
            asked = engine.scheduler.write_chunks(writing(engine, tokens), sent(lie))
            assert await refused(asked) is Reason.INVALID_FIELD, what
            await nothing_left(server)
            assert await engine.hits(tokens) == (2 if what == "past the end" else 1), what
            blocks = list(range(PER_CHUNK, 2 * PER_CHUNK))
            assert outcomes(await engine.retrieve(await engine.lookup(tokens), blocks)) == ["LOADED"]
            assert engine.image.wrong_tokens(blocks) == []
            await (await server.admin()).clear(api.ClearTarget(all=True))


async def test_who_sends_nothing_is_ended(tmp_path: Path) -> None:
    async with local_server(tmp_path, l1_bytes=32 * MIB, limits=WHOLE, copy_deadline_s=3.0) as server:
        engine = await server.engine(kv=BIG, num_blocks=2 * PER_CHUNK)
        tokens, parts = tokens_of(1, 2 * CHUNK), parts_of(chunks_of(engine, 0, 2))

        async def stalls() -> AsyncIterator[ChunkPart]:
            for part in parts[:6]:
                yield part
            await asyncio.Event().wait()

        assert await refused(engine.scheduler.write_chunks(writing(engine, tokens), stalls())) is Reason.DEADLINE
        await nothing_left(server)
        assert await engine.hits(tokens) == 1


async def test_who_leaves_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    async with local_server(tmp_path, l1_bytes=32 * MIB, limits=WHOLE) as server:
        engine = await server.engine(kv=BIG, num_blocks=2 * PER_CHUNK)
        tokens, parts, never = tokens_of(1, 2 * CHUNK), parts_of(chunks_of(engine, 0, 2)), asyncio.Event()

        async def stalls() -> AsyncIterator[ChunkPart]:
            for part in parts[:6]:
                yield part
            await never.wait()

        task = asyncio.create_task(engine.scheduler.write_chunks(writing(engine, tokens), stalls()))
        await until(lambda: server.book.counts().chunks == 1 and server.book.arena_status().writing_bytes)
        server.check()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await nothing_left(server)
        assert await engine.hits(tokens) == 1


async def test_an_object_that_fits_nowhere_takes_nothing(tmp_path: Path) -> None:
    async with local_server(tmp_path, limits=WHOLE) as server:
        mover = server.client("mover")
        await server.attach(mover, "a-mover-of-chunks", Role.SCHEDULER)
        identity = api.SpaceIdentity("huge", "", "uint8", 1, OWN_HASH_ALGORITHM, "token-major:1:4:1")
        base = (await mover.handshake(api.Hello(identity=identity))).space_base
        begin = WriteChunksRequest("a-mover-of-chunks", api.SpaceRef(base), tokens_of(1, CHUNK), 1 << 48, "1x1x4")
        part = ChunkPart(0, 0, 1 << 48, zlib.crc32(bytes(MIB)), bytes(MIB))
        results = await mover.write_chunks(begin, sent([part, replace(part, offset=MIB)]))
        assert [(one.outcome.value, one.reason) for one in results] == [("REFUSED", "OBJECT_TOO_LARGE")]
        await nothing_left(server)


async def test_what_is_refused(tmp_path: Path) -> None:
    async with local_server(tmp_path, limits=WHOLE) as server:
        engine, other = await server.engine(kv=SMALL), await server.engine(kv=SMALL)
        tokens, found = tokens_of(1, 2 * CHUNK), chunks_of(engine, 0, 2)
        right = writing(engine, tokens)

        async def reason(asking: Any, **changes: Any) -> Reason:
            return await refused(asking.write_objects(replace(right, **changes), found))

        assert await reason(server.client("stranger")) is Reason.NOT_ATTACHED
        assert await reason(other.worker) is Reason.ENGINE_UNKNOWN
        assert await reason(engine.worker, space=api.SpaceRef(b"?" * 16)) is Reason.SPACE_UNKNOWN
        assert await reason(engine.worker, content=api.Hashes([b"h" * 32], CHUNK)) is Reason.CONTENT_KIND
        assert await reason(engine.worker, kv_rank=1) is Reason.RANK
        assert await reason(engine.worker, object_bytes=0) is Reason.INVALID_FIELD
        for order in ("", "x" * 4097):
            assert await reason(engine.worker, order=order) is Reason.INVALID_FIELD
        for start, end in ((0, CHUNK + 1), (4, CHUNK), (0, 3 * CHUNK), (0, CHUNK << 20)):
            assert await reason(engine.worker, range=TokenRange(start, end)) is Reason.RANGE
        window = replace(engine.identity, stored_form="token-major:1:4:1+sliding-window:64:token-major:1:4:1")
        base = (await engine.worker.handshake(api.Hello(identity=window))).space_base
        assert await reason(engine.worker, space=api.SpaceRef(base)) is Reason.GROUP_KIND_UNSUPPORTED
        await nothing_left(server)
        assert outcomes(
            await engine.worker.write_objects(replace(right, range=TokenRange(CHUNK, 2 * CHUNK)), {1: found[1]})
        ) == ["STORED"]


async def test_streams_are_bounded_in_all_and_by_client(tmp_path: Path) -> None:
    async with local_server(tmp_path, limits=WHOLE) as server:
        engine, go = await server.engine(kv=SMALL), asyncio.Event()
        found = chunks_of(engine, 0, 1)
        (part,) = parts_of(found)

        async def waits() -> AsyncIterator[ChunkPart]:
            await go.wait()
            yield part

        clients = [server.client(f"client-{number}") for number in range(5)]
        for client in clients:
            await server.attach(client, engine.engine_id, Role.WORKER)
        tasks: list[asyncio.Task[Any]] = []
        for number, client in enumerate(clients[:4]):
            for at in range(4):
                begin = writing(engine, tokens_of(number * 4 + at, CHUNK))
                tasks.append(asyncio.create_task(client.write_chunks(begin, waits())))
            await until(lambda number=number: server.driver.writes.running.total() == 4 * number + 4)
            if number < 3:
                assert await refused(client.write_objects(writing(engine, tokens_of(99, CHUNK)), found)) is (
                    Reason.CALL_LIMIT
                )
        assert await refused(clients[4].write_objects(writing(engine, tokens_of(99, CHUNK)), found)) is (
            Reason.CALL_LIMIT
        )
        go.set()
        assert [outcomes(await task) for task in tasks] == [["STORED"]] * 16
        await nothing_left(server)
        assert not server.driver.writes.running


async def test_messages_that_are_no_stream(tmp_path: Path) -> None:
    async with local_server(tmp_path, limits=WHOLE) as server:
        engine = await server.engine(kv=SMALL)
        begin = encode_write_begin(writing(engine, tokens_of(1, CHUNK))).SerializeToString()
        part = encode_write_part(parts_of(chunks_of(engine, 0, 1))[0]).SerializeToString()
        client: Any = engine.worker
        for messages in ([], [part], [begin, begin], [begin, part, begin], [b""], [begin, b""], [begin, b"\xff"]):
            call = client._stubs().channel.stream_unary("/kvgrpc.v1.KvCacheService/WriteChunks")(
                iter(messages), metadata=client._metadata, timeout=10
            )
            assert (await call.code()).name == "INVALID_ARGUMENT", messages
            await nothing_left(server)


async def test_health_answers_beside_streams(tmp_path: Path) -> None:
    """Parts are copied on the event loop, one at a time: other calls go between them."""
    async with local_server(tmp_path, l1_bytes=128 * MIB, limits=WHOLE) as server:
        engine = await server.engine(kv=BIG, num_blocks=4 * PER_CHUNK)
        found, admin = chunks_of(engine, 0, 4), await server.admin()
        tasks = [
            asyncio.create_task(engine.scheduler.write_objects(writing(engine, tokens_of(seed, 4 * CHUNK)), found))
            for seed in range(4)
        ]
        asked = 0
        while not all(task.done() for task in tasks):
            await asyncio.wait_for(admin.get_status(), 5)
            asked += 1
        assert asked > 4
        assert [outcomes(task.result()) for task in tasks] == [["STORED"] * 4] * 4


async def test_what_goes_wrong_on_the_client_is_raised_there_and_leaves_nothing(tmp_path: Path) -> None:
    async with local_server(tmp_path, l1_bytes=32 * MIB, limits=WHOLE) as server:
        engine = await server.engine(kv=BIG, num_blocks=PER_CHUNK)
        tokens, parts = tokens_of(1, CHUNK), parts_of(chunks_of(engine, 0, 1))

        async def breaks() -> AsyncIterator[ChunkPart]:
            for part in parts[:2]:
                yield part
            await until(lambda: server.book.arena_status().writing_bytes)
            raise ValueError("where the bytes come from")

        with pytest.raises(ValueError, match="where the bytes come from"):
            await engine.scheduler.write_chunks(writing(engine, tokens), breaks())
        await nothing_left(server)
        assert await engine.hits(tokens) == 0


async def test_a_server_that_drains_waits_for_streams_and_takes_no_new_ones(tmp_path: Path) -> None:
    async with local_server(tmp_path, limits=WHOLE) as server:
        engine, draining = await server.engine(kv=SMALL), asyncio.Event()
        tokens, found = tokens_of(1, 2 * CHUNK), chunks_of(engine, 0, 2)

        async def around() -> AsyncIterator[ChunkPart]:
            first, second = parts_of(found)
            yield first
            await draining.wait()
            yield second

        task = asyncio.create_task(engine.scheduler.write_chunks(writing(engine, tokens), around()))
        await until(lambda: server.book.counts().chunks == 1)
        drain = asyncio.create_task(server.server.drain(20))
        await until(lambda: server.server.traffic.draining.is_set())
        late = engine.worker.write_objects(writing(engine, tokens_of(2, 2 * CHUNK)), found)
        assert await refused(late) is Reason.SERVER_DRAINING
        assert not drain.done()
        draining.set()
        assert outcomes(await task) == ["STORED"] * 2
        await asyncio.wait_for(drain, 10)
        await nothing_left(server)
