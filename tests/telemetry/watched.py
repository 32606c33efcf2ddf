# SPDX-License-Identifier: Apache-2.0
"""A `kvgrpc serve` process with a scrape endpoint, the engines of tests/e2e against it, and a collector of OTLP."""

from __future__ import annotations

import contextlib
import gzip
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from kvgrpc.core.types import CoreLimits
from tests.e2e.harness import CHUNK, LocalServer
from tests.served import Served, serving

SMALL = ("--l1-size", "8MiB", "--chunk-tokens", str(CHUNK), "--page-size", "4096")

Labels = tuple[tuple[str, str], ...]
Scrape = dict[tuple[str, Labels], float]


@dataclass
class Watched(LocalServer):
    """A server process; what reaches inside a server (book, driver) is not there."""

    served: Served = field(kw_only=True)

    @property
    def metrics(self) -> str:
        """Address of the scrape endpoint."""
        return next(part for part in self.served.log.split('"') if part.endswith("/metrics"))

    def text(self) -> str:
        with urllib.request.urlopen(self.metrics, timeout=10) as answer:
            return answer.read().decode()

    def scrape(self) -> Scrape:
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(self.text())
            for sample in family.samples
        }

    def moved(self, before: Scrape, family: str) -> dict[str, float]:
        """What of a family changed since, by its labels' values."""
        after = self.scrape()
        return {
            ",".join(value for _, value in labels): value - before.get((name, labels), 0)
            for (name, labels), value in after.items()
            if name == family and value != before.get((name, labels), 0)
        }


@contextlib.asynccontextmanager
async def watched(*flags: str) -> AsyncIterator[Watched]:
    with serving(*SMALL, "--metrics-listen", "0", *flags) as served:
        async with contextlib.AsyncExitStack() as stack:
            absent: Any = None
            limits = CoreLimits(chunk_tokens=CHUNK, page_bytes=4096)
            yield Watched(absent, absent, absent, absent, limits, None, stack, served.address, served=served)


@dataclass
class Collector:
    """What an OTLP collector was sent."""

    address: str = ""
    metrics: list[ExportMetricsServiceRequest] = field(default_factory=list)
    traces: list[ExportTraceServiceRequest] = field(default_factory=list)

    def spans(self) -> list[Any]:
        return [
            span
            for request in self.traces
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def metric_names(self) -> set[str]:
        return {
            metric.name
            for request in self.metrics
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                data = gzip.decompress(data)
            if self.path == "/v1/metrics":
                collector.metrics.append(ExportMetricsServiceRequest.FromString(data))
            else:
                assert self.path == "/v1/traces"
                collector.traces.append(ExportTraceServiceRequest.FromString(data))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    collector.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
