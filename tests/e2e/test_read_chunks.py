# SPDX-License-Identifier: Apache-2.0
"""ReadChunks over a socket: what an engine stored through shared memory, read as bytes by a client that shares none."""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvgrpc import api
from kvgrpc.api import BlockForm, ChunkPart, ReadChunksRequest
from kvgrpc.client import object_order, objects
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import MIB, ChunkOutcome, ChunkResult, CoreLimits, Reader, TokenRange
from kvgrpc.v1 import cache_pb2 as pb
from kvgrpc.wire.streams import encode_read_response
from tests.e2e.harness import BLOCK, CHUNK, Engine, LocalServer, local_server, outcomes, tokens_of, until
from tests.e2e.probes import TINY
from tests.kvdata import BLOCKS_OUTERMOST_OPAQUE, LAYERS_OUTERMOST, MHA, MLA, Arrangement, Kv

PER_CHUNK = CHUNK // BLOCK
BIG = Kv(layers=8, planes=2, heads=8, head_dim=1024)  # 4 MiB a chunk
WHOLE = CoreLimits(chunk_tokens=CHUNK, page_bytes=4096)
TOKENS_OUTERMOST = Arrangement("BPTLHD", "TLHD", BlockForm.TOKEN_MAJOR)
"""All layers of a token in one run."""


