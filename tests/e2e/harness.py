# SPDX-License-Identifier: Apache-2.0
"""A real server and real engines on one event loop: gRPC over a Unix socket, shared memory, position-coded data.

    async with local_server(tmp_path) as server:
        engine = await server.engine(kv=MHA)          # attached and registered worker, and its scheduler
        await engine.store(tokens, blocks)            # writes position-coded KV into the blocks, stores them
        hit = await engine.lookup(tokens)
        results = await engine.retrieve(hit, blocks)  # into blocks that hold 0xA5

Engines that have to die are processes of their own (tests/e2e/dying.py).
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvgrpc import api
from kvgrpc.app import Shown
from kvgrpc.client.aio import AioClient
from kvgrpc.client.channel import ChannelOptions
from kvgrpc.core.cache import Bookkeeper
from kvgrpc.core.invariants import check
from kvgrpc.core.types import (
    MIB,
    ChunkOutcome,
    ChunkResult,
    CoreLimits,
    LookupAnswer,
    Role,
    SpaceIdentity,
    SpaceRef,
    TokenRange,
    WritePolicy,
)
from kvgrpc.runtime.admin import DriverAdmin
from kvgrpc.runtime.affinity import AffinityExecutor
from kvgrpc.runtime.clock import Clock, monotonic_clock
from kvgrpc.runtime.driver import Driver, Hands, ServerFacts
from kvgrpc.service.server import Server, ServerOptions
from kvgrpc.telemetry.running import TelemetryOptions
from kvgrpc.tiers.memory import MemoryTier
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.gates import Gates
from kvgrpc.transfer.host import host_id
from kvgrpc.transfer.shm import SharedMemoryMover
from tests.kvdata import LAYERS_OUTERMOST, MHA, Arrangement, Image, Kv, shared_memory

CHUNK = 16
BLOCK = 4
PATIENT = ChannelOptions(call_s=30, copy_s=60)
"""A machine with other work may stand still for seconds; who tests deadlines names them."""


def tokens_of(seed: int, count: int) -> api.Tokens:
    """``count`` token ids that depend on ``seed``; a prefix of a longer list of the same seed."""
    return api.Tokens(array.array("I", ((seed * 1_000_003 + at * 7919) % 2**32 for at in range(count))).tobytes())


def outcomes(results: Sequence[ChunkResult]) -> list[str]:
    """One outcome name a chunk, from the first chunk of the results on."""
    return [result.outcome.value for result in results for _ in range(result.count)]


def loaded_chunks(results: Sequence[ChunkResult]) -> list[int]:
    """Indexes of the chunks that were loaded."""
    return [
        chunk
        for result in results
        if result.outcome is ChunkOutcome.LOADED
        for chunk in range(result.first_chunk, result.first_chunk + result.count)
    ]


async def until(condition: Callable[[], object], timeout_s: float = 30.0, what: str = "condition") -> float:
    """Awaits a condition; the seconds it took. Fails after ``timeout_s``."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, f"{what} did not come true within {timeout_s} s"
        await asyncio.sleep(0.002)
    return time.monotonic() - started


@dataclass
class LocalServer:
    """A running server, with everything inside it in reach."""

    book: Bookkeeper
    driver: Driver
    gates: Gates
    server: Server
    limits: CoreLimits
    tier: MemoryTier | None
    stack: contextlib.AsyncExitStack
    address: str = ""
    names: itertools.count[int] = field(default_factory=itertools.count)

    def client(self, client_id: str) -> AioClient:
        """A client of this server; closed with it."""
        client = AioClient(self.address, client_id, PATIENT)
        self.stack.push_async_callback(client.close)
        return client

    async def attach(self, client: AioClient, engine_id: str, role: Role, session_id: bytes | None = None) -> Stream:
        """Opens a session and keeps it until ``Stream.close`` or the end."""
        stream = Stream(client, engine_id, role, session_id or secrets.token_bytes(16))
        await stream.open()
        self.stack.push_async_callback(stream.close)
        return stream

    async def engine(self, **facts: Any) -> Engine:
        """An engine with one worker and one scheduler; see Engine for the facts."""
        engine = Engine(self, **facts)
        await engine.start()
        return engine

    async def admin(self) -> AioClient:
        return self.client("operator")

    def counts(self) -> tuple[int, int, int]:
        """(pins, calls in flight, bytes that are neither free nor ready)."""
        counts, arena = self.book.counts(), self.book.arena_status()
        return counts.pins, counts.calls_in_flight, arena.total_bytes - arena.free_bytes - arena.ready_bytes

    def check(self) -> None:
        check(self.book)

    def open_shared_memory(self) -> list[str]:
        """Shared memory objects that this process has open, also the tests' own; not those without a name, which are of
        earlier tests and go when they are collected."""
        found = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/self/fd/{fd}"))
        return sorted(path for path in found if path.startswith("/dev/shm/") and not path.endswith(" (deleted)"))


