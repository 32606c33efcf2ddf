# SPDX-License-Identifier: Apache-2.0
"""Several groups, of other kinds than FULL too, in memory of a (fake) card that they share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvgrpc.core.types import Direction, Piece, RunSlice, SliceReport
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.base import Flight
from kvgrpc.transfer.cards import Cards
from kvgrpc.transfer.cuda import CopyMode, CudaMover
from kvgrpc.transfer.layout import check_layout
from tests.cards import fake
from tests.cards.pool import CHUNK, Pool, round_trip
from tests.served import Served, serving

FLAGS = ("--log-format", "json", "--l1-size", "64MiB", "--chunk-tokens", str(CHUNK))


@pytest.fixture(scope="module", params=["auto", "dma", "staged", "direct"])
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in fake.environment().items():
            patch.setenv(name, value)
        with serving("--copy-mode", request.param, *FLAGS, module="tests.cards.serve") as served:
            yield served


@pytest.mark.parametrize("page", [512, 64 << 10])
def test_what_all_groups_need_comes_back_in_another_process(server: Served, page: int) -> None:
    round_trip("fake", server.address, page)
    assert "failed" not in server.log


@pytest.mark.parametrize("mode", [CopyMode.DMA, CopyMode.STAGED, CopyMode.DIRECT], ids=lambda mode: mode.value)
def test_slices_of_all_parts_stay_in_the_order_of_their_launch(mode: CopyMode) -> None:
    """Launched ahead and in turns, into the same pages: what was launched last is what is there."""
    fake.driver()
    arena, pool, memory = Arena(8 << 20), Pool(4096), fake.CardMemory(1 << 20)
    cards = Cards(arena, 1 << 20)
    cards.pin_all()
    for card in cards.opened:
        card.copier.load(1)
        card.has_kernel = True
    mover = CudaMover(cards, CHUNK, mode)
    layout = memory.layout(pool.layout())
    mover.map(1, layout)
    parts = check_layout(layout, CHUNK).parts(CHUNK)
    assert len(parts) == 4
    for at in range(8):
        arena.view(at << 20, 1 << 20)[:] = bytes([at + 1]) * (1 << 20)
    flights: list[Flight] = []
    for at in range(8):
        part = parts[at % 4]
        ids = tuple(tuple(range(1 + 4 * group, 1 + 4 * group + count)) for group, count in enumerate(part.blocks))
        piece = Piece(0, ((at << 20, part.object_bytes),), (0, part.object_bytes), (0,) * len(ids), ids)
        launched = mover.launch(RunSlice(at, "client", 1, 1, Direction.RETRIEVE, (piece,), part=part.number))
        assert not isinstance(launched, SliceReport)
        flights.append(launched)
    assert [flight.wait() for flight in flights] == [SliceReport(1)] * 8
    pages = bytes(memory.buffer)[: pool.page * 96]
    last = [(run, at + 1) for at, run in zip(range(4, 8), (2048, 3072, 4096, 1024), strict=True)]
    block = pages[pool.page : 2 * pool.page]
    owner = [next(value for run, value in reversed(last) if at < run) for at in range(pool.page)]
    assert list(block) == owner
    mover.close()
    memory.free()
    arena.close()
