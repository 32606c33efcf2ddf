# SPDX-License-Identifier: Apache-2.0
"""A cache that answers at once, refuses, fails, or holds a call until it is let go; it records what reached it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from kvgrpc import api
from kvgrpc.core.types import (
    ChunkOutcome,
    ChunkResult,
    Cleared,
    Ended,
    Held,
    LookupAnswer,
    PrefetchStatus,
    Quota,
    Role,
    SpaceRef,
    Warmed,
    WritePolicy,
)

EPOCH = bytes(range(16))
LIMITS = api.Limits(16384, 4096, 16 << 20, 256, 4096, 60_000, 600_000, 500, 1 << 30, 1 << 29)
ARENA = api.ArenaStatus(100, 100, 0, 0, 0, 0, 0, 0)


class FakeCache:
    """What all clients share. ``hold`` and ``raises`` go by the name of a CacheApi or AdminApi method."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, Any]] = []
        self.hold: set[str] = set()
        self.raises: dict[str, BaseException] = {}
        self.entered: dict[str, int] = {}
        self.cancelled: list[str] = []
        self.streams_open = 0
        self.events: dict[str, asyncio.Queue[api.AttachEvent | None]] = {}
        self.released = asyncio.Event()

    def client(self, client_id: str) -> FakeClient:
        return FakeClient(self, client_id)

    async def act(self, client_id: str, verb: str, request: Any = None) -> None:
        self.seen.append((client_id, verb, request))
        self.entered[verb] = self.entered.get(verb, 0) + 1
        if verb in self.raises:
            raise self.raises[verb]
        if verb in self.hold:
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                self.cancelled.append(verb)
                raise

    # ---- operators --------------------------------------------------------------------------------------------------

    async def get_status(self) -> api.ServerStatus:
        await self.act("", "get_status")
        return api.ServerStatus("0.1", EPOCH, 5, 256, False, ARENA, 1, 2, 3, 4, 5, 6, 7)

    async def list_engines(self) -> tuple[api.EngineStatus, ...]:
        await self.act("", "list_engines")
        return (api.EngineStatus("0123456789abcdef", (), 1, 2, False),)

    async def list_spaces(self) -> tuple[api.SpaceStatus, ...]:
        await self.act("", "list_spaces")
        return ()

    async def clear(self, target: api.ClearTarget) -> Cleared:
        await self.act("", "clear", target)
        return Cleared(7, 2)

    async def bump_generation(self, *, model: str = "", space_base: bytes = b"") -> Cleared:
        await self.act("", "bump_generation", (model, space_base))
        return Cleared(3, 0, 9)

    async def warm(self, space: SpaceRef, content: api.Content, wait_ms: int) -> Warmed:
        await self.act("", "warm", (space, content, wait_ms))
        return Warmed(256)

    async def inspect(self, space: SpaceRef, content: api.Content) -> api.Inspection:
        await self.act("", "inspect", (space, content))
        return api.Inspection((api.InspectedChunk(b"k" * 32, 1, 0, 4096, 1, 0),), (), False, ({"disk": 1},), 1, ())

    async def record_trace(self) -> AsyncIterator[api.TracedCalls]:
        await self.act("", "record_trace")
        self.streams_open += 1
        try:
            yield api.TracedCalls((), 0, 256)
            await self.released.wait()
        finally:
            self.streams_open -= 1

    async def pin(self, space: SpaceRef, content: api.Content, ttl_ms: int) -> Held:
        await self.act("", "pin", (space, content, ttl_ms))
        return Held(EPOCH, 512)

    async def unpin(self, pin_id: bytes) -> int:
        await self.act("", "unpin", pin_id)
        return 2

    async def set_quota(self, cache_salt: str, size_bytes: int | None) -> Quota:
        await self.act("", "set_quota", (cache_salt, size_bytes))
        return Quota(size_bytes, 3)

    async def set_write_policy(self, model: str, policy: WritePolicy | None) -> WritePolicy:
        await self.act("", "set_write_policy", (model, policy))
        return policy or WritePolicy.EVICTION

    async def get_quota(self, cache_salt: str) -> Quota:
        await self.act("", "get_quota", cache_salt)
        return Quota(None, 3)

    async def drain_engine(self, engine: str, wait_ms: int = 0) -> bool:
        await self.act("", "drain_engine", (engine, wait_ms))
        return True


