# SPDX-License-Identifier: Apache-2.0
"""Each way to copy, on the fake driver: bytes of some blocks come back in others, and nothing else is touched."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest

from kvgrpc.core.types import Direction, Extent, Piece, RunSlice, SliceReport
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.cards import Cards
from kvgrpc.transfer.cuda import CopyMode, CudaMover
from kvgrpc.transfer.layout import check_layout
from tests.cards import fake
from tests.cards.cases import QUICK, Case
from tests.kvdata import GQA, LAYERS_ONE_TENSOR, Image, Kv

ARENA, PART = 4 << 20, 64 << 10


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    fake.driver()
    arena = Arena(ARENA)
    yield arena
    arena.close()


@pytest.fixture(scope="module")
def cards(arena: Arena) -> Iterator[Cards]:
    cards = Cards(arena, PART)
    cards.pin_all()
    yield cards
    cards.close()


def round_trip(case: Case, mover: CudaMover, arena: Arena, start: int) -> None:
    blocks = case.chunk_tokens // case.block_size
    pool, chance = 2 * blocks + 5, random.Random(case.name)
    memory = [fake.CardMemory(4 << 20) for _ in range(2)]
    facts = (case.kv, case.arrangement, case.block_size, pool)
    one, two = (Image(*facts, lead=case.lead, tail=case.tail, buffer=own.buffer) for own in memory)
    for number, (own, image) in enumerate(zip(memory, (one, two), strict=True)):
        mover.map(number, own.layout(image.layout()))
    size = check_layout(one.layout(), case.chunk_tokens).object_bytes(case.chunk_tokens)
    slots = [laid(start + chunk * (size + (1 << 10)), size, case.page_bytes) for chunk in range(2)]
    ids, others = (chance.sample(range(pool), 2 * blocks) for _ in range(2))
    one.write(ids, 700)
    arena.view(0, ARENA)[:] = b"\x5a" * ARENA
    for number, (direction, names) in enumerate(((Direction.STORE, ids), (Direction.RETRIEVE, others))):
        pieces = tuple(
            Piece(chunk, slot, (0, size), (0,), (tuple(names[chunk * blocks : (chunk + 1) * blocks]),))
            for chunk, slot in enumerate(slots)
        )
        assert mover.copy(RunSlice(1, "client", number, 1, direction, pieces)) == SliceReport(2)
    for chunk, slot in enumerate(slots):
        stored = b"".join(bytes(arena.view(*extent)) for extent in slot)
        assert stored == one.object_bytes(ids[chunk * blocks : (chunk + 1) * blocks])
    whole = bytes(arena.view(0, ARENA))
    assert whole.count(b"\x5a") >= ARENA - 2 * size  # nothing beside the objects
    assert two.wrong_tokens(others, 700) == [] and two.untouched(others)
    for number, own in enumerate(memory):
        mover.unmap(number)
        own.free()


def laid(start: int, size: int, page_bytes: int) -> tuple[Extent, ...]:
    """One extent, or pages with other bytes between them."""
    page = page_bytes or size
    return tuple((start + at // page * (page + 16), min(page, size - at)) for at in range(0, size, page))


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_stored_blocks_come_back_elsewhere(case: Case, arena: Arena, cards: Cards) -> None:
    """Also over the borders of pinned parts."""
    for start in (0, PART - 1000):
        round_trip(case, CudaMover(cards, case.chunk_tokens, CopyMode.DMA), arena, start)


def test_equal_distances_are_copied_at_once(arena: Arena, cards: Cards) -> None:
    """A block's layers and planes lie equally far apart on both sides: one copy for all of them; in memory whose layers
    are tensors of their own, too, if they are parts of one allocation."""
    before = fake.driver().fakeGrids()
    case = next(case for case in QUICK if case.name == f"{LAYERS_ONE_TENSOR}")
    round_trip(case, CudaMover(cards, case.chunk_tokens, CopyMode.DMA), arena, 0)
    blocks = 2 * case.chunk_tokens // case.block_size
    assert 0 < fake.driver().fakeGrids() - before <= 2 * blocks


def test_parts_of_a_chunk_come_back(arena: Arena, cards: Cards) -> None:
    """Slices that end inside rows, and ranges that begin inside a chunk."""
    kv, chunk = Kv(6, 2, 2, 16), 64
    memory = fake.CardMemory(1 << 20)
    image = Image(kv, LAYERS_ONE_TENSOR, 16, 16, buffer=memory.buffer)
    mover = CudaMover(cards, chunk, CopyMode.DMA)
    mover.map(1, memory.layout(image.layout()))
    size, ids, others = kv.token_bytes * chunk, (9, 2, 11, 4), (0, 7, 14, 5)
    image.write(ids, 0)
    cuts = (0, 700, size // 2 + 100, size)
    for direction, names in ((Direction.STORE, ids), (Direction.RETRIEVE, others)):
        for low, high in pairwise(cuts):
            piece = Piece(0, ((4096, size),), (low, high), (0,), (names,))
            assert mover.copy(RunSlice(1, "client", 1, 1, direction, (piece,))) == SliceReport(1)
    assert image.wrong_tokens(others) == []
    tail = Piece(0, ((4096, size),), (0, size), (2,), ((12, 13),))
    assert mover.copy(RunSlice(1, "client", 1, 1, Direction.RETRIEVE, (tail,))) == SliceReport(1)
    assert image.wrong_tokens((12, 13), 32) == [] and image.untouched((*ids, *others, 12, 13))
    mover.unmap(1)
    memory.free()


def test_a_block_that_is_named_twice_gets_the_last_one(arena: Arena, cards: Cards) -> None:
    """Copies of one target go one after the other, whatever could be copied at once."""
    chunk = 32
    memory = fake.CardMemory(1 << 20)
    image = Image(GQA, LAYERS_ONE_TENSOR, 16, 8, buffer=memory.buffer)
    mover = CudaMover(cards, chunk, CopyMode.DMA)
    mover.map(1, memory.layout(image.layout()))
    size = GQA.token_bytes * chunk
    image.write((3, 5), 0)
    for direction, names in ((Direction.STORE, (3, 5)), (Direction.RETRIEVE, (6, 6))):
        piece = Piece(0, ((0, size),), (0, size), (0,), (names,))
        assert mover.copy(RunSlice(1, "client", 1, 1, direction, (piece,))) == SliceReport(1)
    assert image.wrong_tokens((6,), 16) == []
    mover.unmap(1)
    memory.free()
