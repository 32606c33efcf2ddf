# SPDX-License-Identifier: Apache-2.0
"""What is copied by a Store or a Retrieve, of one part of its chunks."""

from __future__ import annotations

from collections.abc import Sequence

from kvgrpc.core import types as t
from kvgrpc.core.desk import Desk
from kvgrpc.core.index import Chunk, Space
from kvgrpc.core.jobs import Job
from kvgrpc.core.keys import part_keys
from kvgrpc.core.leases import finish_read
from kvgrpc.core.slicing import (
    ABSENT,
    AFTER_FAILURE,
    BEING_WRITTEN,
    CLEARED,
    LOADED,
    MISSING,
    RESIDENT,
    SKIPPED,
    STORED,
    PartPlan,
    Targets,
)
from kvgrpc.core.slots import Slot
from kvgrpc.core.types import ChunkOutcome as Outcome


class StorePlan(PartPlan):
    """Copies the full chunks of a range into the arena.

    Slots are reserved slice by slice. Every chunk of the prefix that the call stored or found is in use until it ends,
    so a store never evicts its own head to make room for its tail.
    """

    direction = t.Direction.STORE

    def __init__(
        self, desk: Desk, registration: t.Registration, command: t.StoreCommand, part: t.Part, space: Space
    ) -> None:
        chunk_tokens, content = desk.ledger.limits.chunk_tokens, command.content
        keys = part_keys(content.keys, part.number)
        end = min(command.range.end // chunk_tokens, content.first_chunk + len(keys))
        super().__init__(desk, registration, command, part, -(-command.range.start // chunk_tokens), end)
        self._keys = keys
        self._first_key = content.first_chunk
        self._policy = command.policy
        self._cleared = command.cleared
        self._space = space
        self._table = space.table
        self._refusal = ""
        self._used_from = max(self.first - content.first_chunk, 0) if part.need.window else 0
        self._ahead = self.end  # chunks to ask room for at once: as many as were given, and more after all were
        self.held: list[Chunk] | None = None

    def _open_next(self, most: int) -> Targets:
        if self.held is None:
            self.held = []
            start = max(self.of.need.first(self.end, self._chunk_tokens) - self._first_key, 0)
            for key in self._keys[start : self.first - self._first_key] if self._table.live else ():
                if (chunk := self._table.chunks.get(key)) is not None:
                    self._hold((chunk,), self.held)
        while self._at < self.end:
            opened = self._reserve(most, self.held)
            if opened is not None:
                return opened
            self._at += 1
        return [], []

    def _reserve(self, most: int, held: list[Chunk]) -> Targets | None:
        """Slots for the chunk at hand, and for those that follow it if they are all new; None when it needs none or
        gets none, and its outcome is known."""
        index, table, rank = self._desk.index, self._table, self._kv_rank
        if self._policy.no_store:
            return self._set(self._at, (Outcome.REFUSED, "NO_STORE"))
        if self._cleared or not table.live:
            return self._set(self._at, CLEARED)
        place = self._at - self._first_key
        chunk = table.chunks.get(self._keys[place])
        if chunk is not None:
            if chunk.writing >> rank & 1:
                return self._set(self._at, BEING_WRITTEN)
            self._hold((chunk,), held)  # or making room might evict what other ranks have of it
            if chunk.ready >> rank & 1:
                return self._set(self._at, RESIDENT)
        if self._refusal:
            return self._set(self._at, (Outcome.REFUSED, self._refusal))
        last = min(place + min(most, self._ahead), self.end - self._first_key) if chunk is None else place + 1
        keys = table.unknown(self._keys[place:last]) if chunk is None else self._keys[place:last]
        slots = index.reserve(self._space, self._object_bytes, len(keys))
        if isinstance(slots, str):
            self._refusal = slots
            return self._set(self._at, (Outcome.REFUSED, slots))
        self._ahead = len(slots) * 2 if len(slots) == len(keys) else len(slots)
        chunks = index.begin_objects(table, keys[: len(slots)], rank, slots, self._policy.priority)
        if chunk is None:
            self._hold(chunks, held)
        return chunks, slots

    def _hold(self, chunks: Sequence[Chunk], held: list[Chunk]) -> None:
        for chunk in chunks:
            chunk.writes += 1
        held += chunks

    def next_slice(self) -> tuple[t.Piece, ...]:
        """As for every plan; the slots are reserved now."""
        pieces = super().next_slice()
        for slot in self.flights[-1].slots if pieces else ():
            slot.in_flight = True
        return pieces

    def slice_done(self, now: int, report: t.SliceReport, *, discard: bool) -> bool:
        """Commits what was copied."""
        places, chunks, slots, _, partial = self.flights.popleft()
        shared = partial and self.flights  # the slice behind it fills the same slot
        self._desk.index.slots.settled(() if shared else slots)
        if discard:
            return False
        copied = report.completed
        done = 0 if partial else copied
        known = STORED if self._desk.index.commit_objects(chunks[:done], self._kv_rank) else CLEARED
        self._desk.writes.stored(now, chunks[:done], self._kv_rank)
        for at in places[:done]:
            self.outcomes[at - self.first] = known
        if copied >= len(places):
            return True
        self._set(places[copied], (Outcome.TORN if report.torn else Outcome.FAILED, report.reason))
        self._abort(chunks[copied:], slots[copied:])
        self.abandon()
        self.stop(AFTER_FAILURE)
        return False

    def _abort(self, chunks: list[Chunk], slots: list[Slot]) -> None:
        for chunk, slot in zip(chunks, slots, strict=True):
            if chunk.slots.get(self._kv_rank) is slot:
                self._desk.index.abort_object(chunk, self._kv_rank)

    def abandon(self) -> None:
        """What the slices in flight fill settles."""
        for flight in self.flights:
            self._abort(flight.chunks, flight.slots)

    def stop(self, reason: str) -> None:
        """As for every plan; a chunk that was filled in part is given up."""
        if self._offset:
            self._abort(*self._open)
        super().stop(reason)

    def finish(self, now: int) -> None:
        """The prefix as far as it is there was used; the call's own chunks rest."""
        index, table = self._desk.index, self._table
        keys = self._keys[self._used_from : self.end - self._first_key]
        index.use(table, keys, self._policy.priority)
        if self._policy.retention_ns and table.live:
            self._retain(now, keys)
        index.end_writes(self.held or ())
        self.held = None
        counters = self._desk.ledger.counters
        for result in self.results:
            if result.outcome is Outcome.STORED:
                counters["stored_chunks"] += result.count
            elif result.outcome is Outcome.REFUSED:
                counters[f"refused_{result.reason.lower()}"] += result.count

    def _retain(self, now: int, keys: Sequence[bytes]) -> None:
        """Holds the complete chunks of the prefix; those that other ranks still fill, the last rank's store holds."""
        here = sum(1 << rank for rank in self._space.facts.forms)
        chunks: list[Chunk] = []
        for key in keys:
            chunk = self._table.chunks.get(key)
            if chunk is None or chunk.ready & here != here:
                break
            chunks.append(chunk)
        self._desk.holds.retain(chunks, now + self._policy.retention_ns)


class WindowStorePlan(StorePlan):
    """Stores a part of which the engine may not have every block: the chunks that it has whole."""

    def __init__(
        self, desk: Desk, registration: t.Registration, command: t.StoreCommand, part: t.Part, space: Space
    ) -> None:
        super().__init__(desk, registration, command, part, space)
        self._absent = self._find_absent()

    def _find_absent(self) -> frozenset[int]:
        """Chunks of which the engine does not have every block that can be needed."""
        absent: set[int] = set()
        for ids, size, tail in zip(self.block_ids, self._sizes, self.of.blocks, strict=True):
            for at in range(self.first, self.end):
                end = ((at + 1) * self._chunk_tokens - self._range.start) // size
                if t.NULL_BLOCK in ids[end - tail : end]:
                    absent.add(at)
        return frozenset(absent)

    def _reserve(self, most: int, held: list[Chunk]) -> Targets | None:
        """As for every store; a chunk that the engine does not have whole ends a run."""
        if self._at in self._absent:
            return self._set(self._at, ABSENT)
        run = next((at for at in range(self._at + 1, self._at + most) if at in self._absent), self._at + most)
        return super()._reserve(run - self._at, held)


class RetrievePlan(PartPlan):
    """Copies a range of a job's prefix into the engine's blocks, in prefix order, up to the first chunk that fails."""

    direction = t.Direction.RETRIEVE

    def __init__(
        self, desk: Desk, registration: t.Registration, command: t.RetrieveCommand, part: t.Part, job: Job, bit: int
    ) -> None:
        chunk_tokens, tokens = desk.ledger.limits.chunk_tokens, command.range
        keys, (first, place) = part_keys(job.keys, part.number), job.lease.starts[part.number]
        end = -(-tokens.end // chunk_tokens) if tokens.end > tokens.start else 0
        end = min(end, len(keys)) if part.need.window else end
        super().__init__(desk, registration, command, part, max(tokens.start // chunk_tokens, first), end)
        self._job = job
        self._keys = keys
        self._bit = bit
        self._used_from, self._shift = first, place - first
        self.pinned: list[Chunk] | None = None

    @property
    def whole(self) -> bool:
        """Everything of the hit that is asked for is there now; it is pinned."""
        if self.pinned is None:
            self.pinned = self._pin_resident()
        return len(self.pinned) >= min(self.end, len(self._keys)) - self.first

    def give_up(self) -> None:
        """Copies nothing, since something is missing, here or elsewhere."""
        if not self.whole:
            self._set(self.first + len(self.pinned or ()), MISSING)
        self.stop(AFTER_FAILURE)

    def _open_next(self, most: int) -> Targets:
        if self.pinned is None:
            self.pinned = self._pin_resident()
        place, rank = self._at - self.first, self._kv_rank
        chunks = self.pinned[place : place + most]
        return chunks, [chunk.slots[rank] for chunk in chunks]

    def _pin_resident(self) -> list[Chunk]:
        """Pins the prefix of the range that is there now."""
        pinned: list[Chunk] = []
        for at in range(self.first, min(self.end, len(self._keys))):
            chunk = self._find(at)
            if chunk is None:
                break
            pinned.append(chunk)
        self._desk.index.pin(pinned)
        return pinned

    def _find(self, at: int) -> Chunk | None:
        lease, table, place = self._job.lease, self._job.table, at + self._shift
        if place < len(lease.remaining) and lease.remaining[place]:
            chunk = lease.chunks[place]
        else:
            chunk = table.chunks.get(self._keys[at]) if table.live else None
        return chunk if chunk is not None and chunk.ready >> self._kv_rank & 1 else None

    def slice_done(self, now: int, report: t.SliceReport, *, discard: bool) -> bool:
        """Takes loaded chunks off the reader."""
        (places, _, _, resumed, partial), done = self.flights.popleft(), report.completed
        for at in places[: 0 if partial else done]:
            finish_read(self._desk.leases, self._job, at + self._shift, self._bit)
            self._set(at, LOADED)
        self._desk.jobs.unpinned(self._job, now)
        if done >= len(places):
            return True
        if report.reason != SKIPPED:
            torn = report.torn or int(resumed and not done)
            self._set(places[done], (Outcome.TORN if torn else Outcome.FAILED, report.reason), max(torn, 1))
            self._offset = 0
            self.stop(AFTER_FAILURE)
        return False

    def abandon(self) -> None:
        """The pins of slices in flight stay until they are reported."""

    def stop(self, reason: str) -> None:
        """As for every plan; a chunk of which a part was loaded is torn."""
        if self._offset:
            self._set(self._at, (Outcome.TORN, reason))
        super().stop(reason)

    def finish(self, now: int) -> None:
        """The prefix up to the range's end was used; the call's pins go. What was not there is missing, as is all past
        the hit; between them nothing was tried."""
        hit = min(max(len(self._keys), self._at), self.end)
        if self._at < hit:
            self._set(self._at, MISSING)
            self._set(self._at + 1, (Outcome.FAILED, AFTER_FAILURE), hit - self._at - 1)
        self._set(hit, MISSING, self.end - hit)
        index = self._desk.index
        index.use(self._job.table, self._keys[self._used_from : self.end], self._job.priority)
        index.unpin(self.pinned or ())
        self.pinned = None
        counters = self._desk.ledger.counters
        loaded = sum(known == LOADED for known in self.outcomes)
        counters["loaded_chunks"] += loaded
        failed = min(self.end, len(self._keys)) - self.first - loaded
        if failed > 0:
            counters["failed_chunks"] += failed
