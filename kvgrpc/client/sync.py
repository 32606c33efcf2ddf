# SPDX-License-Identifier: Apache-2.0
"""The cache over gRPC for programs without an event loop: the same calls as AioClient, blocking."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import TypeVar

from kvgrpc import api
from kvgrpc.client.aio import DEFAULT_OPTIONS, AioClient
from kvgrpc.client.channel import ChannelOptions
from kvgrpc.client.loop import LoopThread
from kvgrpc.client.objects import Grouped
from kvgrpc.core.types import (
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

T = TypeVar("T")


class Client:
    """CacheApi and AdminApi, blocking; see AioClient for errors, deadlines and who owns the blocks.

    Thread rule: may be called from any thread, several at a time; a background thread owns the channel. An iterator
    from ``attach`` belongs to one thread at a time.
    """

    def __init__(self, address: str, client_id: str = "", options: ChannelOptions = DEFAULT_OPTIONS) -> None:
        self._aio = AioClient(address, client_id, options)
        self._loop = LoopThread("kvgrpc-client")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def client_id(self) -> str:
        return self._aio.client_id

    def close(self) -> None:
        """Closes the channel and ends the thread. Harmless when repeated."""
        try:
            if self._loop.has_started:
                self._loop.run(self._aio.close())
        except RuntimeError:  # closed before, or this is a forked child with nothing to close
            pass
        self._loop.stop()

    # ---- sessions ---------------------------------------------------------------------------------------------------

    def handshake(
        self, hello: api.Hello, *, timeout_s: float | None = None, wait_for_server: bool = False
    ) -> api.ServerInfo:
        """With ``wait_for_server`` a server that is not there yet is awaited until the deadline."""
        return self._loop.run(self._aio.handshake(hello, timeout_s=timeout_s, wait_for_server=wait_for_server))

    def attach(self, engine_id: str, role: Role, session_id: bytes) -> Generator[api.AttachEvent, None, None]:
        """Opens the session with the first ``next``; closing the iterator breaks the stream. ``next`` waits for
        events."""
        return self._each(self._aio.attach(engine_id, role, session_id))

    def register(self, request: api.RegisterRequest, *, timeout_s: float | None = None) -> api.RegisterAnswer:
        """Shares the memory of an attached worker; replaces what it shared before."""
        return self._loop.run(self._aio.register(request, timeout_s=timeout_s))

    def unregister(self, engine_id: str, *, timeout_s: float | None = None) -> None:
        """Takes the memory back when running copies have ended. Harmless when nothing is registered."""
        return self._loop.run(self._aio.unregister(engine_id, timeout_s=timeout_s))

    # ---- cache ------------------------------------------------------------------------------------------------------

    def lookup(self, request: api.LookupRequest, *, timeout_s: float | None = None) -> LookupAnswer:
        """Finds and pins the longest prefix; never waits for lower tiers: while ``status.done`` is False, ``query``."""
        return self._loop.run(self._aio.lookup(request, timeout_s=timeout_s))

    def query(
        self, engine_id: str, job_id: bytes, wait_ms: int = 0, *, timeout_s: float | None = None
    ) -> PrefetchStatus:
        """How far a lookup is; with ``wait_ms`` waits for its end at most so long."""
        return self._loop.run(self._aio.query(engine_id, job_id, wait_ms, timeout_s=timeout_s))

    def store(self, request: api.StoreRequest, *, timeout_s: float | None = None) -> tuple[ChunkResult, ...]:
        """Copies whole chunks out of the worker's blocks; any later lookup finds what is STORED or RESIDENT."""
        return self._loop.run(self._aio.store(request, timeout_s=timeout_s))

    def retrieve(self, request: api.RetrieveRequest, *, timeout_s: float | None = None) -> tuple[ChunkResult, ...]:
        """Copies a range of what a lookup found into the worker's blocks; only what is LOADED may be used."""
        return self._loop.run(self._aio.retrieve(request, timeout_s=timeout_s))

    def free(self, request: api.FreeRequest, *, timeout_s: float | None = None) -> int:
        """Gives pins of a lookup back; how many (one a chunk, KV rank and reader). Repeating changes nothing."""
        return self._loop.run(self._aio.free(request, timeout_s=timeout_s))

    def end_request(self, engine_id: str, request_id: str, *, timeout_s: float | None = None) -> Ended:
        """Ends every lookup of a request, with its pins. Harmless when repeated or unknown."""
        return self._loop.run(self._aio.end_request(engine_id, request_id, timeout_s=timeout_s))

    def fence(self, engine_id: str, call_ids: Sequence[int], *, timeout_s: float | None = None) -> None:
        """Revokes stores and retrieves of this client; when it answers, their blocks are free."""
        return self._loop.run(self._aio.fence(engine_id, call_ids, timeout_s=timeout_s))

    def read_chunks(
        self, request: api.ReadChunksRequest, *, timeout_s: float | None = None
    ) -> Generator[api.ReadChunksAnswer, None, None]:
        """Parts and then the results, each when it is there; closing the iterator ends the stream."""
        return self._each(self._aio.read_chunks(request, timeout_s=timeout_s))

    def read_objects(
        self, request: api.ReadChunksRequest, *, timeout_s: float | None = None
    ) -> tuple[dict[int, bytes], tuple[ChunkResult, ...]]:
        """The objects of the chunks that were there, by chunk index, and the results; all of them in memory."""
        return self._loop.run(self._aio.read_objects(request, timeout_s=timeout_s))

    def read_groups(
        self, request: api.ReadChunksRequest, *, timeout_s: float | None = None
    ) -> tuple[dict[int, dict[int, bytes]], tuple[ChunkResult, ...]]:
        """As ``read_objects``, of any model, by the groups (bits) that an object holds."""
        return self._loop.run(self._aio.read_groups(request, timeout_s=timeout_s))

    def write_objects(
        self, request: api.WriteChunksRequest, found: Mapping[int, bytes], *, timeout_s: float | None = None
    ) -> tuple[ChunkResult, ...]:
        """Stores objects by chunk index: one for each chunk of the range, as ``read_objects`` gives them."""
        return self._loop.run(self._aio.write_objects(request, found, timeout_s=timeout_s))

    def write_groups(
        self, request: api.WriteChunksRequest, found: Grouped, *, timeout_s: float | None = None
    ) -> tuple[ChunkResult, ...]:
        """As ``write_objects``, of any model: objects as ``read_groups`` gives them."""
        return self._loop.run(self._aio.write_groups(request, found, timeout_s=timeout_s))

    def watch(self, request: api.WatchRequest) -> Generator[api.WatchEvent, None, None]:
        """``next`` waits for events; closing the iterator ends the stream."""
        return self._each(self._aio.watch(request))

    def _each(self, stream: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        try:
            while (event := self._loop.run(_next(stream))) is not None:
                yield event
        finally:
            try:
                self._loop.run(stream.aclose())
            except RuntimeError:  # the client was closed first, and the stream with it
                pass

    # ---- operators --------------------------------------------------------------------------------------------------

    def get_status(self) -> api.ServerStatus:
        """The server at a glance: L1, tiers, counters."""
        return self._loop.run(self._aio.get_status())

    def list_engines(self) -> tuple[api.EngineStatus, ...]:
        """Engines with a client that is attached, and their clients."""
        return self._loop.run(self._aio.list_engines())

    def list_spaces(self) -> tuple[api.SpaceStatus, ...]:
        """Spaces that have data in L1."""
        return self._loop.run(self._aio.list_spaces())

    def clear(self, target: api.ClearTarget) -> Cleared:
        """Forgets: nothing that was stored before the answer is found again, in any tier."""
        return self._loop.run(self._aio.clear(target))

    def bump_generation(self, *, model: str = "", space_base: bytes = b"") -> Cleared:
        """Says that the weights of a model, or of one identity, are new: what was stored is not found any more."""
        return self._loop.run(self._aio.bump_generation(model=model, space_base=space_base))

    def pin(self, space: SpaceRef, content: api.Content, ttl_ms: int) -> Held:
        """Keeps what is there of a prefix in L1 for ``ttl_ms``."""
        return self._loop.run(self._aio.pin(space, content, ttl_ms))

    def warm(self, space: SpaceRef, content: api.Content, wait_ms: int) -> Warmed:
        """Reads a prefix from lower tiers into L1, within ``wait_ms``."""
        return self._loop.run(self._aio.warm(space, content, wait_ms))

    def inspect(self, space: SpaceRef, content: api.Content) -> api.Inspection:
        """Where the chunks of a prompt are, and who keeps them. Changes nothing."""
        return self._loop.run(self._aio.inspect(space, content))

    def record_trace(self) -> Generator[api.TracedCalls, None, None]:
        """``next`` waits for calls; closing the iterator ends the recording."""
        yield from self._each(self._aio.record_trace())

    def unpin(self, pin_id: bytes) -> int:
        """Ends a ``pin``; how many chunks it held."""
        return self._loop.run(self._aio.unpin(pin_id))

    def set_quota(self, cache_salt: str, size_bytes: int | None) -> Quota:
        """Bounds what a tenant may hold (None: no bound)."""
        return self._loop.run(self._aio.set_quota(cache_salt, size_bytes))

    def set_write_policy(self, model: str, policy: WritePolicy | None) -> WritePolicy:
        """When what is stored for a model (empty: for any without a policy of its own) goes to lower tiers."""
        return self._loop.run(self._aio.set_write_policy(model, policy))

    def get_quota(self, cache_salt: str) -> Quota:
        """What a tenant may hold, and holds."""
        return self._loop.run(self._aio.get_quota(cache_salt))

    def drain_engine(self, engine: str, wait_ms: int = 0) -> bool:
        """Takes an engine (its id or fingerprint) out; True when it is idle within ``wait_ms``."""
        return self._loop.run(self._aio.drain_engine(engine, wait_ms))


async def _next(stream: AsyncGenerator[T, None]) -> T | None:
    async for event in stream:
        return event
    return None
