# SPDX-License-Identifier: Apache-2.0
"""This client against a server of a recorded version, which knows that version's descriptors and nothing newer."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kvgrpc import api
from kvgrpc.client import AioClient, ChunkOutcome, RegisterRequest, SchedulerClient, Tokens, Watcher, WorkerClient
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import Reader, SpaceIdentity, SpaceRef, TokenRange
from tests.compat.smoke import BLOCK_SIZE, NUM_BLOCKS, RUN_BYTES, layout, smoke
from tests.compat.test_compat import HERE, VERSIONS
from tests.compat.then import CHUNK, MAJOR, MINOR, Then
from tests.e2e.harness import until
from tests.kvdata import shared_memory

SIZE_BYTES = NUM_BLOCKS * RUN_BYTES
ENGINE, SPACE, TOKENS = "an-engine-of-today", SpaceRef(b"x" * 16), Tokens.from_ids(range(CHUNK))


@asynccontextmanager
async def server_of_then(version: str, tmp_path: Path, major: int = MAJOR) -> AsyncIterator[tuple[Then, str]]:
    then, address = Then(HERE / version, major), f"unix:{tmp_path}/s"
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((then,))
    server.add_insecure_port(address)
    await server.start()
    try:
        yield then, address
    finally:
        await server.stop(None)


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_calls_of_then_work_and_nothing_newer_is_needed(version: str, tmp_path: Path) -> None:
    async with server_of_then(version, tmp_path) as (then, address):
        with shared_memory(SIZE_BYTES) as (name, memory):
            await smoke(address, name, memory)
        assert {"Handshake", "Attach", "RegisterKvCache", "Store", "Lookup", "Retrieve", "Fence"} <= {*then.called}
        assert then.unknown == []


def engine_at_work(address: str, name: str, memory: Any) -> None:
    """The client that engines use: what it stores comes back into other blocks."""
    identity = SpaceIdentity("model", "", "uint8", 1, api.OWN_HASH_ALGORITHM, "opaque:SMOKE:B:16")
    engine_id = secrets.token_hex(16)
    worker = WorkerClient(address, RegisterRequest(engine_id, identity, 0, 0, 1, 1, layout(name)))
    scheduler = SchedulerClient(address, engine_id, identity)
    assert worker.start(wait_s=20), worker.problem
    assert scheduler.start(wait_s=20)
    memory[: 2 * RUN_BYTES] = bytes(at % 251 for at in range(2 * RUN_BYTES))
    tokens = Tokens.from_ids(range(2 * BLOCK_SIZE))
    (stored,) = worker.store(tokens, [[0, 1]]).result(20)
    assert (stored.outcome, stored.count) == (ChunkOutcome.STORED, 2)
    found = scheduler.lookup("request", tokens, timeout_s=20)
    assert (found.hit_tokens, found.reason) == (2 * CHUNK, "")
    (loaded,) = worker.retrieve(found.job_id, TokenRange(0, 2 * CHUNK), [[9, 8]]).result(20)
    assert (loaded.outcome, loaded.count) == (ChunkOutcome.LOADED, 2)
    for source, target in ((0, 9), (1, 8)):
        there = memory[target * RUN_BYTES : (target + 1) * RUN_BYTES]
        assert there == memory[source * RUN_BYTES : (source + 1) * RUN_BYTES]
    scheduler.discard("request")
    assert worker.close(timeout_s=20)
    scheduler.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_engines_work_with_a_server_of_then(version: str, tmp_path: Path) -> None:
    async with server_of_then(version, tmp_path) as (then, address):
        with shared_memory(SIZE_BYTES) as (name, memory):
            await asyncio.to_thread(engine_at_work, address, name, memory)
        assert then.unknown == []


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_handshake_agrees_on_the_lower_minor_version(version: str, tmp_path: Path) -> None:
    async with server_of_then(version, tmp_path) as (_, address), AioClient(address, "c") as client:
        newer = api.Hello(protocol_minor=MINOR + 7)
        info = await client.handshake(newer)
        assert (info.protocol_major, info.protocol_minor) == (MAJOR, MINOR)
        assert info.limits == api.Limits(0, 0, 0, 0, 0, 0, 0, 0, 0, 0), "what it does not say is not made up"


@pytest.mark.parametrize("version", VERSIONS)
async def test_another_major_version_is_refused_with_both_named(version: str, tmp_path: Path) -> None:
    async with server_of_then(version, tmp_path, major=9) as (_, address), AioClient(address, "c") as client:
        with pytest.raises(Refusal) as refused:
            await client.handshake(api.Hello())
        assert refused.value.reason is Reason.PROTOCOL_VERSION
        assert f"{api.PROTOCOL_MAJOR}.{api.PROTOCOL_MINOR}" in refused.value.message
        assert f"9.{MINOR}" in refused.value.message
        with shared_memory(SIZE_BYTES) as (name, _):
            identity = SpaceIdentity("model", "", "uint8", 1, api.OWN_HASH_ALGORITHM, "")
            worker = WorkerClient(address, RegisterRequest(ENGINE, identity, 0, 0, 1, 1, layout(name)))
            assert not await asyncio.to_thread(worker.start, 2)
            await until(lambda: worker.problem and worker.problem.reason is Reason.PROTOCOL_VERSION, 30)
            await asyncio.to_thread(worker.close)


async def parts() -> AsyncIterator[api.ChunkPart]:
    raise AssertionError("parts are asked for although the server takes none")
    yield api.ChunkPart(0, 0, 1, 0, b"")


NEWER: dict[str, Callable[[AioClient], Any]] = {
    "ReadChunks": lambda client: client.read_objects(
        api.ReadChunksRequest(ENGINE, bytes(16), Reader(0, 0), TokenRange(0, CHUNK))
    ),
    "WriteChunks": lambda client: client.write_chunks(
        api.WriteChunksRequest(ENGINE, SPACE, TOKENS, 4, "1x1x4"), parts()
    ),
    "Watch": lambda client: anext(client.watch(api.WatchRequest())),
    "Inspect": lambda client: client.inspect(SPACE, TOKENS),
    "Warm": lambda client: client.warm(SPACE, TOKENS, 1),
}


@pytest.mark.parametrize("version", VERSIONS)
async def test_what_came_later_is_refused_at_once(version: str, tmp_path: Path) -> None:
    async with server_of_then(version, tmp_path) as (then, address), AioClient(address, "c") as client:
        for method, ask in NEWER.items():
            begin = time.monotonic()
            with pytest.raises(Refusal) as refused:
                await ask(client)
            assert refused.value.reason is Reason.INTERNAL and "UNIMPLEMENTED" in refused.value.message, method
            assert time.monotonic() - begin < 10
            assert then.unknown[-1].endswith(f"/{method}")
        assert (await client.get_status()).chunks == 0, "the connection is as good as before"


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_watcher_says_why_it_hears_nothing(version: str, tmp_path: Path) -> None:
    async with server_of_then(version, tmp_path) as (_, address):
        watcher = Watcher(address, api.WatchRequest())
        watcher.start()
        await until(lambda: watcher.problem is not None)
        assert watcher.problem is not None and "UNIMPLEMENTED" in watcher.problem.message
        assert watcher.take() == []
        await asyncio.to_thread(watcher.close)
