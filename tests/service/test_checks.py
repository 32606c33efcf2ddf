# SPDX-License-Identifier: Apache-2.0
"""The guard's checks: client id, deadlines, cancellation, request id, limits, logs."""

from __future__ import annotations

import asyncio
import io
import json
import time
from typing import Any

import grpc
import pytest
import structlog
from structlog.testing import capture_logs

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.service.calls import RULES, is_name
from kvgrpc.telemetry import log as telemetry_log
from kvgrpc.v1 import admin_pb2, cache_pb2, engine_pb2
from tests.service import asks
from tests.service.asks import refused, until
from tests.service.conftest import ENGINE, METADATA, Stubs, World

LIMIT = 256 << 10


@pytest.fixture
async def stubs(world: World) -> Stubs:
    return Stubs(world.channel(await world.start()))


def test_every_method_of_the_contract_has_a_rule() -> None:
    files = (cache_pb2.DESCRIPTOR, engine_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR)
    services = [service for file in files for service in file.services_by_name.values()]
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert set(RULES) == methods


# ---- client id ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["", " ", "two words", "a" * 65, "bell\x07"])
def test_what_is_no_client_id(value: str) -> None:
    assert not is_name(value)


@pytest.mark.parametrize("value", ["a", "a" * 64, "engine/0:worker-3_~!"])
def test_what_is_a_client_id(value: str) -> None:
    assert is_name(value)


