# SPDX-License-Identifier: Apache-2.0
"""The implementations of the cache's interface, each as a place where the suite can run.

A new implementation is one async context manager that yields a Place, and a line in PLACES.
"""

from __future__ import annotations

import asyncio
import mmap
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from kvgrpc import api
from kvgrpc.client import AioClient, Client
from kvgrpc.core.cache import Bookkeeper
from kvgrpc.core.invariants import check
from kvgrpc.core.types import MIB, CoreLimits, Role
from kvgrpc.runtime.admin import DriverAdmin
from kvgrpc.runtime.affinity import AffinityExecutor
from kvgrpc.runtime.driver import Driver, Hands, ServerFacts
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.host import host_id
from kvgrpc.transfer.memory import MemoryMover
from tests.kvdata import shared_memory
from tests.ports import free_port
from tests.served import serving

CHUNK = 16
L1_BYTES = 32 * MIB
Buffer = bytearray | mmap.mmap
T = TypeVar("T")


@dataclass
class Place:
    """Where the suite runs: ``client`` makes the cache as one client sees it, ``memory`` engine memory by size."""

    client: Callable[[str], api.CacheApi]
    admin: api.AdminApi
    memory: Callable[[int], tuple[str, Buffer]]
    is_shared: bool = True
    """Other tests use the same server: counts are at least what this test made."""


# ---- in process -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def in_process(address: str) -> AsyncIterator[Place]:
    """The driver over the fake mover and plain bytearrays."""
    arena = Arena(L1_BYTES)
    limits = CoreLimits(chunk_tokens=CHUNK, page_bytes=4096)
    book = Bookkeeper(limits, L1_BYTES)
    mover = MemoryMover(arena, CHUNK)
    hands = Hands(mover=mover, arena=arena, affinity=AffinityExecutor(4), cpu_pool=ThreadPoolExecutor(2))
    driver = Driver(book, limits, hands, ServerFacts("test", host_id()))

    def memory(size_bytes: int) -> tuple[str, Buffer]:
        name, buffer = f"memory-{id(mover)}-{len(names)}", bytearray(size_bytes)
        names.append(name)
        mover.add_memory(name, buffer)
        return name, buffer

    names: list[str] = []
    try:
        yield Place(driver.client, DriverAdmin(driver), memory, is_shared=False)
    finally:
        await driver.close()
        check(book)
        mover.close()
        arena.close()


# ---- over gRPC ------------------------------------------------------------------------------------------------------


@contextmanager
def server_process() -> Iterator[dict[str, str]]:
    """A real server; its addresses by name."""
    tcp = f"127.0.0.1:{free_port()}"
    flags = ("--chunk-tokens", str(CHUNK), "--l1-size", str(L1_BYTES), "--page-size", "4096", "--listen", tcp)
    with serving(*flags) as served:
        yield {"unix": served.address, "tcp": f"grpc://{tcp}"}


@asynccontextmanager
async def over_grpc(address: str) -> AsyncIterator[Place]:
    """AioClient and shared memory."""
    clients: list[AioClient] = []

    def client(client_id: str) -> AioClient:
        clients.append(AioClient(address, client_id))
        return clients[-1]

    with ExitStack() as stack:
        yield Place(client, client(""), lambda size_bytes: stack.enter_context(shared_memory(size_bytes)))
        for each in clients:
            await each.close()


class FromThread:
    """The blocking client as CacheApi and AdminApi: each call waits in a thread."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.to_thread(method, *args, **kwargs)

        return call

    async def attach(self, engine_id: str, role: Role, session_id: bytes) -> AsyncGenerator[api.AttachEvent, None]:
        events = _each(self._client.attach(engine_id, role, session_id))
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()

    def record_trace(self) -> AsyncGenerator[api.TracedCalls, None]:
        return _each(self._client.record_trace())

    def read_chunks(self, request: api.ReadChunksRequest) -> AsyncGenerator[api.ReadChunksAnswer, None]:
        return _each(self._client.read_chunks(request))

    async def write_chunks(self, request: api.WriteChunksRequest, parts: AsyncIterator[api.ChunkPart]) -> Any:
        found: dict[int, bytes] = {}
        async for part in parts:
            found[part.chunk] = found.get(part.chunk, b"") + part.data
        return await asyncio.to_thread(self._client.write_objects, request, found)

    def watch(self, request: api.WatchRequest) -> AsyncGenerator[api.WatchEvent, None]:
        return _each(self._client.watch(request))


async def _each(stream: Generator[T, None, None]) -> AsyncGenerator[T, None]:
    try:
        while (event := await asyncio.to_thread(next, stream, None)) is not None:
            yield event
    finally:
        await asyncio.to_thread(stream.close)


@asynccontextmanager
async def blocking(address: str) -> AsyncIterator[Place]:
    """Client and shared memory."""
    clients: list[Client] = []

    def client(client_id: str) -> Any:
        clients.append(Client(address, client_id))
        return FromThread(clients[-1])

    with ExitStack() as stack:
        yield Place(client, client(""), lambda size_bytes: stack.enter_context(shared_memory(size_bytes)))
        for each in clients:
            await asyncio.to_thread(each.close)


# ---- decorated ------------------------------------------------------------------------------------------------------


class Counting:
    """A decorator: counts calls, changes nothing."""

    def __init__(self, inner: Any, counts: Counter[str]) -> None:
        self._inner = inner
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        self._counts[name] += 1
        return getattr(self._inner, name)


@asynccontextmanager
async def decorated(address: str) -> AsyncIterator[Place]:
    """The driver behind a decorator."""
    counts: Counter[str] = Counter()
    async with in_process(address) as place:
        inner = place.client
        place.client = lambda client_id: Counting(inner(client_id), counts)  # type: ignore[assignment]
        place.admin = Counting(place.admin, counts)  # type: ignore[assignment]
        yield place
    assert counts


PLACES: dict[str, tuple[str, Callable[[str], AbstractAsyncContextManager[Place]]]] = {
    "driver": ("", in_process),
    "decorated driver": ("", decorated),
    "aio over a Unix socket": ("unix", over_grpc),
    "aio over TCP": ("tcp", over_grpc),
    "blocking over a Unix socket": ("unix", blocking),
}
"""By name: which address of the server it needs ("" = none), and the place."""
