# SPDX-License-Identifier: Apache-2.0
"""Locks of lookups end, whatever becomes of the request; sessions that idle, break or are forgotten."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kvgrpc import api
from kvgrpc.core.errors import Refusal
from kvgrpc.core.types import MS, ChunkOutcome, CoreLimits, LookupAnswer, Role, S, TokenRange
from kvgrpc.runtime.clock import ManualClock
from kvgrpc.v1 import cache_pb2_grpc
from kvgrpc.wire.cache import encode_retrieve_request
from tests.e2e.harness import BLOCK, CHUNK, Engine, LocalServer, local_server, outcomes, tokens_of, until
from tests.e2e.probes import TINY, counters, fill_twice, mapped, refused

CHUNKS = 8
TOKENS = CHUNKS * CHUNK
BLOCKS = list(range(0, 64, 2))
L1_BYTES = 64 * CHUNK * TINY.token_bytes
LIMITS = CoreLimits(chunk_tokens=CHUNK, page_bytes=1024)


# ---- field report 11 ------------------------------------------------------------------------------------------------


async def free_all(server: LocalServer, engine: Engine, answer: LookupAnswer) -> None:
    assert await engine.free(answer) == CHUNKS
    assert await engine.free(answer) == 0, "a repeat changes nothing"


async def close_the_channel(server: LocalServer, engine: Engine, answer: LookupAnswer) -> None:
    waiting = asyncio.ensure_future(engine.lookup(tokens_of(1, TOKENS), request_id="cancelled"))
    waiting.cancel()
    await engine.scheduler.close()
    await until(lambda: server.book.counts().pins == 0, what="the end of the session")


async def free_some_and_retrieve_the_rest(server: LocalServer, engine: Engine, answer: LookupAnswer) -> None:
    assert await engine.free(answer, range=TokenRange(0, 3 * CHUNK)) == 3
    rest = TokenRange(3 * CHUNK, TOKENS)
    engine.image.memory[:] = 0xA5
    request = engine.retrieve_request(answer.job_id, BLOCKS[3 * CHUNK // BLOCK :], range=rest)
    assert outcomes(await engine.worker.retrieve(request)) == ["LOADED"] * 5
    assert engine.image.wrong_tokens(BLOCKS[3 * CHUNK // BLOCK :], 3 * CHUNK) == []


async def end_the_request(server: LocalServer, engine: Engine, answer: LookupAnswer) -> None:
    ended = await engine.scheduler.end_request(engine.engine_id, "the request")
    assert (ended.ended_jobs, ended.released_pins) == (1, CHUNKS)
    again = await engine.scheduler.end_request(engine.engine_id, "the request")
    assert (again.ended_jobs, again.released_pins) == (0, 0)


Release = Callable[[LocalServer, Engine, LookupAnswer], Awaitable[None]]


@pytest.mark.parametrize(
    "release", [free_all, close_the_channel, free_some_and_retrieve_the_rest, end_the_request], ids=lambda r: r.__name__
)
async def test_locks_end_with_the_request(tmp_path: Path, release: Release) -> None:
    """Field report 11, (a) to (c): 8 chunks survive a fill of twice L1 while locked, and none once released."""
    async with local_server(tmp_path, l1_bytes=L1_BYTES, limits=LIMITS) as server:
        engine, other = await server.engine(kv=TINY), await server.engine(kv=TINY)
        tokens = tokens_of(1, TOKENS)
        await engine.store(tokens, BLOCKS)
        answer = await engine.lookup(tokens, request_id="the request")
        assert answer.status.hit_tokens == TOKENS
        await fill_twice(server, other)
        assert await other.hits(tokens) == CHUNKS
        await release(server, engine, answer)
        assert server.book.counts().pins == 0
        await fill_twice(server, other)
        assert await other.hits(tokens) == 0
        server.check()


async def test_locks_end_with_their_time(tmp_path: Path) -> None:
    """Field report 11, (d): nobody does anything; the chunks are evictable when the lease is over, not before."""
    clock = ManualClock()
    async with local_server(tmp_path, l1_bytes=L1_BYTES, limits=LIMITS, clock=clock) as server:
        engine, other = await server.engine(kv=TINY), await server.engine(kv=TINY)
        tokens = tokens_of(1, TOKENS)
        await engine.store(tokens, BLOCKS)
        answer = await engine.lookup(tokens)
        clock.advance(LIMITS.lease_ns - MS)
        server.driver.tick()
        await fill_twice(server, other)
        assert await other.hits(tokens) == CHUNKS
        clock.advance(MS)
        server.driver.tick()
        assert server.book.counts().pins == 0
        await fill_twice(server, other)
        assert await other.hits(tokens) == 0
        # the record outlives its pins: what is gone is missing by name, and nothing is written
        engine.image.memory[:] = 0xA5
        late = await engine.worker.retrieve(engine.retrieve_request(answer.job_id, BLOCKS))
        assert {result.outcome for result in late} <= {ChunkOutcome.MISSING, ChunkOutcome.FAILED}
        assert engine.image.untouched()
        clock.advance(LIMITS.record_ns)
        server.driver.tick()
        assert server.book.counts().jobs == 0


@pytest.mark.parametrize("way", ["the scheduler dies", "the request ends", "the lease ends"])
async def test_running_retrieve_keeps_what_it_reads(tmp_path: Path, way: str) -> None:
    """A lock that ends while a copy still reads: the chunks stay until the copy has ended, and it ends right."""
    clock = ManualClock()
    limits = CoreLimits(chunk_tokens=CHUNK, page_bytes=1024, slice_bytes=CHUNK * TINY.token_bytes)
    async with local_server(tmp_path, l1_bytes=L1_BYTES, limits=limits, clock=clock) as server:
        engine, other = await server.engine(kv=TINY), await server.engine(kv=TINY)
        tokens = tokens_of(1, TOKENS)
        await engine.store(tokens, BLOCKS)
        answer = await engine.lookup(tokens, request_id="r")
        gate = server.gates.hold(20, client_id=engine.worker.client_id)
        running = asyncio.ensure_future(engine.retrieve(answer, BLOCKS))
        assert await asyncio.to_thread(gate.wait_reached, 10)
        if way == "the scheduler dies":
            await engine.streams[1].close()
            await until(lambda: bool(server.book.sessions.broken), what="the break to be seen")
            clock.advance(limits.reattach_grace_ns)
        elif way == "the request ends":
            assert (await engine.scheduler.end_request(engine.engine_id, "r")).ended_jobs == 1
        else:
            clock.advance(limits.lease_ns)
        server.driver.tick()
        assert server.book.counts().pins == 0
        await fill_twice(server, other)
        gate.release()
        assert outcomes(await running) == ["LOADED"] * CHUNKS
        assert engine.image.wrong_tokens(BLOCKS) == []
        assert engine.image.untouched(BLOCKS)
        server.check()
        await fill_twice(server, other)
        assert await other.hits(tokens) == 0


# ---- field report 25 ------------------------------------------------------------------------------------------------


async def test_idle_worker_works_for_ever(tmp_path: Path) -> None:
    """Field report 25: a worker that registered and then idled for an hour stores and retrieves."""
    clock = ManualClock()
    async with local_server(tmp_path, limits=LIMITS, clock=clock) as server:
        engine = await server.engine(kv=TINY)
        for _ in range(60):
            clock.advance(60 * S)
            server.driver.tick()
        tokens = tokens_of(1, TOKENS)
        assert outcomes(await engine.store(tokens, BLOCKS)) == ["STORED"] * CHUNKS
        assert outcomes(await engine.retrieve(await engine.lookup(tokens), BLOCKS)) == ["LOADED"] * CHUNKS
        assert engine.image.wrong_tokens(BLOCKS) == []


async def test_forgotten_worker_is_told_at_once(tmp_path: Path) -> None:
    """Field report 25: after its session was ended every call says so by name, and in under 100 ms; once the worker
    has registered again it works."""
    async with local_server(tmp_path, limits=LIMITS) as server:
        engine = await server.engine(kv=TINY)
        tokens = tokens_of(1, TOKENS)
        await engine.store(tokens, BLOCKS)
        answer = await engine.lookup(tokens)
        await engine.streams[0].close()
        await until(lambda: engine.worker.client_id not in server.book.sessions.clients, what="the end of the session")
        times: list[float] = []
        for _ in range(20):
            for call in (
                engine.worker.retrieve(engine.retrieve_request(answer.job_id, BLOCKS)),
                engine.worker.store(engine.store_request(tokens, BLOCKS)),
            ):
                started = time.monotonic()
                assert (await refused(call))[:2] == ("FAILED_PRECONDITION", "NOT_ATTACHED")
                times.append(time.monotonic() - started)
        assert sorted(times)[20] < 0.25
        await server.attach(engine.worker, engine.engine_id, Role.WORKER)
        before = await refused(engine.worker.store(engine.store_request(tokens, BLOCKS)))
        assert before[:2] == ("FAILED_PRECONDITION", "NOT_REGISTERED")
        await engine.worker.register(engine.registration())
        assert outcomes(await engine.retrieve(answer, BLOCKS)) == ["LOADED"] * CHUNKS
        assert engine.image.wrong_tokens(BLOCKS) == []


async def test_no_call_lasts_longer_than_the_servers_own_limit(tmp_path: Path) -> None:
    """Field report 25: a client without a deadline of its own gets the server's."""
    async with local_server(tmp_path, limits=LIMITS, copy_deadline_s=0.3) as server:
        engine = await server.engine(kv=TINY)
        await engine.store(tokens_of(1, TOKENS), BLOCKS)
        answer = await engine.lookup(tokens_of(1, TOKENS))
        gate = server.gates.hold(0)
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub: Any = cache_pb2_grpc.KvCacheServiceStub(channel)
            message = encode_retrieve_request(engine.retrieve_request(answer.job_id, BLOCKS))
            started = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await stub.Retrieve(message, metadata=(("kvgrpc-client-id", engine.worker.client_id),))
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert 0.25 < time.monotonic() - started < 10
        gate.release()


