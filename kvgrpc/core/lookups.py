# SPDX-License-Identifier: Apache-2.0
"""Lookups: the longest prefix that is there for all wanted ranks, pinned; what follows it, prefetched."""

from __future__ import annotations

from collections.abc import Sequence

from kvgrpc.core import checks
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.index import Chunk, Index
from kvgrpc.core.jobs import Job, Jobs
from kvgrpc.core.leases import Lease, Leases
from kvgrpc.core.ledger import Ledger
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

    def resident(self, ref: SpaceRef, keys: Sequence[bytes], want: int) -> list[Chunk]:
        """Chunks of the longest prefix that has all ranks of ``want``."""
        space = self._index.spaces.get(ref)
        found: list[Chunk] = []
        if space is not None:
            get = space.table.chunks.get
            for key in keys:
                chunk = get(key)
                if chunk is None or chunk.ready & want != want:
                    break
                found.append(chunk)
        return found

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
        kv_tp_size = checks.lookup_kv_tp_size(command, len(ranks), engine.registration())
        if command.policy.no_lookup:
            return NO_HIT
        counters["lookups"] += 1
        counters["lookup_tokens"] += command.content.num_tokens
        want = sum(1 << rank for rank in ranks)
        found = self.resident(command.space, keys, want)
        prefetches = bool(self._prefetcher.writes.lanes) and len(found) < len(keys)
        if not found and not prefetches:
            return NO_HIT
        lease = Lease(ranks, kv_tp_size, command.tp_size // kv_tp_size)
        self._jobs.admit(engine, lease, len(keys) if prefetches else len(found))
        space = self._index.space(command.space)
        kept = list(keys if prefetches else keys[: len(found)])
        name = (command.job_id, command.request_id, command.attempt, command.tp_size, command.fingerprint)
        job = Job(*name, command.policy.priority, engine, client.client_id, space, space.table, lease, kept)
        pinned = self._leases.fits(found)
        if pinned:
            self._index.pin(found)
            self._leases.grant(lease, found)
        self._index.eviction.use(found, command.policy.priority)
        self._prefetcher.writes.used(found)
        self._jobs.add(job, now)
        counters["hit_tokens"] += len(found) * limits.chunk_tokens
        wait_ns = (
            limits.prefetch_wait_ns + limits.prefetch_wait_token_ns * (len(keys) - len(found)) * limits.chunk_tokens
        )
        wait_ns = command.prefetch_wait_ns or min(wait_ns, limits.prefetch_wait_most_ns)
        if prefetches and pinned and self._prefetcher.begin(job, want, now, wait_ns, len(found)):
            return job.answer(command.fingerprint)
        limited_by = LIMIT if prefetches and not pinned else ""
        if not found:
            self._jobs.drop(job)
            return NO_HIT_FOR_LIMIT if limited_by else NO_HIT
        del job.keys[len(found) :]
        hit_tokens = len(found) * limits.chunk_tokens
        self._jobs.settle(job, PrefetchStatus(True, hit_tokens, pinned, {"l1": len(found)}, limited_by), now)
        return job.answer(command.fingerprint)

    def warm(self, now: int, ref: SpaceRef, keys: Sequence[bytes], wait_ns: int, job_id: bytes) -> Warmed | None:
        """Begins to read what is missing of a prefix; None: JobDone will come, then ask ``warmed``. Refuses:
        SPACE_UNKNOWN, JOB_LIMIT, RECORD_LIMIT."""
        facts, chunk_tokens = self._index.facts(ref.space_base), self._ledger.limits.chunk_tokens
        found = self.resident(ref, keys, facts.all_ranks)
        self._index.eviction.use(found, Priority.NORMAL)
        warmed = Warmed(len(found) * chunk_tokens)
        if len(found) == len(keys) or not self._prefetcher.writes.lanes:
            return warmed
        ranks = tuple(range(facts.identity.kv_world_size))
        lease = Lease(ranks, 1, 1)
        self._jobs.admit(self.warming, lease, len(keys))
        space, priority, name = self._index.space(ref), Priority.NORMAL, job_id.hex()
        job = Job(job_id, name, 0, 1, 0, priority, self.warming, "", space, space.table, lease, list(keys), pins=False)
        self._jobs.add(job, now)
        if self._prefetcher.begin(job, facts.all_ranks, now, wait_ns, len(found)):
            return None
        self._jobs.drop(job)
        return warmed

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
        released = self._leases.release(lease, start, end, mask)
        self._jobs.unpinned(job, now, freed=freed)
        return released

    def end(self, job: Job) -> int:
        """Ends a job, its prefetch and its record; how many pins were released."""
        self._prefetcher.end(job)
        return self._jobs.drop(job)
