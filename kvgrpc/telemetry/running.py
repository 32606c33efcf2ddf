# SPDX-License-Identifier: Apache-2.0
"""Telemetry of a running server: what is shown and sent, from its start to its end.

Only what is wanted is imported: a server without metrics and traces never loads OpenTelemetry.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgrpc.api import CacheApi, ServerStatus
from kvgrpc.core.types import PrefetchStatus
from kvgrpc.telemetry.hands import CountedMover, CountedTier
from kvgrpc.telemetry.log import logger
from kvgrpc.telemetry.series import Series, Sources, SpanFigures, all_series
from kvgrpc.tiers.base import Tier
from kvgrpc.transfer.base import Mover

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider

    from kvgrpc.telemetry.scrape import ScrapeEndpoint
    from kvgrpc.telemetry.tracing import Tracing

READ_S = 5.0
"""What the event loop gets for a reading; after that the last one is shown."""
STOP_S = 2.0
"""What a collector gets at the end."""

log = logger("telemetry")
ClientFor = Callable[[str], CacheApi]


class TelemetryError(Exception):
    """Telemetry cannot start; the text says why."""


@dataclass(frozen=True, slots=True)
class TelemetryOptions:
    """``listen`` is host and port of the scrape endpoint, ``collector`` the base address of OTLP over HTTP."""

    listen: tuple[str, int] | None = None
    collector: str = ""
    interval_s: float = 15.0
    trace_share: float = 0.0
    version: str = ""
    instance: str = ""

    @property
    def wanted(self) -> bool:
        return self.listen is not None or bool(self.collector)


class Telemetry:
    """Wraps the hands and the cache before the server is made; ``start`` when it is. Belongs to the event loop.

    ``traceparent`` answers what the running call brought; ``final`` how a lookup ended.
    """

    def __init__(
        self,
        options: TelemetryOptions,
        traceparent: Callable[[], str],
        final: Callable[[bytes], Awaitable[PrefetchStatus | None]],
    ) -> None:
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._home = threading.get_ident()
        self._stopping = False
        self._endpoint: ScrapeEndpoint | None = None
        self._sending: MeterProvider | None = None
        self._tracing: Tracing | None = None
        self._take: Callable[[], Awaitable[ServerStatus]] | None = None
        self._sources: Sources | None = None
        self.spans = SpanFigures()
        if options.collector:
            from kvgrpc.telemetry.metrics import resource
            from kvgrpc.telemetry.tracing import TraceOptions, Tracing

            who = resource(options.version, options.instance)
            traces = TraceOptions(options.collector, options.trace_share)
            self._tracing = Tracing(traces, who, self.spans, traceparent, final)

    def counted(self, mover: Mover) -> tuple[Mover, CountedMover]:
        """The mover to use, and its figures."""
        counted = CountedMover(mover)
        if self._tracing is None:
            return counted, counted
        from kvgrpc.telemetry.traced import TracedMover

        return TracedMover(counted, self._tracing), counted

    def counted_tier(self, tier: Tier) -> CountedTier:
        if self._tracing is None:
            return CountedTier(tier)
        from kvgrpc.telemetry.traced import TracedTier

        return TracedTier(tier, self._tracing)

    def traced(self, client_for: ClientFor) -> ClientFor:
        """The cache as clients see it."""
        tracing = self._tracing
        if tracing is None:
            return client_for
        from kvgrpc.telemetry.traced import TracedCache

        return lambda client_id: TracedCache(client_for(client_id), client_id, tracing)

    def start(self, sources: Sources, take: Callable[[], Awaitable[ServerStatus]]) -> str:
        """Shows and sends from now on; answers the address of the scrape endpoint, if there is one.

        ``take`` answers the server's status, on the loop. Raises TelemetryError.
        """
        from kvgrpc.telemetry.metrics import resource, scraped, sent

        options, self._sources, self._take = self._options, sources, take
        who = resource(options.version, options.instance)
        if options.collector:
            self._sending = sent(self._read, who, options.collector, options.interval_s, STOP_S)
        if options.listen is None:
            return ""
        from kvgrpc.telemetry.scrape import ScrapeEndpoint

        host, port = options.listen
        try:
            self._endpoint = ScrapeEndpoint(scraped(self._read, who), host, port)
        except OSError as error:
            raise TelemetryError(f"--metrics-listen {host}:{port}: {error.strerror}") from None
        address = f"[{host}]:{self._endpoint.port}" if ":" in host else f"{host}:{self._endpoint.port}"
        log.info("metrics", address=f"http://{address}/metrics")
        return address

    def _read(self) -> list[Series]:
        sources = self._sources
        assert sources is not None
        if not self._stopping and threading.get_ident() != self._home:
            reading = asyncio.run_coroutine_threadsafe(self._refresh(), self._loop)
            try:
                reading.result(READ_S)
            except FutureTimeoutError:
                reading.cancel()
        return all_series(sources)

    async def _refresh(self) -> None:
        assert self._sources is not None and self._take is not None
        self._sources.status = await self._take()

    async def stop(self) -> None:
        """Sends what is left; a collector that does not answer gets ``STOP_S``. Harmless when repeated."""
        if self._stopping:
            return
        if self._sources is not None:
            await self._refresh()
        self._stopping = True
        if self._tracing is not None:
            self._tracing.stop()
            await asyncio.sleep(0)  # so that spans that were cut short end before the last sending
        ended = asyncio.Event()

        def end() -> None:
            if self._endpoint is not None:
                self._endpoint.close()
            if self._tracing is not None:
                self._tracing.close()
            if self._sending is not None:
                self._sending.shutdown()
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(ended.set)

        # not a thread of a pool, for which the process would wait at its end
        threading.Thread(target=end, name="kvgrpc-telemetry-end", daemon=True).start()
        try:
            await asyncio.wait_for(ended.wait(), STOP_S)
        except asyncio.TimeoutError:
            log.warning("the collector did not take the last figures in time", limit_s=STOP_S)
