# SPDX-License-Identifier: Apache-2.0
"""What caches of other sizes would have found: recorded calls against the server's own order of eviction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvgrpc.api import CallKind
from kvgrpc.cli.trace.file import Recorded, TraceError
from kvgrpc.core.cache import Bookkeeper
from kvgrpc.core.index import Chunk
from kvgrpc.core.types import CoreLimits, Priority, SpaceIdentity, SpaceRef


class CoreOrder:
    """Chunks by number, of ``most_bytes`` at most, that go in the order in which the server evicts
    (``kvgrpc/core/eviction.py``)."""

    def __init__(self, most_bytes: int) -> None:
        book = Bookkeeper(CoreLimits(), 1 << 20)
        base = book.space_base(0, SpaceIdentity("trace", "", "uint8", 1, "engine", "opaque"))
        self._most_bytes = most_bytes
        self._table = book.index.space(SpaceRef(base)).table
        self._eviction = book.index.eviction
        self._chunks: dict[int, Chunk] = {}
        self._numbers: dict[Chunk, tuple[int, int]] = {}
        self.used_bytes = 0
        self.evicted = 0

    def __contains__(self, number: int) -> bool:
        return number in self._chunks

    def found(self, numbers: Sequence[int]) -> int:
        """How many of a prompt's chunks are there, from the first on."""
        return next((at for at, number in enumerate(numbers) if number not in self._chunks), len(numbers))

    def use(self, numbers: Sequence[int], chunk_bytes: int, first: int = 0) -> None:
        """A prompt was used; what is missing of it, from place ``first`` on, is stored."""
        for number in numbers[first:]:
            if number not in self._chunks:
                chunk = Chunk(b"", self._table, self._table.space.account, Priority.NORMAL, {})
                self._chunks[number], self._numbers[chunk] = chunk, (number, chunk_bytes)
                self.used_bytes += chunk_bytes
        self._eviction.use([self._chunks[n] for n in numbers if n in self._chunks], Priority.NORMAL)
        victims = self._eviction.take_victims()
        while self.used_bytes > self._most_bytes:
            chunk = next(victims)
            self._eviction.drop((chunk,))
            number, size_bytes = self._numbers.pop(chunk)
            del self._chunks[number]
            self.used_bytes -= size_bytes
            self.evicted += 1


@dataclass
class Facts:
    """What a trace is, and what happened when it was recorded (``recorded_hits`` None: it does not say)."""

    lookups: int = 0
    stores: int = 0
    asked_chunks: int = 0
    recorded_hits: int | None = None
    working_set_bytes: int = 0
    chunk_bytes: dict[int, int] = field(default_factory=dict[int, int])
    """By space."""


def survey(calls: Iterable[Recorded], chunk_bytes: int | None = None) -> Facts:
    """``chunk_bytes`` is for calls that do not say. TraceError when it is needed and not there."""
    facts, seen = Facts(), set[tuple[int, int]]()
    sizes = facts.chunk_bytes
    for call in calls:
        size = call.chunk_bytes or sizes.get(call.space) or chunk_bytes
        if size is None and (call.kind is not CallKind.LOOKUP or call.prefix_chunks):
            raise TraceError("the trace does not say how many bytes a chunk has; say it with --chunk-size")
        if size is not None:
            sizes[call.space] = size
        facts.stores += call.kind is not CallKind.LOOKUP
        if call.kind is not CallKind.STORE:
            facts.lookups += 1
            facts.asked_chunks += len(call.chunks)
        if call.kind is CallKind.LOOKUP:
            facts.recorded_hits = (facts.recorded_hits or 0) + call.prefix_chunks
        stored = call.chunks[: call.prefix_chunks] if call.kind is CallKind.LOOKUP else call.chunks
        new = {(call.space, chunk) for chunk in stored} - seen
        seen |= new
        facts.working_set_bytes += len(new) * (size or 0)
    return facts


@dataclass(frozen=True, slots=True)
class Point:
    """One size of cache and what it found."""

    size_bytes: int
    hit_chunks: int
    hit_rate: float
    evicted_chunks: int


def replay(calls: Iterable[Recorded], facts: Facts, sizes: Sequence[int]) -> list[Point]:
    """All sizes in one pass.

    A recorded hit that a smaller cache misses is computed and stored there, as an engine does; the recording has no
    store of it.
    """
    orders, hits = [CoreOrder(size) for size in sizes], [0] * len(sizes)
    for call in calls:
        chunk_bytes = facts.chunk_bytes.get(call.space, 0)
        for at, order in enumerate(orders):
            if call.kind is CallKind.STORE:
                order.use(call.chunks, chunk_bytes, call.prefix_chunks)
                continue
            found = order.found(call.chunks)
            hits[at] += found
            stored = len(call.chunks) if call.kind is None else max(found, call.prefix_chunks)
            order.use(call.chunks[:stored], chunk_bytes)
    asked = max(facts.asked_chunks, 1)
    return [
        Point(size, count, count / asked, order.evicted) for size, count, order in zip(sizes, hits, orders, strict=True)
    ]


def default_sizes(working_set_bytes: int) -> list[int]:
    """Doubling, up to where everything fits."""
    most = 1 << max(working_set_bytes - 1, 1).bit_length()
    return [most >> shift for shift in range(7, -1, -1) if most >> shift]