async def reader_of(server: LocalServer, engine: Engine, tokens: api.Tokens, **changes: Any) -> tuple[Any, Any]:
    """A client without memory, and what it asks for: all of the prompt."""
    answer = await engine.lookup(tokens, **changes)
    whole = TokenRange(0, tokens.num_tokens // CHUNK * CHUNK)
    return engine.scheduler, ReadChunksRequest(engine.engine_id, answer.job_id, Reader(0, 0), whole)


def chunks_of(engine: Engine, blocks: list[int]) -> list[bytes]:
    """The objects that a store of these blocks makes, by the test's own arithmetic."""
    return [engine.image.object_bytes(blocks[at : at + PER_CHUNK]) for at in range(0, len(blocks), PER_CHUNK)]


@pytest.mark.parametrize("page_bytes", [1024, 4096, 256 << 10])
@pytest.mark.parametrize(
    ("kv", "arrangement"), [(MHA, LAYERS_OUTERMOST), (MLA, LAYERS_OUTERMOST), (MHA, BLOCKS_OUTERMOST_OPAQUE)]
)
async def test_the_bytes_are_those_that_were_stored(
    tmp_path: Path, kv: Kv, arrangement: Arrangement, page_bytes: int
) -> None:
    limits = CoreLimits(chunk_tokens=CHUNK, page_bytes=page_bytes)
    async with local_server(tmp_path, limits=limits) as server:
        engine = await server.engine(kv=kv, arrangement=arrangement)
        tokens, blocks = tokens_of(1, 6 * CHUNK), list(range(100, 100 - 6 * PER_CHUNK, -1))
        await engine.store(tokens, blocks)
        client, request = await reader_of(server, engine, tokens)
        found, results = await client.read_objects(request)
        assert outcomes(results) == ["LOADED"] * 6
        assert [found[at] for at in range(6)] == chunks_of(engine, blocks)
        assert server.counts() == (0, 0, 0), "the reader has read"
        server.check()


async def test_large_objects_come_in_parts_of_a_mebibyte(tmp_path: Path) -> None:
    async with local_server(tmp_path, l1_bytes=16 * MIB, limits=WHOLE) as server:
        engine = await server.engine(kv=BIG, num_blocks=2 * PER_CHUNK)
        tokens, blocks = tokens_of(1, 2 * CHUNK), list(reversed(range(2 * PER_CHUNK)))
        await engine.store(tokens, blocks)
        client, request = await reader_of(server, engine, tokens)
        answers = [answer async for answer in client.read_chunks(request)]
        parts = [answer for answer in answers if isinstance(answer, ChunkPart)]
        assert {len(part.data) for part in parts} == {MIB} and len(parts) == 8
        assert [(part.chunk, part.offset) for part in parts] == [(c, o * MIB) for c in range(2) for o in range(4)]
        assert all(zlib.crc32(part.data) == part.checksum for part in parts)
        whole = [b"".join(part.data for part in parts if part.chunk == chunk) for chunk in range(2)]
        assert whole == chunks_of(engine, blocks)


async def test_a_part_of_the_prefix_and_what_is_not_there(tmp_path: Path) -> None:
    async with local_server(tmp_path, limits=WHOLE) as server:
        engine = await server.engine()
        tokens, blocks = tokens_of(1, 4 * CHUNK), list(range(4 * PER_CHUNK))
        await engine.store(tokens, blocks)
        answer = await engine.lookup(tokens_of(1, 6 * CHUNK))
        asked = ReadChunksRequest(engine.engine_id, answer.job_id, Reader(0, 0), TokenRange(2 * CHUNK, 6 * CHUNK))
        found, results = await engine.scheduler.read_objects(asked)
        assert outcomes(results) == ["LOADED", "LOADED", "MISSING", "MISSING"]
        assert [found[2], found[3]] == chunks_of(engine, blocks)[2:]
        assert server.book.counts().pins == 2, "chunks 0 and 1 were not read"


async def test_a_clear_ends_the_read_behind_the_chunk_at_hand(tmp_path: Path) -> None:
    async with local_server(tmp_path, l1_bytes=16 * MIB, limits=WHOLE) as server:
        engine = await server.engine(kv=BIG, num_blocks=3 * PER_CHUNK)
        tokens, blocks = tokens_of(1, 3 * CHUNK), list(range(3 * PER_CHUNK))
        await engine.store(tokens, blocks)
        expected = chunks_of(engine, blocks)
        answer = await engine.lookup(tokens)
        asked = ReadChunksRequest(engine.engine_id, answer.job_id, Reader(0, 0), TokenRange(0, 3 * CHUNK))
        stream: Any = server.driver.client(engine.scheduler.client_id).read_chunks(asked)
        first = await anext(stream)
        await (await server.admin()).clear(api.ClearTarget(all=True))
        other = tokens_of(2, 2 * CHUNK)  # whose bytes would lie where the cleared ones do, were those not pinned
        await engine.store(other, blocks[: 2 * PER_CHUNK])
        rest = [part async for part in stream]
        data = first.data + b"".join(part.data for part in rest if isinstance(part, ChunkPart))
        assert data == expected[0]
        assert outcomes(rest[-1]) == ["LOADED", "MISSING", "FAILED"]
        server.check()


async def test_bytes_come_with_the_order_that_they_were_stored_in(tmp_path: Path) -> None:
    """While a part's checksum is made, everything is cleared, and another engine registers another order."""
    async with local_server(tmp_path, l1_bytes=16 * MIB, limits=WHOLE) as server:
        engine, held = await server.engine(kv=BIG, num_blocks=PER_CHUNK), threading.Event()
        tokens = tokens_of(1, CHUNK)
        await engine.store(tokens, range(PER_CHUNK))
        (expected,) = chunks_of(engine, list(range(PER_CHUNK)))
        client, request = await reader_of(server, engine, tokens)
        for _ in range(2):  # all of the pool's threads
            server.driver.hands.cpu_pool.submit(held.wait, 30)
        stream: Any = client.read_chunks(request)
        reading = asyncio.ensure_future(anext(stream))
        await until(lambda: server.book.leases.reading)
        await (await server.admin()).clear(api.ClearTarget(all=True))
        await engine.worker.unregister(engine.engine_id)
        other = await server.engine(kv=BIG, num_blocks=PER_CHUNK, arrangement=TOKENS_OUTERMOST)
        assert not reading.done()
        held.set()
        part = await reading
        assert (part.data, part.order) == (expected[:MIB], object_order(engine.image.layout().groups))
        assert part.order != object_order(other.image.layout().groups)
        await stream.aclose()


async def test_who_leaves_in_the_middle_holds_nothing(tmp_path: Path) -> None:
    async with local_server(tmp_path, l1_bytes=16 * MIB, limits=WHOLE) as server:
        engine = await server.engine(kv=BIG, num_blocks=3 * PER_CHUNK)
        tokens = tokens_of(1, 3 * CHUNK)
        await engine.store(tokens, range(3 * PER_CHUNK))
        client, request = await reader_of(server, engine, tokens)
        stream: Any = client.read_chunks(request)
        await anext(stream)
        await until(lambda: server.driver.reads.running)
        server.check()
        await stream.aclose()
        await until(lambda: not server.driver.reads.running)
        assert server.book.leases.reading == []
        await engine.stop()
        await until(lambda: server.counts() == (0, 0, 0))


async def test_who_takes_nothing_is_ended_and_costs_little(tmp_path: Path) -> None:
    """Back-pressure: the server reads ahead of a slow peer no further than gRPC's windows."""
    async with local_server(tmp_path, l1_bytes=64 * MIB, limits=WHOLE, copy_deadline_s=3.0) as server:
        engine = await server.engine(kv=BIG, num_blocks=12 * PER_CHUNK)
        tokens = tokens_of(1, 12 * CHUNK)
        await engine.store(tokens, range(12 * PER_CHUNK))
        client, request = await reader_of(server, engine, tokens)
        stream: Any = client.read_chunks(request)
        await anext(stream)
        await until(lambda: not server.driver.reads.running, 30)
        with pytest.raises(Refusal) as ended:
            async for _ in stream:
                pass
        assert ended.value.reason is Reason.DEADLINE
        assert server.book.leases.reading == []


async def test_what_is_refused(tmp_path: Path) -> None:
    async with local_server(tmp_path, limits=WHOLE) as server:
        engine, other = await server.engine(kv=TINY), await server.engine(kv=TINY)
        tokens = tokens_of(1, 4 * CHUNK)
        await engine.store(tokens, range(4 * PER_CHUNK))
        client, right = await reader_of(server, engine, tokens)
        stranger = server.client("stranger")

        async def reason(asking: Any, **changes: Any) -> Reason:
            fields = {name: getattr(right, name) for name in ReadChunksRequest.__slots__}
            with pytest.raises(Refusal) as refused:
                await asking.read_objects(ReadChunksRequest(**{**fields, **changes}))
            return refused.value.reason

        assert await reason(stranger) is Reason.NOT_ATTACHED
        assert await reason(other.worker) is Reason.ENGINE_UNKNOWN
        assert await reason(other.worker, engine_id=other.engine_id) is Reason.JOB_UNKNOWN
        assert await reason(client, job_id=b"j" * 16) is Reason.JOB_UNKNOWN
        assert await reason(client, reader=Reader(1, 0)) is Reason.READER_UNKNOWN
        for start, end in ((0, CHUNK + 1), (4, CHUNK), (2 * CHUNK, CHUNK), (0, CHUNK << 20)):
            assert await reason(client, range=TokenRange(start, end)) is Reason.RANGE
        streams: list[Any] = [server.driver.client(client.client_id).read_chunks(right) for _ in range(16)]
        for stream in streams:
            await anext(stream)
        assert await reason(client) is Reason.CALL_LIMIT
        for stream in streams:
            await stream.aclose()
        assert len((await client.read_objects(right))[0]) == 4


PARTS = [ChunkPart(0, 0, 6, zlib.crc32(b"abc"), b"abc"), ChunkPart(0, 3, 6, zlib.crc32(b"def"), b"def")]
RESULTS = (ChunkResult(0, 1, ChunkOutcome.LOADED),)


async def collected(*answers: api.ReadChunksAnswer) -> dict[int, bytes]:
    async def messages() -> AsyncIterator[pb.ReadChunksResponse]:
        for answer in answers:
            yield pb.ReadChunksResponse.FromString(encode_read_response(answer).SerializeToString())

    found, _ = await objects.collected(objects.checked(messages()), by_groups=False)
    return {chunk: of_groups[0] for chunk, of_groups in found.items()}


async def test_a_client_takes_nothing_that_is_damaged() -> None:
    first, second = PARTS
    assert await collected(first, second, RESULTS) == {0: b"abcdef"}
    wrong = ChunkPart(0, 3, 6, zlib.crc32(b"def"), b"deF")
    longer = ChunkPart(0, 3, 6, zlib.crc32(b"defg"), b"defg")
    elsewhere = ChunkPart(1, 3, 6, zlib.crc32(b"def"), b"def")
    for answers in (
        (first, second),
        (first, RESULTS),
        (second, RESULTS),
        (first, first, RESULTS),
        (first, wrong, RESULTS),
        (first, longer, RESULTS),
        (first, elsewhere, RESULTS),
        (first, second, ()),
        (RESULTS,),
    ):
        with pytest.raises(Refusal) as refused:
            await collected(*answers)
        assert refused.value.reason is Reason.INTERNAL


async def test_health_answers_beside_streams(tmp_path: Path) -> None:
    """Parts are copied on the event loop, one at a time: other calls go between them."""
    async with local_server(tmp_path, l1_bytes=64 * MIB, limits=WHOLE) as server:
        engine = await server.engine(kv=BIG, num_blocks=8 * PER_CHUNK)
        tokens = tokens_of(1, 8 * CHUNK)
        await engine.store(tokens, range(8 * PER_CHUNK))
        client, request = await reader_of(server, engine, tokens)
        admin = await server.admin()
        reading = [asyncio.create_task(client.read_objects(request)) for _ in range(4)]
        asked = 0
        while not all(task.done() for task in reading):
            await asyncio.wait_for(admin.get_status(), 5)
            asked += 1
        assert asked > 4
        for task in reading:
            found, _ = task.result()
            assert [found[at] for at in range(8)] == chunks_of(engine, list(range(8 * PER_CHUNK)))