class FakeClient:
    """The fake as one client sees it."""

    def __init__(self, cache: FakeCache, client_id: str) -> None:
        self._cache = cache
        self._client_id = client_id

    async def handshake(self, hello: api.Hello) -> api.ServerInfo:
        await self._cache.act(self._client_id, "handshake", hello)
        return api.ServerInfo(1, 0, "0.1", EPOCH, 256, api.OWN_HASH_ALGORITHM, LIMITS, "host", b"")

    async def attach(self, engine_id: str, role: Role, session_id: bytes) -> AsyncIterator[api.AttachEvent]:
        await self._cache.act(self._client_id, "attach", (engine_id, role, session_id))
        queue = self._cache.events.setdefault(self._client_id, asyncio.Queue())
        self._cache.streams_open += 1
        try:
            yield api.AttachEvent(False, EPOCH)
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._cache.streams_open -= 1

    async def register(self, request: api.RegisterRequest) -> api.RegisterAnswer:
        await self._cache.act(self._client_id, "register", request)
        return api.RegisterAnswer(EPOCH, 256, 1, "form", 4096)

    async def unregister(self, engine_id: str) -> None:
        await self._cache.act(self._client_id, "unregister", engine_id)

    async def lookup(self, request: api.LookupRequest) -> LookupAnswer:
        await self._cache.act(self._client_id, "lookup", request)
        return LookupAnswer(EPOCH, PrefetchStatus(True, 256, True, {"l1": 1}))

    async def query(self, engine_id: str, job_id: bytes, wait_ms: int = 0) -> PrefetchStatus:
        await self._cache.act(self._client_id, "query", (engine_id, job_id, wait_ms))
        return PrefetchStatus(False)

    async def store(self, request: api.StoreRequest) -> tuple[ChunkResult, ...]:
        await self._cache.act(self._client_id, "store", request)
        return (ChunkResult(0, 2, ChunkOutcome.STORED),)

    async def retrieve(self, request: api.RetrieveRequest) -> tuple[ChunkResult, ...]:
        await self._cache.act(self._client_id, "retrieve", request)
        return (ChunkResult(0, 1, ChunkOutcome.LOADED), ChunkResult(1, 1, ChunkOutcome.MISSING))

    async def free(self, request: api.FreeRequest) -> int:
        await self._cache.act(self._client_id, "free", request)
        return 3

    async def end_request(self, engine_id: str, request_id: str) -> Ended:
        await self._cache.act(self._client_id, "end_request", (engine_id, request_id))
        return Ended(1, 2)

    async def fence(self, engine_id: str, call_ids: Sequence[int]) -> None:
        await self._cache.act(self._client_id, "fence", (engine_id, tuple(call_ids)))

    async def write_chunks(
        self, request: api.WriteChunksRequest, parts: AsyncIterator[api.ChunkPart]
    ) -> tuple[ChunkResult, ...]:
        await self._cache.act(self._client_id, "write_chunks", (request, [part async for part in parts]))
        return (ChunkResult(0, 1, ChunkOutcome.STORED),)

    async def read_chunks(self, request: api.ReadChunksRequest) -> AsyncIterator[api.ReadChunksAnswer]:
        await self._cache.act(self._client_id, "read_chunks", request)
        yield ()

    async def watch(self, request: api.WatchRequest) -> AsyncIterator[api.WatchEvent]:
        await self._cache.act(self._client_id, "watch", request)
        yield api.WatchEvent(1, api.WatchKind.STARTED)
