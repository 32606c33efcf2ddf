# SPDX-License-Identifier: Apache-2.0
"""Reads of whole objects by clients without memory: one chunk at a time is pinned, whatever a stream's length.

The lease holds what is still to come, as for a Retrieve. Whoever copies the bytes does it between two calls of the
core, so nothing is in flight that the core does not see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.geometry import ALL
from kvgrpc.core.index import Chunk, Index
from kvgrpc.core.jobs import Job, Jobs
from kvgrpc.core.leases import Leases, finish_read
from kvgrpc.core.sessions import Client
from kvgrpc.core.slicing import AFTER_FAILURE, LOADED, MISSING, run_lengths
from kvgrpc.core.slots import Slot
from kvgrpc.core.types import ChunkOutcome, ChunkResult, CoreLimits, Reader, TokenRange

if TYPE_CHECKING:
    from kvgrpc.core.cache import Bookkeeper

U32 = 1 << 32


def begin(
    book: Bookkeeper, client_id: str, engine_id: str, job_id: bytes, reader: Reader, tokens: TokenRange
) -> Reading:
    """Refuses: NOT_ATTACHED, ENGINE_UNKNOWN, ENGINE_DRAINING, JOB_UNKNOWN, JOB_PENDING, GROUP_KIND_UNSUPPORTED, RANGE,
    READER_UNKNOWN."""
    client = book.sessions.find_working(client_id, engine_id)
    job = book.jobs.find(client.engine, job_id)
    return Reading(book.index, book.leases, book.jobs, client, job).begin(reader, tokens, book.limits)


class Reading:
    """One stream: its chunks [first, end) of a job, for one reader. ``open_next``, then ``done``, until there is none;
    then ``results``; ``close`` however it ends."""

    def __init__(self, index: Index, leases: Leases, jobs: Jobs, client: Client, job: Job) -> None:
        self._index, self._leases, self._jobs = index, leases, jobs
        self._client, self._job = client, job
        self._open: Chunk | None = None
        self.at = 0

    def begin(self, reader: Reader, tokens: TokenRange, limits: CoreLimits) -> Reading:
        """Refuses: GROUP_KIND_UNSUPPORTED, RANGE, JOB_PENDING, READER_UNKNOWN."""
        if self._job.space.facts.needs != (ALL,):
            text = "chunks of models whose layers need different things are in parts, which are not read as bytes"
            raise Refusal(Reason.GROUP_KIND_UNSUPPORTED, text, field="job_id")
        size = limits.chunk_tokens
        if not 0 <= tokens.start <= tokens.end < U32 or tokens.start % size or tokens.end % size:
            text = f"range [{tokens.start}, {tokens.end}) is not ordered, or not aligned to chunks of {size}"
            raise Refusal(Reason.RANGE, text, field="range")
        if tokens.end - tokens.start > limits.keys_per_call * size:
            raise Refusal(Reason.RANGE, f"range has more than {limits.keys_per_call} chunks", field="range")
        if not self._job.status.done:
            raise Refusal(Reason.JOB_PENDING, "the lookup is still prefetching; query it first", retry_after_ms=10)
        self._rank, self._bit = reader.kv_rank, self._job.lease.bit(reader)
        self._first = self.at = tokens.start // size
        self._end = tokens.end // size
        return self

    def open_next(self) -> Slot | None:
        """The slot of chunk ``at``, pinned until ``done`` or ``close``; None when there is no more to read."""
        job, at = self._job, self.at
        over = self._client.gone or job.engine.draining or job.job_id not in self._jobs.jobs or not job.table.live
        if over or at >= min(self._end, len(job.keys)):
            return None
        chunk = job.table.chunks.get(job.keys[at])
        if chunk is None or not chunk.ready >> self._rank & 1:
            return None
        self._index.pin((chunk,))
        self._leases.reading.append(chunk)
        self._open = chunk
        return chunk.slots[self._rank]

    def done(self, now: int) -> None:
        """The reader has the chunk ``at``."""
        self.close()
        finish_read(self._leases, self._job, self.at, self._bit)
        self._jobs.unpinned(self._job, now)
        self.at += 1

    def close(self) -> None:
        """Nothing is read any more. Harmless when repeated."""
        if self._open is not None:
            self._leases.reading.remove(self._open)
            self._index.unpin((self._open,))
            self._open = None
            self._index.use(self._job.table, self._job.keys[: self.at + 1], self._job.priority)

    def results(self) -> tuple[ChunkResult, ...]:
        """As for a Retrieve: what was not there is missing, as is all past the hit; between them nothing was tried."""
        hit = min(max(len(self._job.keys), self.at), self._end)
        outcomes = [LOADED] * (self.at - self._first) + ([MISSING] if self.at < hit else [])
        outcomes += [(ChunkOutcome.FAILED, AFTER_FAILURE)] * (hit - self._first - len(outcomes))
        outcomes += [MISSING] * (self._end - self._first - len(outcomes))
        return run_lengths(self._first, ((known, 0) for known in outcomes))
