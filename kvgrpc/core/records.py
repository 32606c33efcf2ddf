# SPDX-License-Identifier: Apache-2.0
"""What is known of objects beyond the life of the server: where they lie, what they are, and a checksum.

A record is made of each object some time after it has become READY, outside (``kvgrpc.runtime.recorder``). Nothing
holds the object meanwhile: a checksum counts if the same slot is still there when it comes back, and a slot that was
READY all the time has not changed. Nothing takes a record back either. So a record is a claim, no proof: the next
server compares bytes and name with the checksum before anybody can find the object. The name has the space, its version
and the key in it, so that what was cleared since, or lies where another object lay, does not pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from kvgrpc.core.errors import Refusal
from kvgrpc.core.geometry import Part, PartForm
from kvgrpc.core.index import Chunk, Index, Space
from kvgrpc.core.keys import object_name, part_of
from kvgrpc.core.ledger import Ledger
from kvgrpc.core.slots import Claims, Slot
from kvgrpc.core.states import READY
from kvgrpc.core.types import Extent, Priority, SpaceIdentity, SpaceRef, Versions
from kvgrpc.core.versions import version_of

WAITING_MOST = 65536
"""Objects that wait for a record; of more, the oldest are left to the end."""


class Form(NamedTuple):
    """What the objects of one version of a space, one KV rank and one part have in common. ``parts``: of all parts of
    a chunk of that rank, since the next server has to know what a hit needs before an engine tells it."""

    identity: SpaceIdentity
    lora: str
    cache_salt: str
    version: int
    kv_rank: int
    parts: tuple[PartForm, ...]
    part: int = 0

    @property
    def size_bytes(self) -> int:
        """Length of the objects."""
        return self.parts[self.part].object_bytes


class Record(NamedTuple):
    """One object of an arena. ``checksum``: 16 bytes, over its name and its bytes."""

    form: Form
    key: bytes
    priority: Priority
    extents: tuple[Extent, ...]
    checksum: bytes


class UnsoundRecordsError(Exception):
    """Records of a server that ended in order, and one of them cannot be; the message says which."""


@dataclass(eq=False, slots=True)
class Sealing:
    """An object whose checksum is being made or compared."""

    chunk: Chunk
    kv_rank: int
    slot: Slot
    name: str


class Records:
    """Says of what records are made, and makes objects of records. ``on``: somebody makes them."""

    def __init__(self, ledger: Ledger, index: Index) -> None:
        self._ledger = ledger
        self._index = index
        self.on = False
        self.waiting: deque[tuple[Chunk, int]] = deque(maxlen=WAITING_MOST)
        self.unchecked: dict[Sealing, None] = {}
        """Adopted, and still to be compared with their checksums, the most recently used first."""

    # ---- records of objects -----------------------------------------------------------------------------------------

    def ready(self, chunks: Sequence[Chunk], kv_rank: int) -> None:
        """These objects can be found now."""
        if self.on:
            self.waiting.extend((chunk, kv_rank) for chunk in chunks)

    def take(self, most_bytes: int) -> list[Sealing]:
        """Objects that are to get a checksum, of so many bytes, but for the first."""
        taken: list[Sealing] = []
        while self.waiting and most_bytes > 0:
            sealing = self._sealing(*self.waiting.popleft())
            if sealing is not None:
                taken.append(sealing)
                most_bytes -= sealing.slot.size_bytes
        return taken

    def unrecorded(self) -> list[Sealing]:
        """All that have none, the most recently used first."""
        self.waiting.clear()
        chunks = reversed(self.chunks())
        found = [self._sealing(chunk, kv_rank) for chunk in chunks for kv_rank in chunk.slots]
        return [sealing for sealing in found if sealing is not None]

    def _sealing(self, chunk: Chunk, kv_rank: int) -> Sealing | None:
        slot = chunk.slots.get(kv_rank)
        if slot is None or slot.state is not READY or slot.checksum or not chunk.table.live:
            return None
        return Sealing(chunk, kv_rank, slot, _name(chunk, kv_rank))

    def sealed(self, sealing: Sealing, checksum: bytes) -> Record | None:
        """The checksum is made; None when the object has gone meanwhile."""
        chunk, slot = sealing.chunk, sealing.slot
        if chunk.slots.get(sealing.kv_rank) is not slot or slot.state is not READY or not chunk.table.live:
            return None
        slot.checksum = checksum
        return _record(chunk, sealing.kv_rank, slot)

    def kept(self, count: int) -> None:
        """So many records are where a kill does not reach them."""
        self._ledger.counters["recorded_objects"] += count

    def chunks(self) -> list[Chunk]:
        """All chunks, least recently used first in each priority."""
        return list(chain.from_iterable((*queue.parked, *queue.order) for queue in self._index.eviction.queues))

    def of(self, chunks: Sequence[Chunk]) -> list[Record]:
        """What has a checksum and was not cleared, also if nobody has checked it yet."""
        return [
            _record(chunk, kv_rank, slot)
            for chunk in chunks
            if chunk.table.live
            for kv_rank, slot in chunk.slots.items()
            if slot.checksum
        ]

    # ---- objects of records -----------------------------------------------------------------------------------------

    def adopt(self, records: Sequence[Record], kept: Versions, *, whole: bool) -> None:
        """Gives objects that an earlier server left their places, as being written until they were ``checked``. Of two
        records that cannot both be true, the later may be.

        ``kept``: versions of spaces when that server ended. ``whole``: it ended in order, so that all records were true
        then. Raises UnsoundRecordsError, and nothing is adopted.
        """
        spaces = {form: self._space(form, kept) for form in {record.form: None for record in reversed(records)}}
        claims, seen = Claims(self._index.slots), set[tuple[bytes, bytes, int]]()
        claimed: list[tuple[Record, Space, Slot]] = []
        for record in reversed(records):
            form, space = record.form, spaces[record.form]
            if space is None:
                continue
            named = (space.digest, record.key, form.kv_rank)
            slot = (
                None
                if named in seen or part_of(record.key) != form.part
                else claims.claim(form.size_bytes, record.extents)
            )
            if slot is None and whole:
                raise UnsoundRecordsError(f"two objects share a place, or one lies where none can: {record.extents}")
            if slot is not None:
                seen.add(named)
                slot.checksum = record.checksum
                claimed.append((record, space, slot))
        claims.take()
        adopted = list[Sealing]()
        for record, space, slot in reversed(claimed):
            kv_rank, priority = record.form.kv_rank, record.priority
            chunks = self._index.begin_objects(space.table, (record.key,), kv_rank, (slot,), priority)
            self._index.eviction.use(chunks, priority)
            adopted.append(Sealing(chunks[0], kv_rank, slot, _name(chunks[0], kv_rank)))
        self.unchecked = dict.fromkeys(reversed(adopted))

    def _space(self, form: Form, kept: Versions) -> Space | None:
        """The space of such objects; None when it was cleared since, or has objects of another form."""
        index = self._index
        try:
            facts = index.name_base(form.identity)
            space = index.space(SpaceRef(facts.base, form.lora, form.cache_salt))
        except Refusal:
            return None  # too many are remembered already
        if not form.version == space.version == version_of(kept, facts.base, space.digest):
            return None
        needs = tuple(need for need, _, _ in form.parts)
        facts.needs = facts.needs if facts.forms else needs
        parts = [Part(number, need, (), (), size, order) for number, (need, size, order) in enumerate(form.parts)]
        known = facts.forms.setdefault(form.kv_rank, tuple(parts)) if needs == facts.needs else ()
        return space if tuple(part.form for part in known) == form.parts else None

    def checked(self, sealing: Sealing, holds: bool) -> None:
        """An adopted object is what its record says, and can be found from now on; or its place is free."""
        index, chunk = self._index, sealing.chunk
        del self.unchecked[sealing]
        if not holds:
            index.abort_object(chunk, sealing.kv_rank)
        elif not index.commit_objects((chunk,), sealing.kv_rank):
            holds = False
        self._ledger.counters["restored_objects" if holds else "dropped_objects"] += 1


def _name(chunk: Chunk, kv_rank: int) -> str:
    space = chunk.table.space
    order = space.facts.forms[kv_rank][part_of(chunk.key)].order
    return object_name(space.digest, space.version, chunk.key, kv_rank, order)


def _record(chunk: Chunk, kv_rank: int, slot: Slot) -> Record:
    space = chunk.table.space
    ref, parts = space.ref, tuple(part.form for part in space.facts.forms[kv_rank])
    form = Form(space.facts.identity, ref.lora, ref.cache_salt, space.version, kv_rank, parts, part_of(chunk.key))
    return Record(form, chunk.key, chunk.priority, slot.extents, slot.checksum)
