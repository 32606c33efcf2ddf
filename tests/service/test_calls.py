# SPDX-License-Identifier: Apache-2.0
"""Every method end to end over real channels: what reaches the cache, what comes back, and how refusals look."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from kvgrpc import api
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import Role
from kvgrpc.v1 import admin_pb2, cache_pb2, engine_pb2
from tests.service import asks
from tests.service.asks import refused, until
from tests.service.conftest import ENGINE, METADATA, Stubs, World
from tests.service.fakes import EPOCH


@pytest.fixture(params=["unix", "tcp"])
async def stubs(world: World, request: pytest.FixtureRequest) -> Stubs:
    server = await world.start(listen=("127.0.0.1:0",))
    return Stubs(world.channel(server, at=["unix", "tcp"].index(request.param)))


async def test_cache_methods_reach_the_named_client(world: World, stubs: Stubs) -> None:
    found = await stubs.cache.Lookup(asks.lookup(), metadata=METADATA)
    assert (found.job_id, found.status.hit_tokens, found.status.pinned) == (EPOCH, 256, True)
    status = (await stubs.cache.QueryPrefetchStatus(asks.query(), metadata=METADATA)).status
    assert status.state == cache_pb2.PrefetchStatus.STATE_PENDING
    stored = await stubs.cache.Store(asks.store(), metadata=METADATA)
    assert [(r.first_chunk, r.count, r.outcome) for r in stored.results] == [(0, 2, cache_pb2.CHUNK_OUTCOME_STORED)]
    loaded = await stubs.cache.Retrieve(asks.retrieve(), metadata=METADATA)
    assert [r.outcome for r in loaded.results] == [cache_pb2.CHUNK_OUTCOME_LOADED, cache_pb2.CHUNK_OUTCOME_MISSING]
    assert (await stubs.cache.FreeLookupLocks(asks.free(), metadata=METADATA)).released_pins == 3
    assert (await stubs.cache.EndRequest(asks.end_request(), metadata=METADATA)).ended_jobs == 1
    await stubs.cache.Fence(asks.fence(), metadata=METADATA)
    assert {client for client, _, _ in world.cache.seen} == {"worker-0"}
    verbs = [verb for _, verb, _ in world.cache.seen]
    assert verbs == ["lookup", "query", "store", "retrieve", "free", "end_request", "fence"]
    content = world.cache.seen[0][2].content
    assert isinstance(content, api.Tokens)
    assert list(memoryview(content.data).cast("I")) == list(range(512))


async def test_engine_methods(world: World, stubs: Stubs) -> None:
    hello = await stubs.engine.Handshake(engine_pb2.HandshakeRequest(protocol_major=1, client_version="go 1"))
    assert (hello.server_epoch, hello.chunk_tokens, hello.limits.keys_per_call) == (EPOCH, 256, 16384)
    await stubs.engine.UnregisterKvCache(engine_pb2.UnregisterKvCacheRequest(engine_id=ENGINE), metadata=METADATA)
    assert world.cache.seen[-1] == ("worker-0", "unregister", ENGINE)
    details = await refused(stubs.engine.RegisterKvCache(engine_pb2.RegisterKvCacheRequest(), metadata=METADATA))
    assert details.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_admin_methods_need_no_client(stubs: Stubs) -> None:
    status = await stubs.admin.GetStatus(admin_pb2.GetStatusRequest())
    assert (status.server_version, status.chunks, status.draining) == ("0.1", 1, False)
    assert (await stubs.admin.ListEngines(admin_pb2.ListEnginesRequest())).engines[0].engine == "0123456789abcdef"
    assert not (await stubs.admin.ListSpaces(admin_pb2.ListSpacesRequest())).spaces
    assert (await stubs.admin.Clear(admin_pb2.ClearRequest(all=True))).removed_chunks == 7
    assert (await stubs.admin.BumpGeneration(admin_pb2.BumpGenerationRequest(model="m"))).generation == 9
    pinned = await stubs.admin.Pin(admin_pb2.PinRequest(space=asks.SPACE, content=asks.tokens(512), ttl_ms=1))
    assert pinned.pinned_tokens == 512
    assert (await stubs.admin.Unpin(admin_pb2.UnpinRequest(pin_id=EPOCH))).released_chunks == 2
    assert (await stubs.admin.SetQuota(admin_pb2.SetQuotaRequest(size_bytes=5))).size_bytes == 5
    quota = await stubs.admin.GetQuota(admin_pb2.GetQuotaRequest(cache_salt="s"))
    assert (quota.size_bytes, quota.used_bytes) == (0, 3)
    asked = admin_pb2.SetWritePolicyRequest(model="m", policy=admin_pb2.WRITE_POLICY_NONE)
    assert (await stubs.admin.SetWritePolicy(asked)).policy == admin_pb2.WRITE_POLICY_NONE
    unset = await stubs.admin.SetWritePolicy(admin_pb2.SetWritePolicyRequest())
    assert unset.policy == admin_pb2.WRITE_POLICY_EVICTION
    assert (await stubs.admin.DrainEngine(admin_pb2.DrainEngineRequest(engine=ENGINE))).drained


async def test_attach_confirms_first_and_passes_events(world: World, stubs: Stubs) -> None:
    stream: Any = stubs.engine.Attach(asks.attach(), metadata=METADATA)
    first = await stream.read()
    assert first.attached.server_epoch == EPOCH
    assert world.cache.seen == [("worker-0", "attach", (ENGINE, Role.WORKER, b"t" * 16))]
    world.cache.events["worker-0"].put_nowait(api.AttachEvent(True, reason="the engine is being drained"))
    assert (await stream.read()).draining.reason == "the engine is being drained"
    world.cache.events["worker-0"].put_nowait(None)
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK
    assert world.cache.streams_open == 0


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_the_session_is_closed_when_the_stream_breaks(world: World, stubs: Stubs, how: str) -> None:
    stream: Any = stubs.engine.Attach(asks.attach(), metadata=METADATA)
    await stream.read()
    assert world.cache.streams_open == 1
    if how == "cancel":
        stream.cancel()
    else:
        await stubs.channel.close()
    await until(lambda: world.cache.streams_open == 0)


async def test_the_session_of_a_peer_that_reads_nothing_is_closed_when_it_leaves(world: World, stubs: Stubs) -> None:
    stream: Any = stubs.engine.Attach(asks.attach(), metadata=METADATA)
    await stream.read()
    events = world.cache.events["worker-0"]
    for _ in range(200):
        events.put_nowait(api.AttachEvent(True, reason="r" * 100_000))
    await until(lambda: events.qsize() < 200)
    await asyncio.wait_for(stubs.cache.QueryPrefetchStatus(asks.query(), metadata=METADATA), 30)
    assert events.qsize() > 0
    await stubs.channel.close()
    await until(lambda: world.cache.streams_open == 0)


async def test_a_refused_attach_carries_details(world: World, stubs: Stubs) -> None:
    world.cache.raises["attach"] = Refusal(Reason.CLIENT_EXISTS, "another process has this client id")
    details = await refused(stubs.engine.Attach(asks.attach(), metadata=METADATA).read())
    assert (details.code, details.reason) == (grpc.StatusCode.ALREADY_EXISTS, "CLIENT_EXISTS")


async def test_all_details_of_a_refusal_arrive(world: World, stubs: Stubs) -> None:
    world.cache.raises["lookup"] = Refusal(
        Reason.JOB_LIMIT, "the engine has 4096 jobs", field="request_id", retry_after_ms=1500, resource="jobs"
    )
    details = await refused(stubs.cache.Lookup(asks.lookup(), metadata=METADATA))
    assert (details.code, details.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "JOB_LIMIT")
    assert details.text == "the engine has 4096 jobs"
    assert details.bad_request.field_violations[0].field == "request_id"
    assert details.retry.retry_delay.ToMilliseconds() == 1500
    assert details.resource.resource_name == "jobs"


async def test_a_plain_refusal_has_the_error_info_only(world: World, stubs: Stubs) -> None:
    world.cache.raises["query"] = Refusal(Reason.JOB_UNKNOWN, "no such job")
    details = await refused(stubs.cache.QueryPrefetchStatus(asks.query(), metadata=METADATA))
    assert (details.code, details.reason) == (grpc.StatusCode.NOT_FOUND, "JOB_UNKNOWN")
    assert len(details.status.details) == 1


async def test_a_long_message_still_fits_the_trailers(world: World, stubs: Stubs) -> None:
    world.cache.raises["lookup"] = Refusal(Reason.INVALID_FIELD, "lang" * 5000, field="model")
    details = await refused(stubs.cache.Lookup(asks.lookup(), metadata=METADATA))
    assert details.reason == "INVALID_FIELD"
    assert details.text.startswith("langlang")


async def test_a_bug_is_internal_and_shows_nothing_to_the_peer(world: World, stubs: Stubs) -> None:
    world.cache.raises["store"] = KeyError("secret salt")
    metadata = (*METADATA, ("kvgrpc-request-id", "trace-7"))
    with capture_logs() as lines:
        details = await refused(stubs.cache.Store(asks.store(), metadata=metadata))
    assert (details.code, details.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "trace-7" in details.text
    assert "secret" not in str(details.status)
    assert "KeyError" not in str(details.status)
    failed = [line for line in lines if line["log_level"] == "error"]
    assert [line["request_id"] for line in failed] == ["trace-7"]
    assert failed[0]["exc_info"]
    del world.cache.raises["store"]
    await stubs.cache.Store(asks.store(), metadata=METADATA)


async def test_what_is_no_message_is_refused_by_name(stubs: Stubs) -> None:
    call = stubs.channel.unary_unary("/kvgrpc.v1.KvCacheService/Lookup")
    details = await refused(call(b"\x0a\xff\xff", metadata=METADATA))
    assert (details.code, details.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")


async def test_unknown_fields_of_newer_clients_are_ignored(stubs: Stubs) -> None:
    call = stubs.channel.unary_unary("/kvgrpc.v1.KvCacheService/Lookup")
    unknown = b"\xf8\x3f\x01"  # field 1023, varint 1
    assert await call(asks.lookup().SerializeToString() + unknown, metadata=METADATA)


async def test_unknown_methods_are_unimplemented(stubs: Stubs) -> None:
    for method in ("/kvgrpc.v1.KvCacheService/Nothing", "/kvgrpc.v1.Nothing/Lookup"):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stubs.channel.unary_unary(method)(b"", metadata=METADATA)
        assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_one_stuck_call_does_not_hold_others(world: World, stubs: Stubs) -> None:
    world.cache.hold.add("store")
    stuck = [asyncio.ensure_future(stubs.cache.Store(asks.store(), metadata=METADATA)) for _ in range(50)]
    await until(lambda: world.cache.entered.get("store") == 50)
    for _ in range(20):
        await asyncio.wait_for(stubs.cache.QueryPrefetchStatus(asks.query(), metadata=METADATA), 10)
    world.cache.released.set()
    await asyncio.gather(*stuck)
