# SPDX-License-Identifier: Apache-2.0
"""What tests of wrong data ask besides the calls themselves: how a call was refused, whether anything changed, whether
something is still locked, and how objects get into a tier.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvgrpc import api
from kvgrpc.core.errors import Refusal
from kvgrpc.core.keys import chunk_keys, object_name, space_digest
from kvgrpc.core.types import ChunkResult, CoreLimits, ObjectName, SpaceRef
from kvgrpc.transfer.layout import check_layout
from tests.e2e.harness import CHUNK, Engine, LocalServer, tokens_of, until
from tests.kvdata import Kv

TINY = Kv(layers=2, planes=2, heads=1, head_dim=16)
"""2 KiB a chunk of 16 tokens."""
OTHER_SEED = 1_000_000
"""Prompts of seeds from here on are used for filling only."""


async def refused(call: Awaitable[object]) -> tuple[str, str, str]:
    """(gRPC code, reason, field) of a call that the server must refuse."""
    with pytest.raises(Refusal) as caught:
        await call
    error = caught.value.__context__
    assert isinstance(error, grpc.aio.AioRpcError), "refused before it was sent"
    return error.code().name, caught.value.reason.value, caught.value.field


def spans(results: tuple[ChunkResult, ...]) -> list[tuple[int, int, str, str]]:
    """(first chunk, count, outcome, reason) of each result."""
    return [(r.first_chunk, r.count, r.outcome.value, r.reason) for r in results]


# ---- servers elsewhere -----------------------------------------------------------------------------------------------


_NAMES = itertools.count()
"""Of all clients of such servers: one that has just left may still have its name there."""


def out_of_reach(address: str, stack: contextlib.AsyncExitStack) -> LocalServer:
    """A server in another process: engines can be made there, nothing inside it can be looked at."""
    inside: Any = None
    return LocalServer(inside, inside, inside, inside, CoreLimits(chunk_tokens=CHUNK), None, stack, address, _NAMES)


# ---- state ----------------------------------------------------------------------------------------------------------


def state(server: LocalServer) -> tuple[object, ...]:
    """Everything that a call without effect leaves as it is, but for records of jobs, which time takes."""
    book = server.book
    counts = replace(book.counts(), jobs=0)
    return counts, book.arena_status(), mapped(server), server.open_shared_memory(), book.spaces()


def mapped(server: LocalServer) -> int:
    """Mappings that the server has open."""
    mover: Any = server.driver.hands.mover
    return len(mover.mapped)


@contextlib.asynccontextmanager
async def nothing_changes(server: LocalServer, *engines: Engine) -> AsyncIterator[None]:
    """Neither the cache nor any engine's memory changes; mappings may take a moment to go."""
    before, jobs = state(server), server.book.counts().jobs
    memories = [engine.image.memory.copy() for engine in engines]
    yield
    with contextlib.suppress(AssertionError):
        await until(lambda: state(server) == before, 5)
    changed = [(was, now) for was, now in zip(before, state(server), strict=True) if was != now]
    assert not changed, f"changed, before and after: {changed}"
    assert server.book.counts().jobs <= jobs
    for engine, memory in zip(engines, memories, strict=True):
        assert (engine.image.memory == memory).all(), "a byte of an engine was written"
    server.check()


async def polled(server: LocalServer, job_id: bytes, polls: int = 1) -> None:
    """Returns when so many long polls of the job wait."""
    await until(lambda: len(server.driver._jobs.get(job_id, ())) == polls, 30, "the polls")


async def assert_serving(server: LocalServer) -> None:
    """The standard health service answers SERVING."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def counters(server: LocalServer) -> dict[str, int]:
    """The server's counters, as an operator sees them."""
    return (await (await server.admin()).get_status()).counters


# ---- room -----------------------------------------------------------------------------------------------------------


async def fill_twice(server: LocalServer, engine: Engine) -> None:
    """Stores unrelated chunks for twice the size of L1: what is not locked by then is evicted."""
    fill = next(server.names)
    chunks = 2 * server.book.arena_status().total_bytes // engine.object_bytes
    batch = 8
    blocks = range(batch * server.limits.chunk_tokens // engine.image.block_size)
    for at in range(0, chunks + batch, batch):
        tokens = tokens_of(OTHER_SEED + fill * 10_000 + at, batch * server.limits.chunk_tokens)
        await engine.worker.store(engine.store_request(tokens, blocks))


# ---- tiers ----------------------------------------------------------------------------------------------------------


def object_names(server: LocalServer, engine: Engine, tokens: api.Tokens, **changes: Any) -> list[str]:
    """Names in a tier of this rank's objects of every full chunk. ``changes``: generation, space."""
    space: SpaceRef = changes.get("space", engine.space)
    digest = space_digest(space)
    keys = chunk_keys(digest, tokens.data, server.limits.chunk_tokens)
    chunk_tokens = server.limits.chunk_tokens
    (part,) = check_layout(engine.registration().layout, chunk_tokens).parts(chunk_tokens)
    return [object_name(digest, changes.get("generation", 0), key, engine.parallel[0], part.order) for key in keys]


async def keep_in_tier(server: LocalServer, engine: Engine, tokens: api.Tokens) -> list[str]:
    """Puts position-coded objects of every full chunk into the tier; their names."""
    assert server.tier is not None
    names = object_names(server, engine, tokens)
    per_chunk = server.limits.chunk_tokens // engine.image.block_size
    for at, name in enumerate(names):
        engine.image.write(range(per_chunk), at * server.limits.chunk_tokens)
        data = engine.image.object_bytes(range(per_chunk))
        await server.tier.write(ObjectName(name, len(data)), [memoryview(data)])
    engine.image.memory[:] = 0xA5
    return names


async def found(engine: Engine, tokens: api.Tokens, **changes: Any) -> tuple[bytes, api.PrefetchStatus]:
    """A lookup awaited to its end, with more patience than a busy machine needs: its job id and final status."""
    answer = await engine.lookup(tokens, **{"prefetch_wait_ms": 10_000, **changes})
    if answer.status.done:
        return answer.job_id, answer.status
    status = await engine.scheduler.query(engine.engine_id, answer.job_id, 30_000)
    assert status.done
    return answer.job_id, status


@contextlib.contextmanager
def foreign_memory(uid: int, size_bytes: int) -> Iterator[str]:
    """A shared memory object that belongs to another user; its name."""
    name = f"kvgrpc-test-foreign-{os.getpid()}"
    path = f"/dev/shm/{name}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, b"\xa5" * size_bytes)
        os.fchown(fd, uid, -1)
        yield name
        assert os.pread(fd, size_bytes + 1, 0) == b"\xa5" * size_bytes, "another user's memory was written"
    finally:
        os.close(fd)
        os.unlink(path)


async def store_without_its_keys(
    server: LocalServer, engine: Engine, tokens: api.Tokens, monkeypatch: pytest.MonkeyPatch
) -> tuple[asyncio.Task[tuple[ChunkResult, ...]], threading.Event]:
    """A Store of blocks 0 to 31 whose prompt waits for the pool that hashes long ones, until the event is set."""
    monkeypatch.setattr("kvgrpc.runtime.driver.INLINE_HASH_TOKENS", 0)
    pool, go_on = server.driver.hands.cpu_pool, threading.Event()
    for _ in range(2):
        pool.submit(go_on.wait, 30)
    storing = asyncio.create_task(engine.worker.store(engine.store_request(tokens, range(32))))
    await until(lambda: pool._work_queue.qsize() == 1, what="the prompt to wait for the pool")  # type: ignore[attr-defined]
    return storing, go_on
