# SPDX-License-Identifier: Apache-2.0
"""What a server shows of itself, as named series. docs/telemetry.md says what each means.

Every series is there from the first reading on, at 0. Labels take their values from closed lists and from the
operator's own settings (names of tiers), never from what a client sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from kvgrpc.api import ServerStatus
from kvgrpc.core.errors import Reason
from kvgrpc.runtime.figures import ABSENT, GIVEN_UP, LookupFigures, Spread
from kvgrpc.telemetry.hands import CountedMover, CountedTier
from kvgrpc.telemetry.rpcs import RpcFigures

Kind = Literal["counter", "gauge", "spread"]
Point: TypeAlias = tuple[dict[str, str], "float | Spread"]

L1 = "l1"
ANSWERS = ("full", "part", "none", GIVEN_UP)
MISSES = (ABSENT, "prefetch_timeout", "prefetch_limit", "prefetch_failed", GIVEN_UP)
STORES = ("stored", "no_store", "quota", "no_room", "settling_limit", "object_too_large", "cleared", "null_blocks")
METHOD, STATUS = "grpc.method", "grpc.status"


@dataclass(frozen=True, slots=True)
class Series:
    """``unit`` as in UCUM; braces hold what is counted."""

    name: str
    kind: Kind
    unit: str
    text: str
    points: list[Point]


class SpanFigures:
    """Spans that went to the collector, and those that were given up."""

    def __init__(self) -> None:
        self.exported = 0
        self.dropped = 0


@dataclass(slots=True)
class Sources:
    """Where figures are kept. ``status`` is the reading that was taken last on the event loop."""

    status: ServerStatus
    rpcs: RpcFigures
    lookups: LookupFigures
    mover: CountedMover
    waited: Callable[[], Spread]
    busy_s: Callable[[], float]
    draining: Callable[[], bool]
    tiers: tuple[CountedTier, ...] = ()
    spans: SpanFigures = field(default_factory=SpanFigures)


def all_series(sources: Sources) -> list[Series]:
    """Every series with its value now. Callable from any thread."""
    return [*_rpcs(sources.rpcs), *_lookups(sources), *_copies(sources), *_tiers(sources), *_state(sources)]


def _one(value: float) -> list[Point]:
    return [({}, value)]


def _by(label: str, values: Mapping[str, float]) -> list[Point]:
    return [({label: name}, value) for name, value in values.items()]


def _rpcs(rpcs: RpcFigures) -> list[Series]:
    started: list[Point] = []
    seconds: list[Point] = []
    sent: list[Point] = []
    received: list[Point] = []
    for path, method in rpcs.methods.items():
        name = path[1:]
        started.append(({METHOD: name}, method.started))
        for status, figures in tuple(method.statuses.items()):
            labels = {METHOD: name, STATUS: status}
            seconds.append((labels, figures.seconds))
            sent.append((labels, figures.sent))
            received.append((labels, figures.received))
    refused = {reason.value: rpcs.refusals[reason.value] for reason in Reason}
    call = "grpc.server.call"
    return [
        Series(f"{call}.started", "counter", "{call}", "Calls that began", started),
        Series(f"{call}.duration", "spread", "s", "Time of a call from its begin to its end", seconds),
        Series(f"{call}.sent_total_compressed_message_size", "spread", "By", "Size of answers", sent),
        Series(f"{call}.rcvd_total_compressed_message_size", "spread", "By", "Size of requests", received),
        Series("kvgrpc.refusals", "counter", "{call}", "Calls that were refused", _by("reason", refused)),
    ]


def _lookups(sources: Sources) -> list[Series]:
    figures, counters = sources.lookups, sources.status.counters
    tiers = (L1, *(tier.name for tier in sources.tiers))
    answers = {result: figures.answers[result] for result in ANSWERS}
    hits = {tier: figures.hit_chunks[tier] for tier in tiers}
    hit_bytes = {tier: figures.hit_bytes[tier] for tier in tiers}
    misses = {reason: figures.missed_chunks[reason] for reason in MISSES}
    return [
        Series("kvgrpc.lookups", "counter", "{lookup}", "Lookups that are final", _by("result", answers)),
        Series("kvgrpc.lookups.pending", "gauge", "{lookup}", "Lookups that wait for tiers", _one(figures.pending)),
        Series(
            "kvgrpc.lookup.tokens", "counter", "{token}", "Tokens asked for", _one(counters.get("lookup_tokens", 0))
        ),
        Series("kvgrpc.hit.tokens", "counter", "{token}", "Tokens found", _one(counters.get("hit_tokens", 0))),
        Series("kvgrpc.hit.chunks", "counter", "{chunk}", "Chunks found, by where they were", _by("tier", hits)),
        Series("kvgrpc.hit", "counter", "By", "Bytes of chunks found, by where they were", _by("tier", hit_bytes)),
        Series("kvgrpc.miss.chunks", "counter", "{chunk}", "Chunks asked for and not found", _by("reason", misses)),
        Series("kvgrpc.hits.unpinned", "counter", "{lookup}", "Hits that were not pinned", _one(figures.unpinned)),
        Series(
            "kvgrpc.leases.expired",
            "counter",
            "{lease}",
            "Leases ended by time",
            _one(counters.get("expired_leases", 0)),
        ),
    ]


def _copies(sources: Sources) -> list[Series]:
    counters = sources.status.counters
    loads = {"loaded": counters.get("loaded_chunks", 0), "failed": counters.get("failed_chunks", 0)}
    stores = {name: counters.get(f"refused_{name}", 0) for name in STORES}
    stores["stored"] = counters.get("stored_chunks", 0)
    copies = {direction.value: figures for direction, figures in sources.mover.copies.items()}
    streamed = {name: counters.get(f"{name}_chunks_bytes", 0) for name in ("write", "read")}
    copied = {**{name: figures.bytes for name, figures in copies.items()}, **streamed}
    failed = {name: figures.failed for name, figures in copies.items()}
    seconds: list[Point] = [({"direction": name}, figures.seconds) for name, figures in copies.items()]
    waited = sources.waited()
    return [
        Series("kvgrpc.load.chunks", "counter", "{chunk}", "Chunks of Retrieve calls", _by("result", loads)),
        Series("kvgrpc.store.chunks", "counter", "{chunk}", "Chunks of Store calls", _by("result", stores)),
        Series("kvgrpc.copied", "counter", "By", "Bytes copied", _by("direction", copied)),
        Series("kvgrpc.copies.failed", "counter", "{slice}", "Slices that stopped early", _by("direction", failed)),
        Series("kvgrpc.copy.duration", "spread", "s", "Time of a slice of a copy", seconds),
        Series("kvgrpc.queue.duration", "spread", "s", "Time that work waited for its thread", [({}, waited)]),
        Series(
            "kvgrpc.evicted.chunks",
            "counter",
            "{chunk}",
            "Chunks that made room for others",
            _one(counters.get("evicted_chunks", 0)),
        ),
    ]


def _tiers(sources: Sources) -> list[Series]:
    tiers, states = sources.tiers, sources.status.tiers
    arena = sources.status.arena
    sizes = {L1: arena.total_bytes - arena.free_bytes, **{state.name: state.used_bytes for state in states}}
    healthy = {state.name: int(state.healthy) for state in states}
    running = {state.name: state.reads_in_flight for state in states}
    reads: list[Point] = [
        ({"tier": tier.name, "result": result}, count) for tier in tiers for result, count in tier.reads.items()
    ]
    read_bytes = {tier.name: tier.read_bytes for tier in tiers}
    written = {tier.name: tier.written_bytes for tier in tiers}
    failed = {tier.name: tier.failed_writes for tier in tiers}
    seconds: list[Point] = [({"tier": tier.name}, tier.read_seconds) for tier in tiers]
    return [
        Series("kvgrpc.tier", "gauge", "By", "Bytes that a tier holds", _by("tier", sizes)),
        Series("kvgrpc.tier.healthy", "gauge", "", "1 while a tier is asked", _by("tier", healthy)),
        Series("kvgrpc.tier.reads.running", "gauge", "{object}", "Reads that run", _by("tier", running)),
        Series("kvgrpc.tier.reads", "counter", "{object}", "Reads that ended", reads),
        Series("kvgrpc.tier.read", "counter", "By", "Bytes read from tiers", _by("tier", read_bytes)),
        Series("kvgrpc.tier.read.duration", "spread", "s", "Time of a read", seconds),
        Series("kvgrpc.tier.written", "counter", "By", "Bytes written to tiers", _by("tier", written)),
        Series("kvgrpc.tier.writes.failed", "counter", "{object}", "Writes that failed", _by("tier", failed)),
    ]


def _state(sources: Sources) -> list[Series]:
    status, arena = sources.status, sources.status.arena
    states = {
        "free": arena.free_bytes,
        "writing": arena.writing_bytes,
        "ready": arena.ready_bytes,
        "pinned": arena.pinned_bytes,
        "doomed": arena.doomed_bytes,
        "settling": arena.settling_bytes,
    }
    queued = sum(executor.queued for executor in status.executors)
    ended = status.counters.get("ended_sessions", 0)
    spans = {"exported": sources.spans.exported, "dropped": sources.spans.dropped}
    return [
        Series("kvgrpc.arena", "gauge", "By", "Bytes of L1 by state", _by("state", states)),
        Series("kvgrpc.arena.limit", "gauge", "By", "Bytes of L1", _one(arena.total_bytes)),
        Series("kvgrpc.arena.held", "gauge", "By", "Bytes held by retention and Pin", _one(arena.held_bytes)),
        Series("kvgrpc.chunks", "gauge", "{chunk}", "Chunks in L1", _one(status.chunks)),
        Series("kvgrpc.spaces", "gauge", "{space}", "Spaces that hold data", _one(status.spaces)),
        Series("kvgrpc.engines", "gauge", "{engine}", "Engines", _one(status.engines)),
        Series("kvgrpc.clients", "gauge", "{client}", "Attached clients", _one(status.clients)),
        Series("kvgrpc.jobs", "gauge", "{job}", "Records of lookups", _one(status.jobs)),
        Series("kvgrpc.leases.pins", "gauge", "{pin}", "Pins of leases", _one(status.pins)),
        Series("kvgrpc.calls.running", "gauge", "{call}", "Stores and retrieves", _one(status.calls_in_flight)),
        Series("kvgrpc.sessions.ended", "counter", "{session}", "Sessions that ended", _one(ended)),
        Series("kvgrpc.queue.length", "gauge", "{work}", "Work that waits or runs", _one(queued)),
        Series("kvgrpc.queue.longest", "gauge", "s", "Age of the work that runs longest", _one(sources.busy_s())),
        Series("kvgrpc.draining", "gauge", "", "1 while the server drains", _one(int(sources.draining()))),
        Series("kvgrpc.uptime", "gauge", "s", "Time since the start", _one(status.uptime_ms / 1000)),
        Series("kvgrpc.telemetry.spans", "counter", "{span}", "Spans by what became of them", _by("result", spans)),
    ]
