# SPDX-License-Identifier: Apache-2.0
"""Reading from lower tiers what a lookup wants and the arena does not have.

A lookup that misses asks the tiers (probe), then plans reads in prefix order as far as every wanted object is resident,
found or already being read, and as far as room reaches. Only so many bytes are read at a time; a job that has come so
far goes on planning as reads end, first come, first served. Each planned chunk is pinned for the job until the job is
final: when all reads are in, or at its deadline with what is ready. A read that no job waits for is cancelled; its slot
settles until the read is reported.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvgrpc.core.index import Chunk, Index
from kvgrpc.core.jobs import Job, Jobs
from kvgrpc.core.keys import object_name
from kvgrpc.core.leases import Leases
from kvgrpc.core.ledger import Ledger
from kvgrpc.core.slots import Slot
from kvgrpc.core.types import CancelRead, JobDone, ObjectName, PrefetchStatus, ProbeTiers, ReadTier
from kvgrpc.core.writes import WriteBehind

TIMEOUT, LIMIT, FAILED = "PREFETCH_TIMEOUT", "PREFETCH_LIMIT", "PREFETCH_FAILED"


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
    """What a pending job waits for, after its ``first`` chunks, which were there."""

    first: int
    want: int
    probe_id: int
    probed: list[tuple[int, int, ObjectName]] = field(default_factory=list[tuple[int, int, ObjectName]])
    """(chunk, KV rank, object) that the tiers are asked for."""
    planned: list[Chunk] = field(default_factory=list[Chunk])
    """Pinned, from chunk ``first`` on."""
    sources: list[str] = field(default_factory=list[str])
    """Where each planned chunk is from."""
    where: dict[tuple[int, int], tuple[str, ObjectName]] = field(
        default_factory=dict[tuple[int, int], tuple[str, ObjectName]]
    )
    """The tier that has the object of (chunk, KV rank)."""
    silent: bool = False
    """A tier did not say what it has."""
    waiting: dict[int, Read] = field(default_factory=dict[int, Read])
    limited_by: str = ""


class Prefetcher:
    """Plans reads for pending jobs and makes jobs final."""

    def __init__(self, ledger: Ledger, index: Index, leases: Leases, jobs: Jobs, writes: WriteBehind) -> None:
        self._ledger = ledger
        self._index = index
        self._leases = leases
        self._jobs = jobs
        self.writes = writes
        self.pending: dict[int, Job] = {}
        """By probe id."""
        self.reads: dict[int, Read] = {}
        self._by_slot: dict[Slot, Read] = {}
        self.reading_bytes = 0
        self.blocked: OrderedDict[Job, None] = OrderedDict()
        """Jobs that plan on when reads end."""
        self._deadlines: list[tuple[int, int]] = []
        """(when, probe id), also of jobs that are final by now."""

    # ---- begin ------------------------------------------------------------------------------------------------------

    def begin(self, job: Job, want: int, now: int, wait_ns: int, first: int) -> bool:
        """Asks the tiers for what the job misses after its ``first`` chunks; False when there is nothing to ask."""
        prefetch = Prefetch(first, want, self._ledger.next_id())
        forms = job.space.facts.forms
        if any(rank not in forms for rank in job.lease.ranks):
            return False  # nobody has said yet how long the objects are
        for at in range(prefetch.first, len(job.keys)):
            chunk = job.table.chunks.get(job.keys[at])
            for rank in job.lease.ranks:
                if chunk is None or not chunk.ready >> rank & 1:
                    form = forms[rank][0]
                    name = object_name(job.space.digest, job.space.version, job.keys[at], rank, form.order)
                    prefetch.probed.append((at, rank, ObjectName(name, form.object_bytes)))
            if len(prefetch.probed) >= self._ledger.limits.keys_per_call:
                break
        job.prefetch = prefetch
        self.pending[prefetch.probe_id] = job
        heapq.heappush(self._deadlines, (now + wait_ns, prefetch.probe_id))
        self._ledger.outbox.append(ProbeTiers(prefetch.probe_id, tuple([name for _, _, name in prefetch.probed])))
        return True

    def probe_done(self, now: int, probe_id: int, found: Sequence[str], silent: bool = False) -> None:
        """The tiers have answered, or ``silent``, not all of them: plan and launch the reads. An answer that nobody
        waits for changes nothing."""
        job = self.pending.get(probe_id)
        if job is None or job.prefetch is None:
            return
        prefetch = job.prefetch
        prefetch.silent = silent
        prefetch.where = {
            (at, rank): (tier, name) for (at, rank, name), tier in zip(prefetch.probed, found, strict=True) if tier
        }
        prefetch.probed.clear()
        self._plan_on(job, prefetch, now)

    def _plan_on(self, job: Job, prefetch: Prefetch, now: int) -> None:
        for at in range(prefetch.first + len(prefetch.planned), len(job.keys)):
            if not self._plan(job, prefetch, at):
                break
        if not prefetch.waiting and job not in self.blocked:
            self.finish(job, now)

    def _must_wait(self, job: Job, prefetch: Prefetch, at: int) -> bool:
        """Whether others' reads take what may be read at a time."""
        cost = self._index.slots.cost_bytes
        needs = [
            cost(prefetch.where[at, rank][1].size_bytes) for rank in job.lease.ranks if (at, rank) in prefetch.where
        ]
        most = self._index.slots.total_bytes * self._ledger.limits.prefetch_share
        return self.reading_bytes > 0 and self.reading_bytes + sum(needs) > most

    def _plan(self, job: Job, prefetch: Prefetch, at: int) -> bool:
        """Plans one chunk; False when the prefix ends before it, for now or at all."""
        table, key, source = job.table, job.keys[at], "l1"
        chunk = table.chunks.get(key)
        reads: list[Read] = []
        if not table.live:
            return False
        if self._must_wait(job, prefetch, at):
            self.blocked[job] = None
            prefetch.limited_by = LIMIT
            return False
        if chunk is not None:
            if not self._leases.fits([chunk], self.reading_bytes):
                prefetch.limited_by = LIMIT
                return False
            self._index.pin((chunk,))  # or making room might evict what is there of it
        for rank in job.lease.ranks:
            if chunk is not None and chunk.ready >> rank & 1:
                continue
            if chunk is not None and chunk.writing >> rank & 1:
                read = self._by_slot.get(chunk.slots[rank])  # None: a store writes it
            else:
                read = self._begin_read(job, prefetch, at, rank)
            if read is None:
                self._drop(job, reads)
                if chunk is not None:
                    self._index.unpin((chunk,))
                return False
            source = read.tier
            read.jobs[job] = None
            reads.append(read)
            if chunk is None:
                chunk = read.chunk
                self._index.pin((chunk,))
        assert chunk is not None
        prefetch.waiting.update((read.read_id, read) for read in reads)
        prefetch.planned.append(chunk)
        prefetch.sources.append(source)
        return True

    def _begin_read(self, job: Job, prefetch: Prefetch, at: int, rank: int) -> Read | None:
        if (at, rank) not in prefetch.where:
            if prefetch.silent:
                prefetch.limited_by = FAILED
            return None
        tier, name = prefetch.where[at, rank]
        index, limits = self._index, self._ledger.limits
        reading = self.reading_bytes + index.slots.cost_bytes(name.size_bytes)
        slots: list[Slot] | str = LIMIT
        if reading <= index.slots.total_bytes * limits.prefetch_share and self._leases.fits([], reading):
            slots = index.reserve(job.space, name.size_bytes)
        if isinstance(slots, str):
            prefetch.limited_by = LIMIT
            return None
        (slot,) = slots
        slot.in_flight = True
        (chunk,) = index.begin_objects(job.table, (job.keys[at],), rank, slots, job.priority)
        read = Read(self._ledger.next_id(), tier, chunk, rank, slot)
        self.reads[read.read_id] = self._by_slot[slot] = read
        self.reading_bytes = reading
        self._ledger.outbox.append(ReadTier(read.read_id, tier, name, slot.extents))
        return read

    # ---- end --------------------------------------------------------------------------------------------------------

    def read_done(self, now: int, read_id: int, ok: bool) -> None:
        """A read has ended; its buffers are nobody's any more."""
        read = self.reads.pop(read_id)
        del self._by_slot[read.slot]
        self.reading_bytes -= read.slot.taken_bytes
        self._index.slots.settled((read.slot,))
        committed = False
        if read.jobs and ok:
            committed = self._index.commit_objects((read.chunk,), read.kv_rank)
            self.writes.has(read.chunk, read.kv_rank, read.tier)
        elif read.jobs:
            self._index.abort_object(read.chunk, read.kv_rank)
        counter = "prefetched_objects" if committed else "failed_reads" if read.jobs else "cancelled_reads"
        self._ledger.counters[counter] += 1
        for job in read.jobs:
            prefetch = job.prefetch
            assert prefetch is not None
            del prefetch.waiting[read_id]
            if not committed:
                prefetch.limited_by = FAILED
                self.blocked.pop(job, None)
            if not prefetch.waiting and job not in self.blocked:
                self.finish(job, now)
        self._unblock(now)

    def _unblock(self, now: int) -> None:
        """Jobs that waited for the end of reads plan on."""
        while self.blocked:
            job = next(iter(self.blocked))
            prefetch = job.prefetch
            assert prefetch is not None
            at = prefetch.first + len(prefetch.planned)
            if self._must_wait(job, prefetch, at):
                break
            del self.blocked[job]
            prefetch.limited_by = ""
            self._plan_on(job, prefetch, now)
            if job in self.blocked:
                self.blocked.move_to_end(job, last=False)

    def finish(self, job: Job, now: int, limited_by: str = "") -> None:
        """The job is final, with what is ready."""
        prefetch = self._detach(job)
        count = 0
        for chunk in prefetch.planned:
            if chunk.ready & prefetch.want != prefetch.want or not chunk.table.live:
                break
            count += 1
        if not limited_by or (prefetch.planned and count == len(prefetch.planned)):
            limited_by = prefetch.limited_by
        kept = count if job.pins else 0
        self._leases.grant(job.lease, prefetch.planned[:kept])
        self._index.unpin(prefetch.planned[kept:])
        total = prefetch.first + count
        by_tier: dict[str, int] = {"l1": prefetch.first} if prefetch.first else {}
        for source in prefetch.sources[:count]:
            by_tier[source] = by_tier.get(source, 0) + 1
        del job.keys[total:]
        chunk_tokens = self._ledger.limits.chunk_tokens
        self._ledger.counters["hit_tokens" if job.pins else "warmed_tokens"] += count * chunk_tokens
        self._jobs.settle(
            job, PrefetchStatus(True, total * chunk_tokens, total > 0 and job.pins, by_tier, limited_by), now
        )
        self._ledger.outbox.append(JobDone(job.job_id))

    def end(self, job: Job) -> None:
        """The job is going: gives back everything that it waits for."""
        if job.prefetch is not None:
            self._index.unpin(self._detach(job).planned)

    def _detach(self, job: Job) -> Prefetch:
        prefetch = job.prefetch
        assert prefetch is not None
        job.prefetch = None
        del self.pending[prefetch.probe_id]
        self.blocked.pop(job, None)
        self._index.use(job.table, job.keys, job.priority)
        self._drop(job, prefetch.waiting.values())
        return prefetch

    def _drop(self, job: Job, reads: Iterable[Read]) -> None:
        """The job does not wait for these any more."""
        for read in reads:
            del read.jobs[job]
            if not read.jobs:
                self._ledger.outbox.append(CancelRead(read.read_id))
                self._index.abort_object(read.chunk, read.kv_rank)

    # ---- time -------------------------------------------------------------------------------------------------------

    def next_deadline(self) -> int | None:
        """When the next pending job runs out of time."""
        while self._deadlines and self._deadlines[0][1] not in self.pending:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def tick(self, now: int) -> None:
        """Makes jobs final whose time is up."""
        while (deadline_ns := self.next_deadline()) is not None and deadline_ns <= now:
            self.finish(self.pending[self._deadlines[0][1]], now, TIMEOUT)
