# SPDX-License-Identifier: Apache-2.0
"""What pending lookups wait for, and which hit those aim at whose model has its chunks in parts.

Of such models a prefix is of no use without the windows at its end, and a shorter one needs others. So what is read
from lower tiers is what one hit needs: the longest for which everything is resident, on its way or found below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvgrpc.core.index import Chunk, Index
from kvgrpc.core.jobs import Job
from kvgrpc.core.ledger import Ledger
from kvgrpc.core.parted import longest
from kvgrpc.core.slots import Slot
from kvgrpc.core.types import ObjectName

Place = tuple[int, int]
"""(part, chunk)."""


@dataclass(eq=False, slots=True)
class Read:
    """One object on its way into the arena, and the jobs that wait for it."""

    read_id: int
    tier: str
    chunk: Chunk
    kv_rank: int
    slot: Slot
    jobs: dict[Job, None] = field(default_factory=dict[Job, None])


@dataclass(eq=False, slots=True)
class Prefetch:
    """What a pending job waits for, beyond its ``first`` chunks, which were a hit."""

    first: int
    want: int
    probe_id: int
    keys: list[Sequence[bytes]]
    """Of each part."""
    wanted: list[Place]
    """What is to be planned, in this order."""
    target: int
    """The hit that is aimed at, in chunks."""
    probed: list[tuple[bytes, int, ObjectName]] = field(default_factory=list[tuple[bytes, int, ObjectName]])
    """(key, KV rank, object) that the tiers are asked for."""
    planned: list[Chunk] = field(default_factory=list[Chunk])
    """Pinned, those of ``wanted`` from its beginning."""
    sources: list[str] = field(default_factory=list[str])
    """Where each planned chunk is from."""
    where: dict[tuple[bytes, int], tuple[str, ObjectName]] = field(
        default_factory=dict[tuple[bytes, int], tuple[str, ObjectName]]
    )
    """The tier that has the object of (key, KV rank)."""
    silent: bool = False
    """A tier did not say what it has."""
    waiting: dict[int, Read] = field(default_factory=dict[int, Read])
    limited_by: str = ""
    cut_by: str = ""
    """Why what is aimed at is shorter than what was found."""

    def aim_at(self, count: int, places: Sequence[Place]) -> list[Chunk]:
        """What is planned and not among the places, once a place: contents that name a chunk twice plan it twice. The
        rest of the places is to be planned still."""
        new = dict.fromkeys(places)
        planned = list(zip(self.wanted, self.planned, self.sources, strict=False))
        kept = [one for one in planned if one[0] in new]
        self.target = count
        self.wanted = list(dict.fromkeys([*(place for place, _, _ in kept), *places]))
        self.planned, self.sources = [chunk for _, chunk, _ in kept], [source for *_, source in kept]
        return [chunk for place, chunk, _ in planned if place not in new]


class Aims:
    """Chooses hits. ``reads`` are those under way, by slot."""

    def __init__(self, ledger: Ledger, index: Index, reads: Mapping[Slot, Read]) -> None:
        self._ledger = ledger
        self._index = index
        self._reads = reads

    def choose(self, job: Job, prefetch: Prefetch, most: int, reading_bytes: int) -> tuple[int, list[Place], bool]:
        """The longest hit of up to ``most`` chunks that can be had and fits what may be pinned; what it needs, windows
        first; whether one that was longer did not fit."""
        needs, size = job.space.facts.needs, self._ledger.limits.chunk_tokens
        step, limited = 1, False
        while job.table.live:
            count = longest(most, needs, lambda part, at: self.can_be(job, prefetch, part, at), size)
            if count <= prefetch.first:
                break
            places = [(part, at) for part, need in enumerate(needs) for at in range(need.first(count, size), count)]
            places.sort(key=lambda place: not needs[place[0]].window)
            over, chunk_bytes = self._excess(job, prefetch, places, reading_bytes)
            if over <= 0:
                return count, places, limited
            most = count - max(step, int(over // chunk_bytes) if chunk_bytes else 0)
            step, limited = step * 2, True
        return prefetch.first, [], limited

    def can_be(self, job: Job, prefetch: Prefetch, part: int, at: int) -> bool:
        """Whether all wanted objects of a place are there, on their way or in a tier."""
        key = prefetch.keys[part][at]
        chunk = job.table.chunks.get(key)
        for rank in job.lease.ranks:
            if chunk is not None and chunk.ready >> rank & 1:
                continue
            if chunk is not None and chunk.writing >> rank & 1:
                if chunk.slots[rank] not in self._reads:
                    return False  # a store writes it
            elif (key, rank) not in prefetch.where:
                return False
        return True

    def _excess(self, job: Job, prefetch: Prefetch, places: list[Place], reading_bytes: int) -> tuple[float, int]:
        """By how many bytes pins and reads for these places exceed what may be pinned; what one chunk has of the part
        that needs everything."""
        slots, forms = self._index.slots, job.space.facts.forms
        cost = {
            (rank, part.number): slots.cost_bytes(part.object_bytes) for rank in job.lease.ranks for part in forms[rank]
        }
        over = self._index.pinned_bytes + reading_bytes - slots.total_bytes * self._ledger.limits.pin_share
        for part, at in places:
            chunk = job.table.chunks.get(prefetch.keys[part][at])
            there = 0
            if chunk is not None:
                there = chunk.ready | chunk.writing
                over += 0 if chunk.pins else chunk.ready_bytes
            over += sum([cost[rank, part] for rank in job.lease.ranks if not there >> rank & 1])
        whole = job.space.facts.needs[0].window == 0
        return over, sum(cost[rank, 0] for rank in job.lease.ranks) if whole else 0