class Stream:
    """An open Attach stream."""

    def __init__(self, client: AioClient, engine_id: str, role: Role, session_id: bytes) -> None:
        self._events = client.attach(engine_id, role, session_id)
        self.session_id = session_id
        self.events: list[api.AttachEvent] = []
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self.events.append(await anext(self._events))
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async for event in self._events:
            self.events.append(event)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self._events.aclose()  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def local_server(
    tmp_path: Path,
    *,
    l1_bytes: int = 8 * MIB,
    limits: CoreLimits | None = None,
    tier: MemoryTier | None = None,
    clock: Clock = monotonic_clock,
    workers: int = 8,
    gates: Gates | None = None,
    allowed_uids: frozenset[int] = frozenset({os.geteuid()}),
    writes: WritePolicy = WritePolicy.NONE,
    telemetry: TelemetryOptions | None = None,
    **options: Any,
) -> AsyncIterator[LocalServer]:
    """A server on a Unix socket under ``tmp_path``, stopped at the end; then nothing may be left over."""
    limits = limits or CoreLimits(chunk_tokens=CHUNK, page_bytes=4096)
    arena = Arena(l1_bytes)
    book = Bookkeeper(limits, l1_bytes, (tier.name,) if tier else ())
    book.set_write_policy("", writes)
    gates = gates or Gates()
    hands = Hands(
        mover=SharedMemoryMover(arena, limits.chunk_tokens, allowed_uids, gates=gates),
        arena=arena,
        affinity=AffinityExecutor(workers),
        cpu_pool=ThreadPoolExecutor(2),
        tiers={tier.name: tier} if tier else {},
        clock=clock,
    )
    shown = Shown(telemetry or TelemetryOptions(), hands)
    driver = shown.driver = Driver(book, limits, hands, ServerFacts("test", host_id()))
    socket = tmp_path / "kv.sock"
    listening = ServerOptions(socket=socket, **options)
    client_for = shown.telemetry.traced(driver.client) if shown.telemetry is not None else driver.client
    server = Server(listening, client_for, DriverAdmin(driver), busy_s=hands.affinity.longest_busy_s)
    await shown.start(server)
    await server.start()
    async with contextlib.AsyncExitStack() as stack:
        local = LocalServer(book, driver, gates, server, limits, tier, stack, server.addresses[0])
        try:
            yield local
        finally:
            gates.release_all()
            await stack.aclose()
            await server.stop()
            if shown.telemetry is not None:
                await shown.telemetry.stop()
            await driver.close()
            check(book)
            arena.close()


