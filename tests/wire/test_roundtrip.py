# SPDX-License-Identifier: Apache-2.0
"""Every request and answer survives the wire unchanged."""

from __future__ import annotations

import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgrpc import api
from kvgrpc.core.errors import Refusal
from kvgrpc.core.types import (
    ChunkOutcome,
    ChunkResult,
    Cleared,
    ClientStatus,
    Ended,
    Held,
    LookupAnswer,
    Policy,
    PrefetchStatus,
    Priority,
    Quota,
    Reader,
    Role,
    SpaceIdentity,
    SpaceRef,
    TokenRange,
    Warmed,
    WritePolicy,
)
from kvgrpc.v1 import admin_pb2, cache_pb2, common_pb2, engine_pb2
from kvgrpc.wire import admin, cache, engine
from kvgrpc.wire.content import decode_write_policy, encode_write_policy
from kvgrpc.wire.packed import decode_token_ids, encode_token_ids

ENGINE = "engine-0123456789abcdef"
SPACE = SpaceRef(bytes(range(16)), "adapter@v1", "tenant|1\0")
POLICY = Policy(no_store=True, no_lookup=True, retention_ns=5_000_000, priority=Priority.HIGH)
IDENTITY = SpaceIdentity("model", "rev", "bfloat16", 2, "sha256-u32le", "opaque:CPU_ATTN:LBHNC:32")


def over_the_wire(message):
    return type(message).FromString(message.SerializeToString())


def tokens(*ids: int) -> api.Tokens:
    return api.Tokens(array.array("I", ids).tobytes())


@given(st.lists(st.integers(0, 2**32 - 1), max_size=400))
def test_packed_tokens_are_what_protobuf_says_they_are(ids: list[int]) -> None:
    raw = array.array("I", ids).tobytes()
    ours = encode_token_ids(raw)
    assert list(ours.ids) == ids
    assert ours.SerializeToString() == common_pb2.TokenIds(ids=ids).SerializeToString()
    assert bytes(decode_token_ids(common_pb2.TokenIds(ids=ids))) == raw


def test_packed_tokens_ignore_fields_of_newer_clients() -> None:
    raw = array.array("I", [7, 8, 9]).tobytes()
    newer = common_pb2.TokenIds.FromString(encode_token_ids(raw).SerializeToString() + b"\x98\x06\x01")
    assert bytes(decode_token_ids(newer)) == raw
    assert bytes(decode_token_ids(common_pb2.TokenIds.FromString(b"\x98\x06\x01"))) == b""


def test_packed_tokens_need_four_bytes_each() -> None:
    with pytest.raises(ValueError, match="4 bytes"):
        encode_token_ids(b"12345")


@pytest.mark.parametrize("policy", [Policy(), POLICY])
@pytest.mark.parametrize("content", [tokens(1, 2, 2**32 - 1), api.Hashes((b"h" * 32, b"i" * 32), 70)])
def test_lookup(content: api.Content, policy: Policy) -> None:
    request = api.LookupRequest(ENGINE, "r-1", SPACE, content, 4, 3, (0, 2), 250, policy)
    decoded = cache.decode_lookup_request(over_the_wire(cache.encode_lookup_request(request)))
    assert decoded == request
    for status in (PrefetchStatus(False), PrefetchStatus(True, 512, True, {"l1": 1, "disk": 1}, "PREFETCH_TIMEOUT")):
        answer = LookupAnswer(b"j" * 16, status)
        assert cache.decode_lookup_response(over_the_wire(cache.encode_lookup_response(answer))) == answer
        assert cache.decode_query_response(over_the_wire(cache.encode_query_response(status))) == status
    query = (ENGINE, b"j" * 16, 50)
    assert cache.decode_query_request(over_the_wire(cache.encode_query_request(*query))) == query


@pytest.mark.parametrize("tokens_range", [None, TokenRange(16, 64)])
def test_store(tokens_range: TokenRange | None) -> None:
    content = api.Hashes((b"h" * 16,), 70, first_chunk=3)
    request = api.StoreRequest(
        ENGINE,
        2**64 - 1,
        SPACE,
        content,
        (array.array("I", (3, 1, 3)), array.array("I")),
        tokens_range,
        b"e" * 64,
        POLICY,
    )
    assert cache.decode_store_request(over_the_wire(cache.encode_store_request(request))) == request


