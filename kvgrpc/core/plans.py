# SPDX-License-Identifier: Apache-2.0
"""What a Store or Retrieve call still has to do, slice by slice. The schedule is ``kvgrpc.core.calls``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvgrpc.core.calls import Results
from kvgrpc.core.eviction import touch_order
from kvgrpc.core.holds import Holds
from kvgrpc.core.index import Chunk, Index, Space
from kvgrpc.core.jobs import Job, Jobs
from kvgrpc.core.leases import Leases, finish_read, unpin_all
from kvgrpc.core.ledger import Ledger
from kvgrpc.core.slots import Slot
from kvgrpc.core.types import (
    ChunkOutcome,
    Direction,
    Piece,
    Registration,
    RetrieveCommand,
    SliceReport,
    StoreCommand,
    TokenRange,
)

AFTER_FAILURE = "AFTER_FAILURE"


@dataclass(frozen=True, slots=True)
class Desk:
    """The parts of the core that a plan works on."""

    ledger: Ledger
    index: Index
    leases: Leases
    jobs: Jobs
    holds: Holds


class _Flight:
    """A piece in flight: part of one chunk's object; ``last`` completes the chunk."""

    __slots__ = ("chunk", "last", "slot")

    def __init__(self, chunk: Chunk, slot: Slot, last: bool) -> None:
        self.chunk = chunk
        self.slot = slot
        self.last = last


