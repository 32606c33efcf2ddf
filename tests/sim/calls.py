# SPDX-License-Identifier: Apache-2.0
"""A Store or Retrieve as its engine sees it, and what its answer must be worth."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from kvgrpc.core.types import NULL_BLOCK, ChunkOutcome, ChunkResult, RetrieveCommand, StoreCommand
from tests.sim.loop import PromiseError, Signal
from tests.sim.memory import Cell, EngineMemory
from tests.sim.truth import Lease, Space

STORE_REFUSALS = {"NO_ROOM", "QUOTA", "NO_STORE", "CLEARED", "OBJECT_TOO_LARGE", "SETTLING_LIMIT", "NOT_WRITER"}


@dataclass
class Call:
    """One call. ``blocks`` belong to the server until ``returned``."""

    client_id: str
    command: StoreCommand | RetrieveCommand
    memory: EngineMemory
    kv_rank: int
    tp_rank: int
    space: Space
    version: int
    keys: dict[int, bytes]
    """By chunk index, for every chunk that the range touches."""
    lease: Lease | None = None
    ended: Signal = field(default_factory=Signal)
    results: tuple[ChunkResult, ...] | None = None
    answered_at: int = -1
    """Number of the contact with the bookkeeper that brought the answer."""
    stopped: bool = False
    """Somebody gave it up: fence, cancel, the client's or engine's end."""
    returned: bool = False
    moved: dict[tuple[int, int], int] = field(default_factory=dict)
    """Cells of each chunk and part that reports say have been copied."""
    broken: dict[int, bool] = field(default_factory=dict)
    """Chunks at which a copy was made to fail: torn?"""
    before: dict[tuple[int, int], list[Cell]] = field(default_factory=dict)
    """What the blocks of a Retrieve held when it was called."""

    @property
    def call_id(self) -> int:
        return self.command.call_id

    def content(self, chunk: int, cell: Hashable) -> Cell:
        """What a store's blocks hold there."""
        return self.space.content(self.version, self.keys[chunk], self.kv_rank, cell)

    def part(self, chunk: int, part: int = 0) -> list[tuple[Hashable, int, int, int]]:
        """Cells of the chunk inside the range that the engine has: (index in the object, group, block id, cell of the
        block)."""
        size = self.memory.shape.chunk_tokens
        found: list[tuple[Hashable, int, int, int]] = []
        for index, (group, block, inner) in enumerate(self.memory.places[part]):
            block_size = self.memory.shape.groups[group].block_size
            first = chunk * size + block * block_size
            if self.command.range.start <= first and first + block_size <= self.command.range.end:
                slot = (first - self.command.range.start) // block_size
                if self.command.blocks[group][slot] != NULL_BLOCK:
                    found.append(((part, index) if part else index, group, self.command.blocks[group][slot], inner))
        return found

    def remember_blocks(self) -> None:
        for group, ids in enumerate(self.command.blocks):
            for block in set(ids) - {NULL_BLOCK}:
                self.before[(group, block)] = list(self.memory.blocks[group][block])


def flatten(call: Call) -> dict[int, tuple[ChunkOutcome, str]]:
    """Results by chunk; they cover exactly the call's chunks, in order."""
    flat: dict[int, tuple[ChunkOutcome, str]] = {}
    for result in call.results or ():
        if result.count < 1 or (flat and result.first_chunk != max(flat) + 1):
            raise PromiseError(f"results of call {call.call_id} are not consecutive: {call.results}")
        for chunk in range(result.first_chunk, result.first_chunk + result.count):
            flat[chunk] = (result.outcome, result.reason)
    if sorted(flat) != sorted(call.keys):
        raise PromiseError(f"results of call {call.call_id} name chunks {sorted(flat)}, not {sorted(call.keys)}")
    return flat


def check_failure(call: Call, chunk: int, outcome: ChunkOutcome, reason: str, failed_before: bool) -> None:
    """A chunk that is FAILED or TORN has a cause that the world knows."""
    torn = call.broken.get(chunk)
    if outcome is ChunkOutcome.TORN:
        begun = (chunk, 0) in call.moved  # by an earlier slice, when a chunk is bigger than a slice
        if torn is not True and not (begun and (call.stopped or torn is False)):
            raise PromiseError(f"chunk {chunk} of call {call.call_id} answered torn, but no copy of it was cut")
    elif reason == "REVOKED":
        if not call.stopped:
            raise PromiseError(f"chunk {chunk} of call {call.call_id} answered revoked, but nobody revoked the call")
    elif reason == "AFTER_FAILURE":
        if not failed_before:
            raise PromiseError(f"chunk {chunk} of call {call.call_id} answered AFTER_FAILURE without a failure")
    elif torn is None:
        raise PromiseError(f"chunk {chunk} of call {call.call_id} answered failed ({reason}), but no copy of it failed")
    elif torn:
        raise PromiseError(f"chunk {chunk} of call {call.call_id} was torn, but is answered as untouched")


