# SPDX-License-Identifier: Apache-2.0
"""The end of a server: what is told, refused, answered and awaited, and what signals do."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvgrpc.service.server import Server, ServerOptions, run
from kvgrpc.v1 import admin_pb2, engine_pb2
from tests.service import asks
from tests.service.asks import refused, until
from tests.service.conftest import ENGINE, METADATA, Stubs, World
from tests.service.test_server import SERVICES, serving_process

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_drain_from_its_begin_to_its_end(world: World) -> None:
    server = await world.start()
    stubs = Stubs(world.channel(server))
    health: Any = health_pb2_grpc.HealthStub(stubs.channel)
    session: Any = stubs.engine.Attach(asks.attach(), metadata=METADATA)
    assert (await session.read()).attached.server_epoch
    world.cache.hold.add("retrieve")
    running = asyncio.ensure_future(stubs.cache.Retrieve(asks.retrieve(), metadata=METADATA))
    await until(lambda: "retrieve" in world.cache.entered)

    drain = asyncio.ensure_future(server.drain())
    assert (await asyncio.wait_for(session.read(), 10)).draining.reason

    statuses = {
        name: (await health.Check(health_pb2.HealthCheckRequest(service=name))).status
        for name in ["", "readiness", "liveness", *SERVICES]
    }
    assert statuses.pop("liveness") == SERVING
    assert set(statuses.values()) == {NOT_SERVING}

    new = [
        stubs.cache.Lookup(asks.lookup(), metadata=METADATA),
        stubs.cache.Store(asks.store(), metadata=METADATA),
        stubs.cache.Retrieve(asks.retrieve(), metadata=METADATA),
        stubs.engine.Handshake(engine_pb2.HandshakeRequest()),
        stubs.engine.Attach(asks.attach(), metadata=(("kvgrpc-client-id", "late"),)).read(),
        stubs.admin.Clear(admin_pb2.ClearRequest(all=True)),
    ]
    for call in new:
        details = await refused(call)
        assert (details.code, details.reason) == (grpc.StatusCode.UNAVAILABLE, "SERVER_DRAINING")
        assert details.retry.retry_delay.ToMilliseconds() > 0
    await stubs.cache.QueryPrefetchStatus(asks.query(), metadata=METADATA)
    await stubs.cache.FreeLookupLocks(asks.free(), metadata=METADATA)
    await stubs.cache.EndRequest(asks.end_request(), metadata=METADATA)
    await stubs.cache.Fence(asks.fence(), metadata=METADATA)
    await stubs.engine.UnregisterKvCache(engine_pb2.UnregisterKvCacheRequest(engine_id=ENGINE), metadata=METADATA)
    assert (await stubs.admin.GetStatus(admin_pb2.GetStatusRequest())).draining

    assert not drain.done()
    assert world.cache.streams_open == 1
    world.cache.released.set()
    assert len((await running).results) == 2
    await asyncio.wait_for(drain, 10)
    assert await session.read() is grpc.aio.EOF
    assert world.cache.streams_open == 0
    assert not world.socket.exists()
    await asyncio.wait_for(server.wait(), 10)


async def test_an_idle_server_drains_at_once_whoever_is_attached_or_polls(world: World) -> None:
    server = await world.start()
    stubs = Stubs(world.channel(server))
    session: Any = stubs.engine.Attach(asks.attach(), metadata=METADATA)
    await session.read()
    world.cache.hold.add("query")
    poll = asyncio.ensure_future(stubs.cache.QueryPrefetchStatus(asks.query(wait_ms=60_000), metadata=METADATA))
    await until(lambda: "query" in world.cache.entered)
    start = time.monotonic()
    await server.drain()
    assert time.monotonic() - start < 10
    assert (await session.read()).draining.reason
    with pytest.raises(grpc.aio.AioRpcError):
        await poll


async def test_calls_that_outlive_the_drain_time_are_cancelled(world: World) -> None:
    server = await world.start()
    stubs = Stubs(world.channel(server))
    world.cache.hold.add("store")
    running = asyncio.ensure_future(stubs.cache.Store(asks.store(), metadata=METADATA))
    await until(lambda: "store" in world.cache.entered)
    start = time.monotonic()
    await server.drain(0.3)
    assert 0.3 <= time.monotonic() - start < 10
    with pytest.raises(grpc.aio.AioRpcError):
        await running
    assert world.cache.cancelled == ["store"]


async def test_draining_never_comes_before_the_session_is_confirmed(world: World) -> None:
    server = await world.start()
    stubs = Stubs(world.channel(server))
    world.cache.hold |= {"attach", "store"}
    session: Any = stubs.engine.Attach(asks.attach(), metadata=METADATA)
    running = asyncio.ensure_future(stubs.cache.Store(asks.store(), metadata=METADATA))
    await until(lambda: {"attach", "store"} <= set(world.cache.entered))
    drain = asyncio.ensure_future(server.drain())
    await until(server.traffic.draining.is_set)
    world.cache.released.set()
    kinds: list[Any] = [message.WhichOneof("event") async for message in session]
    assert kinds[0] == "attached"
    await asyncio.gather(running, drain)


async def test_after_a_stop_nobody_calls_the_cache(world: World) -> None:
    server = await world.start()
    stubs = Stubs(world.channel(server))
    world.cache.hold.add("store")
    session: Any = stubs.engine.Attach(asks.attach(), metadata=METADATA)
    await session.read()
    calls = [asyncio.ensure_future(stubs.cache.Store(asks.store(), metadata=METADATA)) for _ in range(20)]
    await until(lambda: world.cache.entered.get("store") == 20)
    await server.stop()
    assert world.cache.streams_open == 0
    assert len(world.cache.cancelled) == 20
    await asyncio.gather(*calls, return_exceptions=True)


async def test_a_second_drain_or_stop_is_harmless(world: World) -> None:
    server = await world.start()
    await asyncio.gather(server.drain(), server.stop())
    await server.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_the_process(world: World, number: signal.Signals) -> None:
    child = await serving_process(world)
    async with grpc.aio.insecure_channel(f"unix:{world.socket}") as channel:
        session: Any = Stubs(channel).engine.Attach(asks.attach(), metadata=METADATA)
        await session.read()
        child.send_signal(number)
        assert (await asyncio.wait_for(session.read(), 30)).draining.reason
    assert await asyncio.wait_for(child.wait(), 30) == 0
    assert not world.socket.exists()


async def test_a_second_signal_stops_at_once(world: World) -> None:
    child = await serving_process(world, "store")
    async with grpc.aio.insecure_channel(f"unix:{world.socket}") as channel:
        stubs = Stubs(channel)
        session: Any = stubs.engine.Attach(asks.attach(), metadata=METADATA)
        await session.read()
        running = asyncio.ensure_future(stubs.cache.Store(asks.store(), metadata=METADATA))
        await until_running(stubs)
        start = time.monotonic()
        child.send_signal(signal.SIGTERM)
        assert (await asyncio.wait_for(session.read(), 30)).draining.reason
        assert child.returncode is None
        child.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(child.wait(), 30) == 0
        assert time.monotonic() - start < 20, "it waited for the call"
        with pytest.raises(grpc.aio.AioRpcError):
            await running


async def until_running(stubs: Stubs) -> None:
    """A call that was sent before on the same connection has reached the server when a later one is answered."""
    await stubs.cache.EndRequest(asks.end_request(), metadata=METADATA)


async def test_a_second_signal_does_not_give_the_socket_up_before_the_last_copy(world: World) -> None:
    """Or the next server under this path starts, and clients take that for the end of this one's copies."""
    entered, copied = asyncio.Event(), asyncio.Event()

    async def at_rest() -> None:
        entered.set()
        await copied.wait()

    server = Server(ServerOptions(socket=world.socket), world.cache.client, world.cache, at_rest=at_rest)
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    started = asyncio.Event()
    running = asyncio.ensure_future(run(server, started.set, signals))
    await started.wait()
    signals.put_nowait(signal.SIGTERM)
    await asyncio.wait_for(entered.wait(), 10)
    entered.clear()
    signals.put_nowait(signal.SIGTERM)
    await asyncio.wait_for(entered.wait(), 10)  # the stop waits for it anew
    lock = os.open(f"{world.socket}.lock", os.O_RDWR)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert not running.done()
    finally:
        os.close(lock)
        copied.set()
    await asyncio.wait_for(running, 10)
