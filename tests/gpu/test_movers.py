# SPDX-License-Identifier: Apache-2.0
"""Each way to copy, on a card: bytes of one process come back in another one's blocks, and nothing else is touched."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import Direction, Extent, Piece, RunSlice, SliceReport
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.cards import Cards
from kvgrpc.transfer.cuda import CopyMode, CudaMover
from kvgrpc.transfer.layout import check_layout
from tests.cards.cases import CASES, QUICK, Case
from tests.cards.engines import EngineProcess

pytestmark = pytest.mark.gpu

PART_BYTES = 4 << 20
RUN_APART = 256 << 10
"""Of eight blocks: 2 MiB, so that an allocation has nothing else in it."""
MODES = (CopyMode.DMA, CopyMode.STAGED, CopyMode.DIRECT)


@pytest.fixture(scope="module")
def cards(arena: Arena) -> Iterator[Cards]:
    cards = Cards(arena, PART_BYTES)
    cards.pin_all()
    yield cards
    cards.close()


class Slots:
    """Extents of the arena: one, or pages in no order, all with other bytes between them."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes, self._at = page_bytes, 0
        self._chance = random.Random(page_bytes)

    def take(self, size_bytes: int) -> tuple[Extent, ...]:
        page = self._page_bytes or size_bytes
        sizes = [min(page, size_bytes - at) for at in range(0, size_bytes, page)]
        extents: list[Extent] = []
        for size in sizes:
            extents.append((self._at + 16, size))
            self._at += 16 + size
        if len(set(sizes)) == 1:
            self._chance.shuffle(extents)
        return tuple(extents)


def slices(
    mapping_id: int, direction: Direction, slots: list[tuple[Extent, ...]], ids: list[int], blocks: int, size: int
) -> RunSlice:
    pieces = [
        Piece(chunk, slot, (0, size), (0,), (tuple(ids[chunk * blocks : (chunk + 1) * blocks]),))
        for chunk, slot in enumerate(slots)
    ]
    return RunSlice(1, "client", mapping_id, 1, direction, tuple(pieces))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_stored_blocks_come_back_elsewhere(
    case: Case, mode: CopyMode, source: EngineProcess, target: EngineProcess, arena: Arena, cards: Cards
) -> None:
    round_trip(case, mode, source, target, arena, cards)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_small_ones_for_the_sanitizer(
    mode: CopyMode, source: EngineProcess, target: EngineProcess, arena: Arena, cards: Cards
) -> None:
    for case in QUICK:
        round_trip(case, mode, source, target, arena, cards)


def round_trip(
    case: Case, mode: CopyMode, source: EngineProcess, target: EngineProcess, arena: Arena, cards: Cards
) -> None:
    mover = CudaMover(cards, case.chunk_tokens, mode)
    blocks = case.chunk_tokens // case.block_size
    chance = random.Random(case.name)
    count, pool = 2 * blocks, 2 * blocks + 5
    facts = (case.kv, case.arrangement, case.block_size, pool)
    layouts = [engine.make(*facts, lead=case.lead, tail=case.tail) for engine in (source, target)]
    mapped = [mover.map(number, layout) for number, layout in enumerate(layouts)]
    assert mapped[0] != mapped[1]
    size = check_layout(layouts[0], case.chunk_tokens).object_bytes(case.chunk_tokens)
    room = Slots(case.page_bytes)
    slots = [room.take(size) for _ in range(2)]
    ids, others = chance.sample(range(pool), count), chance.sample(range(pool), count)
    source.write(ids, 700)
    arena.view(0, arena.size_bytes)[:] = b"\x5a" * arena.size_bytes
    assert mover.copy(slices(0, Direction.STORE, slots, ids, blocks, size)) == SliceReport(2)
    for chunk, slot in enumerate(slots):
        stored = b"".join(bytes(arena.view(*extent)) for extent in slot)
        assert stored == source.object_bytes(ids[chunk * blocks : (chunk + 1) * blocks])
    assert mover.copy(slices(1, Direction.RETRIEVE, slots, others, blocks, size)) == SliceReport(2)
    assert target.wrong_tokens(others, 700) == []
    assert target.untouched(others)
    for number in range(2):
        mover.unmap(number)
    assert not mover.mapped