def test_retrieve_free_end_fence() -> None:
    retrieve = api.RetrieveRequest(ENGINE, 9, b"j" * 16, TokenRange(16, 64), (array.array("I", (3, 1, 3)),))
    assert cache.decode_retrieve_request(over_the_wire(cache.encode_retrieve_request(retrieve))) == retrieve
    for free in (
        api.FreeRequest(ENGINE, b"j" * 16, 4),
        api.FreeRequest(ENGINE, b"j" * 16, 4, TokenRange(0, 0), (Reader(0, 1), Reader(0, 3))),
    ):
        assert cache.decode_free_request(over_the_wire(cache.encode_free_request(free))) == free
    assert cache.decode_end_request(over_the_wire(cache.encode_end_request(ENGINE, "r"))) == (ENGINE, "r")
    assert cache.decode_end_response(over_the_wire(cache.encode_end_response(Ended(2, 16)))) == Ended(2, 16)
    assert cache.decode_fence_request(over_the_wire(cache.encode_fence_request(ENGINE, [5, 6]))) == (ENGINE, (5, 6))


def test_every_outcome() -> None:
    results = tuple(ChunkResult(at, 1, outcome, "WHY", 1 << 63) for at, outcome in enumerate(ChunkOutcome))
    assert cache.decode_store_response(over_the_wire(cache.encode_store_response(results))) == results
    assert cache.decode_retrieve_response(over_the_wire(cache.encode_retrieve_response(results))) == results


def test_an_outcome_of_a_newer_server_counts_as_torn() -> None:
    newer = cache_pb2.RetrieveResponse.FromString(
        cache_pb2.RetrieveResponse(
            results=[cache_pb2.ChunkResult(count=1, outcome=77)]  # type: ignore[arg-type]
        ).SerializeToString()
    )
    assert cache.decode_retrieve_response(newer) == (ChunkResult(0, 1, ChunkOutcome.TORN),)


def test_handshake_and_attach() -> None:
    for identity in (None, IDENTITY):
        hello = api.Hello(1, 0, "test 1", identity)
        assert engine.decode_handshake_request(over_the_wire(engine.encode_handshake_request(hello))) == hello
    limits = api.Limits(1, 2, 3, 4, 5, 6, 7, 8, 9, 2**40)
    info = api.ServerInfo(1, 0, "0.1.0", b"e" * 16, 256, "sha256-u32le", limits, "host", b"s" * 16)
    assert engine.decode_handshake_response(over_the_wire(engine.encode_handshake_response(info))) == info
    for role in Role:
        attach = (ENGINE, role, b"s" * 16)
        assert engine.decode_attach_request(over_the_wire(engine.encode_attach_request(*attach))) == attach
    for event in (api.AttachEvent(False, b"e" * 16, True), api.AttachEvent(True, reason="bye")):
        assert engine.decode_attach_response(over_the_wire(engine.encode_attach_response(event))) == event
    assert engine.decode_attach_response(engine_pb2.AttachResponse()) is None


def test_register() -> None:
    group = api.KvGroup(
        block_size=16,
        num_blocks=100,
        runs=(api.Runs(0, 64, 32, 1 << 20, 2, 1 << 19, 4096, 4096), api.Runs(1, 0, 1, 0, 1, 0, 2**40, 2**40)),
        form=api.BlockForm.TOKEN_MAJOR,
        kind=api.GroupKind.SLIDING_WINDOW,
        window_tokens=1024,
        backend="FLASH_ATTN",
        layout="LBNHC",
        heads=8,
        head_dim=128,
    )
    memory = (api.SharedMemory("psm_1", 4160, 2**40), api.CudaIpcMemory(b"h" * 64, "GPU-1", 512, 2**30))
    request = api.RegisterRequest(ENGINE, IDENTITY, 1, 1, 2, 2, api.Layout(memory, (group,)), "host")
    assert engine.decode_register_request(over_the_wire(engine.encode_register_request(request))) == request
    answer = api.RegisterAnswer(b"s" * 16, 256, 7, "form", 2**40)
    assert engine.decode_register_response(over_the_wire(engine.encode_register_response(answer))) == answer
    assert engine.decode_unregister_request(over_the_wire(engine.encode_unregister_request(ENGINE))) == ENGINE


