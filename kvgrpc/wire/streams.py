# SPDX-License-Identifier: Apache-2.0
"""Messages of the streams, both ways."""

from __future__ import annotations

from collections.abc import Iterable

from kvgrpc import api
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import DEFAULT_POLICY, MAX_NEEDS, ChunkResult, ObjectForm, Reader, TokenRange
from kvgrpc.transfer.layout import MAX_ORDER_BYTES
from kvgrpc.v1 import cache_pb2 as pb
from kvgrpc.v1 import common_pb2
from kvgrpc.wire.cache import check_engine_id, decode_results, encode_results
from kvgrpc.wire.content import (
    decode_content,
    decode_policy,
    decode_range,
    decode_space,
    encode_content,
    encode_policy,
    encode_range,
    encode_space,
)
from kvgrpc.wire.fields import check_bytes, check_number, check_text, invalid

SALTS_MOST = 1024
OBJECT_BYTES_MOST = 1 << 48
"""A chunk has one for each KV rank and part, and whoever records is told the bytes of them all, in 64 bits."""
BITS_MOST = (1 << 64) - 1


def encode_watch_request(request: api.WatchRequest) -> pb.WatchRequest:
    """An empty set of salts cannot be said: nobody asks for nothing."""
    salts = sorted(request.cache_salts or ())
    return pb.WatchRequest(space_base=request.space_base, cache_salts=salts, snapshot=request.snapshot)


def decode_watch_request(message: pb.WatchRequest) -> api.WatchRequest:
    if len(message.space_base) not in (0, 16):
        raise Refusal(Reason.INVALID_FIELD, "space_base must have 16 bytes, or none", field="space_base")
    if len(message.cache_salts) > SALTS_MOST:
        raise Refusal(Reason.INVALID_FIELD, f"at most {SALTS_MOST} salts can be named", field="cache_salts")
    salts = frozenset(check_text(salt, "cache_salts", most=512) for salt in message.cache_salts)
    return api.WatchRequest(message.space_base, salts or None, message.snapshot)


def encode_watch_response(event: api.WatchEvent) -> pb.WatchResponse:
    space = None
    if event.space:
        space = pb.WatchedSpace(
            digest=event.space, space_base=event.space_base, lora=event.lora, salt_fingerprint=event.salt_fingerprint
        )
    return pb.WatchResponse(
        sequence=event.sequence,
        kind=pb.WatchKind.Value(f"WATCH_KIND_{event.kind.value}"),
        server_epoch=event.server_epoch,
        chunk_tokens=event.chunk_tokens,
        space=space,
        tier=event.tier,
        keys=event.keys,
    )


def decode_watch_response(message: pb.WatchResponse) -> api.WatchEvent | None:
    """None for a kind that this version does not know."""
    name = pb.WatchKind.Name(message.kind).removeprefix("WATCH_KIND_") if message.kind in pb.WatchKind.values() else ""
    if name not in api.WatchKind.__members__:
        return None
    space = message.space
    return api.WatchEvent(
        message.sequence,
        api.WatchKind[name],
        message.server_epoch,
        message.chunk_tokens,
        space.digest,
        space.space_base,
        space.lora,
        space.salt_fingerprint,
        message.tier,
        tuple(message.keys),
    )


# ---- ReadChunks -----------------------------------------------------------------------------------------------------


def encode_read_request(request: api.ReadChunksRequest) -> pb.ReadChunksRequest:
    return pb.ReadChunksRequest(
        engine_id=request.engine_id,
        job_id=request.job_id,
        reader=common_pb2.Reader(kv_rank=request.reader.kv_rank, tp_rank=request.reader.tp_rank),
        range=common_pb2.TokenRange(start=request.range.start, end=request.range.end),
        by_groups=request.by_groups,
    )


def decode_read_request(message: pb.ReadChunksRequest) -> api.ReadChunksRequest:
    return api.ReadChunksRequest(
        check_engine_id(message.engine_id),
        check_bytes(message.job_id, "job_id", 16),
        Reader(message.reader.kv_rank, message.reader.tp_rank),
        TokenRange(message.range.start, message.range.end),
        message.by_groups,
    )


