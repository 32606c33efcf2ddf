# SPDX-License-Identifier: Apache-2.0
"""Run generation against an oracle that knows each byte's place."""

from __future__ import annotations

import random

import pytest

from kvgrpc.api import BlockForm, KvGroup, Layout, Runs, SharedMemory
from kvgrpc.core.types import Piece
from kvgrpc.transfer.layout import check_layout
from kvgrpc.transfer.runs import Run, piece_runs

ENTRY = Runs(0, 0, 1, 0, 1, 0, 10, 10)


def layout_of(*entries: Runs, block_size: int = 4, num_blocks: int = 8, size_bytes: int = 4096) -> Layout:
    group = KvGroup(block_size, num_blocks, entries, BlockForm.OPAQUE)
    layout = Layout((SharedMemory("a", 0, size_bytes), SharedMemory("b", 0, size_bytes)), (group,))
    check_layout(layout, 16)
    return layout


def one(block_ids: tuple[int, ...], first_block: int = 0, **change: object) -> Piece:
    fields = {"chunk": 0, "extents": ((1000, 40),), "span": (0, 40), "first_block": (first_block,)}
    return Piece(**{**fields, "block_ids": (block_ids,), **change})  # type: ignore[arg-type]


def test_consecutive_blocks_are_one_run() -> None:
    assert list(piece_runs(layout_of(ENTRY), 16, one((2, 3, 4, 5)))) == [Run(0, 20, 1000, 40)]


def test_other_blocks_are_runs_of_their_own_in_prefix_order() -> None:
    runs = list(piece_runs(layout_of(ENTRY), 16, one((5, 1, 2, 0))))
    assert runs == [Run(0, 50, 1000, 10), Run(0, 10, 1010, 20), Run(0, 0, 1030, 10)]


def test_blocks_with_bytes_between_them_are_not_merged() -> None:
    entry = Runs(1, 7, 1, 0, 1, 0, 16, 10)
    runs = list(piece_runs(layout_of(entry), 16, one((2, 3, 4, 5))))
    assert runs == [Run(1, 39 + 16 * i, 1000 + 10 * i, 10) for i in range(4)]


def test_planes_that_touch_are_merged() -> None:
    entry = Runs(0, 0, 2, 20, 2, 10, 40, 10)
    piece = one((3,), first_block=2, extents=((0, 160),), span=(0, 160))
    positions = [20, 60, 100, 140]
    runs = list(piece_runs(layout_of(entry), 16, piece))
    assert runs == [Run(0, 120 + 10 * i, position, 10) for i, position in enumerate(positions)]
    whole = Runs(0, 0, 2, 20, 2, 10, 40, 10)
    group = KvGroup(16, 8, (whole,), BlockForm.OPAQUE)
    layout = Layout((SharedMemory("a", 0, 320),), (group,))
    assert list(piece_runs(layout, 16, one((3,)))) == [Run(0, 120, 1000, 40)]


def test_span_cuts_bytes_and_not_blocks() -> None:
    runs = list(piece_runs(layout_of(ENTRY), 16, one((5, 1, 2, 0), span=(5, 25))))
    assert runs == [Run(0, 55, 1005, 5), Run(0, 10, 1010, 15)]
    assert list(piece_runs(layout_of(ENTRY), 16, one((0,), first_block=3, span=(0, 30)))) == []


def test_runs_straddle_extents_and_neighbouring_extents_are_merged() -> None:
    runs = list(piece_runs(layout_of(ENTRY), 16, one((0, 1, 2, 3), extents=((100, 15), (115, 5), (50, 20)))))
    assert runs == [Run(0, 0, 100, 20), Run(0, 20, 50, 20)]


def test_ids_outside_the_memory_are_a_bug_and_not_a_copy() -> None:
    for piece in (one((8,)), one((-1,)), one((0, 1, 2, 3), first_block=1)):
        with pytest.raises(AssertionError):
            list(piece_runs(layout_of(ENTRY), 16, piece))


def test_every_byte_has_its_place() -> None:
    chance = random.Random(9)
    for _ in range(300):
        entries, base = [], [0, 0]
        for _ in range(chance.randint(1, 3)):
            memory, run_bytes = chance.randrange(2), chance.randint(1, 9)
            layers, planes, gap = chance.randint(1, 3), chance.randint(1, 2), chance.choice((0, 3))
            plane_stride = (run_bytes + gap) * 8
            layer_stride = plane_stride * planes
            entries.append(
                Runs(memory, base[memory], layers, layer_stride, planes, plane_stride, run_bytes + gap, run_bytes)
            )
            base[memory] += layer_stride * layers
        layout = layout_of(*entries)
        total = sum(e.layers * e.planes * e.run_bytes * 4 for e in entries)
        count = chance.randint(1, 4)
        first, ids = chance.randint(0, 4 - count), tuple(chance.choices(range(8), k=count))
        low = chance.randrange(total)
        span = (low, chance.randint(low + 1, total))
        sizes, left = [], total
        while left:
            sizes.append(min(left, chance.randint(1, 30)))
            left -= sizes[-1]
        extents = tuple((1000 * i + chance.choice((0, 990)), size) for i, size in enumerate(sizes))
        place = [offset + i for offset, size in extents for i in range(size)]
        expected: list[tuple[int, int, int]] = []
        at = 0
        for e in entries:
            for layer in range(e.layers):
                for plane in range(e.planes):
                    for block in range(4):
                        for byte in range(e.run_bytes):
                            if first <= block < first + count and span[0] <= at < span[1]:
                                address = e.base_bytes + layer * e.layer_stride_bytes + plane * e.plane_stride_bytes
                                address += ids[block - first] * e.block_stride_bytes + byte
                                expected.append((e.memory_index, address, place[at]))
                            at += 1
        runs = list(piece_runs(layout, 16, Piece(0, extents, span, (first,), (ids,))))
        got = [(r.memory_index, r.offset + i, r.position + i) for r in runs for i in range(r.length)]
        assert got == expected
