# SPDX-License-Identifier: Apache-2.0
"""Messages of cache.proto."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvgrpc import api
from kvgrpc.core.checks import READERS_MOST
from kvgrpc.core.types import DEFAULT_POLICY, ChunkOutcome, ChunkResult, Ended, LookupAnswer, PrefetchStatus
from kvgrpc.v1 import cache_pb2 as pb
from kvgrpc.wire.content import (
    decode_content,
    decode_policy,
    decode_range,
    decode_reader,
    decode_space,
    encode_content,
    encode_policy,
    encode_range,
    encode_reader,
    encode_space,
)
from kvgrpc.wire.fields import check_bytes, check_number, check_text, invalid
from kvgrpc.wire.packed import join_token_ids, split_token_ids

WAIT_MS_MOST = 60_000
FENCE_CALLS_MOST = 1024
RANKS_MOST = 1024
BLOCKS_MOST, BLOCKS_IN_ALL = 1 << 20, 1 << 22
"""Ids of one group, and of all: the loop reads them, 4 million of them for most of a second."""
GROUPS_MOST = 64
U64 = (1 << 64) - 1

_STATE = pb.PrefetchStatus
M = TypeVar("M", bound=Message)
R = TypeVar("R", api.LookupRequest, api.StoreRequest)
_NO_TOKENS = api.Tokens(b"")


def check_engine_id(value: str) -> str:
    """16 to 64 characters; it is a capability, so it is never echoed in an error."""
    return check_text(value, "engine_id", least=16, most=64)


def _write(encode: Callable[[Any], Message], request: api.LookupRequest | api.StoreRequest, field: int) -> bytes:
    if not isinstance(request.content, api.Tokens):
        return encode(request).SerializeToString()
    message = encode(replace(request, content=_NO_TOKENS))
    message.ClearField("content")
    return join_token_ids(message.SerializeToString(), field, request.content.data)


def _read(parse: Callable[[bytes], M], decode: Callable[[M], R], raw: bytes, field: int) -> R:
    split = split_token_ids(raw, field)
    if split is None:
        return decode(parse(raw))
    rest, ids = split
    return replace(decode(parse(rest)), content=api.Tokens(ids))


# ---- lookup ---------------------------------------------------------------------------------------------------------


def encode_lookup_request(request: api.LookupRequest) -> pb.LookupRequest:
    return pb.LookupRequest(
        engine_id=request.engine_id,
        request_id=request.request_id,
        attempt=request.attempt,
        space=encode_space(request.space),
        content=encode_content(request.content),
        tp_size=request.tp_size,
        kv_ranks=request.kv_ranks,
        prefetch_wait_ms=request.prefetch_wait_ms,
        policy=encode_policy(request.policy),
    )


def decode_lookup_request(message: pb.LookupRequest) -> api.LookupRequest:
    check_number(len(message.kv_ranks), "kv_ranks", 0, RANKS_MOST)
    return api.LookupRequest(
        engine_id=check_engine_id(message.engine_id),
        request_id=check_text(message.request_id, "request_id", least=1, most=128),
        attempt=message.attempt,
        space=decode_space(message.space),
        content=decode_content(message.content),
        tp_size=check_number(message.tp_size, "tp_size", 1, 128),
        kv_ranks=tuple(message.kv_ranks),
        prefetch_wait_ms=check_number(message.prefetch_wait_ms, "prefetch_wait_ms", 0, WAIT_MS_MOST),
        policy=decode_policy(message.policy) if message.HasField("policy") else DEFAULT_POLICY,
    )


def write_lookup_request(request: api.LookupRequest) -> bytes:
    """The request as it travels."""
    return _write(encode_lookup_request, request, pb.LookupRequest.CONTENT_FIELD_NUMBER)


def read_lookup_request(raw: bytes) -> api.LookupRequest:
    """Raises DecodeError for what is no such message, and refuses what ``decode_lookup_request`` refuses."""
    return _read(pb.LookupRequest.FromString, decode_lookup_request, raw, pb.LookupRequest.CONTENT_FIELD_NUMBER)


def encode_status(status: PrefetchStatus) -> pb.PrefetchStatus:
    if not status.done:
        return pb.PrefetchStatus(state=_STATE.STATE_PENDING)
    return pb.PrefetchStatus(
        state=_STATE.STATE_DONE,
        hit_tokens=status.hit_tokens,
        pinned=status.pinned,
        hit_chunks_by_tier=status.hit_chunks_by_tier,
        limited_by=status.limited_by,
    )


def decode_status(message: pb.PrefetchStatus) -> PrefetchStatus:
    if message.state != _STATE.STATE_DONE:
        return PrefetchStatus(False)
    return PrefetchStatus(
        True, message.hit_tokens, message.pinned, dict(message.hit_chunks_by_tier), message.limited_by
    )


def encode_lookup_response(answer: LookupAnswer) -> pb.LookupResponse:
    return pb.LookupResponse(job_id=answer.job_id, status=encode_status(answer.status))


def decode_lookup_response(message: pb.LookupResponse) -> LookupAnswer:
    return LookupAnswer(message.job_id, decode_status(message.status))


def encode_query_request(engine_id: str, job_id: bytes, wait_ms: int) -> pb.QueryPrefetchStatusRequest:
    return pb.QueryPrefetchStatusRequest(engine_id=engine_id, job_id=job_id, wait_ms=wait_ms)


def decode_query_request(message: pb.QueryPrefetchStatusRequest) -> tuple[str, bytes, int]:
    """(engine_id, job_id, wait_ms)."""
    return (
        check_engine_id(message.engine_id),
        check_bytes(message.job_id, "job_id", 16),
        check_number(message.wait_ms, "wait_ms", 0, WAIT_MS_MOST),
    )


def encode_query_response(status: PrefetchStatus) -> pb.QueryPrefetchStatusResponse:
    return pb.QueryPrefetchStatusResponse(status=encode_status(status))


def decode_query_response(message: pb.QueryPrefetchStatusResponse) -> PrefetchStatus:
    return decode_status(message.status)


# ---- copies ---------------------------------------------------------------------------------------------------------


def _encode_blocks(blocks: Sequence[Sequence[int]]) -> list[pb.BlockIds]:
    return [pb.BlockIds(ids=ids) for ids in blocks]


def _decode_blocks(blocks: Sequence[pb.BlockIds]) -> tuple[Sequence[int], ...]:
    check_number(len(blocks), "blocks", 0, GROUPS_MOST)
    for group in blocks:
        check_number(len(group.ids), "blocks.ids", 0, BLOCKS_MOST)
    check_number(sum(len(group.ids) for group in blocks), "blocks", 0, BLOCKS_IN_ALL)
    return tuple(array("I", group.ids) for group in blocks)


def encode_store_request(request: api.StoreRequest) -> pb.StoreRequest:
    return pb.StoreRequest(
        engine_id=request.engine_id,
        call_id=request.call_id,
        space=encode_space(request.space),
        content=encode_content(request.content),
        range=None if request.range is None else encode_range(request.range),
        blocks=_encode_blocks(request.blocks),
        ready_event=request.ready_event,
        policy=encode_policy(request.policy),
    )


def decode_store_request(message: pb.StoreRequest) -> api.StoreRequest:
    return api.StoreRequest(
        engine_id=check_engine_id(message.engine_id),
        call_id=check_number(message.call_id, "call_id", 1, U64),
        space=decode_space(message.space),
        content=decode_content(message.content),
        blocks=_decode_blocks(message.blocks),
        range=decode_range(message.range) if message.HasField("range") else None,
        ready_event=check_bytes(message.ready_event, "ready_event", 0, 64),
        policy=decode_policy(message.policy) if message.HasField("policy") else DEFAULT_POLICY,
    )


def write_store_request(request: api.StoreRequest) -> bytes:
    """The request as it travels."""
    return _write(encode_store_request, request, pb.StoreRequest.CONTENT_FIELD_NUMBER)


def read_store_request(raw: bytes) -> api.StoreRequest:
    """Raises DecodeError for what is no such message, and refuses what ``decode_store_request`` refuses."""
    return _read(pb.StoreRequest.FromString, decode_store_request, raw, pb.StoreRequest.CONTENT_FIELD_NUMBER)


def encode_retrieve_request(request: api.RetrieveRequest) -> pb.RetrieveRequest:
    return pb.RetrieveRequest(
        engine_id=request.engine_id,
        call_id=request.call_id,
        job_id=request.job_id,
        range=encode_range(request.range),
        blocks=_encode_blocks(request.blocks),
    )


def decode_retrieve_request(message: pb.RetrieveRequest) -> api.RetrieveRequest:
    return api.RetrieveRequest(
        engine_id=check_engine_id(message.engine_id),
        call_id=check_number(message.call_id, "call_id", 1, U64),
        job_id=check_bytes(message.job_id, "job_id", 16),
        range=decode_range(message.range),
        blocks=_decode_blocks(message.blocks),
    )


def encode_results(results: Iterable[ChunkResult]) -> list[pb.ChunkResult]:
    return [
        pb.ChunkResult(
            first_chunk=result.first_chunk,
            count=result.count,
            outcome=pb.ChunkOutcome.Value(f"CHUNK_OUTCOME_{result.outcome.value}"),
            reason=result.reason,
            groups=result.groups,
        )
        for result in results
    ]


def decode_results(messages: Iterable[pb.ChunkResult]) -> tuple[ChunkResult, ...]:
    """An outcome that only a newer server knows says nothing about the blocks, so it counts as TORN."""
    results: list[ChunkResult] = []
    for message in messages:
        known = message.outcome in pb.ChunkOutcome.values()
        name = pb.ChunkOutcome.Name(message.outcome).removeprefix("CHUNK_OUTCOME_") if known else "UNSPECIFIED"
        outcome = ChunkOutcome.TORN if name == "UNSPECIFIED" else ChunkOutcome(name)
        results.append(ChunkResult(message.first_chunk, message.count, outcome, message.reason, message.groups))
    return tuple(results)


def encode_store_response(results: Iterable[ChunkResult]) -> pb.StoreResponse:
    return pb.StoreResponse(results=encode_results(results))


def decode_store_response(message: pb.StoreResponse) -> tuple[ChunkResult, ...]:
    return decode_results(message.results)


def encode_retrieve_response(results: Iterable[ChunkResult]) -> pb.RetrieveResponse:
    return pb.RetrieveResponse(results=encode_results(results))


def decode_retrieve_response(message: pb.RetrieveResponse) -> tuple[ChunkResult, ...]:
    return decode_results(message.results)


# ---- ends -----------------------------------------------------------------------------------------------------------


def encode_free_request(request: api.FreeRequest) -> pb.FreeLookupLocksRequest:
    return pb.FreeLookupLocksRequest(
        engine_id=request.engine_id,
        job_id=request.job_id,
        tp_size=request.tp_size,
        range=None if request.range is None else encode_range(request.range),
        readers=[encode_reader(reader) for reader in request.readers],
    )


def decode_free_request(message: pb.FreeLookupLocksRequest) -> api.FreeRequest:
    check_number(len(message.readers), "readers", 0, READERS_MOST)
    return api.FreeRequest(
        engine_id=check_engine_id(message.engine_id),
        job_id=check_bytes(message.job_id, "job_id", 16),
        tp_size=check_number(message.tp_size, "tp_size", 1, 128),
        range=decode_range(message.range) if message.HasField("range") else None,
        readers=tuple(decode_reader(reader) for reader in message.readers),
    )


def encode_free_response(released_pins: int) -> pb.FreeLookupLocksResponse:
    return pb.FreeLookupLocksResponse(released_pins=released_pins)


def decode_free_response(message: pb.FreeLookupLocksResponse) -> int:
    return message.released_pins


def encode_end_request(engine_id: str, request_id: str) -> pb.EndRequestRequest:
    return pb.EndRequestRequest(engine_id=engine_id, request_id=request_id)


def decode_end_request(message: pb.EndRequestRequest) -> tuple[str, str]:
    """(engine_id, request_id)."""
    return check_engine_id(message.engine_id), check_text(message.request_id, "request_id", least=1, most=128)


def encode_end_response(ended: Ended) -> pb.EndRequestResponse:
    return pb.EndRequestResponse(ended_jobs=ended.ended_jobs, released_pins=ended.released_pins)


def decode_end_response(message: pb.EndRequestResponse) -> Ended:
    return Ended(message.ended_jobs, message.released_pins)


def encode_fence_request(engine_id: str, call_ids: Sequence[int]) -> pb.FenceRequest:
    return pb.FenceRequest(engine_id=engine_id, call_ids=call_ids)


def decode_fence_request(message: pb.FenceRequest) -> tuple[str, tuple[int, ...]]:
    """(engine_id, call_ids)."""
    check_number(len(message.call_ids), "call_ids", 1, FENCE_CALLS_MOST)
    if not all(message.call_ids):
        raise invalid("call_ids", "holds a 0, which is no call id")
    return check_engine_id(message.engine_id), tuple(message.call_ids)
