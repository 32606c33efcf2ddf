# SPDX-License-Identifier: Apache-2.0
"""Whatever layout, blocks, places and ranges: what copies of a card do is what the run generator says."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvgrpc.api import BlockForm, CudaIpcMemory, KvGroup, Layout, Runs
from kvgrpc.core.types import Direction, Extent, Part, Piece, RunSlice, SliceReport
from kvgrpc.transfer import _native
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.cards import Cards
from kvgrpc.transfer.cuda import CopyMode, CudaMover
from kvgrpc.transfer.layout import check_layout
from kvgrpc.transfer.runs import piece_runs
from tests.cards import fake

ARENA, PART, MEMORY = 2 << 20, 64 << 10, 256 << 10
SEEDS = 40
STORE, RETRIEVE = Direction.STORE, Direction.RETRIEVE


def groups_of(chance: random.Random, chunk: int, pieces: int) -> tuple[KvGroup, ...]:
    """Entries that follow each other in the pieces of memory, with layers, planes and blocks in any order."""
    ends, groups = [0] * pieces, list[KvGroup]()
    for _ in range(chance.choice((1, 1, 2))):
        block_size = chance.choice([size for size in range(1, chunk + 1) if chunk % size == 0])
        num_blocks, entries = chance.randrange(1, 24), list[Runs]()
        for _ in range(chance.choice((1, 2, 3))):
            run, at = chance.choice((1, 3, 16, 100, 512)), chance.randrange(pieces)
            sizes = {"L": chance.choice((1, 2, 4, 6)), "P": chance.choice((1, 2)), "B": num_blocks}
            strides, reach = dict[str, int](), run
            for axis in chance.choice(("BPL", "PLB", "BLP", "PBL")):
                strides[axis] = reach = reach + chance.choice((0, 0, 7, 16))
                reach *= sizes[axis]
            base = ends[at] + chance.choice((0, 0, 5))
            if base + reach <= MEMORY:
                ends[at] = base + reach
                axes = (sizes["L"], strides["L"], sizes["P"], strides["P"], strides["B"])
                entries.append(Runs(at, base, *axes, run))
        if entries:
            groups.append(KvGroup(block_size, num_blocks, tuple(entries), BlockForm.OPAQUE, backend="X", layout="Y"))
    return tuple(groups)


def places(chance: random.Random, start: int, size: int) -> tuple[Extent, ...]:
    """Room for an object from there on: in one piece, or in pages with gaps, in any order where all are of a size."""
    page, extents, at = chance.choice((size, 777, 4096)), list[Extent](), start
    for done in range(0, size, page):
        extents.append((at, min(page, size - done)))
        at += extents[-1][1] + chance.choice((0, 0, 13))
    if size % page == 0:
        chance.shuffle(extents)
    return tuple(extents)


def slices(chance: random.Random, groups: Sequence[KvGroup], part: Part) -> list[RunSlice]:
    """Of one direction; some name a block twice, some begin inside their chunk, some are cut."""
    direction, at, found = chance.choice((STORE, RETRIEVE)), chance.choice((0, 3, PART - 100)), list[RunSlice]()
    for number in range(chance.choice((1, 2, 3))):
        pieces: list[Piece] = []
        for chunk in range(chance.choice((1, 2, 4))):
            extents = places(chance, at, part.object_bytes)
            at = max(start + length for start, length in extents)
            first = tuple(chance.choice((0, 0, chance.randrange(count))) for count in part.blocks)
            counts = [count - start for count, start in zip(part.blocks, first, strict=True)]
            ids = tuple(
                tuple(chance.sample(range(group.num_blocks), count))
                if count <= group.num_blocks and chance.random() < 0.8
                else tuple(chance.randrange(group.num_blocks) for _ in range(count))
                for group, count in zip(groups, counts, strict=True)
            )
            span = (0, part.object_bytes)
            if chance.random() < 0.3:
                span = tuple(sorted(chance.randrange(part.object_bytes + 1) for _ in range(2)))
            pieces.append(Piece(chunk, extents, (span[0], span[1]), first, ids))
        found.append(RunSlice(number, "c", 1, 1, direction, tuple(pieces)))
    return found


@pytest.mark.parametrize("mode", [CopyMode.DMA, CopyMode.STAGED, CopyMode.DIRECT], ids=lambda mode: mode.value)
def test_copies_are_what_the_run_generator_says(mode: CopyMode) -> None:
    """Slices are launched ahead of each other; a block that is named twice has what was written last."""
    fake.driver()
    arena, copied = Arena(ARENA), 0
    cards = Cards(arena, PART)
    cards.pin_all()
    for card in cards.opened:
        card.copier.load(1)
        card.has_kernel = True
    for seed in range(SEEDS):
        chance = random.Random(seed)
        chunk, pieces = chance.choice((4, 8, 12, 24)), chance.choice((1, 2, 3))
        groups = groups_of(chance, chunk, pieces)
        memory = [fake.CardMemory(MEMORY) for _ in range(pieces)]
        shared = [_native.export_memory(own.pointer) for own in memory]
        layout = Layout(tuple(CudaIpcMemory(handle, uuid, 0, MEMORY) for handle, uuid, _, _ in shared), groups)
        (part,) = check_layout(layout, chunk).parts(chunk)
        orders = slices(chance, groups, part)
        if max(sum(extent) for order in orders for piece in order.pieces for extent in piece.extents) <= ARENA:
            mover = CudaMover(cards, chunk, mode)
            mover.map(1, layout)
            for own in memory:
                own.buffer[:] = chance.randbytes(MEMORY)
            arena.view(0, ARENA)[:] = chance.randbytes(ARENA)
            here, there = bytearray(arena.view(0, ARENA)), [bytearray(own.buffer) for own in memory]
            for order in orders:
                for run in (run for piece in order.pieces for run in piece_runs(layout, chunk, piece)):
                    mine, theirs = slice(run.position, run.position + run.length), there[run.memory_index]
                    other = slice(run.offset, run.offset + run.length)
                    if order.direction is STORE:
                        here[mine] = theirs[other]
                    else:
                        theirs[other] = here[mine]
            flights = [mover.launch(order) for order in orders]
            reports = [flight if isinstance(flight, SliceReport) else flight.wait() for flight in flights]
            assert reports == [SliceReport(len(order.pieces)) for order in orders], seed
            assert arena.view(0, ARENA) == here, seed
            assert [bytearray(own.buffer) for own in memory] == there, seed
            mover.unmap(1)
            copied += 1
        for own in memory:
            own.free()
    assert copied > SEEDS // 2
    cards.close()
    arena.close()