@pytest.mark.parametrize("metadata", [(), (("kvgrpc-client-id", "a" * 65),), (("kvgrpc-client-id", "a b"),)])
async def test_without_a_client_id_nothing_reaches_the_cache(world: World, stubs: Stubs, metadata: Any) -> None:
    calls = [
        stubs.cache.Lookup(asks.lookup(), metadata=metadata),
        stubs.cache.QueryPrefetchStatus(asks.query(), metadata=metadata),
        stubs.cache.Store(asks.store(), metadata=metadata),
        stubs.cache.Retrieve(asks.retrieve(), metadata=metadata),
        stubs.cache.FreeLookupLocks(asks.free(), metadata=metadata),
        stubs.cache.EndRequest(asks.end_request(), metadata=metadata),
        stubs.cache.Fence(asks.fence(), metadata=metadata),
        stubs.engine.Attach(asks.attach(), metadata=metadata).read(),
        stubs.engine.RegisterKvCache(engine_pb2.RegisterKvCacheRequest(), metadata=metadata),
        stubs.engine.UnregisterKvCache(engine_pb2.UnregisterKvCacheRequest(engine_id=ENGINE), metadata=metadata),
    ]
    for call in calls:
        details = await refused(call)
        assert (details.code, details.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CLIENT_ID_MISSING")
        assert details.bad_request.field_violations[0].field == "kvgrpc-client-id"
    assert world.cache.seen == []


# ---- deadlines and cancellation -------------------------------------------------------------------------------------


async def test_a_call_without_a_deadline_gets_the_default(world: World) -> None:
    stubs = Stubs(world.channel(await world.start(deadline_s=0.2, copy_deadline_s=4.0)))
    world.cache.hold |= {"lookup", "retrieve"}
    start = time.monotonic()
    details = await refused(stubs.cache.Lookup(asks.lookup(), metadata=METADATA))
    short_s = time.monotonic() - start
    assert (details.code, details.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE")
    details = await refused(stubs.cache.Retrieve(asks.retrieve(), metadata=METADATA))
    long_s = time.monotonic() - start - short_s
    assert (details.code, details.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE")
    assert 0.2 <= short_s < 4.0 <= long_s < 20
    assert world.cache.cancelled == ["lookup", "retrieve"]


async def test_copies_may_have_the_shorter_default(world: World) -> None:
    stubs = Stubs(world.channel(await world.start(deadline_s=30, copy_deadline_s=0.2)))
    world.cache.hold.add("store")
    details = await refused(asyncio.wait_for(stubs.cache.Store(asks.store(), metadata=METADATA), 20))
    assert details.reason == "DEADLINE"


async def test_a_long_poll_gets_its_wait_on_top(world: World) -> None:
    stubs = Stubs(world.channel(await world.start(deadline_s=0.1)))
    world.cache.hold.add("query")
    start = time.monotonic()
    details = await refused(stubs.cache.QueryPrefetchStatus(asks.query(wait_ms=400), metadata=METADATA))
    assert details.reason == "DEADLINE"
    assert 0.5 <= time.monotonic() - start < 10


async def test_a_deadline_of_the_client_is_its_own(world: World) -> None:
    stubs = Stubs(world.channel(await world.start(deadline_s=0.1)))
    world.cache.hold.add("lookup")
    call = asyncio.ensure_future(stubs.cache.Lookup(asks.lookup(), metadata=METADATA, timeout=30))
    done, _ = await asyncio.wait({call}, timeout=0.4)
    assert not done
    world.cache.released.set()
    assert (await call).status.hit_tokens == 256


async def test_attach_has_no_deadline(world: World) -> None:
    stubs = Stubs(world.channel(await world.start(deadline_s=0.1, copy_deadline_s=0.1)))
    stream = stubs.engine.Attach(asks.attach(), metadata=METADATA)
    await stream.read()
    reading = asyncio.ensure_future(stream.read())
    done, _ = await asyncio.wait({reading}, timeout=0.4)
    assert not done
    assert world.cache.streams_open == 1


async def test_the_clients_deadline_reaches_the_cache_as_a_cancel(world: World, stubs: Stubs) -> None:
    world.cache.hold.add("store")
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await stubs.cache.Store(asks.store(), metadata=METADATA, timeout=0.2)
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: world.cache.cancelled == ["store"])


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_a_cancel_reaches_the_cache(world: World, stubs: Stubs, how: str) -> None:
    world.cache.hold.add("retrieve")
    call = stubs.cache.Retrieve(asks.retrieve(), metadata=METADATA)
    await until(lambda: "retrieve" in world.cache.entered)
    if how == "cancel":
        call.cancel()
    else:
        await stubs.channel.close()
    await until(lambda: world.cache.cancelled == ["retrieve"])


async def test_abandoned_calls_leave_nothing_behind(world: World) -> None:
    server = await world.start(running_calls=4)
    stubs = Stubs(world.channel(server))
    world.cache.hold.add("retrieve")
    for _ in range(25):
        calls = [stubs.cache.Retrieve(asks.retrieve(), metadata=METADATA, timeout=0.02) for _ in range(4)]
        await asyncio.gather(*(call.code() for call in calls))
        await until(lambda: server.traffic.limited_calls == 0)
        assert await stubs.cache.Lookup(asks.lookup(), metadata=METADATA, timeout=30)
    assert server.traffic.holding_calls == 0


# ---- limits ---------------------------------------------------------------------------------------------------------


async def test_running_calls_are_bounded_and_operators_still_see(world: World) -> None:
    stubs = Stubs(world.channel(await world.start(running_calls=3)))
    world.cache.hold.add("lookup")
    held = [asyncio.ensure_future(stubs.cache.Lookup(asks.lookup(), metadata=METADATA)) for _ in range(3)]
    await until(lambda: world.cache.entered.get("lookup") == 3)
    details = await refused(stubs.cache.Lookup(asks.lookup(), metadata=METADATA))
    assert (details.code, details.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "CALL_LIMIT")
    assert details.retry.retry_delay.ToMilliseconds() > 0
    assert await stubs.admin.GetStatus(admin_pb2.GetStatusRequest())
    world.cache.released.set()
    await asyncio.gather(*held)
    assert await stubs.cache.Lookup(asks.lookup(), metadata=METADATA)


async def test_a_message_beyond_the_limit_is_refused_naming_it(world: World) -> None:
    server = await world.start(message_bytes=LIMIT, listen=("127.0.0.1:0",))
    stubs = Stubs(world.channel(server))
    other = Stubs(world.channel(server, at=1))
    call = stubs.channel.unary_unary("/kvgrpc.v1.KvCacheService/Lookup")
    request = asks.lookup().SerializeToString()
    request += b"\xf8\x3f\x01" * ((LIMIT - len(request)) % 2)  # an unknown field of three bytes makes it even
    at_limit = request + b"\x18\x00" * ((LIMIT - len(request)) // 2)  # attempt = 0, again and again
    assert len(at_limit) == LIMIT
    assert await call(at_limit, metadata=METADATA)
    details = await refused(call(at_limit + b"\x18", metadata=METADATA))
    assert (details.code, details.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
    assert str(LIMIT) in details.text
    with pytest.raises(grpc.aio.AioRpcError) as failed:  # far beyond: gRPC itself, before the memory is taken
        await call(bytes(LIMIT + (8 << 20)), metadata=METADATA)
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in (failed.value.details() or "")
    assert await stubs.cache.Lookup(asks.lookup(), metadata=METADATA)
    assert await other.cache.Lookup(asks.lookup(), metadata=METADATA)


async def test_two_million_tokens_fit_the_default_limit(world: World, stubs: Stubs) -> None:
    content = asks.tokens(2_000_000)
    assert await stubs.cache.Lookup(asks.lookup(content=content), metadata=METADATA)
    assert world.cache.seen[0][2].content.num_tokens == 2_000_000


# ---- request ids and logs -------------------------------------------------------------------------------------------


async def test_request_ids_are_echoed_or_made(stubs: Stubs) -> None:
    async def request_id(*metadata: tuple[str, str]) -> Any:
        call = stubs.cache.Lookup(asks.lookup(), metadata=(*METADATA, *metadata))
        await call
        return dict(await call.trailing_metadata())["kvgrpc-request-id"]

    assert await request_id(("kvgrpc-request-id", "abc-1")) == "abc-1"
    made = {await request_id(), await request_id(), await request_id(("kvgrpc-request-id", "a b"))}
    assert len(made) == 3
    stream = stubs.engine.Attach(asks.attach(), metadata=(*METADATA, ("kvgrpc-request-id", "s1")))
    await stream.read()
    assert dict(await stream.initial_metadata())["kvgrpc-request-id"] == "s1"


async def test_refusals_carry_the_request_id(world: World, stubs: Stubs) -> None:
    world.cache.raises["lookup"] = Refusal(Reason.SPACE_UNKNOWN, "no such space")
    metadata = (*METADATA, ("kvgrpc-request-id", "abc-2"))
    assert (await refused(stubs.cache.Lookup(asks.lookup(), metadata=metadata))).request_id == "abc-2"


async def test_one_line_a_call_and_no_secret_in_it(world: World, stubs: Stubs) -> None:
    world.cache.raises["store"] = Refusal(Reason.ENGINE_UNKNOWN, f"engine {ENGINE} of tenant salt-of-tenant")
    space = {"space_base": b"s" * 16, "cache_salt": "salt-of-tenant"}
    with capture_logs() as lines:
        await stubs.cache.Lookup(asks.lookup(space=space), metadata=METADATA)
        await refused(stubs.cache.Store(asks.store(space=space), metadata=METADATA))
    assert [(line["log_level"], line["method"]) for line in lines] == [
        ("debug", "KvCacheService/Lookup"),
        ("warning", "KvCacheService/Store"),
    ]
    assert lines[1]["reason"] == "ENGINE_UNKNOWN"
    assert lines[1]["client_id"] == "worker-0"
    assert ENGINE not in str(lines)
    assert "salt-of-tenant" not in str(lines)


@pytest.mark.parametrize("form", ["json", "console"])
def test_log_lines_hide_secrets_and_local_variables(form: str) -> None:
    out = io.StringIO()
    old = structlog.get_config()
    try:
        telemetry_log.configure("info", form, out)
        telemetry_log.REQUEST_ID.set("req-9")
        log = telemetry_log.logger("test")
        log.debug("not shown")
        log.info("attached", engine_id=ENGINE, cache_salt="salt-of-tenant")
        try:
            prompt = "what the user typed"
            raise ValueError(len(prompt))
        except ValueError:
            log.error("failed", exc_info=True)
    finally:
        structlog.configure(**old)
        telemetry_log.REQUEST_ID.set("")
    text = out.getvalue()
    assert "not shown" not in text
    assert telemetry_log.fingerprint(ENGINE) in text
    assert text.count("req-9") == 2
    assert "ValueError" in text
    for secret in (ENGINE, "salt-of-tenant", "what the user typed"):
        assert secret not in text
    if form == "json":
        assert [json.loads(line)["event"] for line in text.splitlines()] == ["attached", "failed"]


@pytest.mark.parametrize("wrong", [{"level": "loud"}, {"form": "xml"}])
def test_unknown_log_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong.values()))):
        telemetry_log.configure(**wrong)
