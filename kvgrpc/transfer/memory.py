# SPDX-License-Identifier: Apache-2.0
"""A mover over plain bytearrays, shipped for tests and for engines' own demonstrations: real layouts, real bytes, and
it can be steered.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from kvgrpc.api import CudaIpcMemory, Layout
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import Direction, Part, Piece, RunSlice, SliceReport
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.gates import Gate, Gates
from kvgrpc.transfer.layout import check_layout, digest
from kvgrpc.transfer.runs import Run, piece_runs


@dataclass(frozen=True, slots=True)
class Failure:
    """Stop at piece ``piece`` of the next slice, after ``after_runs`` of its runs, with this reason."""

    piece: int
    after_runs: int
    reason: str


class MemoryMover:
    """Copies between bytearrays, added under names that ``SharedMemory.name`` picks, and the arena.

    Steered by: ``delay_s`` (slept at the start of each slice), ``shuffle`` (a source of chance that reorders the runs
    inside each piece), ``fail_next``, ``hold``. ``slices`` are those that were asked for, in order.

    Threads: as Mover; steer it from any thread.
    """

    def __init__(self, arena: Arena, chunk_tokens: int) -> None:
        self._arena = arena
        self._chunk_tokens = chunk_tokens
        self._named: dict[str, bytearray] = {}
        self._mappings: dict[int, tuple[Layout, tuple[Part, ...], tuple[memoryview, ...]]] = {}
        self._gates = Gates()
        self._failure: Failure | None = None
        self.delay_s = 0.0
        self.shuffle: random.Random | None = None
        self.slices: list[RunSlice] = []

    def add_memory(self, name: str, memory: bytearray) -> None:
        """Engine memory that layouts may name from now on."""
        self._named[name] = memory

    def hold(self, after_runs: int, direction: Direction | None = None, client_id: str = "") -> Gate:
        """A gate before the run that comes after ``after_runs`` others."""
        return self._gates.hold(after_runs, direction, client_id)

    def fail_next(self, piece: int = 0, after_runs: int = 0, reason: str = "MEMORY_IO") -> None:
        """Makes the next slice stop at that piece: before its copy (``after_runs`` 0), or torn: in its middle, at the
        latest after its last run.
        """
        self._failure = Failure(piece, after_runs, reason)

    @property
    def mapped(self) -> frozenset[int]:
        """Ids that are mapped."""
        return frozenset(self._mappings)

    def map(self, mapping_id: int, layout: Layout) -> bytes:
        parts = check_layout(layout, self._chunk_tokens).parts(self._chunk_tokens)
        assert mapping_id not in self._mappings, "a mapping id is used twice"
        views: list[memoryview] = []
        for index, memory in enumerate(layout.memory):
            if isinstance(memory, CudaIpcMemory):
                raise Refusal(Reason.CUDA_UNSUPPORTED, "this mover has no device memory", field=f"memory[{index}]")
            named = self._named.get(memory.name)
            if named is None:
                raise Refusal(
                    Reason.MEMORY, f"there is no memory {memory.name!r}", field=f"memory[{index}].shared.name"
                )
            end = memory.offset_bytes + memory.size_bytes
            if end > len(named):
                sentence = f"memory {memory.name!r} has {len(named)} bytes; the layout reaches up to byte {end}"
                raise Refusal(Reason.MEMORY, sentence, field=f"memory[{index}].shared.size_bytes")
            views.append(memoryview(named)[memory.offset_bytes : end])
        self._mappings[mapping_id] = (layout, parts, tuple(views))
        return digest(layout, [id(view.obj) for view in views])

    def copy(self, work: RunSlice) -> SliceReport:
        layout, parts, views = self._mappings[work.mapping_id]
        failure, self._failure = self._failure, None
        self.slices.append(work)
        time.sleep(self.delay_s)
        for done, piece in enumerate(work.pieces):
            stop = failure if failure and failure.piece == done else None
            moved = 0
            for run in self._gates.pace(work, self._ordered(layout, piece, parts[work.part])):
                if stop and moved == stop.after_runs:
                    break
                self._move(work.direction, views[run.memory_index], run)
                moved += 1
            if stop:
                return SliceReport(done, stop.reason, moved > 0)
        return SliceReport(len(work.pieces))

    def unmap(self, mapping_id: int) -> None:
        _, _, views = self._mappings.pop(mapping_id, (None, (), ()))
        for view in views:
            view.release()

    def close(self) -> None:
        for mapping_id in tuple(self._mappings):
            self.unmap(mapping_id)

    def _ordered(self, layout: Layout, piece: Piece, part: Part) -> Iterator[Run]:
        runs = piece_runs(layout, self._chunk_tokens, piece, part)
        if self.shuffle is None:
            return runs
        shuffled = list(runs)
        self.shuffle.shuffle(shuffled)
        return iter(shuffled)

    def _move(self, direction: Direction, engine: memoryview, run: Run) -> None:
        engine = engine[run.offset : run.offset + run.length]
        arena = self._arena.view(run.position, run.length)
        if direction is Direction.STORE:
            arena[:] = engine
        else:
            engine[:] = arena
