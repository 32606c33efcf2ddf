# SPDX-License-Identifier: Apache-2.0
"""Spans as a collector gets them: one tree a lookup, under the engine's own span."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.client.aio import AioClient
from kvgrpc.telemetry.running import TelemetryOptions
from kvgrpc.telemetry.tracing import engine_context
from kvgrpc.tiers.memory import MemoryTier
from tests.e2e.harness import BLOCK, CHUNK, local_server, outcomes, tokens_of
from tests.e2e.probes import keep_in_tier
from tests.served import stop
from tests.telemetry.watched import Collector, collecting, watched

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


def send(client: AioClient, traceparent: str) -> None:
    """Every call of the client brings it from now on."""
    more = (("traceparent", traceparent),) if traceparent else ()
    client._named = (*client._named[:1], *more)


def by_name(collector: Collector) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for span in collector.spans():
        found.setdefault(span.name, []).append(span)
    return found


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: one.value.string_value or one.value.int_value for one in span.attributes}


async def test_a_lookup_of_both_phases_is_one_tree_under_the_engines_span(tmp_path: Path):
    prompt, blocks, tier = tokens_of(1, 3 * CHUNK), tuple(range(3 * CHUNK // BLOCK)), MemoryTier()
    with collecting() as collector:
        options = TelemetryOptions(collector=collector.address)
        async with local_server(tmp_path, tier=tier, telemetry=options) as server:
            engine = await server.engine()
            await keep_in_tier(server, engine, prompt)
            for client in (engine.scheduler, engine.worker):
                send(client, SAMPLED)
            tier.hang()
            pending = await engine.lookup(prompt, prefetch_wait_ms=10_000)
            assert not pending.status.done
            waiting = asyncio.create_task(engine.scheduler.query(engine.engine_id, pending.job_id, 10_000))
            tier.resume()
            assert (await waiting).hit_tokens == 3 * CHUNK
            assert outcomes(await engine.retrieve(pending, blocks)) == ["LOADED"] * 3
    spans = by_name(collector)
    counts = {name: len(some) for name, some in spans.items()}
    assert counts == {"lookup_and_prefetch": 1, "tier_read": 3, "retrieve": 1, "copy": 1}
    lookup, retrieve, copy = (spans[name][0] for name in ("lookup_and_prefetch", "retrieve", "copy"))
    assert {span.trace_id.hex() for span in collector.spans()} == {TRACE}
    assert lookup.parent_span_id.hex() == PARENT
    assert {span.parent_span_id for span in (*spans["tier_read"], retrieve)} == {lookup.span_id}
    assert copy.parent_span_id == retrieve.span_id
    assert [link.span_id.hex() for link in retrieve.links] == [PARENT]
    reads_end = max(span.end_time_unix_nano for span in spans["tier_read"])
    assert lookup.start_time_unix_nano < reads_end <= lookup.end_time_unix_nano
    facts = attributes(lookup)
    assert (facts["kvgrpc.hit_tokens"], facts["kvgrpc.hit_chunks.memory"]) == (3 * CHUNK, 3)
    assert facts["kvgrpc.request_id"] == "request-1"
    assert attributes(retrieve)["kvgrpc.chunks.loaded"] == 3
    assert engine.engine_id not in str(collector.traces)


async def test_a_lookup_that_is_given_up_ends_its_span(tmp_path: Path):
    prompt, tier = tokens_of(1, 3 * CHUNK), MemoryTier()
    with collecting() as collector:
        async with local_server(tmp_path, tier=tier, telemetry=TelemetryOptions(collector=collector.address)) as server:
            engine = await server.engine()
            await keep_in_tier(server, engine, prompt)
            send(engine.scheduler, SAMPLED)
            tier.hang()
            await engine.lookup(prompt, request_id="r")
            await engine.scheduler.end_request(engine.engine_id, "r")
            figures = server.driver.figures
            assert (figures.answers["given_up"], figures.missed_chunks["given_up"], figures.pending) == (1, 3, 0)
    lookup = by_name(collector)["lookup_and_prefetch"][0]
    assert attributes(lookup)["kvgrpc.limited_by"] == "given_up"


@pytest.mark.parametrize(
    ("share", "traceparent", "count"),
    [(0.0, "", 0), (1.0, "", 1), (1.0, NOT_SAMPLED, 0), (0.0, SAMPLED, 1), (0.0, "00-" + "0" * 32 + "-1-01", 0)],
)
async def test_the_engine_decides_and_else_chance(tmp_path: Path, share: float, traceparent: str, count: int):
    with collecting() as collector:
        options = TelemetryOptions(collector=collector.address, trace_share=share)
        async with local_server(tmp_path, telemetry=options) as server:
            engine = await server.engine()
            send(engine.scheduler, traceparent)
            await engine.lookup(tokens_of(1, CHUNK))
    assert [span.name for span in collector.spans()] == ["lookup_and_prefetch"] * count


@pytest.mark.parametrize(
    "text", ["", "x", "00", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", SAMPLED[:-3]]
)
def test_what_is_no_traceparent(text: str):
    assert engine_context(text) is None


async def test_a_servers_metrics_and_spans_reach_the_collector_before_it_ends():
    with collecting() as collector:
        async with watched("--otlp-endpoint", collector.address, "--trace-share", "1") as server:
            engine = await server.engine()
            await engine.hits(tokens_of(1, CHUNK))
            await engine.store(tokens_of(1, CHUNK), range(CHUNK // BLOCK))
            assert stop(server.served.process) == 0
    assert sorted(span.name for span in collector.spans()) == ["copy", "lookup_and_prefetch", "store"]
    assert {"kvgrpc.hit.chunks", "grpc.server.call.duration", "kvgrpc.copy.duration"} <= collector.metric_names()
