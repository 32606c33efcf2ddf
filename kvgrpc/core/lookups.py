# SPDX-License-Identifier: Apache-2.0
"""Lookups: the longest prefix that is there for all wanted ranks, pinned; what follows it, prefetched."""

from __future__ import annotations

from collections.abc import Sequence

from kvgrpc.core import checks
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.index import Index
from kvgrpc.core.jobs import Job, Jobs
from kvgrpc.core.leases import Lease, Leases
from kvgrpc.core.ledger import Ledger
from kvgrpc.core.parted import Hit, find
from kvgrpc.core.prefetch import LIMIT, Prefetcher
from kvgrpc.core.sessions import Client, Engine
from kvgrpc.core.types import FreeCommand, LookupAnswer, LookupCommand, PrefetchStatus, Priority, SpaceRef, Warmed

NO_HIT = LookupAnswer(b"", PrefetchStatus(True))
NO_HIT_FOR_LIMIT = LookupAnswer(b"", PrefetchStatus(True, limited_by=LIMIT))


class Lookups:
    """Answers lookups, and ends them."""

    def __init__(self, ledger: Ledger, index: Index, leases: Leases, jobs: Jobs, prefetcher: Prefetcher) -> None:
        self._ledger = ledger
        self._index = index
        self._leases = leases
        self._jobs = jobs
        self._prefetcher = prefetcher
        self.warming = Engine("warming")
        """Whose the jobs of ``warm`` are."""

    def resident(self, ref: SpaceRef, keys: Sequence[bytes], want: int) -> Hit:
        """The longest prefix that is there of all ranks of ``want``. Refuses: SPACE_UNKNOWN."""
        space, facts = self._index.spaces.get(ref), self._index.facts(ref.space_base)
        if space is None:
            return Hit(0, [], ((0, 0),) * len(facts.needs))
        return find(space.table, keys, want, facts.needs, self._ledger.limits.chunk_tokens)

    def _prefetches(self, missing: int) -> bool:
        """Whether lower tiers may have some of what is missing."""
        return missing > 0 and bool(self._prefetcher.writes.lanes)

    def lookup(self, now: int, client: Client, command: LookupCommand) -> LookupAnswer:
        """Idempotent by (engine, request id, attempt)."""
        engine, keys = client.engine, command.content.keys
        earlier = engine.requests.get(command.request_id, {}).get(command.attempt)
        if earlier is not None:
            return earlier.answer(command.fingerprint)
        limits, counters = self._ledger.limits, self._ledger.counters
        checks.check_prefix(command.content, limits)
        facts = self._index.facts(command.space.space_base)
        ranks = checks.lookup_ranks(command, facts)
        kv_tp_size = checks.lookup_kv_tp_size(command, len(ranks), facts.identity, engine.registration())
        if command.policy.no_lookup:
            return NO_HIT
        counters["lookups"] += 1
        counters["lookup_tokens"] += command.content.num_tokens
        want = sum(1 << rank for rank in ranks)
        count, found, _ = hit = self.resident(command.space, keys, want)
        prefetches = self._prefetches(len(keys) - count)
        if not count and not prefetches:
            return NO_HIT
        lease = Lease(ranks, kv_tp_size, command.tp_size // kv_tp_size)
        lease.starts = hit.starts
        kept = list(keys if prefetches else keys[:count])
        self._jobs.admit(engine, lease, len(kept) * len(facts.needs))
        space = self._index.space(command.space)
        name = (command.job_id, command.request_id, command.attempt, command.tp_size, command.fingerprint)
        job = Job(*name, command.policy.priority, engine, client.client_id, space, space.table, lease, kept)
        pinned = self._leases.fits(found)
        if pinned:
            self._index.pin(found)
            self._leases.grant(lease, found)
        self._index.eviction.use(hit.in_order(), command.policy.priority)
        self._prefetcher.writes.used(now, found)
        self._jobs.add(job, now)
        counters["hit_tokens"] += count * limits.chunk_tokens
        wait_ns = limits.prefetch_wait_ns + limits.prefetch_wait_token_ns * (len(keys) - count) * limits.chunk_tokens
        wait_ns = command.prefetch_wait_ns or min(wait_ns, limits.prefetch_wait_most_ns)
        limited_by: str | None = LIMIT if prefetches else ""
        if prefetches and pinned:
            limited_by = self._prefetcher.begin(job, want, now, wait_ns, count)
        if limited_by is None:
            return job.answer(command.fingerprint)
        if not count:
            self._jobs.drop(job)
            return NO_HIT_FOR_LIMIT if limited_by else NO_HIT
        del job.keys[count:]
        hit_tokens = count * limits.chunk_tokens
        self._jobs.settle(job, PrefetchStatus(True, hit_tokens, pinned, {"l1": count}, limited_by), now)
        return job.answer(command.fingerprint)

    def warm(self, now: int, ref: SpaceRef, keys: Sequence[bytes], wait_ns: int, job_id: bytes) -> Warmed | None:
        """Begins to read what is missing of a prefix; None: JobDone will come, then ask ``warmed``. Refuses:
        SPACE_UNKNOWN, JOB_LIMIT, RECORD_LIMIT."""
        facts, chunk_tokens = self._index.facts(ref.space_base), self._ledger.limits.chunk_tokens
        hit = self.resident(ref, keys, facts.all_ranks)
        self._index.eviction.use(hit.in_order(), Priority.NORMAL)
        warmed = Warmed(hit.size * chunk_tokens)
        if not self._prefetches(len(keys) - hit.size):
            return warmed
        ranks = tuple(range(facts.identity.kv_world_size))
        lease = Lease(ranks, 1, 1)
        self._jobs.admit(self.warming, lease, len(keys) * len(facts.needs))
        space, priority, name = self._index.space(ref), Priority.NORMAL, job_id.hex()
        job = Job(job_id, name, 0, 1, 0, priority, self.warming, "", space, space.table, lease, list(keys), pins=False)
        self._jobs.add(job, now)
        limited_by = self._prefetcher.begin(job, facts.all_ranks, now, wait_ns, hit.size)
        if limited_by is None:
            return None
        self._jobs.drop(job)
        return Warmed(warmed.resident_tokens, limited_by)

    def warmed(self, job_id: bytes) -> Warmed:
        """What became of it; its record goes. Whoever does not wait for it ends it so."""
        job = self.warming.jobs.get(job_id)
        if job is None:
            return Warmed(0, LIMIT)
        self.end(job)
        return Warmed(job.status.hit_tokens, job.status.limited_by)

    def free(self, now: int, job: Job, command: FreeCommand) -> int:
        """Releases pins of one job; how many. What reaches the end of a pending job, for all readers, ends its
        prefetch. Refuses: TP_SIZE_MISMATCH, READER_UNKNOWN."""
        lease, tokens, chunk_tokens = job.lease, command.range, self._ledger.limits.chunk_tokens
        if command.tp_size != job.tp_size:
            text = f"the lookup was made with tp_size {job.tp_size}, not {command.tp_size}"
            raise Refusal(Reason.TP_SIZE_MISMATCH, text, field="tp_size")
        mask = 0 if command.readers else lease.full
        for reader in command.readers:
            mask |= lease.bit(reader)
        start, end = (-(-tokens.start // chunk_tokens), tokens.end // chunk_tokens) if tokens else (0, len(job.keys))
        if job.prefetch is not None and not command.readers and end >= len(job.keys):
            self._prefetcher.finish(job, now)
        freed = mask == lease.full and start <= 0 and end >= len(job.keys)
        released = self._leases.free(lease, start, end, mask)
        self._jobs.unpinned(job, now, freed=freed)
        return released

    def end(self, job: Job) -> int:
        """Ends a job, its prefetch and its record; how many pins were released."""
        self._prefetcher.end(job)
        return self._jobs.drop(job)
