# SPDX-License-Identifier: Apache-2.0
"""Position-coded KV through every mover: what one engine stored, another finds in its own blocks, and nothing else
has changed.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from kvgrpc.core.types import Direction, SliceReport
from tests.kvdata import (
    ARRANGEMENTS,
    BLOCKS_OUTERMOST,
    BLOCKS_OUTERMOST_OPAQUE,
    GQA,
    HEADS_FIRST_OPAQUE,
    LAYERS_ONE_TENSOR,
    LAYERS_OUTERMOST,
    MHA,
    MLA,
    Arrangement,
    Kv,
    byte_at,
    token_data,
)
from tests.transfer.scene import MOVERS, scene

STORE, RETRIEVE = Direction.STORE, Direction.RETRIEVE
KINDS = pytest.mark.parametrize("kind", MOVERS)
CHUNKS = itertools.cycle((64, 32, 128, 512, 256))
PAGES = itertools.cycle((0, 4096, 1000, 257))
SHAPES = [
    (replace(kv, itemsize=itemsize), arrangement, block_size)
    for kv in (MHA, GQA, MLA)
    for arrangement in ARRANGEMENTS
    for block_size, itemsize in zip((1, 8, 16, 32), itertools.cycle((2, 1, 4)), strict=False)
]


def test_expected_bytes_are_what_the_formula_says() -> None:
    kv = replace(GQA, seed=5, first_head=3)
    data = token_data(kv, 1000, 4)
    for layer, plane, token, offset in ((0, 0, 0, 0), (3, 1, 2, 31), (1, 1, 3, 7)):
        assert data[layer, plane, token, 0, offset] == byte_at(5, layer, plane, 1000 + token, 3, offset)
    assert len(np.unique(data)) > 200


@KINDS
@pytest.mark.parametrize(
    ("kv", "arrangement", "block_size", "chunk_tokens", "page_bytes"),
    [(*shape, next(CHUNKS), next(PAGES)) for shape in SHAPES],
    ids=lambda value: str(value) if not isinstance(value, Kv) else f"{value.heads}x{value.head_dim}x{value.itemsize}",
)
def test_stored_blocks_come_back_elsewhere(
    kind: str, kv: Kv, arrangement: Arrangement, block_size: int, chunk_tokens: int, page_bytes: int
) -> None:
    with scene(kind, chunk_tokens) as world:
        blocks = 2 * chunk_tokens // block_size
        source = world.engine(kv, arrangement, block_size, blocks + 5, lead=4160, tail=13)
        slots = [world.slot(source.object_bytes, page_bytes) for _ in range(2)]
        ids = source.ids(blocks)
        source.image.write(ids)
        assert source.copy(STORE, source.pieces(slots, ids)) == SliceReport(2)
        half = source.chunk_blocks
        assert world.read(slots[0]) == source.image.object_bytes(ids[:half])
        assert world.read(slots[1]) == source.image.object_bytes(ids[half:])
        assert source.image.wrong_tokens(ids) == []
        assert source.image.untouched(ids)

        target = world.engine(kv, arrangement, block_size, 2 * blocks, lead=64, tail=1)
        other = target.ids(blocks)
        assert target.copy(RETRIEVE, target.pieces(slots, other)) == SliceReport(2)
        assert target.image.wrong_tokens(other) == []
        assert target.image.untouched(other)


@KINDS
@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=str)
@pytest.mark.parametrize("order", ["reversed", "ascending", "mixed"])
def test_any_order_of_block_ids(kind: str, arrangement: Arrangement, order: str) -> None:
    with scene(kind, 64) as world:
        source = world.engine(MHA, arrangement, 8, 40)
        slots = [world.slot(source.object_bytes, 500) for _ in range(2)]
        source.image.write(list(range(3, 19)))
        source.copy(STORE, source.pieces(slots, list(range(3, 19))))
        target = world.engine(MHA, arrangement, 8, 40)
        ids = list(range(20, 36))
        if order == "reversed":
            ids.reverse()
        elif order == "mixed":
            ids = [9, 8, 11, 12, 13, 2, 1, 0, 30, 32, 31, 39, 38, 20, 21, 22]
        assert target.copy(RETRIEVE, target.pieces(slots, ids)).completed == 2
        assert target.image.wrong_tokens(ids) == []
        assert target.image.untouched(ids)


@pytest.mark.parametrize("kind", ["memory", "shm", "gated shm"])
@pytest.mark.parametrize("arrangement", [LAYERS_OUTERMOST, BLOCKS_OUTERMOST, BLOCKS_OUTERMOST_OPAQUE], ids=str)
def test_repeated_block_ids_read_twice_and_the_last_write_stays(kind: str, arrangement: Arrangement) -> None:
    with scene(kind, 32) as world:
        source = world.engine(GQA, arrangement, 8, 12)
        slot = world.slot(source.object_bytes)
        source.image.write([4, 5, 3])
        source.copy(STORE, source.pieces([slot], [4, 5, 3, 4]))
        assert world.read(slot) == source.image.object_bytes([4, 5, 3, 4])
        target = world.engine(GQA, arrangement, 8, 12)
        target.copy(RETRIEVE, target.pieces([slot], [7, 8, 6, 7]))
        assert target.image.wrong_tokens([7, 8, 6]) == []  # block 7 was given twice, with equal bytes
        source.image.write([0, 1, 2, 3])
        source.copy(STORE, source.pieces([slot], [0, 1, 2, 3]))
        target.copy(RETRIEVE, target.pieces([slot], [7, 8, 6, 7]))
        assert target.image.wrong_tokens([8, 6, 7], first_token=8) == []
        assert target.image.untouched([6, 7, 8])


@KINDS
@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=str)
@pytest.mark.parametrize(("first_block", "blocks"), [(0, 3), (1, 2), (3, 1), (2, 7), (1, 11), (3, 5)])
def test_range_that_starts_and_ends_inside_a_chunk(
    kind: str, arrangement: Arrangement, first_block: int, blocks: int
) -> None:
    with scene(kind, 64) as world:
        source = world.engine(MHA, arrangement, 16, 16)
        slots = [world.slot(source.object_bytes, 777) for _ in range(3)]
        ids = source.ids(12)
        source.image.write(ids)
        source.copy(STORE, source.pieces(slots, ids))
        target = world.engine(MHA, arrangement, 16, 30)
        other = target.ids(blocks)
        pieces = target.pieces(slots, other, first_block)
        assert target.copy(RETRIEVE, pieces) == SliceReport(len(pieces))
        assert target.image.wrong_tokens(other, first_token=first_block * 16) == []
        assert target.image.untouched(other)


@KINDS
@pytest.mark.parametrize("span_bytes", [1, 97, 1024, 5000])
def test_spans_smaller_than_a_chunk_add_up(kind: str, span_bytes: int) -> None:
    kv = replace(GQA, layers=2, itemsize=1)
    with scene(kind, 16) as world:
        source = world.engine(kv, LAYERS_OUTERMOST, 8, 6)
        slots = [world.slot(source.object_bytes, 200)]
        source.image.write([4, 1])
        pieces = source.pieces(slots, [4, 1], span_bytes=span_bytes)
        assert source.copy(STORE, pieces) == SliceReport(len(pieces))
        assert world.read(slots[0]) == source.image.object_bytes([4, 1])
        target = world.engine(kv, LAYERS_OUTERMOST, 8, 6)
        for piece in target.pieces(slots, [2, 5], span_bytes=span_bytes):
            assert target.copy(RETRIEVE, [piece]) == SliceReport(1)
        assert target.image.wrong_tokens([2, 5]) == []
        assert target.image.untouched([2, 5])


@KINDS
@pytest.mark.parametrize("kv", [MHA, GQA, MLA], ids=["mha", "gqa", "mla"])
@pytest.mark.parametrize("target_arrangement", [LAYERS_OUTERMOST, LAYERS_ONE_TENSOR, BLOCKS_OUTERMOST], ids=str)
@pytest.mark.parametrize(("stored", "loaded"), [(16, 32), (32, 16), (1, 8), (64, 16)])
def test_token_major_is_shared_between_block_sizes(
    kind: str, kv: Kv, target_arrangement: Arrangement, stored: int, loaded: int
) -> None:
    with scene(kind, 64) as world:
        source = world.engine(kv, LAYERS_OUTERMOST, stored, 2 * 64 // stored)
        slots = [world.slot(source.object_bytes, 3000) for _ in range(2)]
        ids = source.ids(2 * 64 // stored)
        source.image.write(ids)
        source.copy(STORE, source.pieces(slots, ids))
        target = world.engine(kv, target_arrangement, loaded, 2 * 64 // loaded + 3)
        assert target.object_bytes == source.object_bytes
        other = target.ids(2 * 64 // loaded)
        assert target.copy(RETRIEVE, target.pieces(slots, other)).completed == 2
        assert target.image.wrong_tokens(other) == []
        assert target.image.untouched(other)


@KINDS
def test_ranks_with_other_heads_keep_apart(kind: str) -> None:
    with scene(kind, 32) as world:
        ranks = [world.engine(replace(GQA, first_head=head), HEADS_FIRST_OPAQUE, 16, 4) for head in range(2)]
        slots = [world.slot(rank.object_bytes) for rank in ranks]
        for rank, slot in zip(ranks, slots, strict=True):
            rank.image.write([3, 0])
            rank.copy(STORE, rank.pieces([slot], [3, 0]))
        reader = world.engine(replace(GQA, first_head=1), HEADS_FIRST_OPAQUE, 16, 4)
        reader.copy(RETRIEVE, reader.pieces([slots[1]], [1, 2]))
        assert reader.image.wrong_tokens([1, 2]) == []
        assert world.read(slots[0]) != world.read(slots[1])


@KINDS
def test_arena_bytes_around_the_slots_stay(kind: str) -> None:
    with scene(kind, 32) as world:
        everything = world.arena.view(0, world.arena.size_bytes)
        everything[:] = b"\x5a" * len(everything)
        engine = world.engine(GQA, LAYERS_OUTERMOST, 8, 8)
        slot = world.slot(engine.object_bytes, 300)
        engine.copy(STORE, engine.pieces([slot], [5, 2, 7, 0]))
        for offset, length in slot:
            everything[offset : offset + length] = b"\x5a" * length
        assert bytes(everything) == b"\x5a" * len(everything)
        everything.release()
