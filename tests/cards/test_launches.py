# SPDX-License-Identifier: Apache-2.0
"""What copies may not do once launched, on the fake driver: leave an allocation, overtake each other, keep much."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvgrpc.api import BlockForm, CudaIpcMemory, KvGroup, Layout, Runs
from kvgrpc.core.types import Direction, Extent, Piece, RunSlice, SliceReport
from kvgrpc.transfer import _native
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.base import Flight
from kvgrpc.transfer.cards import Cards
from kvgrpc.transfer.cuda import CopyMode, CudaMover
from tests.cards import fake
from tests.served import wait_until

MIB = 1 << 20
STORE, RETRIEVE = Direction.STORE, Direction.RETRIEVE
MODES = (CopyMode.DMA, CopyMode.STAGED, CopyMode.DIRECT)


@pytest.fixture
def arena() -> Iterator[Arena]:
    fake.driver()
    arena = Arena(32 * MIB)
    yield arena
    arena.close()


@pytest.fixture
def cards(arena: Arena) -> Iterator[Cards]:
    cards = Cards(arena, 32 * MIB)
    cards.pin_all()
    for card in cards.opened:
        card.copier.load(1)
        card.has_kernel = True
    yield cards
    cards.close()


def shared(memory: fake.CardMemory) -> CudaIpcMemory:
    handle, uuid, _, size = _native.export_memory(memory.pointer)
    return CudaIpcMemory(handle, uuid, 0, size)


def layout_of(memory: tuple[fake.CardMemory, ...], num_blocks: int, *runs: Runs) -> Layout:
    group = KvGroup(1, num_blocks, runs, BlockForm.OPAQUE, backend="X", layout="Y")
    return Layout(tuple(map(shared, memory)), (group,))


def piece(chunk: int, ids: tuple[int, ...], size: int, extents: tuple[Extent, ...]) -> Piece:
    return Piece(chunk, extents, (0, size), (0,), (ids,))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_a_copy_does_not_leave_its_allocation(mode: CopyMode, arena: Arena, cards: Cards) -> None:
    """Found by review: layers are allocations of their own, one behind the other; a chunk that begins with the first
    block and ends with the last one went over from one layer to the next in one copy, which the driver refuses."""
    blocks, run = 8, 4096
    memory = tuple(fake.CardMemory(blocks * run) for _ in range(2))
    mover = CudaMover(cards, 2, mode)
    mover.map(1, layout_of(memory, blocks, *(Runs(at, 0, 1, 0, 1, 0, run, run) for at in range(2))))
    pointers = [one.pointer for one in cards.opened[0].memory.values()]
    assert pointers[1] == pointers[0] + blocks * run
    for number, own in enumerate(memory):
        for block in range(blocks):
            own.buffer[block * run : (block + 1) * run] = bytes([10 * number + block]) * run
    size = 4 * run
    assert mover.copy(RunSlice(1, "c", 1, 1, STORE, (piece(0, (0, 7), size, ((0, size),)),))) == SliceReport(1)
    assert bytes(arena.view(0, size)) == b"".join(bytes([at]) * run for at in (0, 7, 10, 17))
    for own in memory:
        own.buffer[:] = bytes(blocks * run)
    assert mover.copy(RunSlice(2, "c", 1, 1, RETRIEVE, (piece(0, (0, 7), size, ((0, size),)),))) == SliceReport(1)
    for number, own in enumerate(memory):
        assert [own.buffer[block * run] for block in (0, 1, 6, 7)] == [10 * number, 0, 0, 10 * number + 7]
    mover.unmap(1)
    for own in memory:
        own.free()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_blocks_that_are_named_twice_wait_for_what_was_launched_before(
    mode: CopyMode, arena: Arena, cards: Cards
) -> None:
    """Found by review: such a slice goes by copy engines whatever the mode, and overtook the kernels before it."""
    blocks, run, chunk = 128, 4096, 64
    memory = fake.CardMemory(blocks * run)
    mover = CudaMover(cards, chunk, mode)
    mover.map(1, layout_of((memory,), blocks, Runs(0, 0, 1, 0, 1, 0, run, run)))
    size = chunk * run
    arena.view(0, MIB)[:] = b"\1" * MIB
    arena.view(MIB, MIB)[:] = b"\2" * MIB
    arena.view(2 * MIB, MIB)[:] = b"\3" * MIB
    paged = tuple((at * 2 * run, run) for at in range(chunk))  # each a copy of its own into the ring
    orders = (
        (paged, tuple(range(64))),
        (((MIB, size),), (5, 5, *range(66, 128))),
        (((2 * MIB, size),), tuple(range(64))),
    )
    for upto in (2, 3):
        flights: list[Flight] = []
        for number, (extents, ids) in enumerate(orders[:upto]):
            launched = mover.launch(RunSlice(number, "c", 1, 1, RETRIEVE, (piece(0, ids, size, extents),)))
            assert not isinstance(launched, SliceReport)
            flights.append(launched)
        assert [flight.wait() for flight in flights] == [SliceReport(1)] * upto
        assert memory.buffer[5 * run] == upto
        assert memory.buffer[6 * run] == (1 if upto == 2 else 3)
    mover.unmap(1)
    memory.free()


@pytest.mark.parametrize("mode", MODES[1:], ids=lambda mode: mode.value)
def test_tiny_runs_take_a_bounded_amount_of_host_memory(mode: CopyMode, arena: Arena, cards: Cards) -> None:
    """Found by review: the lists that the kernel reads lie in pinned memory, 0.8 MB for 32,768 runs, and a slice kept
    all of its own to its end."""
    layers, chunk, run = 512, 1024, 16
    stride = chunk * 2 * run
    memory = fake.CardMemory(layers * stride)
    mover = CudaMover(cards, chunk, mode)
    mover.map(1, layout_of((memory,), chunk, Runs(0, 0, layers, stride, 1, 0, 2 * run, run)))
    size, before = layers * chunk * run, fake.driver().fakeHostAllocations()
    memory.buffer[:] = bytes(range(256)) * (layers * stride // 256)
    assert mover.copy(
        RunSlice(1, "c", 1, 1, STORE, (piece(0, tuple(range(chunk)), size, ((0, size),)),))
    ) == SliceReport(1)
    assert bytes(arena.view(0, size)) == bytes(at for at in range(256) if at // run % 2 == 0) * (size // 128)
    assert fake.driver().fakeHostAllocations() - before <= 9
    mover.unmap(1)
    memory.free()


def retrieved(cards: Cards, good: int) -> tuple[SliceReport, list[int]]:
    """What a Retrieve of three chunks reports whose copies are refused from some on; a byte of each chunk's blocks."""
    blocks, run, size = 16, 4096, 8192
    memory = fake.CardMemory(blocks * run)
    mover = CudaMover(cards, 2, CopyMode.DMA)
    mover.map(1, layout_of((memory,), blocks, Runs(0, 0, 1, 0, 1, 0, run, run)))
    ids = ((0, 2), (5, 7), (9, 13))
    pieces = tuple(piece(at, ids[at], size, ((at * size, size),)) for at in range(3))
    fake.driver().fakeRefuse(good, False)
    report = mover.copy(RunSlice(1, "c", 1, 1, RETRIEVE, pieces))
    fake.driver().fakeRefuse(-1, False)
    found = [memory.buffer[one * run] for pair in ids for one in pair]
    mover.unmap(1)
    memory.free()
    return report, found