def test_slices_that_are_launched_ahead_stay_in_order(
    source: EngineProcess, target: EngineProcess, arena: Arena, cards: Cards
) -> None:
    """Sixteen stores, then sixteen loads, all in flight at once."""
    case = CASES[1]
    blocks = case.chunk_tokens // case.block_size
    for mode in MODES:
        mover = CudaMover(cards, case.chunk_tokens, mode)
        for number, engine in enumerate((source, target)):
            mover.map(number, engine.make(case.kv, case.arrangement, case.block_size, 16 * blocks))
        size = case.kv.token_bytes * case.chunk_tokens
        ids = list(range(16 * blocks))
        source.write(ids)
        for number, direction in enumerate((Direction.STORE, Direction.RETRIEVE)):
            flights = [
                mover.launch(slices(number, direction, [((at * size, size),)], ids[at * blocks :], blocks, size))
                for at in range(16)
            ]
            reports = [flight if isinstance(flight, SliceReport) else flight.wait() for flight in flights]
            assert reports == [SliceReport(1)] * 16
        assert target.wrong_tokens(ids) == []
        for number in range(2):
            mover.unmap(number)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_layers_in_allocations_of_their_own(
    mode: CopyMode, source: EngineProcess, arena: Arena, cards: Cards, capsys: pytest.CaptureFixture[str]
) -> None:
    """A chunk of the first block and the last one: where allocations follow each other, no copy goes from one into the
    next."""
    layers, blocks, run = 4, 8, RUN_APART
    mover, size = CudaMover(cards, 2, mode), 2 * layers * run
    mover.map(1, source.make_apart(layers, blocks, run))
    ends = [one.pointer + one.size_bytes for one in cards.opened[0].memory.values()]
    begins = [one.pointer for one in cards.opened[0].memory.values()]
    with capsys.disabled():
        print("gaps between allocations:", [begin - end for end, begin in zip(ends, begins[1:], strict=False)])
    for number, (direction, ids) in enumerate(((Direction.STORE, (0, 7)), (Direction.RETRIEVE, (0, 7)))):
        piece = Piece(0, ((0, size),), (0, size), (0,), (ids,))
        assert mover.copy(RunSlice(number, "c", 1, 1, direction, (piece,))) == SliceReport(1)
        if direction is Direction.STORE:
            stored = b"".join(bytes([16 * layer + at]) * run for layer in range(layers) for at in ids)
            assert bytes(arena.view(0, size)) == stored
            arena.view(0, size)[:] = b"\xee" * size
    mover.unmap(1)
    wanted = [[16 * layer + at if at not in (0, 7) else 0xEE for at in range(blocks)] for layer in range(layers)]
    assert source.free_apart(run) == wanted


def test_two_registrations_share_an_allocation(source: EngineProcess, cards: Cards) -> None:
    """The first to go takes nothing from the other."""
    case = CASES[1]
    mover = CudaMover(cards, case.chunk_tokens, CopyMode.DMA)
    layout = source.make(case.kv, case.arrangement, case.block_size, 8)
    assert mover.map(1, layout) == mover.map(2, layout)
    mover.unmap(1)
    source.write([0, 1, 2, 3])
    size = case.kv.token_bytes * case.chunk_tokens
    assert mover.copy(slices(2, Direction.STORE, [((0, size),)], [0, 1, 2, 3], 4, size)) == SliceReport(1)
    mover.unmap(2)


def test_memory_made_anew_at_the_same_place_is_not_taken_for_the_old(source: EngineProcess, cards: Cards) -> None:
    """Its handle differs, so nobody keeps the old allocation for it."""
    case = CASES[1]
    layouts = [source.make(case.kv, case.arrangement, case.block_size, 8) for _ in range(3)]
    handles = {layout.memory[0].handle for layout in layouts}
    assert len(handles) == 3


def test_bad_handles_are_refused(source: EngineProcess, cards: Cards) -> None:
    case = CASES[1]
    mover = CudaMover(cards, case.chunk_tokens, CopyMode.DMA)
    layout = source.make(case.kv, case.arrangement, case.block_size, 8)
    piece = layout.memory[0]
    for changed, reason in (
        ({"handle": bytes(64)}, Reason.MEMORY),
        ({"handle": b"x" * 64}, Reason.MEMORY),
        ({"device_uuid": "GPU-00000000-0000-0000-0000-000000000000"}, Reason.CUDA_UNSUPPORTED),
        ({"offset_bytes": 1 << 40}, Reason.MEMORY),
    ):
        wrong = type(piece)(**{name: changed.get(name, getattr(piece, name)) for name in type(piece).__slots__})
        with pytest.raises(Refusal) as refused:
            mover.map(9, type(layout)((wrong,), layout.groups))
        assert refused.value.reason is reason, refused.value
    assert not mover.mapped