async def test_session_that_comes_back_in_its_grace_is_the_same(tmp_path: Path) -> None:
    """A stream that broke and was opened again: registration, leases and calls are still there."""
    async with local_server(tmp_path, limits=replace(LIMITS, reattach_grace_ns=60 * S)) as server:
        engine = await server.engine(kv=TINY)
        tokens = tokens_of(1, TOKENS)
        await engine.store(tokens, BLOCKS)
        answer = await engine.lookup(tokens)
        for stream, client, role in (
            (engine.streams[0], engine.worker, Role.WORKER),
            (engine.streams[1], engine.scheduler, Role.SCHEDULER),
        ):
            await stream.close()
            again = await server.attach(client, engine.engine_id, role, stream.session_id)
            assert again.events == [api.AttachEvent(False, server.driver.facts.server_epoch, resumed=True)]
        assert server.book.counts().pins == CHUNKS
        assert outcomes(await engine.retrieve(answer, BLOCKS)) == ["LOADED"] * CHUNKS
        assert (await counters(server)).get("ended_sessions", 0) == 0


# ---- field report 54 ------------------------------------------------------------------------------------------------


async def threads_of(server: LocalServer) -> dict[str, int]:
    engines = await (await server.admin()).list_engines()
    return {client.client_id: client.thread for engine in engines for client in engine.clients}