class _BlockMap:
    """Which of a call's block ids belong to which chunk."""

    __slots__ = ("blocks", "chunk_tokens", "range", "sizes")

    def __init__(
        self, registration: Registration, tokens: TokenRange, blocks: tuple[Sequence[int], ...], chunk: int
    ) -> None:
        self.sizes = tuple(group.block_size for group in registration.geometry.groups)
        self.range = tokens
        self.blocks = blocks
        self.chunk_tokens = chunk

    def piece(self, at: int, slot: Slot, span: tuple[int, int]) -> Piece:
        """The part of chunk ``at`` that lies in the range, cut to ``span`` of its bytes."""
        base = at * self.chunk_tokens
        start = max(self.range.start, base)
        end = min(self.range.end, base + self.chunk_tokens)
        origin = self.range.start
        return Piece(
            chunk=at,
            extents=slot.extents,
            span=span,
            first_block=tuple((start - base) // size for size in self.sizes),
            block_ids=tuple(
                ids[(start - origin) // size : (end - origin) // size]
                for ids, size in zip(self.blocks, self.sizes, strict=True)
            ),
        )

    def block_set(self) -> frozenset[tuple[int, int]]:
        return frozenset((group, block) for group, ids in enumerate(self.blocks) for block in ids)


class StorePlan:
    """Copies the full chunks of a range into the arena.

    Slots are reserved slice by slice. Every chunk that the call stored or found stays in use until the call ends, so a
    store never evicts its own head to make room for its tail.
    """

    direction = Direction.STORE

    def __init__(self, desk: Desk, registration: Registration, command: StoreCommand, space: Space) -> None:
        self._desk = desk
        self._command = command
        self._space = space
        self._table = space.table
        self._kv_rank = registration.kv_rank
        limits = desk.ledger.limits
        self._object_bytes = registration.geometry.object_bytes(limits.chunk_tokens)
        self._map = _BlockMap(registration, command.range, command.blocks, limits.chunk_tokens)
        content = command.content
        first = -(-command.range.start // limits.chunk_tokens)
        end = min(command.range.end // limits.chunk_tokens, content.first_chunk + len(content.keys))
        self._at = max(first, content.first_chunk)
        self._end = max(end, self._at)
        self._first = self._at
        self.results = Results(self._at)
        self._refusal = ""
        self._planned: list[_Flight | tuple[ChunkOutcome, str]] = []
        self._flight: list[_Flight] = []
        self._partial: tuple[Chunk, Slot, int] | None = None
        self._held: list[Chunk] = []

    def block_set(self) -> frozenset[tuple[int, int]]:
        return self._map.block_set()

    def chunks(self) -> list[Chunk]:
        """Chunks that the call has a part in, for invariants."""
        return self._held

    def pinned_chunks(self) -> list[Chunk]:
        return []

    def held_chunks(self) -> list[Chunk]:
        return self._held

    def slots_in_flight(self) -> list[Slot]:
        return [flight.slot for flight in self._flight]

    # ---- plan -------------------------------------------------------------------------------------------------------

    def next_slice(self) -> tuple[Piece, ...]:
        """Pieces of the next slice, reserved; empty when nothing is left to copy."""
        room = self._desk.ledger.limits.slice_bytes
        pieces: list[Piece] = []
        while room > 0 and (self._partial is not None or self._at < self._end):
            if self._partial is None:
                if pieces and self._object_bytes > room:
                    break
                self._partial = self._open_chunk()
                if self._partial is None:
                    self._at += 1
                    continue
            chunk, slot, offset = self._partial
            until = min(offset + room, self._object_bytes)
            slot.in_flight = True
            last = until == self._object_bytes
            flight = _Flight(chunk, slot, last)
            self._flight.append(flight)
            if last:
                self._planned.append(flight)
            pieces.append(self._map.piece(self._at, slot, (offset, until)))
            room -= until - offset
            self._partial = None if last else (chunk, slot, until)
            self._at += last
        if not pieces:
            self._flush()
        return tuple(pieces)

    def _open_chunk(self) -> tuple[Chunk, Slot, int] | None:
        """Reserves a slot for the chunk at hand; None when its outcome is known without a copy."""
        content = self._command.content
        key = content.keys[self._at - content.first_chunk]
        outcome, reason = ChunkOutcome.REFUSED, self._refusal
        if self._command.policy.no_store:
            reason = "NO_STORE"
        elif not self._table.live:
            reason = "CLEARED"
        else:
            chunk = self._table.chunks.get(key)
            bit = 1 << self._kv_rank
            if chunk is not None and chunk.ready & bit:
                outcome, reason = ChunkOutcome.RESIDENT, ""
                self._keep(chunk)
            elif chunk is not None and chunk.writing & bit:
                outcome, reason = ChunkOutcome.BEING_WRITTEN, ""
            elif not reason:
                if chunk is not None:
                    self._keep(chunk)  # or making room might evict what other ranks have of it
                slot = self._desk.index.reserve(self._space, self._object_bytes)
                if not isinstance(slot, str):
                    fresh = chunk is None
                    chunk = self._desk.index.begin_object(self._table, key, self._kv_rank, slot)
                    self._desk.index.set_priority(chunk, self._command.policy.priority)
                    if fresh:
                        self._keep(chunk)
                    return chunk, slot, 0
                self._refusal = reason = slot
        self._planned.append((outcome, reason))
        return None

    def _keep(self, chunk: Chunk) -> None:
        self._desk.index.begin_write(chunk)
        self._held.append(chunk)

    # ---- report -----------------------------------------------------------------------------------------------------

    def slice_done(self, report: SliceReport, now: int, *, discard: bool) -> bool:
        """Commits what was copied; False when the call ends here. ``discard``: nobody wants it any more."""
        flights, self._flight = self._flight, []
        for flight in flights:
            self._desk.index.slots.settled(flight.slot)
        if discard:
            return False
        failed = report.completed < len(flights)
        outcome = ChunkOutcome.TORN if report.torn else ChunkOutcome.FAILED
        broken = flights[report.completed].chunk if failed else None
        done = {flight.chunk for flight in flights[: report.completed] if flight.last}
        for item in self._planned:
            if isinstance(item, tuple):
                self.results.add(*item)
            elif item.chunk in done:
                stored = self._desk.index.commit_object(item.chunk, self._kv_rank)
                if stored:
                    self._desk.ledger.counters["stored_chunks"] += 1
                    self.results.add(ChunkOutcome.STORED)
                else:
                    self.results.add(ChunkOutcome.REFUSED, "CLEARED")
            else:
                self._abort(item.chunk, item.slot)
                if item.chunk is broken:
                    self.results.add(outcome, report.reason)
                else:
                    self.results.add(ChunkOutcome.FAILED, AFTER_FAILURE)
        self._planned.clear()
        if failed and self._partial is not None:
            if self._partial[0] is broken:
                self._drop_partial(outcome, report.reason)
            else:
                self._drop_partial(ChunkOutcome.FAILED, AFTER_FAILURE)
        if failed:
            self.stop(AFTER_FAILURE)
        return not failed

    def _drop_partial(self, outcome: ChunkOutcome, reason: str) -> None:
        assert self._partial is not None
        chunk, slot, _ = self._partial
        self._partial = None
        self._abort(chunk, slot)
        self.results.add(outcome, reason)
        self._at += 1

    def _abort(self, chunk: Chunk, slot: Slot) -> None:
        if chunk.slots.get(self._kv_rank) is slot:
            self._desk.index.abort_object(chunk, self._kv_rank)

    def _flush(self) -> None:
        for item in self._planned:
            assert isinstance(item, tuple)
            self.results.add(*item)
        self._planned.clear()

    # ---- end --------------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Nobody wants the slice in flight: what it fills settles."""
        for flight in self._flight:
            self._abort(flight.chunk, flight.slot)

    def stop(self, reason: str) -> None:
        """Ends what has not been copied."""
        for item in self._planned:
            if isinstance(item, tuple):
                self.results.add(*item)
            else:
                self._abort(item.chunk, item.slot)
                self.results.add(ChunkOutcome.FAILED, reason)
        self._planned.clear()
        if self._partial is not None:
            self._drop_partial(ChunkOutcome.FAILED, reason)
        self.results.add(ChunkOutcome.FAILED, reason, self._end - self._at)
        self._at = self._end

    def finish(self, now: int) -> None:
        """The call has ended: its chunks rest, tails first, then the prefix before them."""
        index, policy = self._desk.index, self._command.policy
        content = self._command.content
        chunks = self._table.chunks
        keys_before = content.keys[: self._first - content.first_chunk]
        before = [chunk for key in keys_before if (chunk := chunks.get(key)) is not None]
        if policy.retention_ns and self._table.live:
            kept = [chunk for chunk in self._held if chunk.ready]
            self._desk.holds.retain([*before, *kept], now + policy.retention_ns)
        for chunk in touch_order(self._held):
            index.touch(chunk, policy.priority)
            index.end_write(chunk)
        for chunk in touch_order(before):
            index.touch(chunk, policy.priority)
        self._held = []


class RetrievePlan:
    """Copies a range of a job's prefix into the engine's blocks, in prefix order, up to the first chunk that fails."""

    direction = Direction.RETRIEVE

    def __init__(self, desk: Desk, registration: Registration, command: RetrieveCommand, job: Job, bit: int) -> None:
        self._desk = desk
        self._job = job
        self._bit = bit
        self._kv_rank = registration.kv_rank
        limits = desk.ledger.limits
        self._object_bytes = registration.geometry.object_bytes(limits.chunk_tokens)
        self._map = _BlockMap(registration, command.range, command.blocks, limits.chunk_tokens)
        self._at: int = command.range.start // limits.chunk_tokens
        self._end: int = max(-(-command.range.end // limits.chunk_tokens), self._at)
        self.results = Results(self._at)
        self._first = self._at
        self._pinned: list[Chunk] | None = None
        self._flight: list[_Flight] = []
        self._offset = 0
        self._partly = False
        """Earlier spans of the chunk at hand are in the blocks already."""

    def block_set(self) -> frozenset[tuple[int, int]]:
        return self._map.block_set()

    def chunks(self) -> list[Chunk]:
        """Chunks that the call has a part in, for invariants."""
        return self._pinned or []

    def pinned_chunks(self) -> list[Chunk]:
        return self._pinned or []

    def held_chunks(self) -> list[Chunk]:
        return []

    def slots_in_flight(self) -> list[Slot]:
        return [flight.slot for flight in self._flight]

    # ---- plan -------------------------------------------------------------------------------------------------------

    def next_slice(self) -> tuple[Piece, ...]:
        """Pieces of the next slice; empty when nothing is left to copy."""
        if self._pinned is None:
            self._pinned = self._pin_resident()
        room = self._desk.ledger.limits.slice_bytes
        last_chunk = self._first + len(self._pinned)
        pieces: list[Piece] = []
        while room > 0 and self._at < last_chunk:
            if pieces and not self._offset and self._object_bytes > room:
                break
            chunk = self._pinned[self._at - self._first]
            slot = chunk.slots[self._kv_rank]
            until = min(self._offset + room, self._object_bytes)
            last = until == self._object_bytes
            self._flight.append(_Flight(chunk, slot, last))
            pieces.append(self._map.piece(self._at, slot, (self._offset, until)))
            room -= until - self._offset
            self._offset = 0 if last else until
            self._at += last
        if not pieces and self._at < self._end:
            self._miss()
        return tuple(pieces)

    def _pin_resident(self) -> list[Chunk]:
        """Pins the prefix of the range that is there now."""
        pinned: list[Chunk] = []
        for at in range(self._first, min(self._end, len(self._job.keys))):
            chunk = self._find(at)
            if chunk is None:
                break
            self._desk.index.pin(chunk)
            pinned.append(chunk)
        return pinned

    def _find(self, at: int) -> Chunk | None:
        lease = self._job.lease
        if at < len(lease.remaining) and lease.remaining[at]:
            return lease.chunks[at]
        table = self._job.table
        chunk = table.chunks.get(self._job.keys[at]) if table.live else None
        return chunk if chunk is not None and chunk.ready >> self._kv_rank & 1 else None

    def _miss(self) -> None:
        """The chunk at hand is not there: it is missing, and so is all past the hit; between them nothing was tried."""
        hit = min(max(len(self._job.keys), self._at), self._end)
        if self._at < hit:
            self.results.add(ChunkOutcome.MISSING)
            self.results.add(ChunkOutcome.FAILED, AFTER_FAILURE, hit - self._at - 1)
            self._desk.ledger.counters["failed_chunks"] += hit - self._at
        self.results.add(ChunkOutcome.MISSING, "", self._end - hit)
        self._at = self._end

    # ---- report -----------------------------------------------------------------------------------------------------

    def slice_done(self, report: SliceReport, now: int, *, discard: bool) -> bool:
        """Takes loaded chunks off the reader; False when the call ends here."""
        flights, self._flight = self._flight, []
        counters = self._desk.ledger.counters
        for flight in flights[: report.completed]:
            self._partly = not flight.last
            if flight.last:
                finish_read(self._desk.leases, self._job, self.results.next_chunk, self._bit)
                self.results.add(ChunkOutcome.LOADED)
                counters["loaded_chunks"] += 1
        if report.completed < len(flights):
            torn = report.torn or self._partly
            self._at = self.results.next_chunk
            self._offset = 0
            counters["failed_chunks"] += 1
            self.results.add(ChunkOutcome.TORN if torn else ChunkOutcome.FAILED, report.reason)
            self._at += 1
            self.stop(AFTER_FAILURE)
            return False
        return True

    def abandon(self) -> None:
        """The pins of the slice in flight stay until it is reported."""

    def stop(self, reason: str) -> None:
        """Ends what has not been copied; a chunk of which a part was loaded is torn."""
        if self._offset:
            self.results.add(ChunkOutcome.TORN, reason)
            self._offset = 0
            self._at += 1
        self._desk.ledger.counters["failed_chunks"] += self._end - self._at
        self.results.add(ChunkOutcome.FAILED, reason, self._end - self._at)
        self._at = self._end

    def finish(self, now: int) -> None:
        """The call has ended: its pins go, tails first."""
        if self._pinned:
            unpin_all(self._desk.index, self._pinned)
        self._pinned = None
        self._desk.jobs.unpinned(self._job, now)
