# SPDX-License-Identifier: Apache-2.0
"""Engines of the benchmark: shared memory with a paging, and prompts that are stored or not."""

from __future__ import annotations

import hashlib
import secrets
import time
from array import array
from collections.abc import AsyncGenerator, Awaitable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory

from kvgrpc import api
from kvgrpc.bench.processes import BenchError
from kvgrpc.client.aio import AioClient
from kvgrpc.core.types import ChunkOutcome, ChunkResult, LookupAnswer, Role, SpaceIdentity, SpaceRef, TokenRange
from kvgrpc.transfer.host import host_id
from kvgrpc.transfer.layout import stored_form

COPY_S = 60.0
BLOCK, CHUNK = 16, 256
LENGTHS = {"1K": 1 << 10, "8K": 8 << 10, "32K": 32 << 10, "128K": 128 << 10}
KINDS = {"tokens": api.OWN_HASH_ALGORITHM, "hashes": "bench-sha256"}
"""How a prompt is named, and the hash algorithm of the space that is asked."""


@dataclass(frozen=True, slots=True)
class Paging:
    """Engine memory of ``num_blocks`` blocks, layer by layer, plane by plane (K and V)."""

    layers: int
    planes: int
    run_bytes: int
    num_blocks: int
    block_size: int = BLOCK

    @property
    def object_bytes(self) -> int:
        return self.layers * self.planes * self.run_bytes * (CHUNK // self.block_size)

    @property
    def size_bytes(self) -> int:
        return self.layers * self.planes * self.run_bytes * self.num_blocks

    def layout(self, name: str) -> api.Layout:
        plane, run = self.run_bytes * self.num_blocks, self.run_bytes
        runs = api.Runs(0, 0, self.layers, plane * self.planes, self.planes, plane, run, run)
        form = f"{self.layers}x{self.planes}x{run}"
        group = api.KvGroup(
            self.block_size, self.num_blocks, (runs,), api.BlockForm.OPAQUE, backend="bench", layout=form
        )
        return api.Layout((api.SharedMemory(name, 0, self.size_bytes),), (group,))

    def identity(self, hash_algorithm: str = api.OWN_HASH_ALGORITHM) -> SpaceIdentity:
        return SpaceIdentity("bench", "", "uint8", 1, hash_algorithm, stored_form(self.layout("").groups))


@contextmanager
def shared_memory(size_bytes: int) -> Generator[SharedMemory, None, None]:
    """Memory of this size, every page of it touched."""
    memory = SharedMemory(create=True, size=size_bytes)
    try:
        assert memory.buf is not None, "it is open"
        memory.buf[:] = bytes(range(256)) * (size_bytes // 256)
        yield memory
    finally:
        memory.close()
        memory.unlink()


@dataclass(frozen=True, slots=True)
class Prefix:
    """One that was found, under the name of a request."""

    name: str
    job_id: bytes
    tokens: TokenRange


class Worker:
    """An attached client with registered memory. Copies answer how long the call took in seconds."""

    def __init__(self, client: AioClient, engine_id: str, space: SpaceRef) -> None:
        self._client = client
        self._engine_id = engine_id
        self._space = space
        self._calls = 0

    async def store(self, content: api.Content, blocks: Sequence[int]) -> float:
        self._calls += 1
        request = api.StoreRequest(self._engine_id, self._calls, self._space, content, (blocks,))
        return await _copied(self._client.store(request, timeout_s=COPY_S), ChunkOutcome.STORED)

    async def store_again(self, content: api.Content, blocks: Sequence[int]) -> None:
        """Whatever of it is there already."""
        self._calls += 1
        request = api.StoreRequest(self._engine_id, self._calls, self._space, content, (blocks,))
        await self._client.store(request, timeout_s=COPY_S)

    async def retrieve(self, content: api.Content, blocks: Sequence[int]) -> float:
        """Looks up, which is not counted, and retrieves."""
        return await self.load(await self.find(content), blocks)

    async def find(self, content: api.Content) -> Prefix:
        """What ``load`` takes, once."""
        self._calls += 1
        name = str(self._calls)
        hit = await self.lookup(content, name)
        return Prefix(name, hit.job_id, TokenRange(0, content.num_tokens))

    async def load(self, prefix: Prefix, blocks: Sequence[int]) -> float:
        request = api.RetrieveRequest(self._engine_id, self._calls, prefix.job_id, prefix.tokens, (blocks,))
        took = await _copied(self._client.retrieve(request, timeout_s=COPY_S), ChunkOutcome.LOADED)
        await self._client.end_request(self._engine_id, prefix.name)
        return took

    async def lookup(self, content: api.Content, name: str) -> LookupAnswer:
        return await self._client.lookup(api.LookupRequest(self._engine_id, name, self._space, content))

    async def end(self, name: str) -> None:
        await self._client.end_request(self._engine_id, name)


async def _copied(call: Awaitable[tuple[ChunkResult, ...]], outcome: ChunkOutcome) -> float:
    began = time.perf_counter()
    results = await call
    took = time.perf_counter() - began
    if {result.outcome for result in results} != {outcome}:
        raise BenchError(f"a copy did not end as {outcome.value}: {results}")
    return took


@asynccontextmanager
async def working(address: str, paging: Paging, identity: SpaceIdentity) -> AsyncGenerator[Worker, None]:
    """A worker with memory of this paging, in an engine of its own."""
    with shared_memory(paging.size_bytes) as memory:
        async with sharing(address, paging.layout(memory.name), identity) as worker:
            yield worker


@asynccontextmanager
async def sharing(address: str, layout: api.Layout, identity: SpaceIdentity) -> AsyncGenerator[Worker, None]:
    """A worker whose memory is this, in an engine of its own."""
    engine_id = secrets.token_hex(16)
    async with AioClient(address) as client:
        session = client.attach(engine_id, Role.WORKER, secrets.token_bytes(16))
        await anext(session)
        answer = await client.register(api.RegisterRequest(engine_id, identity, 0, 0, 1, 1, layout, host_id()))
        try:
            yield Worker(client, engine_id, SpaceRef(answer.space_base))
        finally:
            await client.unregister(engine_id)
            await session.aclose()


# ---- prompts --------------------------------------------------------------------------------------------------------

_SMALL = Paging(1, 1, 512, LENGTHS["128K"] // BLOCK)
"""8 KiB a chunk: what a lookup costs does not depend on the size of objects."""


def identities() -> dict[str, SpaceIdentity]:
    """The identity of the space of each kind of prompt."""
    return {kind: _SMALL.identity(algorithm) for kind, algorithm in KINDS.items()}


def prompt(kind: str, num_tokens: int, stored: bool) -> api.Content:
    """A prompt that ``store_prompts`` has stored, or one that differs in its first token (and so in every hash)."""
    if kind == "tokens":
        return api.Tokens(array("I", [0 if stored else 1 << 31, *range(1, num_tokens)]).tobytes())
    hashes = [hashlib.sha256(f"{stored} {at}".encode()).digest() for at in range(num_tokens // CHUNK)]
    return api.Hashes(tuple(hashes), num_tokens)


async def store_prompts(address: str) -> None:
    """Stores the longest prompt of each kind, of which the others are prefixes."""
    for kind, identity in identities().items():
        async with working(address, _SMALL, identity) as worker:
            await worker.store(prompt(kind, LENGTHS["128K"], True), range(_SMALL.num_blocks))
