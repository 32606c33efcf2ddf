# SPDX-License-Identifier: Apache-2.0
"""Records of lookups. A record outlives its pins, so that an answer stays readable and a late Retrieve finds its keys.

A job is pending while its prefetch runs, then final. What ends its pins: its readers are done, it is freed, its lease
expires, its request, client or engine ends. What ends its record: ``read_record_ns`` after its last reader, ``record_ns``
after the lookup, the end of its request or engine, or room for another record when it pins nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.index import Space, Table
from kvgrpc.core.leases import Lease, Leases
from kvgrpc.core.ledger import Ledger
from kvgrpc.core.sessions import Engine
from kvgrpc.core.types import JobDone, LookupAnswer, LookupCommand, PrefetchStatus

if TYPE_CHECKING:
    from kvgrpc.core.prefetch import Prefetch

RECORD_BYTES = 1024
"""What a record costs beside its keys."""
KEY_BYTES = 96
"""What a kept key costs: the bytes object, and its places in the record's lists."""


class Job:
    """One lookup. ``keys`` are those of the hit (while pending: of all that is wanted)."""

    __slots__ = (
        "attempt",
        "cost_bytes",
        "engine",
        "job_id",
        "keys",
        "lease",
        "lease_end_ns",
        "owner",
        "prefetch",
        "read_end_ns",
        "record_end_ns",
        "request_id",
        "space",
        "status",
        "table",
        "tp_size",
    )

    def __init__(self, command: LookupCommand, engine: Engine, owner: str, space: Space, lease: Lease) -> None:
        self.job_id = command.job_id
        self.engine = engine
        self.owner = owner
        self.request_id = command.request_id
        self.attempt = command.attempt
        self.tp_size = command.tp_size
        self.space = space
        self.table: Table = space.table
        self.lease = lease
        self.keys: list[bytes] = []
        self.status = PrefetchStatus(False)
        self.prefetch: Prefetch | None = None
        self.cost_bytes = 0
        self.lease_end_ns = 0
        self.record_end_ns = 0
        self.read_end_ns = 0

    @property
    def answer(self) -> LookupAnswer:
        return LookupAnswer(self.job_id, self.status)


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

    def admit(self, engine: Engine, num_keys: int) -> None:
        """Makes room for one more record. Refuses: JOB_LIMIT, RECORD_LIMIT."""
        limits = self._ledger.limits
        while len(engine.jobs) >= limits.jobs_per_engine:
            if not engine.finished:
                text = f"{limits.jobs_per_engine} lookups of this engine are pinned or pending; retrieve or free them"
                raise Refusal(Reason.JOB_LIMIT, text, retry_after_ms=1000, resource="jobs")
            self.drop(next(iter(engine.finished)))
        cost = RECORD_BYTES + KEY_BYTES * num_keys
        while self.record_bytes + cost > limits.records_bytes:
            if not self.finished:
                text = f"records of lookups take {limits.records_bytes} bytes and all are pinned or pending"
                raise Refusal(Reason.RECORD_LIMIT, text, retry_after_ms=1000, resource="records")
            self.drop(next(iter(self.finished)))

    def add(self, job: Job, now: int) -> None:
        """Records a job; ``admit`` was called."""
        engine = job.engine
        self.jobs[job.job_id] = job
        engine.jobs[job.job_id] = job
        engine.requests[job.request_id, job.attempt] = job
        engine.by_request.setdefault(job.request_id, {})[job.job_id] = job
        job.record_end_ns = now + self._ledger.limits.record_ns
        self.recorded[job] = None
        self._charge(job)

    def _charge(self, job: Job) -> None:
        cost = RECORD_BYTES + KEY_BYTES * len(job.keys)
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

    def unpinned(self, job: Job, now: int) -> None:
        """Call after pins of a final job were released: when none are left, the record starts to age."""
        if job not in self.leased or any(job.lease.remaining):
            return
        del self.leased[job]
        job.lease.chunks.clear()
        job.lease.remaining.clear()
        job.read_end_ns = now + self._ledger.limits.read_record_ns
        self.read[job] = None
        self._finish(job)

    def _finish(self, job: Job) -> None:
        self.finished[job] = None
        job.engine.finished[job] = None

    def expire_lease(self, job: Job) -> None:
        """Its time is up: the pins go, the record stays."""
        self._ledger.counters["expired_leases"] += 1
        del self.leased[job]
        self._leases.end(job.lease)
        job.lease.chunks.clear()
        job.lease.remaining.clear()
        self._finish(job)

    def drop(self, job: Job) -> int:
        """Ends a record and what it pins; how many pins were released. Its prefetch must have been ended."""
        assert job.prefetch is None
        released = self._leases.end(job.lease)
        job.lease.chunks.clear()
        job.lease.remaining.clear()
        engine = job.engine
        del self.jobs[job.job_id]
        del engine.jobs[job.job_id]
        if engine.requests.get((job.request_id, job.attempt)) is job:
            del engine.requests[job.request_id, job.attempt]
        of_request = engine.by_request[job.request_id]
        del of_request[job.job_id]
        if not of_request:
            del engine.by_request[job.request_id]
        for order in (self.leased, self.recorded, self.read, self.finished, engine.finished):
            order.pop(job, None)
        self.record_bytes -= job.cost_bytes
        self._ledger.outbox.append(JobDone(job.job_id))
        return released
