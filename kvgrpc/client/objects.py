# SPDX-License-Identifier: Apache-2.0
"""Objects that travel as parts: nothing is taken for an object that is not all of it, in order and intact."""

from __future__ import annotations

import zlib
from asyncio import InvalidStateError
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from typing import Any

from grpc.aio import AioRpcError, BaseError

from kvgrpc import api
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import MIB, ChunkOutcome, ChunkResult
from kvgrpc.v1 import cache_pb2 as pb
from kvgrpc.wire.streams import decode_read_response, encode_write_part

TAKEN_KEY = "kvgrpc-request-id"
"""What the server sends when it has taken the beginning of a stream."""
ENDED = (AioRpcError, BaseError, InvalidStateError)
"""What gRPC raises when the other end has ended the call."""


async def send(stream: Any, begin: pb.WriteChunksRequest, parts: AsyncIterator[api.ChunkPart]) -> None:
    """Returns when everything was sent, or the server has ended the stream; why, its answer says. The parts are asked
    for when the server has taken the beginning: gRPC's Python loses a refusal that meets a message on its way."""
    try:
        await stream.write(begin)
        if TAKEN_KEY not in (await stream.initial_metadata() or ()):
            return  # it was refused
    except ENDED:
        return
    async for part in parts:
        try:
            await stream.write(encode_write_part(part))
        except ENDED:
            return
    with suppress(*ENDED):
        await stream.done_writing()


async def parts_of(found: Mapping[int, bytes]) -> AsyncIterator[api.ChunkPart]:
    """The objects in order of their chunks, cut as WriteChunks wants them."""
    for chunk in sorted(found):
        whole = found[chunk]
        for offset in range(0, len(whole), MIB):
            data = whole[offset : offset + MIB]
            yield api.ChunkPart(chunk, offset, len(whole), zlib.crc32(data), data)


async def checked(messages: AsyncIterator[pb.ReadChunksResponse]) -> AsyncGenerator[api.ReadChunksAnswer, None]:
    """The answers, whose parts follow each other and fit their checksums. Raises Refusal (INTERNAL) for others, and for
    a stream without its last message."""
    last: api.ChunkPart | None = None
    async for message in messages:
        answer = decode_read_response(message)
        whole = last is None or last.offset + len(last.data) == last.object_bytes
        if not isinstance(answer, api.ChunkPart):
            if not whole:
                raise _damaged("ends inside a chunk")
            yield answer
            return
        _check(answer, last, whole)
        last = answer
        yield answer
    raise _damaged("ended without its results")


def _check(part: api.ChunkPart, last: api.ChunkPart | None, whole: bool) -> None:
    end = part.offset + len(part.data)
    if whole or last is None:
        in_order = part.offset == 0 and (last is None or part.chunk > last.chunk)
    else:
        before = (last.chunk, last.offset + len(last.data), last.object_bytes)
        in_order = (part.chunk, part.offset, part.object_bytes) == before
    if not in_order or not part.data or end > part.object_bytes:
        raise _damaged(f"has a part out of its place, of chunk {part.chunk}")
    if zlib.crc32(part.data) != part.checksum:
        raise _damaged(f"has bytes of chunk {part.chunk} that do not fit their checksum")


def _damaged(what: str) -> Refusal:
    return Refusal(Reason.INTERNAL, f"the stream {what}")


async def collected(
    answers: AsyncGenerator[api.ReadChunksAnswer, None],
) -> tuple[dict[int, bytes], tuple[ChunkResult, ...]]:
    """Whole objects by chunk index, and the results."""
    parts: dict[int, list[bytes]] = {}
    results: tuple[ChunkResult, ...] = ()
    async with aclosing(answers):
        async for answer in answers:
            if isinstance(answer, api.ChunkPart):
                parts.setdefault(answer.chunk, []).append(answer.data)
            else:
                results = answer
    loaded = [
        chunk
        for result in results
        if result.outcome is ChunkOutcome.LOADED
        for chunk in range(result.first_chunk, result.first_chunk + result.count)
    ]
    if sorted(parts) != loaded:
        raise _damaged("has other chunks than its results say")
    return {chunk: b"".join(parts[chunk]) for chunk in loaded}, results
