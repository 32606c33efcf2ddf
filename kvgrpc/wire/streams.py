# SPDX-License-Identifier: Apache-2.0
"""Messages of the streams, both ways."""

from __future__ import annotations

from kvgrpc import api
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import Reader, TokenRange
from kvgrpc.v1 import cache_pb2 as pb
from kvgrpc.v1 import common_pb2
from kvgrpc.wire.cache import check_engine_id, decode_results, encode_results
from kvgrpc.wire.fields import check_bytes, check_text

SALTS_MOST = 1024


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
    )


def decode_read_request(message: pb.ReadChunksRequest) -> api.ReadChunksRequest:
    return api.ReadChunksRequest(
        check_engine_id(message.engine_id),
        check_bytes(message.job_id, "job_id", 16),
        Reader(message.reader.kv_rank, message.reader.tp_rank),
        TokenRange(message.range.start, message.range.end),
    )


def encode_read_response(answer: api.ReadChunksAnswer) -> pb.ReadChunksResponse:
    if not isinstance(answer, api.ChunkPart):
        return pb.ReadChunksResponse(results=encode_results(answer))
    part = pb.ChunkPart(
        chunk=answer.chunk,
        offset=answer.offset,
        object_bytes=answer.object_bytes,
        checksum=answer.checksum,
        data=answer.data,
    )
    return pb.ReadChunksResponse(part=part)


def decode_read_response(message: pb.ReadChunksResponse) -> api.ReadChunksAnswer:
    if not message.HasField("part"):
        return decode_results(message.results)
    part = message.part
    return api.ChunkPart(part.chunk, part.offset, part.object_bytes, part.checksum, part.data)