def check_store(call: Call) -> None:
    """STORED means that all bytes have arrived; every other answer has its cause."""
    failed = False
    whole = len(call.memory.places[0])
    for chunk, (outcome, reason) in flatten(call).items():
        if outcome is ChunkOutcome.STORED:
            moved = call.moved.get((chunk, 0), 0)
            if moved != whole:
                raise PromiseError(f"chunk {chunk} of call {call.call_id} is answered stored after {moved} cells")
        elif outcome is ChunkOutcome.REFUSED:
            if reason not in STORE_REFUSALS:
                raise PromiseError(f"store refused for an unknown reason: {reason!r}")
            if reason == "CLEARED" and call.space.version == call.version:
                raise PromiseError(f"call {call.call_id} is refused as cleared, but nothing was cleared")
        elif outcome in (ChunkOutcome.FAILED, ChunkOutcome.TORN):
            check_failure(call, chunk, outcome, reason, failed)
            failed = True
        elif outcome not in (ChunkOutcome.RESIDENT, ChunkOutcome.BEING_WRITTEN):
            raise PromiseError(f"a store answered {outcome}")


def check_retrieve(call: Call, now: int) -> None:
    """LOADED chunks hold the bytes asked for, MISSING only what nobody promised, the rest is untouched."""
    lease = call.lease
    assert lease is not None
    reader = (call.kv_rank, call.tp_rank)
    failed = False
    for chunk, (outcome, reason) in flatten(call).items():
        part = call.part(chunk)
        cells = [call.memory.blocks[group][block][inner] for _, group, block, inner in part]
        if outcome is ChunkOutcome.LOADED:
            if failed:
                raise PromiseError(f"chunk {chunk} of call {call.call_id} was loaded after a failure")
            if call.moved.get((chunk, 0), 0) != len(part):
                raise PromiseError(f"chunk {chunk} of call {call.call_id} answered loaded before its copy has ended")
            check_loaded(cells, lease, call.keys[chunk], call.kv_rank, [p[0] for p in part])
            continue
        if outcome is ChunkOutcome.MISSING:
            if chunk < lease.hit_chunks and lease.holds(now, chunk, reader) and not call.stopped and not failed:
                raise PromiseError(f"chunk {chunk} is missing for reader {reader}, though its lease pins it")
        elif outcome in (ChunkOutcome.FAILED, ChunkOutcome.TORN):
            check_failure(call, chunk, outcome, reason, failed)
        else:
            raise PromiseError(f"a retrieve answered {outcome}")
        failed = True
        before = [call.before[(group, block)][inner] for _, group, block, inner in part]
        if outcome is not ChunkOutcome.TORN and cells != before:
            raise PromiseError(
                f"chunk {chunk} of call {call.call_id} is {outcome.value} ({reason}), but its blocks were written"
            )


def check_loaded(cells: list[Cell], lease: Lease, key: bytes, kv_rank: int, indexes: list[Hashable]) -> None:
    """All cells are of one version that the lookup may have meant, and of nothing else."""
    for version in range(lease.version, lease.space.version + 1):
        if cells == [lease.space.content(version, key, kv_rank, index) for index in indexes]:
            return
    wanted = [lease.space.content(lease.version, key, kv_rank, index) for index in indexes]
    found, right = next((c, w) for c, w in zip(cells, wanted, strict=True) if c != w)
    raise PromiseError(f"a loaded chunk holds {found}, where {right} was asked for")


def leading_chunks(call: Call) -> int:
    """How many chunks from the prompt's first on a store has answered as being there."""
    good = (ChunkOutcome.STORED, ChunkOutcome.RESIDENT)
    chunks = 0
    for result in call.results or ():
        if result.outcome not in good or result.first_chunk != chunks:
            break
        chunks += result.count
    return chunks
