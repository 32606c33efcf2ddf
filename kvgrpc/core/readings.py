# SPDX-License-Identifier: Apache-2.0
"""Reads of whole objects by clients without memory: one object at a time is pinned, whatever a stream's length.

The lease holds what is still to come, as for a Retrieve. Whoever copies the bytes does it between two calls of the
core, so nothing is in flight that the core does not see. Of a model whose chunks are in parts the stream has what the
hit needs, chunk by chunk; as for a Retrieve nothing of it is begun unless all is there, and nothing counts as loaded
unless all was read.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvgrpc.core.checks import check_range
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.geometry import bits_of, by_need, needs_of
from kvgrpc.core.index import Chunk, IdentityFacts
from kvgrpc.core.jobs import Job
from kvgrpc.core.keys import part_keys
from kvgrpc.core.leases import finish_read
from kvgrpc.core.parted import WHOLE, touch
from kvgrpc.core.sessions import Client
from kvgrpc.core.slicing import AFTER_FAILURE, LOADED, MISSING, Known, run_lengths
from kvgrpc.core.slots import Slot
from kvgrpc.core.types import ChunkOutcome, ChunkResult, Need, Reader, TokenRange

if TYPE_CHECKING:
    from kvgrpc.core.cache import Bookkeeper

BY_GROUPS = "chunks of this model are several objects, for groups of layers that need different things: ask by groups"


def groups_of(facts: IdentityFacts, chunk_tokens: int) -> dict[Need, tuple[int, ...]]:
    """The groups of each part of a chunk. Refuses: GROUP_KIND_UNSUPPORTED when the identity does not tell."""
    try:
        return by_need(needs_of(facts.identity.stored_form, chunk_tokens))
    except ValueError as error:
        text = f"the identity's stored form does not say what each group needs: {error}"
        raise Refusal(Reason.GROUP_KIND_UNSUPPORTED, text, field="space.space_base") from None


def begin(
    book: Bookkeeper,
    client_id: str,
    engine_id: str,
    job_id: bytes,
    reader: Reader,
    tokens: TokenRange,
    *,
    by_groups: bool = False,
) -> Reading:
    """Refuses: NOT_ATTACHED, ENGINE_UNKNOWN, ENGINE_DRAINING, JOB_UNKNOWN, JOB_PENDING, GROUP_KIND_UNSUPPORTED, RANGE,
    READER_UNKNOWN."""
    client = book.sessions.find_working(client_id, engine_id)
    job, size = book.jobs.find(client.engine, job_id), book.limits.chunk_tokens
    if job.space.facts.needs != WHOLE and not by_groups:
        raise Refusal(Reason.GROUP_KIND_UNSUPPORTED, BY_GROUPS, field="by_groups")
    check_range(tokens, size, book.limits)
    if not job.status.done:
        raise Refusal(Reason.JOB_PENDING, "the lookup is still prefetching; query it first", retry_after_ms=10)
    return Reading(book, client, job, reader, range(tokens.start // size, tokens.end // size))


class Reading:
    """One stream: what the hit of a job needs of its chunks [first, end), for one reader. ``open_next``, then ``done``,
    until there is none; then ``results``; ``close`` however it ends."""

    def __init__(self, book: Bookkeeper, client: Client, job: Job, reader: Reader, places: range) -> None:
        """Refuses: READER_UNKNOWN, GROUP_KIND_UNSUPPORTED."""
        self._desk, self._client, self._job = book.desk, client, job
        self._open: Chunk | None = None
        self._rank, self._bit = reader.kv_rank, job.lease.bit(reader)
        self._places, self._parted = places, job.space.facts.needs != WHOLE
        self._groups = [0]
        if self._parted:
            found = groups_of(job.space.facts, book.limits.chunk_tokens)
            self._groups = [bits_of(found[need]) for need in job.space.facts.needs]
        self._starts = job.lease.starts
        self._keys = [part_keys(job.keys, part) for part in range(len(self._starts))]
        hit = range(places.start, min(places.stop, len(job.keys)))
        self._left = deque((at, part) for at in hit for part, (first, _) in enumerate(self._starts) if at >= first)
        self._lost: int | None = None
        if self._parted:
            self._lost = next((at for at, part in self._left if self._find(at, part) is None), None)
        self._read: dict[int, int] = {}
        """The groups (bits) of each chunk that was read."""
        self.at, self.groups, self.order = places.start, 0, ""
        """Of the object that is open: its chunk, its groups (bits; 0: all), and how its runs follow each other: the
        form may change while its bytes are copied."""

    def _find(self, at: int, part: int) -> Chunk | None:
        chunk = self._job.table.chunks.get(self._keys[part][at])
        return chunk if chunk is not None and chunk.ready >> self._rank & 1 else None

    def open_next(self) -> Slot | None:
        """The slot of the next object, pinned until ``done`` or ``close``; None when there is no more to read."""
        job, jobs = self._job, self._desk.jobs.jobs
        over = self._client.gone or job.engine.draining or job.job_id not in jobs or not job.table.live
        if over or not self._left or self._lost is not None:
            return None
        at, part = self._left[0]
        chunk = self._find(at, part)
        if chunk is None:
            return None
        self._desk.index.pin((chunk,))
        self._desk.leases.reading.append(chunk)
        self._open, self.at, self.groups = chunk, at, self._groups[part]
        self.order = job.space.facts.forms[self._rank][part].order
        return chunk.slots[self._rank]

    def done(self, now: int) -> None:
        """The reader has the open object."""
        self.close()
        at, part = self._left.popleft()
        first, place = self._starts[part]
        finish_read(self._desk.leases, self._job, place + at - first, self._bit)
        self._desk.jobs.unpinned(self._job, now)
        self._read[at] = self._read.get(at, 0) | self.groups

    def close(self) -> None:
        """Nothing is read any more. Harmless when repeated."""
        if self._open is not None:
            self._desk.leases.reading.remove(self._open)
            self._desk.index.unpin((self._open,))
            self._open = None
            end = self._places.stop if self._parted else self.at + 1
            touch(self._desk, self._job.table, self._job.keys[:end], 0, self._job.priority)

    def results(self) -> tuple[ChunkResult, ...]:
        """As for a Retrieve: what was not there is missing, as is all past the hit; between them nothing was tried."""
        lost = self._lost if self._lost is not None or not self._left else self._left[0][0]
        return run_lengths(self._places.start, (self._outcome(at, lost) for at in self._places))

    def _outcome(self, at: int, lost: int | None) -> tuple[Known, int]:
        if at >= len(self._job.keys):
            return MISSING, 0
        if at in self._read and (lost is None or not self._parted):
            return LOADED, self._read[at]
        if at in self._read:
            return (ChunkOutcome.TORN, AFTER_FAILURE), self._read[at]
        if lost is None:
            return LOADED, 0  # the hit needs nothing of it
        return (MISSING if at == lost else (ChunkOutcome.FAILED, AFTER_FAILURE)), 0
