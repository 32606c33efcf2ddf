# SPDX-License-Identifier: Apache-2.0
"""Objects that travel as parts: nothing is taken for an object that is not all of it, in order and intact."""

from __future__ import annotations

import zlib
from asyncio import InvalidStateError
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
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


Grouped = Mapping[int, Mapping[int, bytes]]
"""Objects by chunk index, and by the groups (bits) that they hold."""


def alone(found: Mapping[int, bytes]) -> Grouped:
    """Of chunks that have one object each."""
    return {chunk: {0: whole} for chunk, whole in found.items()}


async def parts_of(found: Grouped, forms: Sequence[api.ObjectForm] = ()) -> AsyncIterator[api.ChunkPart]:
    """The objects in order of their chunks and forms, cut as WriteChunks wants them. ValueError for one whose groups
    are no form's."""
    order = [form.groups for form in forms] or [0]
    for chunk in sorted(found):
        if strange := found[chunk].keys() - order:
            raise ValueError(f"chunk {chunk} has objects of the groups (bits) {sorted(strange)}; named are {order}")
        for groups in (one for one in order if one in found[chunk]):
            whole = found[chunk][groups]
            for offset in range(0, len(whole), MIB):
                data = whole[offset : offset + MIB]
                yield api.ChunkPart(chunk, offset, len(whole), zlib.crc32(data), data, groups=groups)


async def checked(messages: AsyncIterator[pb.ReadChunksResponse]) -> AsyncGenerator[api.ReadChunksAnswer, None]:
    """The answers, whose parts follow each other and fit their checksums. Raises Refusal (INTERNAL) for others, and for
    a stream without its last message."""
    last: api.ChunkPart | None = None
    seen = 0  # groups of the last part's chunk
    async for message in messages:
        answer = decode_read_response(message)
        whole = last is None or last.offset + len(last.data) == last.object_bytes
        if not isinstance(answer, api.ChunkPart):
            if not whole:
                raise _damaged("ends inside a chunk")
            yield answer
            return
        _check(answer, last, whole)
        if whole:
            if last is None or answer.chunk > last.chunk:
                seen = 0
            elif not answer.groups or not seen or answer.groups & seen:
                raise _damaged(f"has two objects of the same groups of chunk {answer.chunk}")
            seen |= answer.groups
        last = answer
        yield answer
    raise _damaged("ended without its results")


def _check(part: api.ChunkPart, last: api.ChunkPart | None, whole: bool) -> None:
    end = part.offset + len(part.data)
    if whole or last is None:
        in_order = part.offset == 0 and (last is None or part.chunk >= last.chunk)
    else:
        before = (last.chunk, last.groups, last.offset + len(last.data), last.object_bytes)
        in_order = (part.chunk, part.groups, part.offset, part.object_bytes) == before
    if not in_order or not part.data or end > part.object_bytes:
        raise _damaged(f"has a part out of its place, of chunk {part.chunk}")
    if zlib.crc32(part.data) != part.checksum:
        raise _damaged(f"has bytes of chunk {part.chunk} that do not fit their checksum")


def _damaged(what: str) -> Refusal:
    return Refusal(Reason.INTERNAL, f"the stream {what}")


async def collected(
    answers: AsyncGenerator[api.ReadChunksAnswer, None], *, by_groups: bool
) -> tuple[dict[int, dict[int, bytes]], tuple[ChunkResult, ...]]:
    """Whole objects of the chunks that are LOADED, by chunk index and groups (bits), and the results. Unless asked
    for ``by_groups`` each such chunk has one object, of groups 0."""
    parts: dict[int, dict[int, list[bytes]]] = {}
    results: tuple[ChunkResult, ...] = ()
    async with aclosing(answers):
        async for answer in answers:
            if isinstance(answer, api.ChunkPart):
                parts.setdefault(answer.chunk, {}).setdefault(answer.groups, []).append(answer.data)
            else:
                results = answer
    found: dict[int, dict[int, bytes]] = {}
    for result in results:
        for chunk in range(result.first_chunk, result.first_chunk + result.count):
            came, loaded = parts.pop(chunk, {}), result.outcome is ChunkOutcome.LOADED
            unsaid = came and result.outcome not in (ChunkOutcome.LOADED, ChunkOutcome.TORN)
            if sum(came) != result.groups or unsaid or (loaded and not by_groups and [*came] != [0]):
                raise _damaged(f"has other objects of chunk {chunk} than its results say")
            if loaded:
                found[chunk] = {groups: b"".join(whole) for groups, whole in came.items()}
    if parts:
        raise _damaged("has other chunks than its results say")
    return found, results
