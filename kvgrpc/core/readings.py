# SPDX-License-Identifier: Apache-2.0
"""Reads of whole objects by clients without memory: one chunk at a time is pinned, whatever a stream's length.

The lease holds what is still to come, as for a Retrieve. Whoever copies the bytes does it between two calls of the
core, so nothing is in flight that the core does not see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgrpc.core.checks import check_range
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.geometry import ALL
from kvgrpc.core.index import Chunk
from kvgrpc.core.jobs import Job
from kvgrpc.core.leases import finish_read
from kvgrpc.core.sessions import Client
from kvgrpc.core.slicing import AFTER_FAILURE, LOADED, MISSING, run_lengths
from kvgrpc.core.slots import Slot
from kvgrpc.core.types import ChunkOutcome, ChunkResult, Reader, TokenRange

if TYPE_CHECKING:
    from kvgrpc.core.cache import Bookkeeper

IN_PARTS = "chunks of models whose layers need different things are in parts, which do not travel as bytes"


def begin(
    book: Bookkeeper, client_id: str, engine_id: str, job_id: bytes, reader: Reader, tokens: TokenRange
) -> Reading:
    """Refuses: NOT_ATTACHED, ENGINE_UNKNOWN, ENGINE_DRAINING, JOB_UNKNOWN, JOB_PENDING, GROUP_KIND_UNSUPPORTED, RANGE,
    READER_UNKNOWN."""
    client = book.sessions.find_working(client_id, engine_id)
    job, size = book.jobs.find(client.engine, job_id), book.limits.chunk_tokens
    if job.space.facts.needs != (ALL,):
        raise Refusal(Reason.GROUP_KIND_UNSUPPORTED, IN_PARTS, field="job_id")
    check_range(tokens, size, book.limits)
    if not job.status.done:
        raise Refusal(Reason.JOB_PENDING, "the lookup is still prefetching; query it first", retry_after_ms=10)
    return Reading(book, client, job, reader, range(tokens.start // size, tokens.end // size))


class Reading:
    """One stream: its chunks [first, end) of a job, for one reader. ``open_next``, then ``done``, until there is none;
    then ``results``; ``close`` however it ends."""

    def __init__(self, book: Bookkeeper, client: Client, job: Job, reader: Reader, places: range) -> None:
        """Refuses: READER_UNKNOWN."""
        self._index, self._leases, self._jobs = book.index, book.leases, book.jobs
        self._client, self._job = client, job
        self._open: Chunk | None = None
        self._rank, self._bit = reader.kv_rank, job.lease.bit(reader)
        self._first, self.at, self._end = places.start, places.start, places.stop
        self.order = ""
        """How the runs of the object that is open follow each other: the form may change while its bytes are copied."""

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
        self._open, self.order = chunk, job.space.facts.forms[self._rank][0].order
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
