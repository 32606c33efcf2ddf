# SPDX-License-Identifier: Apache-2.0
"""The service over the real cache, used as an engine in any language uses it: through generated stubs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvgrpc.v1 import admin_pb2, cache_pb2, common_pb2, engine_pb2
from kvgrpc.wire.layout import encode_group, encode_memory
from tests.e2e.harness import BLOCK, CHUNK, LocalServer, local_server
from tests.kvdata import BLOCKS_OUTERMOST_OPAQUE, MHA, Image, shared_memory
from tests.service import asks
from tests.service.asks import refused, until
from tests.service.conftest import Stubs

ENGINE = "engine-0123456789abcdef"
WORKER = (("kvgrpc-client-id", "worker"),)
SCHEDULER = (("kvgrpc-client-id", "scheduler"),)
TOKENS = 4 * CHUNK
BLOCKS = TOKENS // BLOCK


@pytest.fixture
async def local(folder: Path) -> AsyncIterator[LocalServer]:
    async with local_server(folder, deadline_s=10, copy_deadline_s=10) as server:
        yield server


@pytest.fixture
async def stubs(local: LocalServer) -> AsyncIterator[Stubs]:
    async with grpc.aio.insecure_channel(local.address) as channel:
        yield Stubs(channel)


class Worker:
    """An engine of one worker and one scheduler that share a channel."""

    def __init__(self, stubs: Stubs, image: Image, memory_name: str) -> None:
        self.stubs = stubs
        self.image = image
        self.memory_name = memory_name
        self.space = common_pb2.SpaceRef()
        self.streams: list[Any] = []

    async def join(self) -> None:
        for metadata, role in ((WORKER, "WORKER"), (SCHEDULER, "SCHEDULER")):
            stream: Any = self.stubs.engine.Attach(
                engine_pb2.AttachRequest(
                    engine_id=ENGINE,
                    role=engine_pb2.ClientRole.Value(f"CLIENT_ROLE_{role}"),
                    session_id=role.ljust(16).encode(),
                ),
                metadata=metadata,
            )
            assert (await stream.read()).WhichOneof("event") == "attached"
            self.streams.append(stream)
        hello = await self.stubs.engine.Handshake(engine_pb2.HandshakeRequest(protocol_major=1))
        answer = await self.stubs.engine.RegisterKvCache(self.registration(hello.host_id), metadata=WORKER)
        assert answer.object_bytes == CHUNK * MHA.token_bytes
        self.space.space_base = answer.space_base

    def registration(self, host_id: str) -> engine_pb2.RegisterKvCacheRequest:
        layout = self.image.layout(self.memory_name)
        return engine_pb2.RegisterKvCacheRequest(
            engine_id=ENGINE,
            identity=common_pb2.SpaceIdentity(
                model="m", kv_dtype="bfloat16", kv_world_size=1, hash_algorithm="sha256-u32le"
            ),
            tp_size=1,
            kv_tp_size=1,
            memory=[encode_memory(memory) for memory in layout.memory],
            groups=[encode_group(group) for group in layout.groups],
            host_id=host_id,
        )

    def store(self, call_id: int, blocks: list[int]) -> cache_pb2.StoreRequest:
        return asks.store(
            engine_id=ENGINE,
            call_id=call_id,
            space=self.space,
            content=asks.tokens(TOKENS),
            blocks=[cache_pb2.BlockIds(ids=blocks)],
        )

    def retrieve(self, call_id: int, job_id: bytes, blocks: list[int]) -> cache_pb2.RetrieveRequest:
        return asks.retrieve(
            engine_id=ENGINE,
            call_id=call_id,
            job_id=job_id,
            range=common_pb2.TokenRange(start=0, end=TOKENS),
            blocks=[cache_pb2.BlockIds(ids=blocks)],
        )

    async def lookup(self, request_id: str = "r") -> cache_pb2.LookupResponse:
        request = asks.lookup(
            engine_id=ENGINE, request_id=request_id, space=self.space, content=asks.tokens(TOKENS + 3)
        )
        return await self.stubs.cache.Lookup(request, metadata=SCHEDULER)


@pytest.fixture
async def worker(stubs: Stubs) -> AsyncIterator[Worker]:
    plain = Image(MHA, BLOCKS_OUTERMOST_OPAQUE, BLOCK, 4 * BLOCKS)
    with shared_memory(plain.size_bytes) as (name, memory):
        image = Image(MHA, BLOCKS_OUTERMOST_OPAQUE, BLOCK, 4 * BLOCKS, buffer=memory)
        worker = Worker(stubs, image, name)
        await worker.join()
        yield worker
        for stream in worker.streams:
            stream.cancel()


SOURCE = list(range(3, 3 + BLOCKS))
TARGET = list(range(4 * BLOCKS - 1, 3 * BLOCKS - 1, -1))


async def test_a_prefix_goes_in_and_comes_back_elsewhere(worker: Worker, local: LocalServer) -> None:
    worker.image.write(SOURCE, first_token=0)
    assert not (await worker.lookup("before")).job_id
    stored = await worker.stubs.cache.Store(worker.store(1, SOURCE), metadata=WORKER)
    assert [(r.count, r.outcome) for r in stored.results] == [(4, cache_pb2.CHUNK_OUTCOME_STORED)]
    found = await worker.lookup()
    assert (found.status.hit_tokens, found.status.pinned) == (TOKENS, True)
    loaded = await worker.stubs.cache.Retrieve(worker.retrieve(2, found.job_id, TARGET), metadata=WORKER)
    assert [(r.count, r.outcome) for r in loaded.results] == [(4, cache_pb2.CHUNK_OUTCOME_LOADED)]
    assert worker.image.wrong_tokens(TARGET, first_token=0) == []
    assert worker.image.untouched([*SOURCE, *TARGET])
    assert (await worker.stubs.admin.GetStatus(admin_pb2.GetStatusRequest())).pins == 0
    engines = (await worker.stubs.admin.ListEngines(admin_pb2.ListEnginesRequest())).engines
    assert [client.client_id for client in engines[0].clients] == ["worker", "scheduler"]
    assert ENGINE not in str(engines)


async def test_without_a_session_every_call_says_so_at_once(stubs: Stubs) -> None:
    for call in (
        stubs.cache.Lookup(asks.lookup(), metadata=WORKER),
        stubs.cache.Store(asks.store(), metadata=WORKER),
        stubs.cache.Retrieve(asks.retrieve(), metadata=WORKER),
        stubs.cache.QueryPrefetchStatus(asks.query(), metadata=WORKER),
    ):
        start = time.monotonic()
        details = await refused(call)
        assert (details.code, details.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NOT_ATTACHED")
        assert time.monotonic() - start < 5


async def test_another_major_version_is_refused_naming_both(stubs: Stubs) -> None:
    details = await refused(stubs.engine.Handshake(engine_pb2.HandshakeRequest(protocol_major=7)))
    assert (details.code, details.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL_VERSION")
    assert "7" in details.text
    assert "1" in details.text


async def test_a_second_process_with_the_same_client_id_is_refused(worker: Worker) -> None:
    other: Any = worker.stubs.engine.Attach(
        engine_pb2.AttachRequest(engine_id=ENGINE, role=engine_pb2.CLIENT_ROLE_WORKER, session_id=b"another process "),
        metadata=WORKER,
    )
    details = await refused(other.read())
    assert (details.code, details.reason) == (grpc.StatusCode.ALREADY_EXISTS, "CLIENT_EXISTS")
    await worker.stubs.cache.Store(worker.store(1, SOURCE), metadata=WORKER)


async def test_a_store_that_ran_out_of_time_is_fenced_and_shows_nothing(worker: Worker, local: LocalServer) -> None:
    worker.image.write(SOURCE, first_token=0)
    gate = local.gates.hold(after_runs=1)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await worker.stubs.cache.Store(worker.store(1, SOURCE), metadata=WORKER, timeout=4)
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert gate.wait_reached(0), "the machine took longer than the call may"
    request = cache_pb2.FenceRequest(engine_id=ENGINE, call_ids=[1])
    fence = asyncio.ensure_future(worker.stubs.cache.Fence(request, metadata=WORKER))
    done, _ = await asyncio.wait({fence}, timeout=0.3)
    assert not done  # the copy still reads the blocks
    gate.release()
    await asyncio.wait_for(fence, 30)
    worker.image.write(SOURCE, first_token=1000)
    found = await worker.lookup()
    if found.status.hit_tokens:
        await worker.stubs.cache.Retrieve(worker.retrieve(2, found.job_id, TARGET), metadata=WORKER)
        hit_blocks = found.status.hit_tokens // BLOCK
        assert worker.image.wrong_tokens(TARGET[:hit_blocks], first_token=0) == []


async def test_the_end_of_the_streams_gives_everything_back(worker: Worker, local: LocalServer) -> None:
    worker.image.write(SOURCE, first_token=0)
    await worker.stubs.cache.Store(worker.store(1, SOURCE), metadata=WORKER)
    assert (await worker.lookup()).status.pinned
    assert local.book.counts().pins == 4
    opened = len(local.open_shared_memory())
    for stream in worker.streams:
        stream.cancel()
    await until(lambda: local.book.counts().engines == 0)
    assert local.book.counts().pins == 0
    await until(lambda: len(local.open_shared_memory()) == opened - 1)


async def test_a_drain_lets_the_running_copy_end(worker: Worker, local: LocalServer) -> None:
    worker.image.write(SOURCE, first_token=0)
    gate = local.gates.hold(after_runs=1)
    store = asyncio.ensure_future(worker.stubs.cache.Store(worker.store(1, SOURCE), metadata=WORKER))
    await until(lambda: gate.wait_reached(0))
    drain = asyncio.ensure_future(local.server.drain())
    assert (await worker.streams[0].read()).draining.reason
    gate.release()
    assert [r.outcome for r in (await store).results] == [cache_pb2.CHUNK_OUTCOME_STORED]
    await asyncio.wait_for(drain, 5)
    assert local.book.counts().calls_in_flight == 0


async def test_bad_blocks_and_jobs_write_nothing_and_the_next_call_works(worker: Worker) -> None:
    worker.image.write(SOURCE, first_token=0)
    await worker.stubs.cache.Store(worker.store(1, SOURCE), metadata=WORKER)
    job_id = (await worker.lookup()).job_id
    beyond = [*TARGET[1:], worker.image.num_blocks]
    wrong = {
        "JOB_UNKNOWN": worker.retrieve(2, b"x" * 16, TARGET),
        "BLOCK_IDS": worker.retrieve(3, job_id, beyond),
        "RANGE": worker.retrieve(4, job_id, TARGET),
    }
    wrong["RANGE"].range.start = 1
    for reason, request in wrong.items():
        assert (await refused(worker.stubs.cache.Retrieve(request, metadata=WORKER))).reason == reason
    short = worker.retrieve(5, job_id, TARGET[1:])
    assert (await refused(worker.stubs.cache.Retrieve(short, metadata=WORKER))).reason == "BLOCK_IDS"
    assert worker.image.untouched(SOURCE)
    loaded = await worker.stubs.cache.Retrieve(worker.retrieve(6, job_id, TARGET), metadata=WORKER)
    assert [r.outcome for r in loaded.results] == [cache_pb2.CHUNK_OUTCOME_LOADED]
