# SPDX-License-Identifier: Apache-2.0
"""What a Store or Retrieve call still has to do, slice by slice. The schedule is ``kvgrpc.core.calls``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain, count, groupby, pairwise, repeat, starmap
from typing import ClassVar, NamedTuple

from kvgrpc.core import types as t
from kvgrpc.core.desk import Desk
from kvgrpc.core.index import Chunk, Space
from kvgrpc.core.jobs import Job
from kvgrpc.core.leases import finish_read
from kvgrpc.core.slots import Slot
from kvgrpc.core.types import ChunkOutcome as Outcome

AFTER_FAILURE = "AFTER_FAILURE"
SKIPPED = "SKIPPED"
"""Reason of a report of a slice that was not begun, because the one before it stopped early."""
SLICE_PIECES = 1024
"""Most pieces of a slice, however small: all of them are reserved, and ended, in one turn of the loop."""
Known = tuple[Outcome, str]
"""What became of a chunk, and why."""
Targets = tuple[list[Chunk], list[Slot]]
"""Chunks that follow each other, and their slots."""
STORED, RESIDENT, BEING_WRITTEN = (Outcome.STORED, ""), (Outcome.RESIDENT, ""), (Outcome.BEING_WRITTEN, "")
LOADED, MISSING, CLEARED = (Outcome.LOADED, ""), (Outcome.MISSING, ""), (Outcome.REFUSED, "CLEARED")


class Flight(NamedTuple):
    """A slice in flight, one place in the prompt a piece. If it begins inside a chunk (``resumed``) or ends inside one
    (``partial``), it has no other."""

    places: list[int]
    chunks: list[Chunk]
    slots: list[Slot]
    resumed: bool
    partial: bool


class Plan(ABC):
    """Cuts the chunks [first, end) of a call into slices and keeps what became of each."""

    direction: ClassVar[t.Direction]

    def __init__(
        self,
        desk: Desk,
        registration: t.Registration,
        command: t.StoreCommand | t.RetrieveCommand,
        first: int,
        end: int,
    ) -> None:
        self._desk = desk
        self._range = command.range
        self._kv_rank = registration.kv_rank
        self._chunk_tokens = desk.ledger.limits.chunk_tokens
        self._object_bytes = registration.geometry.object_bytes(self._chunk_tokens)
        sizes = [group.block_size for group in registration.geometry.groups]
        tokens = command.range.end - command.range.start
        self._blocks = [
            (array("I", ids[: tokens // size]), size) for ids, size in zip(command.blocks, sizes, strict=True)
        ]
        self.num_blocks = sum(len(ids) for ids, _ in self._blocks)
        self._first = first
        self._at: int = first
        self._end = max(first, end)
        self._outcomes: list[Known | None] = [None] * (self._end - first)
        self._offset = 0
        """Bytes of the open chunk ``_at`` that were ordered; it is then the only one of its slice."""
        self._open: Targets = [], []
        self.flights: deque[Flight] = deque()
        """In the order of their slices."""

    def touches(self, other: Plan) -> bool:
        """Whether the two calls name a block in common. The other may be one that a new registration has revoked, which
        then decides nothing."""
        pairs = zip(self._block_sets, other._blocks, strict=False)
        return not all(own.isdisjoint(ids) for own, (ids, _) in pairs)

    @cached_property
    def _block_sets(self) -> list[frozenset[int]]:
        return [frozenset(ids) for ids, _ in self._blocks]

    # ---- plan -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _open_next(self, most: int) -> Targets:
        """Moves ``_at`` to the next chunk that needs a copy: this and up to ``most`` - 1 that follow it; empty when
        there is none."""

    def next_slice(self) -> tuple[t.Piece, ...]:
        """Pieces of the next slice; empty when nothing is left to copy."""
        room, size = self._desk.ledger.limits.slice_bytes, self._object_bytes
        pieces: list[t.Piece] = []
        places, chunks, slots, resumed = list[int](), list[Chunk](), list[Slot](), self._offset > 0
        while room > 0 and len(pieces) < SLICE_PIECES and not (pieces and size > room):
            if not self._offset:
                self._open = self._open_next(min(max(room // size, 1), SLICE_PIECES - len(pieces)))
            count, until = len(self._open[0]), min(self._offset + room, size)
            if not count:
                break
            pieces += self._pieces(self._open[1], until)
            places += range(self._at, self._at + count)
            chunks += self._open[0]
            slots += self._open[1]
            room -= (until - self._offset) * count
            self._offset = until
            if until == size:
                self._at, self._offset = self._at + count, 0
        if pieces:
            self.flights.append(Flight(places, chunks, slots, resumed, self._offset > 0))
        return tuple(pieces)

    def _pieces(self, slots: list[Slot], until: int) -> Iterable[t.Piece]:
        """The parts of chunks from ``_at`` on that lie in the range, cut to bytes [``_offset``, ``until``)."""
        first: list[int] = []
        columns: list[list[array[int]]] = []
        for ids, size in self._blocks:
            step = self._chunk_tokens // size
            start = (self._at * self._chunk_tokens - self._range.start) // size
            ends = range(start + step, start + step * len(slots) + 1, step)
            columns.append([ids[begin:end] for begin, end in pairwise((max(start, 0), *ends))])
            first.append(max(-start, 0))
        extents = [slot.extents for slot in slots]
        span, firsts = repeat((self._offset, until)), chain((tuple(first),), repeat((0,) * len(first)))
        fields = zip(count(self._at), extents, span, firsts, zip(*columns, strict=True), strict=False)
        return starmap(t.Piece, fields)

    # ---- report -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def slice_done(self, now: int, report: t.SliceReport, *, discard: bool) -> bool:
        """Takes what was copied by the oldest slice in flight; False when the call ends here. ``discard``: it was
        revoked, or has failed before."""

    @abstractmethod
    def abandon(self) -> None:
        """The call was revoked, or has failed, while slices are in flight."""

    def _set(self, at: int, known: Known, count: int = 1) -> None:
        start = at - self._first
        self._outcomes[start : start + count] = [known] * count

    def stop(self, reason: str) -> None:
        """What has no outcome yet will not be copied."""
        self._outcomes = [known or (Outcome.FAILED, reason) for known in self._outcomes]
        self._at, self._offset = self._end, 0

    @abstractmethod
    def finish(self, now: int) -> None:
        """The call has ended: lets go of its chunks."""

    @cached_property
    def results(self) -> tuple[t.ChunkResult, ...]:
        """All outcomes, run-length coded; to be asked for when the call has ended."""
        results: list[t.ChunkResult] = []
        at = self._first
        for known, run in groupby(self._outcomes):
            assert known is not None, "every chunk has an outcome"
            results.append(t.ChunkResult(at, len(list(run)), *known))
            at += results[-1].count
        return tuple(results)


class StorePlan(Plan):
    """Copies the full chunks of a range into the arena.

    Slots are reserved slice by slice. Every chunk of the prefix that the call stored or found is in use until it ends,
    so a store never evicts its own head to make room for its tail.
    """

    direction = t.Direction.STORE

    def __init__(self, desk: Desk, registration: t.Registration, command: t.StoreCommand, space: Space) -> None:
        chunk_tokens, content = desk.ledger.limits.chunk_tokens, command.content
        end = min(command.range.end // chunk_tokens, content.first_chunk + len(content.keys))
        super().__init__(desk, registration, command, -(-command.range.start // chunk_tokens), end)
        self._keys = content.keys
        self._first_key = content.first_chunk
        self._policy = command.policy
        self._cleared = command.cleared
        self._space = space
        self._table = space.table
        self._refusal = ""
        self._ahead = self._end  # chunks to ask room for at once: as many as were given, and more after all were
        self.held: list[Chunk] | None = None

    def _open_next(self, most: int) -> Targets:
        if self.held is None:
            self.held = []
            for key in self._keys[: self._first - self._first_key] if self._table.live else ():
                if (chunk := self._table.chunks.get(key)) is not None:
                    self._hold((chunk,), self.held)
        while self._at < self._end:
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
        last = min(place + min(most, self._ahead), self._end - self._first_key) if chunk is None else place + 1
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
        self._desk.writes.stored(chunks[:done], self._kv_rank)
        for at in places[:done]:
            self._outcomes[at - self._first] = known
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
        keys = self._keys[: self._end - self._first_key]
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
        here = sum(1 << rank for rank in self._space.facts.object_bytes)
        chunks: list[Chunk] = []
        for key in keys:
            chunk = self._table.chunks.get(key)
            if chunk is None or chunk.ready & here != here:
                break
            chunks.append(chunk)
        self._desk.holds.retain(chunks, now + self._policy.retention_ns)


class RetrievePlan(Plan):
    """Copies a range of a job's prefix into the engine's blocks, in prefix order, up to the first chunk that fails."""

    direction = t.Direction.RETRIEVE

    def __init__(
        self, desk: Desk, registration: t.Registration, command: t.RetrieveCommand, job: Job, bit: int
    ) -> None:
        chunk_tokens, tokens = desk.ledger.limits.chunk_tokens, command.range
        end = -(-tokens.end // chunk_tokens) if tokens.end > tokens.start else 0
        super().__init__(desk, registration, command, tokens.start // chunk_tokens, end)
        self._job = job
        self._keys = job.keys
        self._bit = bit
        self.pinned: list[Chunk] | None = None

    def _open_next(self, most: int) -> Targets:
        if self.pinned is None:
            self.pinned = self._pin_resident()
        place, rank = self._at - self._first, self._kv_rank
        chunks = self.pinned[place : place + most]
        return chunks, [chunk.slots[rank] for chunk in chunks]

    def _pin_resident(self) -> list[Chunk]:
        """Pins the prefix of the range that is there now."""
        pinned: list[Chunk] = []
        for at in range(self._first, min(self._end, len(self._keys))):
            chunk = self._find(at)
            if chunk is None:
                break
            pinned.append(chunk)
        self._desk.index.pin(pinned)
        return pinned

    def _find(self, at: int) -> Chunk | None:
        lease, table = self._job.lease, self._job.table
        if at < len(lease.remaining) and lease.remaining[at]:
            chunk = lease.chunks[at]
        else:
            chunk = table.chunks.get(self._keys[at]) if table.live else None
        return chunk if chunk is not None and chunk.ready >> self._kv_rank & 1 else None

    def slice_done(self, now: int, report: t.SliceReport, *, discard: bool) -> bool:
        """Takes loaded chunks off the reader."""
        (places, _, _, resumed, partial), done = self.flights.popleft(), report.completed
        for at in places[: 0 if partial else done]:
            finish_read(self._desk.leases, self._job, at, self._bit)
            self._set(at, LOADED)
        self._desk.jobs.unpinned(self._job, now)
        if done >= len(places):
            return True
        if report.reason != SKIPPED:
            torn = report.torn or (resumed and not done)
            self._set(places[done], (Outcome.TORN if torn else Outcome.FAILED, report.reason))
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
        hit = min(max(len(self._keys), self._at), self._end)
        if self._at < hit:
            self._set(self._at, MISSING)
            self._set(self._at + 1, (Outcome.FAILED, AFTER_FAILURE), hit - self._at - 1)
        self._set(hit, MISSING, self._end - hit)
        index = self._desk.index
        index.use(self._job.table, self._keys[: self._end], self._job.priority)
        index.unpin(self.pinned or ())
        self.pinned = None
        counters = self._desk.ledger.counters
        loaded = sum(known == LOADED for known in self._outcomes)
        counters["loaded_chunks"] += loaded
        failed = min(self._end, len(self._keys)) - self._first - loaded
        if failed > 0:
            counters["failed_chunks"] += failed