async def test_clients_have_threads_of_their_own(tmp_path: Path) -> None:
    """Field report 54: 8 workers on 8 threads, as an operator sees them; a copy that is held is nobody else's delay."""
    async with local_server(tmp_path, limits=LIMITS, workers=8) as server:
        engines = [await server.engine(kv=TINY, scheduler=False) for _ in range(8)]
        assert sorted((await threads_of(server)).values()) == list(range(8))
        gate = server.gates.hold(0, client_id=engines[0].worker.client_id)
        held = asyncio.ensure_future(engines[0].store(tokens_of(100, TOKENS), BLOCKS))
        assert await asyncio.to_thread(gate.wait_reached, 10)

        async def work(number: int, engine: Engine) -> None:
            for at in range(10):
                tokens = tokens_of(1000 * number + at, CHUNK)
                assert outcomes(await engine.store(tokens, BLOCKS[:4])) == ["STORED"]

        await asyncio.gather(*(work(number, engine) for number, engine in enumerate(engines) if number))
        assert not held.done()
        gate.release()
        assert outcomes(await held) == ["STORED"] * CHUNKS


async def test_schedulers_take_no_thread(tmp_path: Path) -> None:
    """Field report 54: as many engines as threads, each with a scheduler that copies nothing: no two workers share."""
    async with local_server(tmp_path, limits=LIMITS, workers=4) as server:
        engines = [await server.engine(kv=TINY) for _ in range(4)]
        threads = await threads_of(server)
        assert sorted(threads[engine.worker.client_id] for engine in engines) == [0, 1, 2, 3]
        register = engines[0].scheduler.register(engines[0].registration())
        assert (await refused(register))[:2] == ("INVALID_ARGUMENT", "INVALID_FIELD")
        lanes = server.driver.hands.affinity.lanes()
        assert [(len(clients), queued) for _, clients, queued in lanes] == [(1, 0)] * 4


