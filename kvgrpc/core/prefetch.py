# SPDX-License-Identifier: Apache-2.0
"""Reading from lower tiers what a lookup wants and the arena does not have.

A lookup that misses asks the tiers (probe), then plans reads in prefix order as far as every wanted object is resident, found
or already being read, and as far as room and budget reach. Each planned chunk is pinned for the job until the job is
final: when all reads are in, or at its deadline with what is ready. A read that no job waits for is cancelled; its slot
settles until the read is reported.
"""

from __future__ import annotations

import heapq

from kvgrpc.core.index import Chunk, Index
from kvgrpc.core.jobs import Job, Jobs
from kvgrpc.core.keys import object_name
from kvgrpc.core.leases import Leases, unpin_all
from kvgrpc.core.ledger import Ledger
from kvgrpc.core.slots import Slot
from kvgrpc.core.types import CancelRead, JobDone, ObjectName, PrefetchStatus, ProbeTiers, ReadTier

TIMEOUT, LIMIT, FAILED = "PREFETCH_TIMEOUT", "PREFETCH_LIMIT", "PREFETCH_FAILED"


class Read:
    """One object on its way into the arena, and the jobs that wait for it."""

    __slots__ = ("chunk", "jobs", "kv_rank", "read_id", "size_bytes", "slot", "tier")

    def __init__(self, read_id: int, tier: str, chunk: Chunk, kv_rank: int, slot: Slot) -> None:
        self.read_id = read_id
        self.tier = tier
        self.chunk = chunk
        self.kv_rank = kv_rank
        self.slot = slot
        self.size_bytes = slot.taken_bytes
        self.jobs: dict[Job, None] = {}


class Prefetch:
    """What a pending job waits for. ``planned`` are the pinned chunks from ``first`` on, ``sources`` where each is from."""

    __slots__ = ("deadline_ns", "first", "limited_by", "planned", "probe_id", "probed", "sources", "waiting", "want")

    def __init__(self, first: int, want: int, deadline_ns: int, probe_id: int) -> None:
        self.first = first
        self.want = want
        self.deadline_ns = deadline_ns
        self.probe_id = probe_id
        self.probed: list[tuple[int, int, ObjectName]] = []
        self.planned: list[Chunk] = []
        self.sources: list[str] = []
        self.waiting: dict[int, Read] = {}
        self.limited_by = ""


