# SPDX-License-Identifier: Apache-2.0
"""The cache over gRPC for programs with an event loop: CacheApi and AdminApi, one client of one server.

Nothing here keeps a session: open ``attach`` first and hold it, or use SchedulerClient or WorkerClient, which do.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import grpc.aio

from kvgrpc import api
from kvgrpc.client import objects
from kvgrpc.client.address import parse_address
from kvgrpc.client.channel import ChannelOptions, open_channel
from kvgrpc.client.credentials import token_for
from kvgrpc.client.fork import add_connection, claim_process
from kvgrpc.core.errors import Reason, Refusal
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
from kvgrpc.status import refusal_from_status
from kvgrpc.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc, engine_pb2_grpc
from kvgrpc.wire import admin, cache, engine, streams
from kvgrpc.wire.content import decode_write_policy, encode_write_policy

CLIENT_ID_KEY = "kvgrpc-client-id"
LOOKUP, STORE = "/kvgrpc.v1.KvCacheService/Lookup", "/kvgrpc.v1.KvCacheService/Store"
DEFAULT_OPTIONS = ChannelOptions()

Request = TypeVar("Request", contravariant=True)
Response = TypeVar("Response", covariant=True)
Answer = TypeVar("Answer")


class _Method(Protocol[Request, Response]):
    def __call__(
        self, request: Request, /, *, timeout: float | None, metadata: Any, wait_for_ready: bool | None
    ) -> Awaitable[Response]: ...


def new_client_id(role: str) -> str:
    """A name that no other process has: unlike a process id, which repeats from container to container."""
    return f"{role}-{secrets.token_hex(12)}"


def refusal_from_error(error: grpc.aio.AioRpcError) -> Exception:
    """The refusal behind a failed call."""
    trailers: Any = error.trailing_metadata() or ()
    return refusal_from_status(error.code(), error.details(), trailers)


@dataclass
class _Open:
    """What exists once the channel does; ``pid`` is the process that it works in."""

    pid: int
    channel: grpc.aio.Channel
    lookup: Any
    store: Any
    """These two take messages that are serialised already."""
    cache: Any
    engine: Any
    admin: Any


class AioClient(api.CacheApi, api.AdminApi):
    """CacheApi and AdminApi over one channel.

    Thread rule: belongs to the event loop of its first call; nothing here may be called from another thread or loop.
    Every method raises Refusal: the server's, or SERVER_UNREACHABLE, DEADLINE or MESSAGE_TOO_LARGE of the connection's
    own; and ForkedProcessError in a forked child. Anything else, such as TypeError for content that is neither Tokens
    nor Hashes, is the program's mistake, and no server runs such a call. ``timeout_s`` replaces the default deadline of
    ``options``. A Store or Retrieve that ends by deadline, cancel or a lost connection may still run on the server: its
    blocks are free only after ``fence``.
    """

    def __init__(self, address: str, client_id: str = "", options: ChannelOptions = DEFAULT_OPTIONS) -> None:
        self.address = parse_address(address)
        self.client_id = client_id or new_client_id("client")
        self.options = options
        self._named: tuple[tuple[str, str], ...] = ((CLIENT_ID_KEY, self.client_id),)
        shown = options.shown()
        if shown.uses_tls(self.address):
            shown.read()  # a file that is not there is told to whoever named it, and not at each attempt to connect
        self._token = token_for(self.address, shown)
        self._opened: _Open | None = None
        self._closed = False

    async def __aenter__(self) -> AioClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel; calls that still run are cancelled. Harmless when repeated, and in a forked child."""
        self._closed = True
        opened, self._opened = self._opened, None
        if opened is not None and opened.pid == os.getpid():
            await opened.channel.close()

    # ---- sessions ---------------------------------------------------------------------------------------------------

    async def handshake(
        self, hello: api.Hello, *, timeout_s: float | None = None, wait_for_server: bool = False
    ) -> api.ServerInfo:
        """With ``wait_for_server`` a server that is not there yet is awaited until the deadline."""
        stub = self._stubs().engine.Handshake
        request = engine.encode_handshake_request(hello)
        return await self._call(stub, request, engine.decode_handshake_response, timeout_s, wait_for_server)

    async def attach(self, engine_id: str, role: Role, session_id: bytes) -> AsyncGenerator[api.AttachEvent, None]:
        request = engine.encode_attach_request(engine_id, role, session_id)
        with _open(self._stubs().engine.Attach(request, metadata=self._metadata)) as stream:
            async for message in stream:
                event = engine.decode_attach_response(message)
                if event is not None:
                    yield event

    async def register(self, request: api.RegisterRequest, *, timeout_s: float | None = None) -> api.RegisterAnswer:
        stub = self._stubs().engine.RegisterKvCache
        message = engine.encode_register_request(request)
        return await self._call(stub, message, engine.decode_register_response, self._copy_s(timeout_s))

    async def unregister(self, engine_id: str, *, timeout_s: float | None = None) -> None:
        stub = self._stubs().engine.UnregisterKvCache
        message = engine.encode_unregister_request(engine_id)
        await self._call(stub, message, _nothing, self._copy_s(timeout_s))

    # ---- cache ------------------------------------------------------------------------------------------------------

    async def lookup(self, request: api.LookupRequest, *, timeout_s: float | None = None) -> LookupAnswer:
        method = self._stubs().lookup
        return await self._call(method, cache.write_lookup_request(request), cache.decode_lookup_response, timeout_s)

    async def query(
        self, engine_id: str, job_id: bytes, wait_ms: int = 0, *, timeout_s: float | None = None
    ) -> PrefetchStatus:
        stub = self._stubs().cache.QueryPrefetchStatus
        message = cache.encode_query_request(engine_id, job_id, wait_ms)
        timeout_s = self.options.call_s + wait_ms / 1000 if timeout_s is None else timeout_s
        return await self._call(stub, message, cache.decode_query_response, timeout_s)

    async def store(self, request: api.StoreRequest, *, timeout_s: float | None = None) -> tuple[ChunkResult, ...]:
        method = self._stubs().store
        message = cache.write_store_request(request)
        return await self._call(method, message, cache.decode_store_response, self._copy_s(timeout_s))

    async def retrieve(
        self, request: api.RetrieveRequest, *, timeout_s: float | None = None
    ) -> tuple[ChunkResult, ...]:
        stub = self._stubs().cache.Retrieve
        message = cache.encode_retrieve_request(request)
        return await self._call(stub, message, cache.decode_retrieve_response, self._copy_s(timeout_s))

    async def free(self, request: api.FreeRequest, *, timeout_s: float | None = None) -> int:
        stub = self._stubs().cache.FreeLookupLocks
        return await self._call(stub, cache.encode_free_request(request), cache.decode_free_response, timeout_s)

    async def end_request(self, engine_id: str, request_id: str, *, timeout_s: float | None = None) -> Ended:
        stub = self._stubs().cache.EndRequest
        message = cache.encode_end_request(engine_id, request_id)
        return await self._call(stub, message, cache.decode_end_response, timeout_s)

    async def fence(self, engine_id: str, call_ids: Sequence[int], *, timeout_s: float | None = None) -> None:
        stub = self._stubs().cache.Fence
        message = cache.encode_fence_request(engine_id, call_ids)
        await self._call(stub, message, _nothing, self._copy_s(timeout_s))

    async def read_chunks(
        self, request: api.ReadChunksRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[api.ReadChunksAnswer, None]:
        """Parts in their order, checked, and then the results. A stream that ends without them raises."""
        message, timeout = streams.encode_read_request(request), self._copy_s(timeout_s)
        with _open(self._stubs().cache.ReadChunks(message, timeout=timeout, metadata=self._metadata)) as stream:
            async for answer in objects.checked(stream):
                yield answer

    async def read_objects(
        self, request: api.ReadChunksRequest, *, timeout_s: float | None = None
    ) -> tuple[dict[int, bytes], tuple[ChunkResult, ...]]:
        """The objects of the chunks that were there, by chunk index, and the results; all of them in memory. Of models
        of which a group is not FULL: ``read_groups``."""
        found, results = await objects.collected(self.read_chunks(request, timeout_s=timeout_s), by_groups=False)
        return {chunk: of_groups[0] for chunk, of_groups in found.items()}, results

    async def read_groups(
        self, request: api.ReadChunksRequest, *, timeout_s: float | None = None
    ) -> tuple[dict[int, dict[int, bytes]], tuple[ChunkResult, ...]]:
        """As ``read_objects``, of any model: what the hit needs of each chunk, by the groups (bits) that an object
        holds; 0 is the only object where all groups are FULL."""
        answers = self.read_chunks(replace(request, by_groups=True), timeout_s=timeout_s)
        return await objects.collected(answers, by_groups=True)

    async def write_chunks(
        self, request: api.WriteChunksRequest, parts: AsyncIterator[api.ChunkPart], *, timeout_s: float | None = None
    ) -> tuple[ChunkResult, ...]:
        """Sends the parts, which are 1 MiB long but for the last of each chunk; what becomes of each chunk."""
        stub, timeout = self._stubs().cache.WriteChunks, self._copy_s(timeout_s)
        with _open(stub(timeout=timeout, metadata=self._metadata)) as stream:
            answer = asyncio.ensure_future(stream)
            sending = asyncio.create_task(objects.send(stream, streams.encode_write_begin(request), parts))
            try:
                await asyncio.wait((answer, sending), return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()
                return streams.decode_write_response(await answer)
            finally:
                for task in (answer, sending):
                    task.cancel()
                await asyncio.wait((answer, sending))

    async def write_objects(
        self, request: api.WriteChunksRequest, found: Mapping[int, bytes], *, timeout_s: float | None = None
    ) -> tuple[ChunkResult, ...]:
        """Stores objects by chunk index: one for each chunk of the range, in memory as ``read_objects`` gives them."""
        return await self.write_groups(request, objects.alone(found), timeout_s=timeout_s)

    async def write_groups(
        self, request: api.WriteChunksRequest, found: objects.Grouped, *, timeout_s: float | None = None
    ) -> tuple[ChunkResult, ...]:
        """As ``write_objects``, of any model: objects as ``read_groups`` gives them. ValueError for one whose groups
        are in none of ``request.objects``."""
        parts = objects.parts_of(found, request.objects)
        return await self.write_chunks(request, parts, timeout_s=timeout_s)

    async def watch(self, request: api.WatchRequest) -> AsyncGenerator[api.WatchEvent, None]:
        """Without a deadline; ends when this watcher is lost, or with the server."""
        message = streams.encode_watch_request(request)
        with _open(self._stubs().cache.Watch(message, metadata=self._metadata)) as stream:
            async for message in stream:
                event = streams.decode_watch_response(message)
                if event is not None:
                    yield event

    # ---- operators --------------------------------------------------------------------------------------------------

    async def get_status(self) -> api.ServerStatus:
        stub = self._stubs().admin.GetStatus
        return await self._call(stub, admin_pb2.GetStatusRequest(), admin.decode_server_status)

    async def list_engines(self) -> tuple[api.EngineStatus, ...]:
        stub = self._stubs().admin.ListEngines
        return await self._call(stub, admin_pb2.ListEnginesRequest(), admin.decode_engines)

    async def list_spaces(self) -> tuple[api.SpaceStatus, ...]:
        stub = self._stubs().admin.ListSpaces
        return await self._call(stub, admin_pb2.ListSpacesRequest(), admin.decode_spaces)

    async def clear(self, target: api.ClearTarget) -> Cleared:
        stub = self._stubs().admin.Clear
        return await self._call(stub, admin.encode_clear_request(target), admin.decode_clear_response)

    async def bump_generation(self, *, model: str = "", space_base: bytes = b"") -> Cleared:
        stub = self._stubs().admin.BumpGeneration
        return await self._call(stub, admin.encode_bump_request(model, space_base), admin.decode_bump_response)

    async def pin(self, space: SpaceRef, content: api.Content, ttl_ms: int) -> Held:
        stub = self._stubs().admin.Pin
        return await self._call(stub, admin.encode_pin_request(space, content, ttl_ms), admin.decode_pin_response)

    async def warm(self, space: SpaceRef, content: api.Content, wait_ms: int) -> Warmed:
        stub, message = self._stubs().admin.Warm, admin.encode_warm_request(space, content, wait_ms)
        return await self._call(stub, message, admin.decode_warm_response, self.options.call_s + wait_ms / 1000)

    async def inspect(self, space: SpaceRef, content: api.Content) -> api.Inspection:
        stub, message = self._stubs().admin.Inspect, admin.encode_inspect_request(space, content)
        return await self._call(stub, message, admin.decode_inspect_response, self.options.copy_s)

    async def record_trace(self) -> AsyncGenerator[api.TracedCalls, None]:
        request = admin_pb2.RecordTraceRequest()
        with _open(self._stubs().admin.RecordTrace(request, metadata=self._metadata)) as stream:
            async for message in stream:
                yield admin.decode_traced_calls(message)

    async def unpin(self, pin_id: bytes) -> int:
        stub = self._stubs().admin.Unpin
        return await self._call(stub, admin_pb2.UnpinRequest(pin_id=pin_id), _released_chunks)

    async def set_quota(self, cache_salt: str, size_bytes: int | None) -> Quota:
        stub = self._stubs().admin.SetQuota
        return await self._call(stub, admin.encode_set_quota_request(cache_salt, size_bytes), admin.decode_quota)

    async def set_write_policy(self, model: str, policy: WritePolicy | None) -> WritePolicy:
        request = admin_pb2.SetWritePolicyRequest(model=model, policy=encode_write_policy(policy))
        answer = await self._call(self._stubs().admin.SetWritePolicy, request, lambda message: message.policy)
        return decode_write_policy(answer) or WritePolicy.THROUGH

    async def get_quota(self, cache_salt: str) -> Quota:
        stub = self._stubs().admin.GetQuota
        return await self._call(stub, admin_pb2.GetQuotaRequest(cache_salt=cache_salt), admin.decode_quota)

    async def drain_engine(self, engine: str, wait_ms: int = 0) -> bool:
        stub = self._stubs().admin.DrainEngine
        message = admin_pb2.DrainEngineRequest(engine=engine, wait_ms=wait_ms)
        return await self._call(stub, message, _drained, self.options.call_s + wait_ms / 1000)

    # ---- inside -----------------------------------------------------------------------------------------------------

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return self._named if self._token is None else (*self._named, *self._token.metadata())

    def _copy_s(self, timeout_s: float | None) -> float:
        return self.options.copy_s if timeout_s is None else timeout_s

    def _stubs(self) -> _Open:
        claim_process()
        if self._opened is not None:
            return self._opened
        if self._closed:
            raise RuntimeError("the client is closed")
        channel = open_channel(self.address, self.options)
        add_connection(channel, self.address)
        self._opened = _Open(
            os.getpid(),
            channel,
            channel.unary_unary(LOOKUP, response_deserializer=cache_pb2.LookupResponse.FromString),
            channel.unary_unary(STORE, response_deserializer=cache_pb2.StoreResponse.FromString),
            cache_pb2_grpc.KvCacheServiceStub(channel),
            engine_pb2_grpc.EngineServiceStub(channel),
            admin_pb2_grpc.AdminServiceStub(channel),
        )
        return self._opened

    async def _call(
        self,
        method: _Method[Request, Response],
        request: Request,
        decode: Callable[[Response], Answer],
        timeout_s: float | None = None,
        wait_for_server: bool = False,
    ) -> Answer:
        timeout = self.options.call_s if timeout_s is None else timeout_s
        wait = True if wait_for_server else None
        call = method(request, timeout=timeout, metadata=self._metadata, wait_for_ready=wait)
        try:
            response = await call
        except grpc.aio.AioRpcError as error:
            raise refusal_from_error(error) from None
        except (grpc.aio.BaseError, asyncio.InvalidStateError, RuntimeError) as error:
            # it may have been sent, so it must not look like a mistake that never was
            raise Refusal(Reason.INTERNAL, f"the call failed in this client: {error!r}") from error
        return decode(response)


@contextmanager
def _open(stream: Any) -> Generator[Any, None, None]:
    """A stream of answers, which ends with the block; what the server refuses is raised as such."""
    try:
        yield stream
    except grpc.aio.AioRpcError as error:
        raise refusal_from_error(error) from None
    finally:
        stream.cancel()


def _nothing(_: object) -> None:
    return None


def _released_chunks(message: admin_pb2.UnpinResponse) -> int:
    return message.released_chunks


def _drained(message: admin_pb2.DrainEngineResponse) -> bool:
    return message.drained