def encode_part(part: api.ChunkPart) -> pb.ChunkPart:
    return pb.ChunkPart(
        chunk=part.chunk,
        offset=part.offset,
        object_bytes=part.object_bytes,
        checksum=part.checksum,
        data=part.data,
        order=part.order,
        groups=part.groups,
    )


def decode_part(part: pb.ChunkPart) -> api.ChunkPart:
    where = part.chunk, part.offset, part.object_bytes
    return api.ChunkPart(*where, part.checksum, part.data, part.order, part.groups)


def encode_read_response(answer: api.ReadChunksAnswer) -> pb.ReadChunksResponse:
    if not isinstance(answer, api.ChunkPart):
        return pb.ReadChunksResponse(results=encode_results(answer))
    return pb.ReadChunksResponse(part=encode_part(answer))


def decode_read_response(message: pb.ReadChunksResponse) -> api.ReadChunksAnswer:
    return decode_part(message.part) if message.HasField("part") else decode_results(message.results)


# ---- WriteChunks ----------------------------------------------------------------------------------------------------


def encode_write_begin(request: api.WriteChunksRequest) -> pb.WriteChunksRequest:
    begin = pb.ChunksToWrite(
        engine_id=request.engine_id,
        space=encode_space(request.space),
        content=encode_content(request.content),
        range=None if request.range is None else encode_range(request.range),
        kv_rank=request.kv_rank,
        object_bytes=request.object_bytes,
        order=request.order,
        policy=encode_policy(request.policy),
        objects=[pb.ObjectForm(**one._asdict()) for one in request.objects],
    )
    return pb.WriteChunksRequest(begin=begin)


def decode_write_begin(message: pb.WriteChunksRequest | None) -> api.WriteChunksRequest:
    """None: there was no message."""
    if message is None or not message.HasField("begin"):
        raise invalid("begin", "is missing: the first message says what comes")
    begin = message.begin
    if len(begin.objects) > MAX_NEEDS:
        raise invalid("begin.objects", f"are {len(begin.objects)}; at most {MAX_NEEDS} can be")
    if begin.objects and (begin.object_bytes or begin.order):
        raise invalid("begin.objects", "say length and order themselves; object_bytes and order must be empty then")
    objects = tuple(
        _decode_form(
            form, f"begin.objects[{at}]", check_number(form.groups, f"begin.objects[{at}].groups", 1, BITS_MOST)
        )
        for at, form in enumerate(begin.objects)
    )
    form = ObjectForm(0, 0, "") if objects else _decode_form(begin, "begin", 0)
    return api.WriteChunksRequest(
        engine_id=check_engine_id(begin.engine_id),
        space=decode_space(begin.space),
        content=decode_content(begin.content),
        object_bytes=form.object_bytes,
        order=form.order,
        kv_rank=begin.kv_rank,
        range=decode_range(begin.range) if begin.HasField("range") else None,
        policy=decode_policy(begin.policy) if begin.HasField("policy") else DEFAULT_POLICY,
        objects=objects,
    )


def _decode_form(message: pb.ObjectForm | pb.ChunksToWrite, where: str, groups: int) -> ObjectForm:
    return ObjectForm(
        groups,
        check_number(message.object_bytes, f"{where}.object_bytes", 1, OBJECT_BYTES_MOST),
        check_text(message.order, f"{where}.order", least=1, most=MAX_ORDER_BYTES),
    )


def encode_write_part(part: api.ChunkPart) -> pb.WriteChunksRequest:
    return pb.WriteChunksRequest(part=encode_part(part))


def decode_write_part(message: pb.WriteChunksRequest) -> api.ChunkPart:
    if not message.HasField("part"):
        raise invalid("part", "is missing: one message begins a stream, all others are parts")
    return decode_part(message.part)


def decode_write_response(message: pb.WriteChunksResponse) -> tuple[ChunkResult, ...]:
    return decode_results(message.results)


def encode_write_response(results: Iterable[ChunkResult]) -> pb.WriteChunksResponse:
    return pb.WriteChunksResponse(results=encode_results(results))