class Prefetcher:
    """Plans reads for pending jobs and makes jobs final."""

    def __init__(self, ledger: Ledger, index: Index, leases: Leases, jobs: Jobs, tiers: tuple[str, ...]) -> None:
        self._ledger = ledger
        self._index = index
        self._leases = leases
        self._jobs = jobs
        self.tiers = tiers
        self.probes: dict[int, Job] = {}
        self.reads: dict[int, Read] = {}
        self._by_slot: dict[Slot, Read] = {}
        self.reading_bytes = 0
        self._deadlines: list[tuple[int, int, Job]] = []

    # ---- begin ------------------------------------------------------------------------------------------------------

    def begin(self, job: Job, want: int, now: int, wait_ns: int) -> bool:
        """Asks the tiers for what the job misses after its pinned prefix; False when there is nothing to ask."""
        first = len(job.lease.chunks)
        prefetch = Prefetch(first, want, now + wait_ns, self._ledger.next_id())
        facts = job.space.facts
        for at in range(first, len(job.keys)):
            key = job.keys[at]
            chunk = job.table.chunks.get(key)
            ready = chunk.ready if chunk is not None else 0
            for rank in job.lease.ranks:
                if ready >> rank & 1:
                    continue
                size_bytes = facts.object_bytes.get(rank)
                if size_bytes is None:
                    break
                name = object_name(job.space.digest, facts.generation, key, rank)
                prefetch.probed.append((at, rank, ObjectName(name, size_bytes)))
            if len(prefetch.probed) >= self._ledger.limits.keys_per_call:
                break
        if not prefetch.probed or prefetch.probed[0][0] != first:
            return False
        job.prefetch = prefetch
        self.probes[prefetch.probe_id] = job
        heapq.heappush(self._deadlines, (prefetch.deadline_ns, prefetch.probe_id, job))
        self._ledger.outbox.append(ProbeTiers(prefetch.probe_id, tuple(name for _, _, name in prefetch.probed)))
        return True

    def probe_done(self, now: int, probe_id: int, found: list[str]) -> None:
        """The tiers have answered: plan and launch the reads. An answer that nobody waits for changes nothing."""
        job = self.probes.pop(probe_id, None)
        if job is None or job.prefetch is None:
            return
        prefetch = job.prefetch
        where = {(at, rank): (tier, name) for (at, rank, name), tier in zip(prefetch.probed, found, strict=True)}
        for at in range(prefetch.first, len(job.keys)):
            if not self._plan(job, prefetch, at, where):
                break
        prefetch.probed.clear()
        if not prefetch.waiting:
            self.finish(job, now)

    def _plan(
        self, job: Job, prefetch: Prefetch, at: int, where: dict[tuple[int, int], tuple[str, ObjectName]]
    ) -> bool:
        """Plans one chunk; False when the prefix ends before it."""
        table, key = job.table, job.keys[at]
        if not table.live:
            return False
        chunk = table.chunks.get(key)
        source = "l1"
        begun: list[Read] = []
        joined: list[Read] = []
        if chunk is not None:
            if not self._leases.fits([chunk]):
                prefetch.limited_by = LIMIT
                return False
            self._index.pin(chunk)  # or making room might evict what is there of it
        for rank in job.lease.ranks:
            if chunk is not None and chunk.ready >> rank & 1:
                continue
            read = self._read_of(chunk, rank)
            if read is not None:
                joined.append(read)
                source = read.tier
                continue
            tier, name = where.get((at, rank), ("", None))
            being_stored = chunk is not None and chunk.writing >> rank & 1
            read = (
                self._begin_read(job, prefetch, key, rank, tier, name) if tier and name and not being_stored else None
            )
            if read is None:
                for other in begun:
                    self._drop_waiter(other, job)
                if chunk is not None:
                    self._index.unpin(chunk)
                return False
            source = tier
            begun.append(read)
            if chunk is None:
                chunk = read.chunk
                self._index.pin(chunk)
        assert chunk is not None
        for read in (*joined, *begun):
            read.jobs[job] = None
            prefetch.waiting[read.read_id] = read
        prefetch.planned.append(chunk)
        prefetch.sources.append(source)
        return True

    def _read_of(self, chunk: Chunk | None, rank: int) -> Read | None:
        if chunk is None or not chunk.writing >> rank & 1:
            return None
        return self._by_slot.get(chunk.slots[rank])

    def _begin_read(
        self, job: Job, prefetch: Prefetch, key: bytes, rank: int, tier: str, name: ObjectName
    ) -> Read | None:
        index, limits = self._index, self._ledger.limits
        total = index.slots.total_bytes
        if job.space.facts.object_bytes.get(rank) != name.size_bytes:
            return None  # the geometry changed since the tiers were asked
        reading = self.reading_bytes + index.slots.cost_bytes(name.size_bytes)
        if reading > total * limits.prefetch_share or index.pinned_bytes + reading > total * limits.pin_share:
            prefetch.limited_by = LIMIT
            return None
        slot = index.reserve(job.space, name.size_bytes)
        if isinstance(slot, str):
            prefetch.limited_by = LIMIT
            return None
        slot.in_flight = True
        chunk = index.begin_object(job.table, key, rank, slot)
        read = Read(self._ledger.next_id(), tier, chunk, rank, slot)
        read.jobs[job] = None
        self.reads[read.read_id] = read
        self._by_slot[slot] = read
        self.reading_bytes += read.size_bytes
        self._ledger.outbox.append(ReadTier(read.read_id, tier, name, slot.extents))
        return read

    # ---- end --------------------------------------------------------------------------------------------------------

    def read_done(self, now: int, read_id: int, ok: bool) -> None:
        """A read has ended; its buffers are nobody's any more."""
        read = self.reads.pop(read_id)
        del self._by_slot[read.slot]
        self.reading_bytes -= read.size_bytes
        wanted = bool(read.jobs)
        self._index.slots.settled(read.slot)
        committed = False
        if wanted:
            if ok:
                committed = self._index.commit_object(read.chunk, read.kv_rank)
            else:
                self._index.abort_object(read.chunk, read.kv_rank)
        counter = "prefetched_objects" if committed else "failed_reads" if wanted else "cancelled_reads"
        self._ledger.counters[counter] += 1
        for job in list(read.jobs):
            prefetch = job.prefetch
            if prefetch is None:
                continue
            del prefetch.waiting[read_id]
            if not committed:
                prefetch.limited_by = FAILED
            if not prefetch.waiting:
                self.finish(job, now)

    def finish(self, job: Job, now: int, limited_by: str = "") -> None:
        """The job is final, with what is ready."""
        prefetch = self._detach(job)
        want = prefetch.want
        count = 0
        for chunk in prefetch.planned:
            if chunk.ready & want != want or not chunk.table.live:
                break
            count += 1
        if not limited_by or (prefetch.planned and count == len(prefetch.planned)):
            limited_by = prefetch.limited_by
        hits = prefetch.planned[:count]
        unpin_all(self._index, prefetch.planned[count:])
        total = prefetch.first + count
        self._leases.grant(job.lease, hits, pinned=True)
        by_tier: dict[str, int] = {"l1": prefetch.first} if prefetch.first else {}
        for source in prefetch.sources[:count]:
            by_tier[source] = by_tier.get(source, 0) + 1
        del job.keys[total:]
        chunk_tokens = self._ledger.limits.chunk_tokens
        status = PrefetchStatus(True, total * chunk_tokens, total > 0, by_tier, limited_by)
        self._ledger.counters["hit_tokens"] += status.hit_tokens - prefetch.first * chunk_tokens
        self._jobs.settle(job, status, now)
        self._ledger.outbox.append(JobDone(job.job_id))

    def end(self, job: Job) -> None:
        """The job is going: gives back everything that it waits for."""
        if job.prefetch is not None:
            prefetch = self._detach(job)
            unpin_all(self._index, prefetch.planned)

    def _detach(self, job: Job) -> Prefetch:
        prefetch = job.prefetch
        assert prefetch is not None
        job.prefetch = None
        self.probes.pop(prefetch.probe_id, None)
        for read in prefetch.waiting.values():
            self._drop_waiter(read, job)
        prefetch.waiting.clear()
        return prefetch

    def _drop_waiter(self, read: Read, job: Job) -> None:
        read.jobs.pop(job, None)
        if not read.jobs and read.read_id in self.reads and read.slot is read.chunk.slots.get(read.kv_rank):
            self._ledger.outbox.append(CancelRead(read.read_id))
            self._index.abort_object(read.chunk, read.kv_rank)

    # ---- time -------------------------------------------------------------------------------------------------------

    def next_deadline(self) -> int | None:
        """When the next pending job runs out of time."""
        heap = self._deadlines
        while heap and (heap[0][2].prefetch is None or heap[0][2].prefetch.probe_id != heap[0][1]):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def tick(self, now: int) -> None:
        """Makes jobs final whose time is up."""
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            self.finish(heapq.heappop(self._deadlines)[2], now, TIMEOUT)
