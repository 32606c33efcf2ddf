# SPDX-License-Identifier: Apache-2.0
"""Objects that come as a stream of parts: nothing is taken for an object that is not all of it, in order and intact."""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from kvgrpc import api
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import ChunkOutcome, ChunkResult
from kvgrpc.v1 import cache_pb2 as pb
from kvgrpc.wire.streams import decode_read_response


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
