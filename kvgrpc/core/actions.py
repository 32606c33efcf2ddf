# SPDX-License-Identifier: Apache-2.0
"""Work for the hands: what the bookkeeper puts into its outbox, and the report of a slice that comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvgrpc.core.types import SpaceRef

Extent = tuple[int, int]
"""(offset, length) in the arena, in bytes."""


class ChunkOutcome(Enum):
    """What became of a chunk. The values are the protocol's names without their prefix."""

    STORED = "STORED"
    RESIDENT = "RESIDENT"
    BEING_WRITTEN = "BEING_WRITTEN"
    REFUSED = "REFUSED"
    LOADED = "LOADED"
    MISSING = "MISSING"
    FAILED = "FAILED"
    TORN = "TORN"


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """The outcome of ``count`` consecutive chunks from ``first_chunk`` on."""

    first_chunk: int
    count: int
    outcome: ChunkOutcome
    reason: str = ""
    groups: int = 0
    """Where the groups are not alike: bit g stands for group g, whose part of these chunks is there (Store) or was
    written (Retrieve)."""


class Direction(Enum):
    """Of a copy."""

    STORE = "store"
    RETRIEVE = "retrieve"


class Piece(NamedTuple):  # one is made for every chunk, and a tuple in a third of a dataclass's time
    """Part of a slice: blocks ``block_ids`` of an object, from its block ``first_block`` on, both by group of its part.

    ``extents`` cover the whole object. ``block_ids[g][i]`` is the engine block that holds block ``first_block[g] + i``
    of the object; only those blocks are touched. ``span`` cuts the object's bytes (half-open) when a chunk is larger
    than a slice.
    """

    chunk: int
    extents: tuple[Extent, ...]
    span: tuple[int, int]
    first_block: tuple[int, ...]
    block_ids: tuple[Sequence[int], ...]


@dataclass(frozen=True, slots=True)
class RunSlice:
    """Copy these pieces, in order, stop at the first failure, then report ``slice_done(slice_id, …)``.

    Slices of a client are copied and reported in the order they come. ``after`` (0: none) is the slice of the same call
    in front of it that was not reported when this one was ordered: if that one stopped early, this copies nothing and
    is reported as ``SKIPPED``. ``part`` is that of all its pieces: an index into ``Geometry.parts``.
    """

    slice_id: int
    client_id: str
    mapping_id: int
    call_id: int
    direction: Direction
    pieces: tuple[Piece, ...]
    after: int = 0
    part: int = 0


@dataclass(frozen=True, slots=True)
class SliceReport:
    """How a slice ended: ``completed`` pieces from the first on; when fewer than all, ``reason`` (UPPER_SNAKE) and how
    many of the others, from the failing one on, may have begun (``torn``)."""

    completed: int
    reason: str = ""
    torn: int = 0


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A store or retrieve has its results; wake whoever waits for it."""

    client_id: str
    call_id: int
    results: tuple[ChunkResult, ...]


@dataclass(frozen=True, slots=True)
class ObjectName:
    """Names an object in tiers: hex of a digest over space, generation, chunk key and KV rank; plus its length, and for
    people what the name stands for."""

    name: str
    size_bytes: int
    about: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ProbeTiers:
    """Ask the tiers, in order, who has these objects; report ``probe_done(probe_id, tier or "" for each)``."""

    probe_id: int
    objects: tuple[ObjectName, ...]


@dataclass(frozen=True, slots=True)
class ReadTier:
    """Read one object from a tier into ``extents``; report ``read_done(read_id, ok)``."""

    read_id: int
    tier: str
    object: ObjectName
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class CancelRead:
    """Nobody wants this read any more; it still has to be reported when it has ended."""

    read_id: int


@dataclass(frozen=True, slots=True)
class WriteObject:
    """Write the object in ``extents`` to a tier that does not have it yet; report ``write_done``."""

    write_id: int
    tier: str
    object: ObjectName
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class JobDone:
    """A pending lookup is final (or gone); wake whoever waits for it."""

    job_id: bytes


@dataclass(frozen=True, slots=True)
class Unmap:
    """No copy touches this mapping any more: unmap it."""

    client_id: str
    mapping_id: int


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A client is gone for good: its stream may close, its thread binding may go."""

    client_id: str


@dataclass(frozen=True, slots=True)
class EngineDraining:
    """Tell this client that its engine is being taken out."""

    client_id: str


class Change(Enum):
    """Of what can be found in a space."""

    STORED = "STORED"
    REMOVED = "REMOVED"
    CLEARED = "CLEARED"


@dataclass(frozen=True, slots=True)
class KeysChanged:
    """Tell watchers: these chunks of the space ``ref`` are complete in the arena, or gone; with CLEARED, all."""

    change: Change
    ref: SpaceRef
    keys: list[bytes]


TierAction = ProbeTiers | ReadTier | CancelRead | WriteObject
Action = RunSlice | CallEnded | TierAction | JobDone | Unmap | SessionEnded | EngineDraining | KeysChanged
