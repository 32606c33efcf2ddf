# SPDX-License-Identifier: Apache-2.0
"""What a Store or Retrieve call still has to do, slice by slice. The schedule is ``kvgrpc.core.calls``, what is copied
``kvgrpc.core.plans``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain, count, groupby, pairwise, repeat, starmap
from typing import NamedTuple

from kvgrpc.core import types as t
from kvgrpc.core.desk import Desk
from kvgrpc.core.index import Chunk
from kvgrpc.core.slots import Slot
from kvgrpc.core.types import ChunkOutcome as Outcome

AFTER_FAILURE = "AFTER_FAILURE"
SKIPPED = "SKIPPED"
"""Reason of a report of a slice that was not begun, because the one before it stopped early."""
SLICE_PIECES = 1024
"""Most pieces of a slice, however small: all of them are reserved, and ended, in one turn of the loop."""
Known = tuple[Outcome, str]
"""What became of a chunk, and why."""
Targets = tuple[list[Chunk], list[Slot]]
"""Chunks that follow each other, and their slots."""
STORED, RESIDENT, BEING_WRITTEN = (Outcome.STORED, ""), (Outcome.RESIDENT, ""), (Outcome.BEING_WRITTEN, "")
LOADED, MISSING, CLEARED = (Outcome.LOADED, ""), (Outcome.MISSING, ""), (Outcome.REFUSED, "CLEARED")
ABSENT = (Outcome.REFUSED, "NULL_BLOCKS")


def run_lengths(first: int, outcomes: Iterable[tuple[Known, int]]) -> tuple[t.ChunkResult, ...]:
    """Results of the chunks from ``first`` on: what became of each, and the groups where they are not alike."""
    results: list[t.ChunkResult] = []
    for (known, groups), run in groupby(outcomes):
        results.append(t.ChunkResult(first, len(list(run)), *known, groups))
        first += results[-1].count
    return tuple(results)


class Flight(NamedTuple):
    """A slice in flight, one place in the prompt a piece. If it begins inside a chunk (``resumed``) or ends inside one
    (``partial``), it has no other."""

    places: list[int]
    chunks: list[Chunk]
    slots: list[Slot]
    resumed: bool
    partial: bool


class Plan(ABC):
    """A call, as far as its copies go."""

    direction: t.Direction
    part: int
    """What part of the chunks the slice at hand is of: an index into ``Geometry.parts``."""
    num_blocks: int
    block_ids: Sequence[Sequence[int]]

    @cached_property
    def _block_set(self) -> frozenset[int]:
        return frozenset(chain.from_iterable(self.block_ids))

    def touches(self, other: Plan) -> bool:
        """Whether the two calls name a block in common; blocks of different groups may be the same memory."""
        return not all(self._block_set.isdisjoint(ids) for ids in other.block_ids)

    @abstractmethod
    def next_slice(self) -> tuple[t.Piece, ...]:
        """Pieces of the next slice; empty when nothing is left to copy."""

    @abstractmethod
    def slice_done(self, now: int, report: t.SliceReport, *, discard: bool) -> bool:
        """Takes what was copied by the oldest slice in flight; False when the call ends here. ``discard``: it was
        revoked, or has failed before."""

    @abstractmethod
    def abandon(self) -> None:
        """The call was revoked, or has failed, while slices are in flight."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """What has no outcome yet will not be copied."""

    @abstractmethod
    def finish(self, now: int) -> None:
        """The call has ended: lets go of its chunks."""

    @cached_property
    def results(self) -> tuple[t.ChunkResult, ...]:
        """All outcomes, run-length coded; to be asked for when the call has ended."""
        return self._results()

    @abstractmethod
    def _results(self) -> tuple[t.ChunkResult, ...]: ...


class PartPlan(Plan):
    """Cuts one part of the chunks [first, end) of a call into slices and keeps what became of each."""

    def __init__(
        self,
        desk: Desk,
        registration: t.Registration,
        command: t.StoreCommand | t.RetrieveCommand,
        part: t.Part,
        first: int,
        end: int,
    ) -> None:
        self._desk = desk
        self._range = command.range
        self._kv_rank = registration.kv_rank
        self._chunk_tokens = desk.ledger.limits.chunk_tokens
        self._object_bytes = part.object_bytes
        self.of, self.part = part, part.number
        sizes = [registration.geometry.groups[group].block_size for group in part.groups]
        tokens = command.range.end - command.range.start
        self.block_ids = [
            array("I", command.blocks[group][: tokens // size]) for group, size in zip(part.groups, sizes, strict=True)
        ]
        self._sizes = sizes
        self.num_blocks = sum(map(len, self.block_ids))
        self.first = first
        self._at: int = first
        self.end = max(first, end)
        self.outcomes: list[Known | None] = [None] * (self.end - first)
        self._offset = 0
        """Bytes of the open chunk ``_at`` that were ordered; it is then the only one of its slice."""
        self._open: Targets = [], []
        self.flights: deque[Flight] = deque()
        """In the order of their slices."""

    # ---- plan -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _open_next(self, most: int) -> Targets:
        """Moves ``_at`` to the next chunk that needs a copy: this and up to ``most`` - 1 that follow it; empty when
        there is none."""

    def next_slice(self) -> tuple[t.Piece, ...]:
        """As for every plan."""
        room, size = self._desk.ledger.limits.slice_bytes, self._object_bytes
        pieces: list[t.Piece] = []
        places, chunks, slots, resumed = list[int](), list[Chunk](), list[Slot](), self._offset > 0
        while room > 0 and len(pieces) < SLICE_PIECES and not (pieces and size > room):
            if not self._offset:
                self._open = self._open_next(min(max(room // size, 1), SLICE_PIECES - len(pieces)))
            count, until = len(self._open[0]), min(self._offset + room, size)
            if not count:
                break
            pieces += self._pieces(self._open[1], until)
            places += range(self._at, self._at + count)
            chunks += self._open[0]
            slots += self._open[1]
            room -= (until - self._offset) * count
            self._offset = until
            if until == size:
                self._at, self._offset = self._at + count, 0
        if pieces:
            self.flights.append(Flight(places, chunks, slots, resumed, self._offset > 0))
        return tuple(pieces)

    def _pieces(self, slots: list[Slot], until: int) -> Iterable[t.Piece]:
        """The parts of chunks from ``_at`` on that lie in the range, cut to bytes [``_offset``, ``until``)."""
        first: list[int] = []
        columns: list[list[Sequence[int]]] = []
        for ids, size, tail in zip(self.block_ids, self._sizes, self.of.blocks, strict=True):
            step = self._chunk_tokens // size
            start = (self._at * self._chunk_tokens - self._range.start) // size
            ends = range(start + step, start + step * len(slots) + 1, step)
            if tail == step:
                columns.append([ids[begin:end] for begin, end in pairwise((max(start, 0), *ends))])
            else:
                columns.append([ids[max(end - tail, 0) : end] for end in ends])
            first.append(max(tail - step - start, 0))
        extents = [slot.extents for slot in slots]
        span, firsts = repeat((self._offset, until)), chain((tuple(first),), repeat((0,) * len(first)))
        fields = zip(count(self._at), extents, span, firsts, zip(*columns, strict=True), strict=False)
        pieces = starmap(t.Piece, fields)
        return map(_named, pieces) if self.of.need.window else pieces

    # ---- report -----------------------------------------------------------------------------------------------------

    def _set(self, at: int, known: Known, count: int = 1) -> None:
        start = at - self.first
        self.outcomes[start : start + count] = [known] * count

    def stop(self, reason: str) -> None:
        """As for every plan."""
        self.outcomes = [known or (Outcome.FAILED, reason) for known in self.outcomes]
        self._at, self._offset = self.end, 0

    def _results(self) -> tuple[t.ChunkResult, ...]:
        known = [(one, 0) for one in self.outcomes if one is not None]
        assert len(known) == len(self.outcomes), "every chunk has an outcome"
        return run_lengths(self.first, known)


def _named(piece: t.Piece) -> t.Piece:
    """Without the blocks that the engine does not have, which come first."""
    nulls = [list(ids).count(t.NULL_BLOCK) for ids in piece.block_ids]
    first = tuple(map(sum, zip(piece.first_block, nulls, strict=True)))
    return piece._replace(first_block=first, block_ids=tuple(map(_from, piece.block_ids, nulls)))


def _from(ids: Sequence[int], start: int) -> Sequence[int]:
    return ids[start:]