def test_status_engines_spaces() -> None:
    status = api.ServerStatus(
        server_version="0.1.0",
        server_epoch=b"e" * 16,
        uptime_ms=5,
        chunk_tokens=256,
        draining=True,
        arena=api.ArenaStatus(8, 1, 1, 1, 1, 2, 2, 1),
        chunks=3,
        spaces=1,
        engines=1,
        clients=2,
        jobs=4,
        pins=2**40,
        calls_in_flight=1,
        tiers=(api.TierStatus("disk", True, 2**40, 3),),
        executors=(api.ExecutorStatus(0, ("a", "b"), 1),),
        counters={"lookups": 5},
    )
    assert admin.decode_server_status(over_the_wire(admin.encode_server_status(status))) == status
    client = ClientStatus("a", Role.WORKER, True, True, 1, 1, 2**40, 1, 3)
    engines = (api.EngineStatus("f" * 16, (client,), 2, 3, False),)
    assert admin.decode_engines(over_the_wire(admin.encode_engines(engines))) == engines
    for policy in (*api.WritePolicy, None):
        spaces = (api.SpaceStatus(b"s" * 16, IDENTITY, "lora", "f" * 16, 2, 3, 2**40, 1, policy),)
        assert admin.decode_spaces(over_the_wire(admin.encode_spaces(spaces))) == spaces


def test_admin_acts() -> None:
    for target in (
        api.ClearTarget(space=SPACE),
        api.ClearTarget(model="m"),
        api.ClearTarget(cache_salt=""),
        api.ClearTarget(all=True),
    ):
        assert admin.decode_clear_request(over_the_wire(admin.encode_clear_request(target))) == target
    cleared = admin.decode_clear_response(over_the_wire(admin.encode_clear_response(Cleared(5, 2))))
    assert cleared == Cleared(5, 2)
    for bump in (("m", b""), ("", b"s" * 16)):
        assert admin.decode_bump_request(over_the_wire(admin.encode_bump_request(*bump))) == bump
    assert admin.decode_bump_response(over_the_wire(admin.encode_bump_response(Cleared(5, 0, 3)))) == Cleared(5, 0, 3)
    pin = (SPACE, tokens(1, 2), 1000)
    assert admin.decode_pin_request(over_the_wire(admin.encode_pin_request(*pin))) == pin
    assert admin.decode_warm_request(over_the_wire(admin.encode_warm_request(*pin))) == pin
    inspected = api.Inspection(
        (api.InspectedChunk(b"k" * 32, 2, 1, 4096, 3, 1), api.InspectedChunk(b"l" * 32)),
        (api.Keeper(1, 500, "0123456789abcdef", "r"), api.Keeper(1, 1, pin_id=b"p" * 16)),
        True,
        ({"disk": 2}, {}),
        4,
        ("store",),
    )
    assert admin.decode_inspect_request(over_the_wire(admin.encode_inspect_request(*pin[:2]))) == pin[:2]
    assert admin.decode_inspect_response(over_the_wire(admin.encode_inspect_response(inspected))) == inspected
    calls = api.TracedCalls((api.TracedCall(api.CallKind.STORE, 5, 1, 600, (1, 2**64 - 1), 1, 4096),), 3, 256)
    assert admin.decode_traced_calls(over_the_wire(admin.encode_traced_calls(calls))) == calls
    warmed = Warmed(512, "PREFETCH_LIMIT")
    assert admin.decode_warm_response(over_the_wire(admin.encode_warm_response(warmed))) == warmed
    held = Held(b"p" * 16, 256)
    assert admin.decode_pin_response(over_the_wire(admin.encode_pin_response(held))) == held
    assert admin.decode_unpin_request(admin_pb2.UnpinRequest(pin_id=b"p" * 16)) == b"p" * 16
    for quota in (("salt", 1 << 40), ("", None)):
        assert admin.decode_set_quota_request(over_the_wire(admin.encode_set_quota_request(*quota))) == quota
    for known in (Quota(None, 7), Quota(9, 7)):
        message = admin_pb2.GetQuotaResponse(size_bytes=known.size_bytes or 0, used_bytes=known.used_bytes)
        assert admin.decode_quota(over_the_wire(message)) == known
    assert admin.decode_get_quota_request(admin_pb2.GetQuotaRequest(cache_salt="s")) == "s"
    assert admin.decode_drain_request(admin_pb2.DrainEngineRequest(engine="f" * 16, wait_ms=5)) == ("f" * 16, 5)


def test_write_policies() -> None:
    for policy in (None, *WritePolicy):
        request = over_the_wire(admin_pb2.SetWritePolicyRequest(model="m", policy=encode_write_policy(policy)))
        assert decode_write_policy(request.policy) is policy
    with pytest.raises(Refusal):
        decode_write_policy(99)
