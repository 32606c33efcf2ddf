# SPDX-License-Identifier: Apache-2.0
"""What operators are told: a server at a glance, what is there of some chunks, recorded calls without their contents.

Words of ``kvgrpc.api``, which has them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvgrpc.core.inspection import InspectedChunk, Keeper
from kvgrpc.core.types import ArenaStatus


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One lower tier. ``writes_queued`` are objects that wait for their turn; ``counters`` are its own."""

    name: str
    healthy: bool
    used_bytes: int
    reads_in_flight: int
    writes_in_flight: int = 0
    writes_queued: int = 0
    counters: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class ExecutorStatus:
    """One affinity thread: the clients bound to it and the slices that wait for it."""

    thread: int
    clients: tuple[str, ...]
    queued: int


@dataclass(frozen=True, slots=True)
class RestartStatus:
    """A named arena's life beyond the server's; fields as in the protocol."""

    checking: bool = False
    refused: str = ""
    found_objects: int = 0
    restored_objects: int = 0
    dropped_objects: int = 0
    recorded_objects: int = 0
    waiting_objects: int = 0


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The server at a glance; fields as in the protocol's GetStatusResponse."""

    server_version: str
    server_epoch: bytes
    uptime_ms: int
    chunk_tokens: int
    draining: bool
    arena: ArenaStatus
    chunks: int
    spaces: int
    engines: int
    clients: int
    jobs: int
    pins: int
    calls_in_flight: int
    tiers: tuple[TierStatus, ...] = ()
    executors: tuple[ExecutorStatus, ...] = ()
    counters: dict[str, int] = field(default_factory=dict[str, int])
    restart: RestartStatus = RestartStatus()


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is there of some chunks. ``tier_ranks`` has for each chunk how many KV ranks' objects which tier says it
    has; tiers were asked about ``asked_objects`` from the first chunk on, and ``silent_tiers`` did not answer."""

    chunks: tuple[InspectedChunk, ...]
    keepers: tuple[Keeper, ...]
    more_keepers: bool
    tier_ranks: tuple[dict[str, int], ...]
    asked_objects: int
    silent_tiers: tuple[str, ...]


class CallKind(Enum):
    """What a recorded call was."""

    LOOKUP = "lookup"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A lookup or store without its contents; fields as in the protocol. ``chunks`` are unsigned 64-bit numbers."""

    kind: CallKind
    at_ms: int
    space: int
    num_tokens: int
    chunks: Sequence[int]
    prefix_chunks: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class TracedCalls:
    """Calls in order; ``dropped`` are missing before them."""

    calls: tuple[TracedCall, ...]
    dropped: int
    chunk_tokens: int
