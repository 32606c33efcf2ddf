# SPDX-License-Identifier: Apache-2.0
"""Bad fields are refused by name before anything is touched; refusals survive the wire."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc
import pytest

from kvgrpc import api, status
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import MAX_NEEDS, SpaceRef
from kvgrpc.v1 import admin_pb2, cache_pb2, common_pb2, engine_pb2
from kvgrpc.wire import admin, cache, engine, streams

ENGINE = "engine-0123456789abcdef"
SPACE = common_pb2.SpaceRef(space_base=b"s" * 16)
TOKENS = common_pb2.Content(tokens=common_pb2.TokenIds(ids=[1, 2, 3]))


def lookup(**changes: object) -> cache_pb2.LookupRequest:
    fields: dict[str, object] = {
        "engine_id": ENGINE,
        "request_id": "r",
        "space": SPACE,
        "content": TOKENS,
        "tp_size": 1,
        **changes,
    }
    return cache_pb2.LookupRequest(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "reason", "field"),
    [
        ({"engine_id": "short"}, Reason.INVALID_FIELD, "engine_id"),
        ({"engine_id": "x" * 65}, Reason.INVALID_FIELD, "engine_id"),
        ({"request_id": ""}, Reason.INVALID_FIELD, "request_id"),
        ({"request_id": "x" * 129}, Reason.INVALID_FIELD, "request_id"),
        ({"space": common_pb2.SpaceRef(space_base=b"s" * 15)}, Reason.INVALID_FIELD, "space.space_base"),
        ({"space": None}, Reason.INVALID_FIELD, "space.space_base"),
        ({"space": common_pb2.SpaceRef(space_base=b"s" * 16, lora="ä" * 257)}, Reason.INVALID_FIELD, "space.lora"),
        ({"content": None}, Reason.CONTENT_KIND, "content"),
        (
            {"content": common_pb2.Content(hashes=common_pb2.ChunkHashes(hashes=[b"h" * 15]))},
            Reason.INVALID_FIELD,
            "content.hashes.hashes",
        ),
        (
            {"content": common_pb2.Content(hashes=common_pb2.ChunkHashes(hashes=[b"h" * 16, b"h" * 65]))},
            Reason.INVALID_FIELD,
            "content.hashes.hashes",
        ),
        ({"tp_size": 0}, Reason.INVALID_FIELD, "tp_size"),
        ({"tp_size": 129}, Reason.INVALID_FIELD, "tp_size"),
        ({"prefetch_wait_ms": 60_001}, Reason.INVALID_FIELD, "prefetch_wait_ms"),
        ({"policy": common_pb2.RequestPolicy(retention_ms=86_400_001)}, Reason.INVALID_FIELD, "policy.retention_ms"),
        ({"policy": common_pb2.RequestPolicy(priority=9)}, Reason.INVALID_FIELD, "policy.priority"),  # type: ignore[arg-type]
    ],
)
def test_lookup_fields(changes: dict[str, object], reason: Reason, field: str) -> None:
    with pytest.raises(Refusal) as caught:
        cache.decode_lookup_request(lookup(**changes))
    assert (caught.value.reason, caught.value.field) == (reason, field)
    assert ENGINE not in str(caught.value)


def test_other_fields() -> None:
    for decode, message, field in (
        (cache.decode_store_request, cache_pb2.StoreRequest(engine_id=ENGINE), "call_id"),
        (
            cache.decode_store_request,
            cache_pb2.StoreRequest(engine_id=ENGINE, call_id=1, space=SPACE, content=TOKENS, ready_event=b"x"),
            "ready_event",
        ),
        (cache.decode_retrieve_request, cache_pb2.RetrieveRequest(engine_id=ENGINE, call_id=1, job_id=b"j"), "job_id"),
        (cache.decode_query_request, cache_pb2.QueryPrefetchStatusRequest(engine_id=ENGINE, job_id=b"j"), "job_id"),
        (cache.decode_fence_request, cache_pb2.FenceRequest(engine_id=ENGINE), "call_ids"),
        (cache.decode_fence_request, cache_pb2.FenceRequest(engine_id=ENGINE, call_ids=range(1, 1026)), "call_ids"),
        (cache.decode_fence_request, cache_pb2.FenceRequest(engine_id=ENGINE, call_ids=[0]), "call_ids"),
        (engine.decode_attach_request, engine_pb2.AttachRequest(engine_id=ENGINE), "role"),
        (engine.decode_attach_request, engine_pb2.AttachRequest(engine_id=ENGINE, role=2), "session_id"),  # type: ignore[arg-type]
        (engine.decode_handshake_request, engine_pb2.HandshakeRequest(client_version="x" * 129), "client_version"),
        (admin.decode_clear_request, admin_pb2.ClearRequest(), "target"),
        (admin.decode_clear_request, admin_pb2.ClearRequest(all=False), "target"),
        (admin.decode_bump_request, admin_pb2.BumpGenerationRequest(), "target"),
        (admin.decode_unpin_request, admin_pb2.UnpinRequest(), "pin_id"),
    ):
        with pytest.raises(Refusal) as caught:
            decode(message)  # type: ignore[operator]
        assert caught.value.reason is Reason.INVALID_FIELD
        assert caught.value.field == field


def test_a_range_that_ends_before_it_starts() -> None:
    message = cache_pb2.RetrieveRequest(engine_id=ENGINE, call_id=1, job_id=b"j" * 16)
    message.range.start = 32
    with pytest.raises(Refusal) as caught:
        cache.decode_retrieve_request(message)
    assert caught.value.reason is Reason.RANGE


def test_the_largest_objects_that_can_be_named_can_be_told() -> None:
    """Who claims larger ones, one for each KV rank, would end every recording of an operator."""
    space, form = SpaceRef(b"s" * 16), partial(api.WriteChunksRequest, ENGINE, order="1x1x1", content=api.Tokens(b""))
    most = streams.OBJECT_BYTES_MOST
    streams.decode_write_begin(streams.encode_write_begin(form(space=space, object_bytes=most)))
    with pytest.raises(Refusal) as caught:
        streams.decode_write_begin(streams.encode_write_begin(form(space=space, object_bytes=most + 1)))
    assert caught.value.field == "begin.object_bytes"
    call = api.TracedCall(api.CallKind.STORE, 0, 0, 0, (), 0, chunk_bytes=cache.RANKS_MOST * MAX_NEEDS * most)
    assert admin.encode_traced_calls(api.TracedCalls((call,), 0, 1)).calls[0].chunk_bytes == call.chunk_bytes


def test_block_ids_are_counted_before_they_are_read() -> None:
    """In one message there is room for 16 million, which take the event loop two seconds."""
    group = cache_pb2.BlockIds(ids=[7] * cache.BLOCKS_MOST)
    message = cache_pb2.RetrieveRequest(engine_id=ENGINE, call_id=1, job_id=b"j" * 16, blocks=[group] * 4)
    cache.decode_retrieve_request(message)
    message.blocks.append(cache_pb2.BlockIds(ids=[7]))
    with pytest.raises(Refusal) as caught:
        cache.decode_retrieve_request(message)
    assert caught.value.field == "blocks"


def test_runs_are_counted_before_they_are_read() -> None:
    """Two million of them in a message of 4 MiB took ten seconds of the event loop, and 400 MiB."""
    group = engine_pb2.KvGroup(kind=1, form=1, runs=[engine_pb2.Runs()] * 8000)  # type: ignore[arg-type]
    message = register(groups=[group] * 64)
    began = time.process_time()
    with pytest.raises(Refusal) as caught:
        engine.decode_register_request(message)
    assert caught.value.field == "groups.runs"
    assert time.process_time() - began < 0.1


def register(**changes: object) -> engine_pb2.RegisterKvCacheRequest:
    identity = common_pb2.SpaceIdentity(model="m", kv_dtype="bf16", kv_world_size=1, hash_algorithm="sha256-u32le")
    memory = engine_pb2.Memory(shared=engine_pb2.SharedMemory(name="n", size_bytes=1))
    group = engine_pb2.KvGroup(kind=1, form=1, runs=[engine_pb2.Runs()])  # type: ignore[arg-type]
    fields: dict[str, object] = {
        "engine_id": ENGINE,
        "identity": identity,
        "tp_size": 1,
        "kv_tp_size": 1,
        "memory": [memory],
        "groups": [group],
        **changes,
    }
    return engine_pb2.RegisterKvCacheRequest(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "reason", "field"),
    [
        ({"memory": []}, Reason.INVALID_FIELD, "memory"),
        ({"memory": [engine_pb2.Memory()]}, Reason.INVALID_FIELD, "memory[0]"),
        (
            {"memory": [engine_pb2.Memory(cuda=engine_pb2.CudaIpcMemory(handle=b"x"))]},
            Reason.INVALID_FIELD,
            "memory[0].cuda.handle",
        ),
        ({"groups": []}, Reason.INVALID_FIELD, "groups"),
        ({"groups": [engine_pb2.KvGroup()]}, Reason.GROUP_KIND_UNSUPPORTED, "groups[0].kind"),
        ({"groups": [engine_pb2.KvGroup(kind=1)]}, Reason.INVALID_FIELD, "groups[0].form"),  # type: ignore[arg-type]
        ({"groups": [engine_pb2.KvGroup(kind=1, form=1)]}, Reason.INVALID_FIELD, "groups[0].runs"),  # type: ignore[arg-type]
        ({"kv_tp_size": 0}, Reason.INVALID_FIELD, "kv_tp_size"),
        ({"identity": common_pb2.SpaceIdentity()}, Reason.INVALID_FIELD, "identity.model"),
    ],
)
def test_register_fields(changes: dict[str, object], reason: Reason, field: str) -> None:
    assert engine.decode_register_request(register()).tp_size == 1
    with pytest.raises(Refusal) as caught:
        engine.decode_register_request(register(**changes))
    assert (caught.value.reason, caught.value.field) == (reason, field)


@pytest.mark.parametrize(
    ("decode", "message", "names"),
    [
        (engine.decode_attach_request, engine_pb2.AttachRequest(engine_id=ENGINE), engine_pb2.ClientRole.keys()),
        (engine.decode_register_request, register(groups=[engine_pb2.KvGroup()]), engine_pb2.GroupKind.keys()),
        (engine.decode_register_request, register(groups=[engine_pb2.KvGroup(kind=1)]), engine_pb2.BlockForm.keys()),  # type: ignore[arg-type]
    ],
)
def test_what_was_not_set_is_told_by_the_names_that_it_may_have(
    decode: Callable[[Any], object], message: object, names: Sequence[str]
) -> None:
    """Who writes a client in another language reads these, and a name that was forgotten is 0 on the wire."""
    with pytest.raises(Refusal) as caught:
        decode(message)
    assert [name for name in names if name in caught.value.message] == list(names[1:])


def test_every_reason_has_one_code() -> None:
    assert set(status.REASON_CODES) == set(Reason)
    assert grpc.StatusCode.OK not in status.REASON_CODES.values()


@pytest.mark.parametrize("reason", list(Reason))
def test_refusals_survive_the_wire(reason: Reason) -> None:
    refusal = Refusal(reason, "why", field="f", retry_after_ms=1500, resource="thing")
    rich = status.rich_status(refusal)
    infos = [detail for detail in rich.details if detail.type_url.endswith("/google.rpc.ErrorInfo")]
    assert len(infos) == 1
    assert len({detail.type_url for detail in rich.details}) == len(rich.details)
    code = status.REASON_CODES[reason]
    back = status.refusal_from_status(code, "why", [(status.DETAILS_KEY, rich.SerializeToString())])
    assert (back.reason, back.message, back.field) == (reason, "why", "f")
    assert (back.retry_after_ms, back.resource) == (1500, "thing")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, Reason.SERVER_UNREACHABLE),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Reason.DEADLINE),
        (grpc.StatusCode.CANCELLED, Reason.CALL_REVOKED),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.MESSAGE_TOO_LARGE),
        (grpc.StatusCode.UNKNOWN, Reason.INTERNAL),
    ],
)
def test_errors_without_our_details(code: grpc.StatusCode, reason: Reason) -> None:
    assert status.refusal_from_status(code, "x", None).reason is reason
    assert status.refusal_from_status(code, "x", [(status.DETAILS_KEY, b"\xff\xff garbage")]).reason is reason