class Engine:
    """One worker and one scheduler of an engine, in this process.

    ``parallel`` = (kv_rank, tp_rank, tp_size, kv_tp_size). A second worker of the same engine is another Engine with
    the same ``engine_id`` and ``scheduler=False``. ``lead`` bytes lie before each tensor in the memory.
    """

    def __init__(
        self,
        server: LocalServer,
        *,
        kv: Kv = MHA,
        arrangement: Arrangement = LAYERS_OUTERMOST,
        block_size: int = BLOCK,
        num_blocks: int = 256,
        **facts: Any,
    ) -> None:
        number = next(server.names)
        self.server = server
        self.engine_id: str = facts.pop("engine_id", f"engine-{number:04}-{secrets.token_hex(8)}")
        self.parallel: tuple[int, int, int, int] = facts.pop("parallel", (0, 0, 1, 1))
        self.salt: str = facts.pop("salt", "")
        self.lora: str = facts.pop("lora", "")
        self.has_scheduler: bool = facts.pop("scheduler", True)
        lead: int = facts.pop("lead", 0)
        self.identity = SpaceIdentity(
            model=facts.pop("model", "test-model"),
            revision=facts.pop("revision", ""),
            kv_dtype=facts.pop("kv_dtype", "bfloat16"),
            kv_world_size=facts.pop("kv_world_size", 1),
            hash_algorithm=facts.pop("hash_algorithm", api.OWN_HASH_ALGORITHM),
            stored_form="",
        )
        assert not facts, f"unknown facts {facts}"
        size_bytes = Image(kv, arrangement, block_size, num_blocks, lead=lead).size_bytes
        self.memory_name, memory = server.stack.enter_context(shared_memory(size_bytes))
        self.image = Image(kv, arrangement, block_size, num_blocks, lead=lead, buffer=memory)
        self.worker = server.client(f"worker-{number}")
        self.scheduler = server.client(f"scheduler-{number}") if self.has_scheduler else self.worker
        self.space = SpaceRef(b"")
        self.streams: list[Stream] = []
        self._call_ids = itertools.count(1)
        self._requests = itertools.count(1)

    async def start(self) -> None:
        self.streams.append(await self.server.attach(self.worker, self.engine_id, Role.WORKER))
        if self.has_scheduler:
            self.streams.append(await self.server.attach(self.scheduler, self.engine_id, Role.SCHEDULER))
        answer = await self.worker.register(self.registration())
        self.space = SpaceRef(answer.space_base, self.lora, self.salt)
        self.object_bytes = answer.object_bytes

    def registration(self) -> api.RegisterRequest:
        kv_rank, tp_rank, tp_size, kv_tp_size = self.parallel
        return api.RegisterRequest(
            engine_id=self.engine_id,
            identity=self.identity,
            kv_rank=kv_rank,
            tp_rank=tp_rank,
            tp_size=tp_size,
            kv_tp_size=kv_tp_size,
            layout=self.image.layout(self.memory_name),
            host_id=host_id(),
        )

    async def stop(self) -> None:
        """Breaks the engine's streams, as if its processes had died."""
        for stream in self.streams:
            await stream.close()

    def next_call_id(self) -> int:
        return next(self._call_ids)

    def fill(self, blocks: Sequence[int], first_token: int = 0) -> None:
        """0xA5 everywhere, then position-coded data in these blocks."""
        self.image.memory[:] = 0xA5
        self.image.write(blocks, first_token)

    def store_request(self, tokens: api.Content, blocks: Sequence[int], **changes: Any) -> api.StoreRequest:
        fields: dict[str, Any] = {
            "engine_id": self.engine_id,
            "call_id": self.next_call_id(),
            "space": self.space,
            "content": tokens,
            "blocks": (tuple(blocks),),
        }
        return api.StoreRequest(**{**fields, **changes})

    async def store(self, tokens: api.Content, blocks: Sequence[int], **changes: Any) -> tuple[ChunkResult, ...]:
        """Writes position-coded data into the blocks (they hold the tokens from 0 on) and stores them."""
        self.image.write(blocks)
        return await self.worker.store(self.store_request(tokens, blocks, **changes))

    def lookup_request(self, tokens: api.Content, **changes: Any) -> api.LookupRequest:
        fields: dict[str, Any] = {
            "engine_id": self.engine_id,
            "request_id": f"request-{next(self._requests)}",
            "space": self.space,
            "content": tokens,
            "tp_size": self.parallel[2],
        }
        return api.LookupRequest(**{**fields, **changes})

    async def lookup(self, tokens: api.Content, **changes: Any) -> LookupAnswer:
        return await self.scheduler.lookup(self.lookup_request(tokens, **changes))

    async def hits(self, tokens: api.Content, **changes: Any) -> int:
        """Hit chunks of a lookup that is given back at once."""
        answer = await self.lookup(tokens, **changes)
        if answer.job_id:
            await self.free(answer)
        return answer.status.hit_tokens // self.server.limits.chunk_tokens

    async def free(self, answer: LookupAnswer, **changes: Any) -> int:
        fields: dict[str, Any] = {"engine_id": self.engine_id, "job_id": answer.job_id, "tp_size": self.parallel[2]}
        return await self.scheduler.free(api.FreeRequest(**{**fields, **changes}))

    def retrieve_request(self, job_id: bytes, blocks: Sequence[int], **changes: Any) -> api.RetrieveRequest:
        fields: dict[str, Any] = {
            "engine_id": self.engine_id,
            "call_id": self.next_call_id(),
            "job_id": job_id,
            "range": TokenRange(0, len(blocks) * self.image.block_size),
            "blocks": (tuple(blocks),),
        }
        return api.RetrieveRequest(**{**fields, **changes})

    async def retrieve(self, answer: LookupAnswer, blocks: Sequence[int], **changes: Any) -> tuple[ChunkResult, ...]:
        """Loads into blocks of memory that otherwise holds 0xA5."""
        self.image.memory[:] = 0xA5
        return await self.worker.retrieve(self.retrieve_request(answer.job_id, blocks, **changes))
