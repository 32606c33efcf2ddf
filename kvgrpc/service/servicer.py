# SPDX-License-Identifier: Apache-2.0
"""KvCacheService and EngineService over the cache interface: decode, await, encode. Refusals are the guard's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, cast

import grpc.aio

from kvgrpc.api import AttachEvent, CacheApi, ChunkPart, LookupRequest, StoreRequest
from kvgrpc.service.calls import CACHE_SERVICE, CURRENT, REQUEST_ID_KEY
from kvgrpc.service.traffic import Traffic, until_closed
from kvgrpc.v1 import cache_pb2, cache_pb2_grpc, engine_pb2, engine_pb2_grpc
from kvgrpc.wire import cache as cache_wire
from kvgrpc.wire import engine as engine_wire
from kvgrpc.wire import streams as streams_wire

ClientFor = Callable[[str], CacheApi]
"""The cache as the client of that id sees it; the empty id only for Handshake."""


READERS: dict[str, Callable[[bytes], object]] = {
    f"/{CACHE_SERVICE}/Lookup": cache_wire.read_lookup_request,
    f"/{CACHE_SERVICE}/Store": cache_wire.read_store_request,
}
"""Methods whose requests are read from their bytes, past protobuf: a prompt's tokens are not copied then."""


class KvCacheServicer(cache_pb2_grpc.KvCacheServiceServicer):
    """Finds, reads and stores for the client that the call names."""

    def __init__(self, client_for: ClientFor, traffic: Traffic) -> None:
        self._client_for = client_for
        self._traffic = traffic

    def _cache(self) -> CacheApi:
        return self._client_for(CURRENT.get().client_id)

    async def Lookup(  # pyright: ignore[reportIncompatibleMethodOverride]  (see READERS)
        self, request: LookupRequest, context: object
    ) -> cache_pb2.LookupResponse:
        answer = await self._cache().lookup(request)
        return cache_wire.encode_lookup_response(answer)

    async def QueryPrefetchStatus(
        self, request: cache_pb2.QueryPrefetchStatusRequest, context: object
    ) -> cache_pb2.QueryPrefetchStatusResponse:
        engine_id, job_id, wait_ms = cache_wire.decode_query_request(request)
        return cache_wire.encode_query_response(await self._cache().query(engine_id, job_id, wait_ms))

    async def Store(  # pyright: ignore[reportIncompatibleMethodOverride]  (see READERS)
        self, request: StoreRequest, context: object
    ) -> cache_pb2.StoreResponse:
        storing = self._cache().store(request)
        del request  # a Store waits for its turn without it
        results = await storing
        return cache_wire.encode_store_response(results)

    async def Retrieve(self, request: cache_pb2.RetrieveRequest, context: object) -> cache_pb2.RetrieveResponse:
        retrieving = self._cache().retrieve(cache_wire.decode_retrieve_request(request))
        del request  # a Retrieve waits for its turn without it
        results = await retrieving
        return cache_wire.encode_retrieve_response(results)

    async def FreeLookupLocks(
        self, request: cache_pb2.FreeLookupLocksRequest, context: object
    ) -> cache_pb2.FreeLookupLocksResponse:
        released_pins = await self._cache().free(cache_wire.decode_free_request(request))
        return cache_wire.encode_free_response(released_pins)

    async def EndRequest(self, request: cache_pb2.EndRequestRequest, context: object) -> cache_pb2.EndRequestResponse:
        ended = await self._cache().end_request(*cache_wire.decode_end_request(request))
        return cache_wire.encode_end_response(ended)

    async def Fence(self, request: cache_pb2.FenceRequest, context: object) -> cache_pb2.FenceResponse:
        await self._cache().fence(*cache_wire.decode_fence_request(request))
        return cache_pb2.FenceResponse()

    async def ReadChunks(
        self, request: cache_pb2.ReadChunksRequest, context: object
    ) -> AsyncGenerator[cache_pb2.ReadChunksResponse, None]:
        answers = self._cache().read_chunks(streams_wire.decode_read_request(request))
        try:
            async for answer in answers:
                yield streams_wire.encode_read_response(answer)
        finally:
            await cast("AsyncGenerator[object, None]", answers).aclose()

    async def WriteChunks(  # pyright: ignore[reportIncompatibleMethodOverride]  (the guard reads messages)
        self, messages: AsyncGenerator[cache_pb2.WriteChunksRequest, None], context: grpc.aio.ServicerContext[Any, Any]
    ) -> cache_pb2.WriteChunksResponse:
        request = streams_wire.decode_write_begin(await anext(messages, None))

        async def parts() -> AsyncGenerator[ChunkPart, None]:
            taken = ((REQUEST_ID_KEY, CURRENT.get().request_id),)
            await context.send_initial_metadata(taken)  # the cache wants the parts
            async for message in messages:
                yield streams_wire.decode_write_part(message)

        async with aclosing(parts()) as coming:
            results = await self._cache().write_chunks(request, coming)
        return streams_wire.encode_write_response(results)

    async def Watch(
        self, request: cache_pb2.WatchRequest, context: object
    ) -> AsyncGenerator[cache_pb2.WatchResponse, None]:
        events = until_closed(self._cache().watch(streams_wire.decode_watch_request(request)), self._traffic)
        try:
            async for event in events:
                yield streams_wire.encode_watch_response(event)
        finally:
            await events.aclose()


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """Session and memory of the client that the call names."""

    def __init__(self, client_for: ClientFor, traffic: Traffic) -> None:
        self._client_for = client_for
        self._traffic = traffic

    def _cache(self) -> CacheApi:
        return self._client_for(CURRENT.get().client_id)

    async def Handshake(self, request: engine_pb2.HandshakeRequest, context: object) -> engine_pb2.HandshakeResponse:
        info = await self._cache().handshake(engine_wire.decode_handshake_request(request))
        return engine_wire.encode_handshake_response(info)

    async def Attach(
        self, request: engine_pb2.AttachRequest, context: object
    ) -> AsyncGenerator[engine_pb2.AttachResponse, None]:
        engine_id, role, session_id = engine_wire.decode_attach_request(request)
        events = session_events(self._cache().attach(engine_id, role, session_id), self._traffic)
        try:
            async for event in events:
                yield engine_wire.encode_attach_response(event)
        finally:
            await events.aclose()

    async def RegisterKvCache(
        self, request: engine_pb2.RegisterKvCacheRequest, context: object
    ) -> engine_pb2.RegisterKvCacheResponse:
        answer = await self._cache().register(engine_wire.decode_register_request(request))
        return engine_wire.encode_register_response(answer)

    async def UnregisterKvCache(
        self, request: engine_pb2.UnregisterKvCacheRequest, context: object
    ) -> engine_pb2.UnregisterKvCacheResponse:
        await self._cache().unregister(engine_wire.decode_unregister_request(request))
        return engine_pb2.UnregisterKvCacheResponse()


async def session_events(events: AsyncIterator[AttachEvent], traffic: Traffic) -> AsyncGenerator[AttachEvent, None]:
    """The cache's events of one session, and a Draining event when the server drains. Ends with the session or when the
    server closes its streams. However it ends, ``events`` is closed before this returns."""
    session = cast("AsyncGenerator[AttachEvent, None]", events)

    async def next_event() -> AttachEvent | None:
        return await anext(session, None)

    upcoming = asyncio.create_task(next_event())
    draining = asyncio.create_task(traffic.draining.wait())
    closed = asyncio.create_task(traffic.closed.wait())
    attached = told = False
    try:
        while True:
            # the first message confirms the session, so Draining waits for it
            waited = {upcoming, closed, draining} if attached and not told else {upcoming, closed}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if upcoming.done():
                event = upcoming.result()
                if event is None:
                    return
                attached = True
                yield event
                upcoming = asyncio.create_task(next_event())
            if draining.done() and attached and not told:
                told = True
                yield AttachEvent(True, reason=traffic.reason)
            if closed.done():
                return
    finally:
        for task in (upcoming, draining, closed):
            task.cancel()
        await asyncio.wait({upcoming})
        await session.aclose()
