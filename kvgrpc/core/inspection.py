# SPDX-License-Identifier: Apache-2.0
"""What is there of some chunks and who keeps it, for operators. Looking changes nothing, also not what goes first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from kvgrpc.core.index import Chunk
from kvgrpc.core.keys import fingerprint, object_name, space_digest
from kvgrpc.core.types import MS, ObjectName, SpaceRef

if TYPE_CHECKING:
    from kvgrpc.core.cache import Bookkeeper

KEEPERS_MOST = 64
VISITS_MOST = 1 << 17
"""Chunks of leases and pins that one look compares: some milliseconds."""


@dataclass(frozen=True, slots=True)
class InspectedChunk:
    """One chunk in L1. ``*_ranks`` count KV ranks; ``pins`` are leases and running copies, ``holds`` retention and
    operator pins."""

    key: bytes
    ready_ranks: int = 0
    writing_ranks: int = 0
    bytes: int = 0
    pins: int = 0
    holds: int = 0


@dataclass(frozen=True, slots=True)
class Keeper:
    """Who keeps ``chunks`` of those that were asked for: the lookup ``request_id`` of ``engine`` (a fingerprint), the
    operator's pin ``pin_id``, or, with neither, retention. ``left_ms``: for how long still; 0 = not known yet."""

    chunks: int
    left_ms: int = 0
    engine: str = ""
    request_id: str = ""
    pin_id: bytes = b""


@dataclass(frozen=True, slots=True)
class Inspected:
    """``objects`` are for lower tiers: (place of the chunk, name) of as many objects as one call may name."""

    chunks: tuple[InspectedChunk, ...]
    keepers: tuple[Keeper, ...]
    more_keepers: bool
    objects: tuple[tuple[int, ObjectName], ...]


def inspect(book: Bookkeeper, now: int, ref: SpaceRef, keys: Sequence[bytes]) -> Inspected:
    """Refuses: SPACE_UNKNOWN."""
    book.index.facts(ref.space_base)
    space = book.index.spaces.get(ref)
    known = {} if space is None else space.table.chunks
    found = {chunk: None for key in keys if (chunk := known.get(key)) is not None}
    keepers, more = _keepers(book, now, found)
    chunks = tuple([_inspected(key, known.get(key)) for key in keys])
    objects = tuple(islice(_objects(book, ref, keys), book.limits.keys_per_call))
    return Inspected(chunks, keepers, more, objects)


def _inspected(key: bytes, chunk: Chunk | None) -> InspectedChunk:
    if chunk is None:
        return InspectedChunk(key)
    counts = (chunk.ready.bit_count(), chunk.writing.bit_count(), chunk.ready_bytes)
    return InspectedChunk(key, *counts, chunk.pins, chunk.holds)


def _objects(book: Bookkeeper, ref: SpaceRef, keys: Sequence[bytes]) -> Iterable[tuple[int, ObjectName]]:
    """Of the ranks whose objects' form is known here; of chunks in parts the first one, as in L1."""
    index = book.index
    facts, space, digest = index.facts(ref.space_base), index.spaces.get(ref), space_digest(ref)
    version = index.known_spaces.get(digest, (b"", facts.version))[1] if space is None else space.version
    for at, key in enumerate(keys):
        for rank, (form, *_) in facts.forms.items():
            yield at, ObjectName(object_name(digest, version, key, rank, form.order), form.object_bytes)


def _keepers(book: Bookkeeper, now: int, found: dict[Chunk, None]) -> tuple[tuple[Keeper, ...], bool]:
    """And whether there may be more."""
    holds, jobs = book.holds, book.jobs
    pinned, held = {chunk for chunk in found if chunk.pins}, {chunk for chunk in found if chunk.holds}
    keepers: list[Keeper] = []
    until = [holds.retained[chunk] for chunk in held if chunk in holds.retained]
    if until:
        keepers.append(Keeper(len(until), _left_ms(max(until), now)))
    visits = 0
    for pin_id, chunks in holds.pins.items() if held else ():
        visits += len(chunks)
        if visits > VISITS_MOST or len(keepers) >= KEEPERS_MOST:
            return tuple(keepers), True
        if count := sum(chunk in held for chunk in chunks):
            keepers.append(Keeper(count, _left_ms(holds.end_of(pin_id), now), pin_id=pin_id))
    for job in jobs.jobs.values() if pinned else ():
        planned = job.prefetch.planned if job.prefetch is not None else []
        visits += len(job.lease.chunks) + len(planned)
        if visits > VISITS_MOST or len(keepers) >= KEEPERS_MOST:
            return tuple(keepers), True
        left = zip(job.lease.chunks, job.lease.remaining, strict=True)
        if count := sum(bits > 0 and chunk in pinned for chunk, bits in left) + sum(c in pinned for c in planned):
            engine = fingerprint(job.engine.engine_id)
            keepers.append(Keeper(count, _left_ms(job.lease_end_ns, now), engine, job.request_id))
    return tuple(keepers), False


def _left_ms(end_ns: int, now: int) -> int:
    return max(end_ns - now, 0) // MS
