# SPDX-License-Identifier: Apache-2.0
"""Records of lookups. A record outlives its pins, so that an answer stays readable and a late Retrieve finds its keys.

A job is pending while its prefetch runs, then final. What ends its pins: its readers are done, it is freed, its lease
expires, its request, client or engine ends. What ends its record: ``read_record_ns`` after its last reader,
``record_ns`` after the lookup, the end of its request or engine, or room for another record when it pins nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.index import Space, Table
from kvgrpc.core.leases import Lease, Leases
from kvgrpc.core.ledger import Ledger
from kvgrpc.core.sessions import Engine
from kvgrpc.core.types import JobDone, LookupAnswer, PrefetchStatus, Priority

if TYPE_CHECKING:
    from kvgrpc.core.prefetch import Prefetch

RECORD_BYTES = 1024
"""What a record costs beside its keys."""
KEY_BYTES = 96
"""What a kept key costs: the bytes object, and its places in the record's lists."""


@dataclass(eq=False, slots=True)
class Job:
    """One lookup. ``keys`` are those of the hit (while pending: of all that is wanted)."""

    job_id: bytes
    request_id: str
    attempt: int
    tp_size: int
    fingerprint: int
    priority: Priority
    engine: Engine
    owner: str
    """Client id of who asked."""
    space: Space
    table: Table
    lease: Lease
    keys: list[bytes]
    status: PrefetchStatus = field(default_factory=lambda: PrefetchStatus(False))
    prefetch: Prefetch | None = None
    cost_bytes: int = 0
    lease_end_ns: int = 0
    record_end_ns: int = 0
    read_end_ns: int = 0
    pins: bool = True
    """Its prefetch ends in pins; else it only fills L1."""

    def answer(self, fingerprint: int) -> LookupAnswer:
        """To a lookup that is asked again. Refuses: INVALID_FIELD when it asks for something else."""
        if fingerprint != self.fingerprint:
            text = "request_id and attempt name another prompt's lookup; end that request or use another attempt"
            raise Refusal(Reason.INVALID_FIELD, text, field="request_id")
        return LookupAnswer(self.job_id, self.status)


def _cost_bytes(lease: Lease, num_keys: int) -> int:
    return RECORD_BYTES + (KEY_BYTES + lease.full.bit_length() // 8) * num_keys


class Jobs:
    """All records, in the orders in which time takes them. Durations are the same for all, so insertion order is time
    order."""

    def __init__(self, ledger: Ledger, leases: Leases) -> None:
        self._ledger = ledger
        self._leases = leases
        self.jobs: dict[bytes, Job] = {}
        self.leased: OrderedDict[Job, None] = OrderedDict()
        self.recorded: OrderedDict[Job, None] = OrderedDict()
        self.read: OrderedDict[Job, None] = OrderedDict()
        self.finished: OrderedDict[Job, None] = OrderedDict()
        self.record_bytes = 0

    def find(self, engine: Engine, job_id: bytes) -> Job:
        """The engine's job. Refuses: JOB_UNKNOWN, also for a job of another engine."""
        job = self.jobs.get(job_id)
        if job is None or job.engine is not engine:
            text = "no such lookup: its record has ended, or it is another engine's"
            raise Refusal(Reason.JOB_UNKNOWN, text, field="job_id", resource="job")
        return job

    def admit(self, engine: Engine, lease: Lease, num_keys: int) -> None:
        """Makes room for one more record. Refuses: JOB_LIMIT, RECORD_LIMIT."""
        limits = self._ledger.limits
        while len(engine.jobs) >= limits.jobs_per_engine:
            if not engine.finished:
                text = f"{limits.jobs_per_engine} lookups of this engine are pinned or pending; retrieve or free them"
                raise Refusal(Reason.JOB_LIMIT, text, retry_after_ms=1000, resource="jobs")
            self.drop(next(iter(engine.finished)))
        cost = _cost_bytes(lease, num_keys)
        while self.record_bytes + cost > limits.records_bytes:
            if not self.finished or cost > limits.records_bytes:
                text = f"records of lookups take {limits.records_bytes} bytes and all are pinned or pending"
                raise Refusal(Reason.RECORD_LIMIT, text, retry_after_ms=1000, resource="records")
            self.drop(next(iter(self.finished)))

    def add(self, job: Job, now: int) -> None:
        """Records a job; ``admit`` was called."""
        self.jobs[job.job_id] = job.engine.jobs[job.job_id] = job
        job.engine.requests.setdefault(job.request_id, {})[job.attempt] = job
        job.record_end_ns = now + self._ledger.limits.record_ns
        self.recorded[job] = None
        self._charge(job)

    def _charge(self, job: Job) -> None:
        most = 0 if job.status.done else len(job.keys) * len(job.space.facts.needs)
        cost = _cost_bytes(job.lease, max(most, len(job.keys), len(job.lease.chunks)))
        self.record_bytes += cost - job.cost_bytes
        job.cost_bytes = cost

    def settle(self, job: Job, status: PrefetchStatus, now: int) -> None:
        """The lookup is final. Its lease, if it pins anything, begins now."""
        job.status = status
        self._charge(job)
        if any(job.lease.remaining):
            job.lease_end_ns = now + self._ledger.limits.lease_ns
            self.leased[job] = None
        else:
            self._finish(job)

    def unpinned(self, job: Job, now: int, *, freed: bool = False) -> None:
        """Call after pins of a job were released: when it is final and none are left, the record starts to age.
        ``freed``: nobody wants it any more, whether it was pinned or not."""
        if (freed or job in self.leased) and job.status.done and not any(job.lease.remaining) and job not in self.read:
            job.read_end_ns = now + self._ledger.limits.read_record_ns
            self.read[job] = None
            self._finish(job)

    def _finish(self, job: Job) -> None:
        """The job is final and pins nothing; the record stays."""
        self._leases.end(job.lease)
        self.leased.pop(job, None)
        self.finished[job] = job.engine.finished[job] = None

    def expire_lease(self, job: Job) -> None:
        """Its time is up: the pins go."""
        self._ledger.counters["expired_leases"] += 1
        self._finish(job)

    def drop(self, job: Job) -> int:
        """Ends a record and what it pins; how many pins were released. Its prefetch must have been ended."""
        assert job.prefetch is None
        released = self._leases.end(job.lease)
        engine = job.engine
        del self.jobs[job.job_id], engine.jobs[job.job_id]
        attempts = engine.requests[job.request_id]
        del attempts[job.attempt]
        if not attempts:
            del engine.requests[job.request_id]
        for order in (self.leased, self.recorded, self.read, self.finished, engine.finished):
            order.pop(job, None)
        self.record_bytes -= job.cost_bytes
        self._ledger.outbox.append(JobDone(job.job_id))
        return released
