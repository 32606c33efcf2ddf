# SPDX-License-Identifier: Apache-2.0
"""Reading from lower tiers what a lookup wants and the arena does not have.

A lookup that misses asks the tiers (probe), then plans reads in prefix order as far as every wanted object is resident,
found or already being read, and as far as room reaches. Only so many bytes are read at a time; a job that has come so
far goes on planning as reads end, first come, first served. Each planned chunk is pinned for the job until the job is
final: when all reads are in, or at its deadline with what is ready. A read that no job waits for is cancelled; its slot
settles until the read is reported.

A job of a model whose chunks are in parts aims at one hit (``kvgrpc.core.aims``) and reads what that needs, windows
first, and nothing else. When something of it turns out to be missing, or room does not reach, it aims at a shorter one.
What it answers is what L1 can serve at the end, never what was aimed at.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from kvgrpc.core.aims import Aims, Prefetch, Read
from kvgrpc.core.index import Chunk, Index
from kvgrpc.core.jobs import Job, Jobs
from kvgrpc.core.keys import object_name, part_keys
from kvgrpc.core.leases import Leases
from kvgrpc.core.ledger import Ledger
from kvgrpc.core.parted import WHOLE, find
from kvgrpc.core.slots import Slot
from kvgrpc.core.types import CancelRead, JobDone, ObjectName, PrefetchStatus, ProbeTiers, ReadTier
from kvgrpc.core.writes import WriteBehind

L1 = "l1"
NAME_BYTES = 400
"""What a name costs that the tiers are asked for, and where one has it."""
TIMEOUT, LIMIT, FAILED = "PREFETCH_TIMEOUT", "PREFETCH_LIMIT", "PREFETCH_FAILED"


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
        self._aims = Aims(ledger, index, self._by_slot)
        self.reading_bytes = 0
        self._names = 0
        """That the tiers were asked for by pending jobs."""
        self.blocked: OrderedDict[Job, None] = OrderedDict()
        """Jobs that plan on when reads end."""
        self._deadlines: list[tuple[int, int]] = []
        """(when, probe id), also of jobs that are final by now."""

    # ---- begin ------------------------------------------------------------------------------------------------------

    def begin(self, job: Job, want: int, now: int, wait_ns: int, first: int) -> str | None:
        """Asks the tiers for what the job misses after its ``first`` chunks; None, or what limits it, and "" when there
        is nothing to ask. Names of pending lookups, and of one more, take no more memory than records may."""
        limits, facts, digest, version = self._ledger.limits, job.space.facts, job.space.digest, job.space.version
        forms, needs = facts.forms, facts.needs
        if any(rank not in forms for rank in job.lease.ranks):
            return ""  # nobody has said yet how long the objects are
        if self._names * NAME_BYTES > limits.records_bytes:
            return LIMIT
        keys = [part_keys(job.keys, part) for part in range(len(needs))]
        lows = [need.first(first + 1, limits.chunk_tokens) if need.window else first for need in needs]
        wanted = [(part, at) for at in range(min(lows), len(job.keys)) for part, low in enumerate(lows) if at >= low]
        prefetch = Prefetch(first, want, self._ledger.next_id(), keys, wanted, len(job.keys))
        for part, at in wanted:
            key = keys[part][at]
            chunk = job.table.chunks.get(key)
            for rank in job.lease.ranks:
                if chunk is None or not chunk.ready >> rank & 1:
                    form = forms[rank][part]
                    name = object_name(digest, version, key, rank, form.order)
                    prefetch.probed.append((key, rank, ObjectName(name, form.object_bytes)))
            if len(prefetch.probed) >= limits.keys_per_call:
                break
        job.prefetch = prefetch
        self.pending[prefetch.probe_id] = job
        self._names += len(prefetch.probed)
        heapq.heappush(self._deadlines, (now + wait_ns, prefetch.probe_id))
        self._ledger.outbox.append(ProbeTiers(prefetch.probe_id, tuple([name for _, _, name in prefetch.probed])))
        return None

    def probe_done(self, now: int, probe_id: int, found: Sequence[str], silent: bool = False) -> None:
        """The tiers have answered, or ``silent``, not all of them: plan and launch the reads. An answer that nobody
        waits for changes nothing."""
        job = self.pending.get(probe_id)
        if job is None or job.prefetch is None:
            return
        prefetch = job.prefetch
        prefetch.silent = silent
        prefetch.where = {
            (key, rank): (tier, name) for (key, rank, name), tier in zip(prefetch.probed, found, strict=True) if tier
        }
        if job.space.facts.needs != WHOLE:
            self._aim(job, prefetch, prefetch.target)
        self._plan_on(job, prefetch, now)

    def _plan_on(self, job: Job, prefetch: Prefetch, now: int) -> None:
        while len(prefetch.planned) < len(prefetch.wanted):
            part, at = prefetch.wanted[len(prefetch.planned)]
            if self._plan(job, prefetch, part, at):
                continue
            if job in self.blocked or job.space.facts.needs == WHOLE:
                break
            no_room = self._aims.can_be(job, prefetch, part, at)
            if no_room and len(self.reads) > len(prefetch.waiting):
                self.blocked[job] = None  # what others read, or was given up, may leave some
                break
            most = prefetch.target - 1
            if not job.space.facts.needs[part].window:
                most = at
            elif no_room:
                most -= most // 8  # in a bounded number of turns there is enough, or nothing is left
            self._aim(job, prefetch, most, LIMIT if no_room else "")
        if not prefetch.waiting and job not in self.blocked:
            self.finish(job, now)

    def _aim(self, job: Job, prefetch: Prefetch, most: int, why: str = "") -> None:
        """Aims at a hit of up to ``most`` chunks, for no more because of ``why``, and lets go of what that does not
        need."""
        count, places, limited = self._aims.choose(job, prefetch, most, self.reading_bytes)
        prefetch.cut_by = LIMIT if limited else why or prefetch.cut_by
        gone = prefetch.aim_at(count, places)
        needed = set(prefetch.planned)
        reads = [read for read in prefetch.waiting.values() if read.chunk not in needed]
        for read in reads:
            del prefetch.waiting[read.read_id]
        self._drop(job, reads)
        self._rest(job, gone)
        self._index.use(job.table, [prefetch.keys[part][at] for part, at in places], job.priority)

    def _must_wait(self, job: Job, prefetch: Prefetch, key: bytes) -> bool:
        """Whether others' reads take what may be read at a time."""
        cost, where = self._index.slots.cost_bytes, prefetch.where
        needs = [cost(where[key, rank][1].size_bytes) for rank in job.lease.ranks if (key, rank) in where]
        most = self._index.slots.total_bytes * self._ledger.limits.prefetch_share
        return self.reading_bytes > 0 and self.reading_bytes + sum(needs) > most

    def _plan(self, job: Job, prefetch: Prefetch, part: int, at: int) -> bool:
        """Plans one chunk, or part of one; False when the prefix ends before it, for now or at all."""
        table, key, source = job.table, prefetch.keys[part][at], L1
        chunk = table.chunks.get(key)
        reads: list[Read] = []
        if not table.live:
            return False
        if self._must_wait(job, prefetch, key):
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
                read = self._begin_read(job, prefetch, key, rank)
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

    def _begin_read(self, job: Job, prefetch: Prefetch, key: bytes, rank: int) -> Read | None:
        if (key, rank) not in prefetch.where:
            if prefetch.silent:
                prefetch.limited_by = FAILED
            return None
        tier, name = prefetch.where[key, rank]
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
        (chunk,) = index.begin_objects(job.table, (key,), rank, slots, job.priority)
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
            self.writes.has(now, read.chunk, read.kv_rank, read.tier)
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
            if not committed and job.space.facts.needs != WHOLE:
                prefetch.where.pop((read.chunk.key, read.kv_rank), None)
                self._aim(job, prefetch, prefetch.target - 1, FAILED)
                self._plan_on(job, prefetch, now)
            elif not prefetch.waiting and job not in self.blocked:
                self.finish(job, now)
        self._unblock(now)

    def _unblock(self, now: int) -> None:
        """Jobs that waited for the end of reads plan on."""
        while self.blocked:
            job = next(iter(self.blocked))
            prefetch = job.prefetch
            assert prefetch is not None
            part, at = prefetch.wanted[len(prefetch.planned)]
            if self._must_wait(job, prefetch, prefetch.keys[part][at]):
                break
            del self.blocked[job]
            prefetch.limited_by = ""
            self._plan_on(job, prefetch, now)
            if job in self.blocked:
                self.blocked.move_to_end(job, last=False)
                break

    def finish(self, job: Job, now: int, limited_by: str = "") -> None:
        """The job is final, with what is ready."""
        prefetch = self._detach(job)
        total = (self._grant if job.space.facts.needs == WHOLE else self._grant_parted)(job, prefetch)
        if not limited_by or (prefetch.planned and total == prefetch.target):
            limited_by = prefetch.cut_by or prefetch.limited_by
        below = {at: source for (_, at), source in zip(prefetch.wanted, prefetch.sources, strict=False) if source != L1}
        by_tier = dict(Counter(below.get(at, L1) if total > prefetch.first else L1 for at in range(total)))
        del job.keys[total:]
        chunk_tokens = self._ledger.limits.chunk_tokens
        more = max(total - prefetch.first, 0) * chunk_tokens
        self._ledger.counters["hit_tokens" if job.pins else "warmed_tokens"] += more
        self._jobs.settle(
            job, PrefetchStatus(True, total * chunk_tokens, total > 0 and job.pins, by_tier, limited_by), now
        )
        self._ledger.outbox.append(JobDone(job.job_id))

    def _grant(self, job: Job, prefetch: Prefetch) -> int:
        """Leases what of the plan is ready, from its beginning; how many chunks the hit has."""
        count = 0
        for chunk in prefetch.planned:
            if chunk.ready & prefetch.want != prefetch.want or not chunk.table.live:
                break
            count += 1
        prefetch.target = prefetch.first + len(prefetch.planned)
        kept = count if job.pins else 0
        self._leases.grant(job.lease, prefetch.planned[:kept])
        self._index.unpin(prefetch.planned[kept:])
        return prefetch.first + count

    def _grant_parted(self, job: Job, prefetch: Prefetch) -> int:
        """Leases the longest hit up to the target that is there now, instead of the first one if it is longer."""
        facts, size, chunks = job.space.facts, self._ledger.limits.chunk_tokens, list[Chunk]()
        hit = find(job.table, job.keys[: prefetch.target if job.table.live else 0], prefetch.want, facts.needs, size)
        count = hit.size if hit.size > prefetch.first or not job.pins else prefetch.first
        if count > prefetch.first and job.pins:
            chunks = hit.chunks
            if [chunk for chunk in chunks if not chunk.pins] and not self._leases.fits(chunks):
                prefetch.cut_by, count, chunks = LIMIT, prefetch.first, []
        if chunks:
            self._leases.renew(job.lease, chunks)
            job.lease.starts = hit.starts
        self._rest(job, prefetch.planned)
        self._index.eviction.use(hit.in_order(), job.priority)
        return count

    def _rest(self, job: Job, chunks: Sequence[Chunk]) -> None:
        """These are not planned any more; they are used first, so that they have a place in the order of eviction."""
        if job.table.live:
            self._index.eviction.use(chunks, job.priority)
        self._index.unpin(chunks)

    def end(self, job: Job) -> None:
        """The job is going: gives back everything that it waits for."""
        if job.prefetch is not None:
            self._rest(job, self._detach(job).planned)

    def _detach(self, job: Job) -> Prefetch:
        prefetch = job.prefetch
        assert prefetch is not None
        job.prefetch = None
        del self.pending[prefetch.probe_id]
        self._names -= len(prefetch.probed)
        self.blocked.pop(job, None)
        if job.space.facts.needs == WHOLE:
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
