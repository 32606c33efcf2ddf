# SPDX-License-Identifier: Apache-2.0
"""Decorators that make spans: of the cache as one client sees it, of a mover, of a tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import Span, get_current_span
from opentelemetry.trace.propagation import set_span_in_context

from kvgrpc import api
from kvgrpc.core.errors import Refusal
from kvgrpc.core.types import ChunkResult, Ended, LookupAnswer, ObjectName, PrefetchStatus, Role, RunSlice, SliceReport
from kvgrpc.telemetry.hands import CountedMover, CountedTier
from kvgrpc.telemetry.log import TRACE_ID
from kvgrpc.telemetry.tracing import Tracing
from kvgrpc.tiers.base import Tier
from kvgrpc.transfer.base import Flight

T = TypeVar("T")


class TracedCache:
    """CacheApi whose lookups, stores and retrieves may become spans."""

    def __init__(self, cache: api.CacheApi, client_id: str, tracing: Tracing) -> None:
        self._cache = cache
        self._client_id = client_id
        self._tracing = tracing

    async def lookup(self, request: api.LookupRequest) -> LookupAnswer:
        tracing = self._tracing
        chosen, parent = tracing.chosen()
        if not chosen:
            return await self._cache.lookup(request)
        span = tracing.begin("lookup_and_prefetch", parent)
        span.set_attribute("kvgrpc.request_id", request.request_id)
        span.set_attribute("kvgrpc.tokens", request.content.num_tokens)
        answer = await self._inside(span, self._cache.lookup(request))
        if answer.status.done:
            if answer.job_id:
                tracing.remember(span, answer.job_id)
            tracing.end_lookup(span, answer.status)
        else:
            tracing.follow(span, answer.job_id)
        return answer

    async def retrieve(self, request: api.RetrieveRequest) -> tuple[ChunkResult, ...]:
        tracing = self._tracing
        lookup = tracing.lookup_of(request.job_id)
        chosen, engine = tracing.chosen() if lookup is None else (True, tracing.chosen()[1])
        if not chosen:
            return await self._cache.retrieve(request)
        span = tracing.begin("retrieve", lookup or engine, engine if lookup is not None else None)
        return await self._copying(span, request.call_id, self._cache.retrieve(request))

    async def store(self, request: api.StoreRequest) -> tuple[ChunkResult, ...]:
        chosen, parent = self._tracing.chosen()
        if not chosen:
            return await self._cache.store(request)
        span = self._tracing.begin("store", parent)
        span.set_attribute("kvgrpc.tokens", request.content.num_tokens)
        return await self._copying(span, request.call_id, self._cache.store(request))

    async def _copying(
        self, span: Span, call_id: int, work: Awaitable[tuple[ChunkResult, ...]]
    ) -> tuple[ChunkResult, ...]:
        key = (self._client_id, call_id)
        self._tracing.copies[key] = set_span_in_context(span, Context())
        try:
            results = await self._inside(span, work)
        finally:
            self._tracing.copies.pop(key, None)
        chunks: Counter[str] = Counter()
        for result in results:
            chunks[result.outcome.value.lower()] += result.count
        span.set_attributes({f"kvgrpc.chunks.{outcome}": count for outcome, count in chunks.items()})
        span.end()
        return results

    async def _inside(self, span: Span, work: Awaitable[T]) -> T:
        """What the work begins, also in tasks of its own, has the span as its parent."""
        TRACE_ID.set(f"{span.get_span_context().trace_id:032x}")
        token = attach(set_span_in_context(span))
        try:
            return await work
        except BaseException as error:
            self._tracing.fail(span, error)
            raise
        finally:
            detach(token)

    # ---- what makes no span -----------------------------------------------------------------------------------------

    async def handshake(self, hello: api.Hello) -> api.ServerInfo:
        return await self._cache.handshake(hello)

    def attach(self, engine_id: str, role: Role, session_id: bytes) -> AsyncIterator[api.AttachEvent]:
        return self._cache.attach(engine_id, role, session_id)

    async def register(self, request: api.RegisterRequest) -> api.RegisterAnswer:
        return await self._cache.register(request)

    async def unregister(self, engine_id: str) -> None:
        await self._cache.unregister(engine_id)

    async def query(self, engine_id: str, job_id: bytes, wait_ms: int = 0) -> PrefetchStatus:
        return await self._cache.query(engine_id, job_id, wait_ms)

    async def free(self, request: api.FreeRequest) -> int:
        return await self._cache.free(request)

    async def end_request(self, engine_id: str, request_id: str) -> Ended:
        return await self._cache.end_request(engine_id, request_id)

    async def fence(self, engine_id: str, call_ids: Sequence[int]) -> None:
        await self._cache.fence(engine_id, call_ids)

    def read_chunks(self, request: api.ReadChunksRequest) -> AsyncIterator[api.ReadChunksAnswer]:
        return self._cache.read_chunks(request)

    async def write_chunks(
        self, request: api.WriteChunksRequest, parts: AsyncIterator[api.ChunkPart]
    ) -> tuple[ChunkResult, ...]:
        return await self._cache.write_chunks(request, parts)

    def watch(self, request: api.WatchRequest) -> AsyncIterator[api.WatchEvent]:
        return self._cache.watch(request)


class TracedMover:
    """A counted mover whose slices are spans where their call is one."""

    def __init__(self, mover: CountedMover, tracing: Tracing) -> None:
        self._mover = mover
        self._tracing = tracing

    def map(self, mapping_id: int, layout: api.Layout) -> bytes:
        return self._mover.map(mapping_id, layout)

    def copy(self, work: RunSlice) -> SliceReport:
        context = self._tracing.copies.get((work.client_id, work.call_id))
        if context is None:
            return self._mover.copy(work)
        attributes = {"kvgrpc.direction": work.direction.value, "kvgrpc.pieces": len(work.pieces)}
        with self._tracing.tracer.start_as_current_span("copy", context, attributes=attributes) as span:
            report = self._mover.copy(work)
            span.set_attribute("kvgrpc.completed", report.completed)
            return report

    def launches(self, mapping_id: int) -> bool:
        return self._mover.launches(mapping_id)

    def launch(self, work: RunSlice) -> Flight | SliceReport:
        context = self._tracing.copies.get((work.client_id, work.call_id))
        if context is None:
            return self._mover.launch(work)
        attributes = {"kvgrpc.direction": work.direction.value, "kvgrpc.pieces": len(work.pieces)}
        flight = _Traced(self._tracing.tracer.start_span("copy", context, attributes=attributes))
        begun = self._mover.launch(work)
        if isinstance(begun, SliceReport):
            return flight.landed(begun)
        flight.flight = begun
        return flight

    def when_ready(self, mapping_id: int, event: bytes, done: Callable[[Refusal | None], None]) -> Callable[[], None]:
        return self._mover.when_ready(mapping_id, event, done)

    def unmap(self, mapping_id: int) -> None:
        self._mover.unmap(mapping_id)

    def close(self) -> None:
        self._mover.close()


class _Traced:
    """A flight whose span ends with it."""

    flight: Flight

    def __init__(self, span: Span) -> None:
        self._span = span

    def wait(self) -> SliceReport:
        return self.landed(self.flight.wait())

    def landed(self, report: SliceReport) -> SliceReport:
        self._span.set_attribute("kvgrpc.completed", report.completed)
        self._span.end()
        return report


class TracedTier(CountedTier):
    """A counted tier whose reads are spans where their lookup is one."""

    def __init__(self, tier: Tier, tracing: Tracing) -> None:
        super().__init__(tier)
        self._tracing = tracing

    async def read(self, object: ObjectName, into: Sequence[memoryview]) -> None:
        if not get_current_span().is_recording():
            return await super().read(object, into)
        attributes = {"kvgrpc.tier": self.name, "kvgrpc.bytes": object.size_bytes}
        with self._tracing.tracer.start_as_current_span("tier_read", attributes=attributes):
            return await super().read(object, into)