async def test_register_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    """A Register whose deadline passes while it waits for the client's thread: no mapping and no work stays."""
    async with local_server(tmp_path, limits=LIMITS, workers=1) as server:
        engine, other = await server.engine(kv=TINY), await server.engine(kv=TINY, num_blocks=128)
        gate = server.gates.hold(0, client_id=engine.worker.client_id)
        held = asyncio.ensure_future(engine.store(tokens_of(1, TOKENS), BLOCKS))
        assert await asyncio.to_thread(gate.wait_reached, 10)
        for _ in range(3):
            with pytest.raises(Refusal):
                await other.worker.register(other.registration(), timeout_s=0.1)
        gate.release()
        await held
        lanes = server.driver.hands.affinity.lanes
        await until(lambda: [queued for _, _, queued in lanes()] == [0], what="the end of all work")
        await until(lambda: mapped(server) == 2, what="the end of the mappings")
        assert outcomes(await other.store(tokens_of(2, TOKENS), BLOCKS)) == ["STORED"] * CHUNKS


async def test_threads_are_shared_evenly_and_given_back(tmp_path: Path) -> None:
    """Field report 54: 64 clients on 8 threads are 8 each; hundreds that came and went leave no trace."""
    limits = CoreLimits(chunk_tokens=CHUNK, page_bytes=1024, reattach_grace_ns=20 * MS)
    async with local_server(tmp_path, limits=limits, workers=8) as server:
        for turn in range(4):
            clients = [server.client(f"client-{turn}-{number}") for number in range(64)]
            streams = [await server.attach(client, "engine-of-many-clients", Role.WORKER) for client in clients]
            threads = list((await threads_of(server)).values())
            assert [threads.count(thread) for thread in range(8)] == [8] * 8
            for stream in streams:
                await stream.close()
            await until(lambda: not server.book.sessions.clients)
        assert [clients for _, clients, _ in server.driver.hands.affinity.lanes()] == [()] * 8
        for turn, number in ((0, 0), (3, 63)):
            assert server.driver.hands.affinity.thread_of(f"client-{turn}-{number}") is None
