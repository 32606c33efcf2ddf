# SPDX-License-Identifier: Apache-2.0
"""What a correct cache would answer, in plain dicts and sets, made without looking at the core.

The oracle learns only what was asked, what was answered, and which copies were ordered and how they ended. The arena is
assumed to be roomy: nothing is ever evicted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvgrpc.core.calls import SLICES_LAUNCHED
from kvgrpc.core.types import ChunkOutcome, ChunkResult, Direction, Piece, PrefetchStatus, RunSlice, SliceReport

Rank = int
ReaderId = tuple[int, int]
"""(kv_rank, tp_rank)."""


@dataclass
class Kind:
    """How an engine spreads its heads over its workers."""

    tp_size: int
    kv_tp_size: int
    kv_world_size: int

    @property
    def readers(self) -> int:
        return self.tp_size // self.kv_tp_size

    def readers_of(self, kv_rank: int) -> set[ReaderId]:
        first = kv_rank % self.kv_tp_size * self.readers
        return {(kv_rank, first + i) for i in range(self.readers)}

    def workers(self) -> list[ReaderId]:
        stages = self.kv_world_size // self.kv_tp_size
        return sorted(r for rank in range(self.kv_tp_size * stages) for r in self.readers_of(rank))


@dataclass
class Place:
    """One space. Clear and BumpGeneration start a new ``version``; objects belong to one version for ever."""

    version: int = 0
    stored: set[tuple[int, bytes, Rank]] = field(default_factory=set)
    """(version, key, rank) of every object whose bytes are there."""
    maybe: set[tuple[int, bytes, Rank]] = field(default_factory=set)
    """Objects that may be there: copied or read when somebody had given up their call or job."""

    def prefix(self, keys: list[bytes], ranks: tuple[Rank, ...]) -> range:
        """How many chunks of a prefix are there for all ranks: from .. to (one number where all is known)."""
        return range(self._prefix(keys, ranks, self.stored), self._prefix(keys, ranks, self.stored | self.maybe) + 1)

    def _prefix(self, keys: list[bytes], ranks: tuple[Rank, ...], objects: set[tuple[int, bytes, Rank]]) -> int:
        for count, key in enumerate(keys):
            if not all((self.version, key, rank) in objects for rank in ranks):
                return count
        return len(keys)


@dataclass
class Job:
    """A lookup that was recorded."""

    engine: str
    request: str
    place: Place
    version: int
    keys: list[bytes]
    ranks: tuple[Rank, ...]
    readers: set[ReaderId]
    expires_ns: int
    status: PrefetchStatus
    hit: int = 0
    """Chunks."""
    pins: set[tuple[int, ReaderId]] = field(default_factory=set)
    """(chunk, reader) that may still be read under the lease."""


@dataclass
class Call:
    """A Store or Retrieve that has not answered, or has."""

    client: str
    call_id: int
    place: Place
    version: int
    keys: dict[int, bytes]
    rank: Rank
    reader: ReaderId
    job: Job | None
    parts: dict[int, int]
    """Bytes of each chunk that the call has to move."""
    moved: dict[int, int] = field(default_factory=dict)
    broken: dict[int, bool] = field(default_factory=dict)
    """Chunks whose copy failed: torn?"""
    stopped: bool = False
    """Fenced, cancelled, or its client or engine went."""
    written_by_others: set[int] = field(default_factory=set)
    results: tuple[ChunkResult, ...] | None = None

    def object(self, chunk: int) -> tuple[int, bytes, Rank]:
        return (self.version, self.keys[chunk], self.rank)


class Oracle:
    """The whole cache as it should be."""

    def __init__(self) -> None:
        self.jobs: dict[bytes, Job] = {}
        self.calls: dict[tuple[str, int], Call] = {}
        self.slices: dict[int, RunSlice] = {}
        self.skipped: set[int] = set()
        """Slices whose predecessor stopped early."""
        self.reads: dict[int, tuple[Place, int, bytes, Rank]] = {}
        """Objects on their way from a tier."""

    # ---- lookups ----------------------------------------------------------------------------------------------------

    def grant(self, job_id: bytes, job: Job, hit: int) -> None:
        """The job has its pins: one a chunk and reader."""
        job.hit = hit
        job.pins = {(chunk, reader) for chunk in range(hit) for reader in job.readers}
        self.jobs[job_id] = job

    def pins(self, engine: str | None = None) -> int:
        return sum(len(job.pins) for job in self.jobs.values() if engine is None or job.engine == engine)

    def reading(self) -> int:
        """Pins that a copy in flight may be using right now."""
        return sum(len(order.pieces) for order in self.slices.values() if order.direction is Direction.RETRIEVE)

    def free(self, job: Job, chunks: range, readers: set[ReaderId] | None) -> int:
        """Pins that a FreeLookupLocks releases."""
        gone = {
            (chunk, reader) for chunk, reader in job.pins if chunk in chunks and (readers is None or reader in readers)
        }
        job.pins -= gone
        return len(gone)

    def end_jobs(self, engine: str, request: str | None = None) -> tuple[int, int]:
        """Ends an engine's jobs, or those of one request: how many, and their pins."""
        ended = [j for j, job in self.jobs.items() if job.engine == engine and request in (None, job.request)]
        pins = sum(len(self.jobs[job_id].pins) for job_id in ended)
        for job_id in ended:
            self.jobs[job_id].pins = set()
            del self.jobs[job_id]
        return len(ended), pins

    def pass_time(self, now: int) -> None:
        for job in self.jobs.values():
            if now >= job.expires_ns:
                job.pins = set()

    # ---- copies -----------------------------------------------------------------------------------------------------

    def begin(self, call: Call) -> None:
        """A Store or Retrieve is made; call it before the core is asked."""
        self.calls[(call.client, call.call_id)] = call
        for order in self.slices.values():
            self._note_writing(order, [call])
        for place, *name in self.reads.values():
            self._note_reading(place, tuple(name), [call])
        for other in self.calls.values():
            if other.results is None and other.job is None and other.place is call.place:
                halves = {other.object(c) for c, moved in other.moved.items() if moved < other.parts[c]}
                call.written_by_others |= {c for c in call.keys if call.object(c) in halves}

    def read_ordered(self, read_id: int, place: Place, version: int, key: bytes, rank: Rank) -> None:
        """A tier read fills an object from now on."""
        self.reads[read_id] = (place, version, key, rank)
        self._note_reading(place, (version, key, rank), list(self.calls.values()))

    def _note_reading(self, place: Place, name: tuple[object, ...], watchers: list[Call]) -> None:
        for call in watchers:
            if call.results is None and call.place is place:
                call.written_by_others |= {c for c in call.keys if call.object(c) == name}

    def ordered(self, order: RunSlice) -> None:
        """A slice is ordered: for a call that is open, one at a time, never two writers of one object."""
        call = self.calls[(order.client_id, order.call_id)]
        assert call.results is None, "a copy for a call that is over"
        assert order.pieces, "an empty slice"
        line = [s for s in self.slices.values() if s.client_id == order.client_id]
        assert len(line) < SLICES_LAUNCHED, "too many slices of a client at a time"
        assert order.after == next((s.slice_id for s in reversed(line) if s.call_id == order.call_id), 0)
        assert (order.direction is Direction.RETRIEVE) == (call.job is not None)
        for piece in order.pieces:
            if call.job is None:
                name = call.object(piece.chunk)
                assert name not in call.place.stored, "an object that is there is written again"
                assert not self._written_by_others(call, name), "two calls write one object"
                assert not self._touched_by_others(call, piece), "a place is written that another call still touches"
            else:
                versions = range(call.job.version, call.place.version + 1)
                names = {(v, call.keys[piece.chunk], call.rank) for v in versions}
                assert names & (call.place.stored | call.place.maybe), "a copy of what is not there"
        self.slices[order.slice_id] = order
        self._note_writing(order, list(self.calls.values()))

    def _written_by_others(self, call: Call, name: tuple[int, bytes, Rank]) -> bool:
        """By a slice whose bytes can still count: behind one that stopped early, the object is given up, and its next
        writer has another place."""
        for order in self.slices.values():
            if order.slice_id in self.skipped:
                continue
            other = self.calls[(order.client_id, order.call_id)]
            if order.direction is Direction.RETRIEVE or other.stopped or other is call or other.place is not call.place:
                continue
            if name in {other.object(piece.chunk) for piece in order.pieces}:
                return True
        return False

    def _touched_by_others(self, call: Call, piece: Piece) -> bool:
        """Whatever becomes of their bytes, and also to read them."""
        others = [s for s in self.slices.values() if (s.client_id, s.call_id) != (call.client, call.call_id)]
        touched = [extent for order in others for other in order.pieces for extent in other.extents]
        return any(a < b + more and b < a + size for a, size in piece.extents for b, more in touched)

    def _note_writing(self, order: RunSlice, watchers: list[Call]) -> None:
        """Open calls remember who else was writing their objects: that is what BEING_WRITTEN may mean."""
        writer = self.calls[(order.client_id, order.call_id)]
        if order.direction is Direction.RETRIEVE:
            return
        names = {writer.object(piece.chunk) for piece in order.pieces}
        for call in watchers:
            if call.results is None and call is not writer and call.place is writer.place:
                call.written_by_others |= {c for c in call.keys if call.object(c) in names}

    def reported(self, order: RunSlice, report: SliceReport, sizes: list[int], object_bytes: int) -> None:
        """A slice has ended; ``sizes`` are the bytes of its pieces. Call it before the core is told. A chunk is done
        with the slice that ends its object: the core cannot know that a part range has no bytes in the last ones."""
        del self.slices[order.slice_id]
        call = self.calls[(order.client_id, order.call_id)]
        if report.completed < len(order.pieces):
            self.skipped |= {s.slice_id for s in self.slices.values() if s.after == order.slice_id}
            if order.slice_id in self.skipped:
                return
            call.broken[order.pieces[report.completed].chunk] = bool(report.torn)
        for piece, size in list(zip(order.pieces, sizes, strict=True))[: report.completed]:
            call.moved[piece.chunk] = call.moved.get(piece.chunk, 0) + size
            if call.moved[piece.chunk] < call.parts[piece.chunk] or piece.span[1] < object_bytes:
                continue
            if call.job is not None:
                call.job.pins.discard((piece.chunk, call.reader))
            else:
                (call.place.maybe if call.stopped else call.place.stored).add(call.object(piece.chunk))

    # ---- answers ----------------------------------------------------------------------------------------------------

    def ended(self, call: Call, results: tuple[ChunkResult, ...], now: int) -> None:
        """Every outcome has its cause."""
        assert call.results is None, "a call ends twice"
        assert all((s.client_id, s.call_id) != (call.client, call.call_id) for s in self.slices.values()), "a copy runs"
        call.results = results
        flat = [(c, r.outcome, r.reason) for r in results for c in range(r.first_chunk, r.first_chunk + r.count)]
        assert [c for c, _, _ in flat] == sorted(call.keys), "results name other chunks than the call"
        failed = False
        for chunk, outcome, reason in flat:
            if outcome in (ChunkOutcome.FAILED, ChunkOutcome.TORN):
                self._check_failure(call, chunk, outcome, reason, failed)
            elif call.job is None:
                self._check_store(call, chunk, outcome, reason)
            else:
                self._check_retrieve(call, call.job, chunk, outcome, failed, now)
            failed = failed or outcome in (ChunkOutcome.FAILED, ChunkOutcome.TORN, ChunkOutcome.MISSING)

    def _check_store(self, call: Call, chunk: int, outcome: ChunkOutcome, reason: str) -> None:
        name = call.object(chunk)
        if outcome is ChunkOutcome.STORED:
            assert call.moved.get(chunk) == call.parts[chunk], "stored, but not all bytes were copied"
            call.place.stored.add(name)
        elif outcome is ChunkOutcome.RESIDENT:
            assert name in call.place.stored | call.place.maybe, "resident, but it was never stored"
        elif outcome is ChunkOutcome.BEING_WRITTEN:
            assert chunk in call.written_by_others, "being written, but by nobody"
        else:
            assert (outcome, reason) == (ChunkOutcome.REFUSED, "CLEARED")
            assert call.place.version > call.version, "refused as cleared, but nothing was cleared"

    def _check_retrieve(self, call: Call, job: Job, chunk: int, outcome: ChunkOutcome, failed: bool, now: int) -> None:
        if outcome is ChunkOutcome.LOADED:
            assert not failed, "loaded after a failure"
            assert call.moved.get(chunk) == call.parts[chunk], "loaded, but not all bytes were copied"
            return
        assert outcome is ChunkOutcome.MISSING
        promised = (chunk, call.reader) in job.pins and now < job.expires_ns
        there = chunk < job.hit and (job.version, call.keys[chunk], call.rank) in call.place.stored
        there = there and job.version == call.place.version
        assert failed or call.stopped or not (promised or there), "missing, but it is there"

    def _check_failure(self, call: Call, chunk: int, outcome: ChunkOutcome, reason: str, failed: bool) -> None:
        torn = call.broken.get(chunk)
        if outcome is ChunkOutcome.TORN:
            begun = chunk in call.moved  # by an earlier slice of a chunk that is bigger than a slice
            assert torn or (begun and (call.stopped or torn is False)), "torn, but its copy was not cut"
        elif reason == "REVOKED":
            assert call.stopped, "revoked by nobody"
        elif reason == "AFTER_FAILURE":
            assert failed, "after a failure that was none"
        else:
            assert torn is False, "failed, but its copy did not"
            assert reason == "COPY_FAILED"
