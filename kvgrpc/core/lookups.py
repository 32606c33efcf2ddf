# SPDX-License-Identifier: Apache-2.0
"""Lookups: the longest prefix that is there for all wanted ranks, pinned; what follows it, prefetched."""

from __future__ import annotations

from collections.abc import Sequence

from kvgrpc.core import checks
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.eviction import touch_order
from kvgrpc.core.index import Chunk, Index
from kvgrpc.core.jobs import Job, Jobs
from kvgrpc.core.leases import Lease, Leases
from kvgrpc.core.ledger import Ledger
from kvgrpc.core.prefetch import LIMIT, Prefetcher
from kvgrpc.core.sessions import Client
from kvgrpc.core.types import FreeCommand, LookupAnswer, LookupCommand, Policy, PrefetchStatus, Priority, SpaceRef

NO_HIT = LookupAnswer(b"", PrefetchStatus(True))


class Lookups:
    """Answers lookups, and ends them."""

    def __init__(self, ledger: Ledger, index: Index, leases: Leases, jobs: Jobs, prefetcher: Prefetcher) -> None:
        self._ledger = ledger
        self._index = index
        self._leases = leases
        self._jobs = jobs
        self._prefetcher = prefetcher

    def resident(self, ref: SpaceRef, keys: Sequence[bytes], want: int) -> list[Chunk]:
        """Chunks of the longest prefix that has all ranks of ``want``."""
        space = self._index.spaces.get(ref)
        found: list[Chunk] = []
        if space is None:
            return found
        get = space.table.chunks.get
        for key in keys:
            chunk = get(key)
            if chunk is None or chunk.ready & want != want:
                break
            found.append(chunk)
        return found

    def lookup(self, now: int, client: Client, command: LookupCommand) -> LookupAnswer:
        """Idempotent by (engine, request id, attempt)."""
        engine = client.engine
        earlier = engine.requests.get((command.request_id, command.attempt))
        if earlier is not None:
            return earlier.answer
        limits, counters = self._ledger.limits, self._ledger.counters
        checks.check_prefix(command.content, limits)
        facts = self._index.facts(command.space.space_base)
        ranks = checks.lookup_ranks(command, facts)
        kv_tp_size = checks.lookup_kv_tp_size(command, engine.registration())
        if command.policy.no_lookup:
            return NO_HIT
        counters["lookups"] += 1
        counters["lookup_tokens"] += command.content.num_tokens
        want = sum(1 << rank for rank in ranks)
        keys = command.content.keys
        found = self.resident(command.space, keys, want)
        prefetches = bool(self._prefetcher.tiers) and len(found) < len(keys)
        if not found and not prefetches:
            return NO_HIT
        self._jobs.admit(engine, len(keys) if prefetches else len(found))
        lease = Lease(ranks, kv_tp_size, command.tp_size // kv_tp_size)
        job = Job(command, engine, client.client_id, self._index.space(command.space), lease)
        job.keys = list(keys if prefetches else keys[: len(found)])
        pinned = self._leases.fits(found)
        if pinned:
            self._leases.grant(lease, found)
        self._use(found, command.policy, pinned=pinned)
        self._jobs.add(job, now)
        hit_tokens = len(found) * limits.chunk_tokens
        counters["hit_tokens"] += hit_tokens
        wait_ns = command.prefetch_wait_ns or limits.prefetch_wait_ns
        if prefetches and pinned and self._prefetcher.begin(job, want, now, wait_ns):
            return job.answer
        del job.keys[len(found) :]
        if not found:
            self._jobs.drop(job)
            return NO_HIT
        by_tier = {"l1": len(found)}
        limited_by = LIMIT if prefetches and not pinned else ""
        self._jobs.settle(job, PrefetchStatus(True, hit_tokens, pinned, by_tier, limited_by), now)
        return job.answer

    def _use(self, found: list[Chunk], policy: Policy, *, pinned: bool) -> None:
        """The found chunks were used; a pinned one is queued again when its pins go."""
        if not pinned:
            for chunk in touch_order(found):
                self._index.touch(chunk, policy.priority)
        elif policy.priority is not Priority.NORMAL:
            for chunk in found:
                self._index.touch(chunk, policy.priority)

    def free(self, now: int, job: Job, command: FreeCommand) -> int:
        """Releases pins of one job; how many. Freeing all of a pending job ends its prefetch. Refuses: TP_SIZE_MISMATCH,
        READER_UNKNOWN."""
        if command.tp_size != job.tp_size:
            text = f"the lookup was made with tp_size {job.tp_size}, not {command.tp_size}"
            raise Refusal(Reason.TP_SIZE_MISMATCH, text, field="tp_size")
        lease = job.lease
        mask = lease.full
        if command.readers:
            mask = 0
            for reader in command.readers:
                mask |= lease.bit(reader)
        start, end = 0, len(lease.chunks)
        if command.range is not None:
            chunk_tokens = self._ledger.limits.chunk_tokens
            start = -(-command.range.start // chunk_tokens)
            end = command.range.end // chunk_tokens
        elif not command.readers and job.prefetch is not None:
            self._prefetcher.finish(job, now)
            end = len(lease.chunks)
        released = self._leases.release(lease, start, end, mask)
        self._jobs.unpinned(job, now)
        return released

    def end(self, job: Job) -> int:
        """Ends a job, its prefetch and its record; how many pins were released."""
        self._prefetcher.end(job)
        return self._jobs.drop(job)
