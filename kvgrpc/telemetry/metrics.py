# SPDX-License-Identifier: Apache-2.0
"""Series as OpenTelemetry metrics: scraped by Prometheus, sent by OTLP, or both.

Nothing is measured here: at each collection the figures are read and become observable instruments. Spreads join them
as histograms, for which OpenTelemetry has no observable instrument. Importing this takes a sixth of a second, so only
a server that shows or sends metrics does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, ProcessCollector

from kvgrpc.runtime.figures import Spread
from kvgrpc.telemetry.series import Series

Read = Callable[[], list[Series]]
"""Answers every series as it is now; called on any thread but the event loop's."""

SCOPE = "kvgrpc"


def resource(version: str, instance: str) -> Resource:
    """Who sends. ``instance`` is the server's epoch: a name of this process and of no other."""
    return Resource.create({"service.name": SCOPE, "service.version": version, "service.instance.id": instance})


class _Collected:
    """The series of one collection at a time. Each reader has its own."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._started_ns = time.time_ns()
        self._complete = True
        self.series = {one.name: one for one in read()}

    def observe(self, name: str, _: CallbackOptions) -> Iterable[Observation]:
        if self._complete:  # the first question of a collection
            self._complete = False
            self.series = {one.name: one for one in self._read()}
        for labels, value in self.series[name].points:
            assert not isinstance(value, Spread)
            yield Observation(value, labels)

    def joined(self, data: MetricsData) -> MetricsData:
        """With the spreads, which completes a collection."""
        self._complete = True
        now_ns = time.time_ns()
        metrics = [self._histogram(one, now_ns) for one in self.series.values() if one.kind == "spread" and one.points]
        # into the one scope that there is: the OTLP encoder keeps one list of metrics a scope
        (whole,) = data.resource_metrics
        (one,) = whole.scope_metrics
        scope = ScopeMetrics(one.scope, [*one.metrics, *metrics], one.schema_url)
        return MetricsData([ResourceMetrics(whole.resource, [scope], whole.schema_url)])

    def _histogram(self, series: Series, now_ns: int) -> Metric:
        points: list[HistogramDataPoint] = []
        for labels, value in series.points:
            assert isinstance(value, Spread)
            counts = tuple(value.counts)
            ends: dict[str, Any] = {"min": None, "max": None}  # unknown, which OTLP allows
            points.append(
                HistogramDataPoint(
                    attributes=labels,
                    start_time_unix_nano=self._started_ns,
                    time_unix_nano=now_ns,
                    count=sum(counts),
                    sum=value.total,
                    bucket_counts=counts,
                    explicit_bounds=value.bounds,
                    **ends,
                )
            )
        return Metric(series.name, series.text, series.unit, Histogram(points, AggregationTemporality.CUMULATIVE))


class _ScrapeReader(PrometheusMetricReader):
    def __init__(self, collected: _Collected, registry: CollectorRegistry) -> None:
        super().__init__(registry=registry, scope_info_enabled=False)
        self._collected = collected

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        whole = self._collected.joined(metrics_data)
        super()._receive_metrics(whole, timeout_millis, **kwargs)  # pyright: ignore[reportUnknownMemberType]


class _SendingReader(PeriodicExportingMetricReader):
    def __init__(self, collected: _Collected, exporter: MetricExporter, interval_s: float) -> None:
        self._collected = collected
        super().__init__(exporter, export_interval_millis=interval_s * 1000)

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        whole = self._collected.joined(metrics_data)
        super()._receive_metrics(whole, timeout_millis, **kwargs)  # pyright: ignore[reportUnknownMemberType]


def _provider(reader: MetricReader, collected: _Collected, who: Resource) -> MeterProvider:
    provider = MeterProvider([reader], resource=who, shutdown_on_exit=False)
    meter = provider.get_meter(SCOPE)
    for one in collected.series.values():
        if one.kind == "spread":
            continue
        make = meter.create_observable_counter if one.kind == "counter" else meter.create_observable_gauge
        make(one.name, callbacks=[partial(collected.observe, one.name)], unit=one.unit, description=one.text)
    return provider


def scraped(read: Read, who: Resource) -> CollectorRegistry:
    """What a scrape shows: every series, and memory, processor time and descriptors of the process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    collected = _Collected(read)
    _provider(_ScrapeReader(collected, registry), collected, who)
    return registry


def sent(read: Read, who: Resource, endpoint: str, interval_s: float, timeout_s: float) -> MeterProvider:
    """Sends every series to the collector at ``endpoint`` (HTTP), until it is shut down."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    exporter = OTLPMetricExporter(endpoint=f"{endpoint.rstrip('/')}/v1/metrics", timeout=timeout_s)
    collected = _Collected(read)
    return _provider(_SendingReader(collected, exporter, interval_s), collected, who)
