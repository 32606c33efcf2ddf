# SPDX-License-Identifier: Apache-2.0
"""Spans of lookups, copies and tier reads, sent to a collector.

    lookup_and_prefetch           from the Lookup until it is final; parent: the engine's traceparent
      tier_read                   one object from a lower tier
      retrieve                    one Retrieve under the lookup, linked to its own traceparent
        copy                      one slice
    store                         parent: the engine's traceparent
      copy

A call is traced when the engine says so (the sampled flag of its traceparent), else by chance. What is not traced
costs that decision and nothing more. Nothing here waits for the collector: what it does not take in time is dropped
and counted. Importing this takes a quarter of a second.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation import set_span_in_context

from kvgrpc.core.types import PrefetchStatus
from kvgrpc.telemetry.series import SpanFigures

QUEUE_SPANS = 2048
JOBS_MOST = 4096
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

CallKey = tuple[str, int]


class _CountedExporter(SpanExporter):
    def __init__(self, exporter: SpanExporter, figures: SpanFigures) -> None:
        self._exporter = exporter
        self._figures = figures

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self._figures.exported += len(spans)
            else:
                self._figures.dropped += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _Queue(BatchSpanProcessor):
    """Takes spans until ``QUEUE_SPANS`` wait; further ones are dropped, and counted, at once."""

    def __init__(self, exporter: SpanExporter, figures: SpanFigures) -> None:
        super().__init__(_CountedExporter(exporter, figures), max_queue_size=QUEUE_SPANS)
        self._figures = figures
        self._refused = 0
        self._ended = 0

    def on_end(self, span: ReadableSpan) -> None:
        handed = self._figures.exported + self._figures.dropped - self._refused
        if self._ended - handed >= QUEUE_SPANS:
            self._refused += 1
            self._figures.dropped += 1
            return
        self._ended += 1
        super().on_end(span)


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """``endpoint`` is the collector's (HTTP); ``share`` of the calls are traced that no engine traces."""

    endpoint: str
    share: float
    timeout_s: float = 2.0


def engine_context(traceparent: str) -> SpanContext | None:
    """What a W3C traceparent names; None for anything else."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None:
        return None
    context = SpanContext(int(found[1], 16), int(found[2], 16), True, TraceFlags(int(found[3], 16)))
    return context if context.is_valid else None


class Tracing:
    """Makes spans. ``traceparent`` answers what the running call brought; ``final`` how a lookup ended.

    Belongs to the event loop, but for ``copies``, which the copying threads read.
    """

    def __init__(
        self,
        options: TraceOptions,
        who: Resource,
        figures: SpanFigures,
        traceparent: Callable[[], str],
        final: Callable[[bytes], Awaitable[PrefetchStatus | None]],
    ) -> None:
        self._share = options.share
        self._traceparent = traceparent
        self._final = final
        exporter = OTLPSpanExporter(endpoint=f"{options.endpoint.rstrip('/')}/v1/traces", timeout=options.timeout_s)
        self._provider = TracerProvider(ALWAYS_ON, who, shutdown_on_exit=False)
        self._provider.add_span_processor(_Queue(exporter, figures))
        self._watching: set[asyncio.Task[None]] = set()
        self._jobs: OrderedDict[bytes, SpanContext] = OrderedDict()
        self.copies: dict[CallKey, Context] = {}
        self.tracer = self._provider.get_tracer("kvgrpc")

    def chosen(self) -> tuple[bool, SpanContext | None]:
        """Whether the running call is traced, and the engine's span."""
        traceparent = self._traceparent()
        parent = engine_context(traceparent) if traceparent else None
        if parent is not None:
            return parent.trace_flags.sampled, parent
        return random.random() < self._share, None  # noqa: S311 - no secret

    def begin(self, name: str, parent: SpanContext | None, link: SpanContext | None = None) -> Span:
        context = None if parent is None else set_span_in_context(NonRecordingSpan(parent), Context())
        return self.tracer.start_span(name, context or Context(), links=[Link(link)] if link is not None else None)

    def lookup_of(self, job_id: bytes) -> SpanContext | None:
        """The span of a lookup that was traced."""
        return self._jobs.get(job_id)

    def follow(self, span: Span, job_id: bytes) -> None:
        """The lookup is not final yet: its span ends when it is."""
        self.remember(span, job_id)
        task = asyncio.get_running_loop().create_task(self._follow(span, job_id))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _follow(self, span: Span, job_id: bytes) -> None:
        try:
            self.end_lookup(span, await self._final(job_id))
        except asyncio.CancelledError:
            span.end()
            raise

    def remember(self, span: Span, job_id: bytes) -> None:
        self._jobs[job_id] = span.get_span_context()
        if len(self._jobs) > JOBS_MOST:
            self._jobs.popitem(last=False)

    def end_lookup(self, span: Span, status: PrefetchStatus | None) -> None:
        if status is None:
            span.set_attribute("kvgrpc.limited_by", "given_up")
        else:
            span.set_attribute("kvgrpc.hit_tokens", status.hit_tokens)
            span.set_attribute("kvgrpc.limited_by", status.limited_by)
            for tier, count in status.hit_chunks_by_tier.items():
                span.set_attribute(f"kvgrpc.hit_chunks.{tier}", count)
        span.end()

    def fail(self, span: Span, error: BaseException) -> None:
        reason = getattr(getattr(error, "reason", None), "value", type(error).__name__)
        span.set_status(Status(StatusCode.ERROR, str(reason)))
        span.end()

    def stop(self) -> None:
        """On the loop: lookups that are not final end here."""
        for task in self._watching:
            task.cancel()

    def close(self) -> None:
        """Sends what waits; blocks, and may be left to its thread."""
        self._provider.shutdown()