def test_a_copy_that_is_refused_on_its_way_is_torn_as_a_whole(arena: Arena, cards: Cards) -> None:
    """Found by review: only its first chunk was called torn, the others untouched, and they were not: copies of a batch
    go in any order."""
    arena.view(0, MIB)[:] = b"\7" * MIB
    report, found = retrieved(cards, 3)
    assert found == [0, 0, 0, 7, 7, 7]
    assert report == SliceReport(0, "CARD_FAILED", torn=3)
    report, found = retrieved(cards, -1)
    assert (report, found) == (SliceReport(3), [7] * 6)


@pytest.mark.parametrize("mode", MODES[:2], ids=lambda mode: mode.value)
def test_a_launch_that_ends_with_an_exception_leaves_nothing_behind(mode: CopyMode, arena: Arena, cards: Cards) -> None:
    """Found by review: what ended a launch and was no answer of the driver left copies on their way, to places and from
    lists that were free again."""
    run, chunk = 4096, 64
    memory = fake.CardMemory(MIB)
    memory.buffer[:] = b"\7" * MIB
    mover = CudaMover(cards, chunk, mode)
    mover.map(1, layout_of((memory,), MIB // run, Runs(0, 0, 1, 0, 1, 0, run, run)))
    size, paged = chunk * run, tuple((at * 2 * run, run) for at in range(chunk))
    order = RunSlice(1, "c", 1, 1, STORE, (piece(0, tuple(range(0, 2 * chunk, 2)), size, paged),))
    fake.driver().fakeRefuse(chunk - 1, True)
    with pytest.raises(MemoryError):
        mover.launch(order)
    fake.driver().fakeRefuse(-1, False)
    found = bytes(arena.view(0, MIB))
    behind = piece(1, tuple(range(chunk)), size, ((MIB, size),))
    assert mover.copy(RunSlice(2, "c", 1, 1, STORE, (behind,))) == SliceReport(1)
    assert bytes(arena.view(0, MIB)) == found
    mover.unmap(1)
    memory.free()


def test_nobody_waits_for_a_driver_that_is_busy_with_another_client(arena: Arena, cards: Cards) -> None:
    """Found by review: streams were made, and streams and events ended, under the interpreter's lock, while the driver
    was pinning memory."""
    driver, late = fake.driver(), fake.LateWrites()
    memory = fake.CardMemory(MIB)
    mover = CudaMover(cards, 2)
    layout = layout_of((memory,), 8, Runs(0, 0, 1, 0, 1, 0, 4096, 4096))
    mover.map(1, layout)
    acts = (
        lambda: mover.map(2, layout),
        lambda: mover.when_ready(2, late.handle, lambda refusal: None),
        lambda: mover.unmap(2),
    )
    for act in acts:
        driver.fakeBusy(True)
        with ThreadPoolExecutor(1) as pool:
            acting = pool.submit(act)
            wait_until(lambda: driver.fakeWaiting() > 0, 10)
            driver.fakeBusy(False)
            acting.result(10)
        assert driver.fakeStuck() == 0
    mover.unmap(1)
    memory.free()
