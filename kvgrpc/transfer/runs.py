# SPDX-License-Identifier: Apache-2.0
"""Which bytes of the engine belong to which bytes of the arena: the run generator of all movers.

An object is ordered group by group, entry of runs by entry, layer by layer, plane by plane, block by block in token
order, ``run_bytes`` each. A token-major object therefore does not depend on the block size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvgrpc.api import KvGroup, Layout
from kvgrpc.core.types import Extent, Part, Piece
from kvgrpc.transfer.layout import check_layout


class Run(NamedTuple):
    """``length`` bytes at ``offset`` of ``memory[memory_index]`` belong to those at ``position`` of the arena."""

    memory_index: int
    offset: int
    position: int
    length: int


_Cut = tuple[int, int, int, int]
"""(memory index, offset in the memory, offset in the object or in the arena, length); plain, since copies spend their
time here
"""


def piece_runs(layout: Layout, chunk_tokens: int, piece: Piece, part: Part | None = None) -> Iterator[Run]:
    """The piece's runs in the object's order; runs that are adjacent on both sides are one.

    ``layout`` has passed ``check_layout``; block ids lie below ``num_blocks`` (asserted, since no address is checked
    again). Bytes of the object outside ``span``, and of blocks that are not named, are left out. ``part`` is the
    piece's; a layout whose groups need everything has one.
    """
    memory_index, offset, position, length = -1, 0, 0, 0
    if part is None:
        (part,) = check_layout(layout, chunk_tokens).parts(chunk_tokens)
    for index, begin, place, size in _placed(_cuts(layout, part, piece), piece.extents):
        if begin == offset + length and place == position + length and index == memory_index:
            length += size
            continue
        if length:
            yield Run(memory_index, offset, position, length)
        memory_index, offset, position, length = index, begin, place, size
    if length:
        yield Run(memory_index, offset, position, length)


def _cuts(layout: Layout, part: Part, piece: Piece) -> Iterator[_Cut]:
    low, high = piece.span
    plane_start = 0
    named = zip(part.groups, part.blocks, piece.first_block, piece.block_ids, strict=True)
    for at, blocks, first_block, block_ids in named:
        group = layout.groups[at]
        _check_blocks(group, blocks, first_block, block_ids)
        single = [(first_block + i, block_id, 1) for i, block_id in enumerate(block_ids)]
        joined = _joined(single)
        for runs in group.runs:
            length, stride = runs.run_bytes, runs.block_stride_bytes
            stretches = joined if length == stride else single
            for layer in range(runs.layers):
                for plane in range(runs.planes):
                    start, plane_start = plane_start, plane_start + blocks * length
                    if plane_start <= low or start >= high:
                        continue
                    base = runs.base_bytes + layer * runs.layer_stride_bytes + plane * runs.plane_stride_bytes
                    for index, block_id, count in stretches:
                        begin = start + index * length
                        head, tail = max(begin, low), min(begin + count * length, high)
                        if head < tail:
                            yield runs.memory_index, base + block_id * stride + head - begin, head, tail - head


def _check_blocks(group: KvGroup, blocks: int, first_block: int, block_ids: Sequence[int]) -> None:
    assert 0 <= first_block <= first_block + len(block_ids) <= blocks, "a piece names blocks outside its object"
    if block_ids:
        assert 0 <= min(block_ids) <= max(block_ids) < group.num_blocks, "a block id lies outside the engine's memory"


def _joined(single: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Joins consecutive block ids: (index in the chunk, block id, count)."""
    joined: list[tuple[int, int, int]] = []
    for index, block_id, _ in single:
        if joined and joined[-1][1] + joined[-1][2] == block_id:
            head, first_id, count = joined[-1]
            joined[-1] = (head, first_id, count + 1)
        else:
            joined.append((index, block_id, 1))
    return joined


def _placed(cuts: Iterable[_Cut], extents: Sequence[Extent]) -> Iterator[_Cut]:
    """Lays ascending cuts of the object onto its extents; a cut that straddles extents becomes several."""
    rest = iter(extents)
    end = shift = 0
    for memory_index, offset, head, length in cuts:
        while head + length > end:
            if head < end:
                part = end - head
                yield memory_index, offset, head + shift, part
                offset, head, length = offset + part, head + part, length - part
            position, size = next(rest)
            shift, end = position - end, end + size
        yield memory_index, offset, head + shift, length


def trim(extents: Sequence[Extent], size_bytes: int) -> list[Extent]:
    """The first ``size_bytes`` of the extents: a slot may be larger than its object."""
    out: list[Extent] = []
    for offset, length in extents:
        if size_bytes <= 0:
            break
        out.append((offset, min(length, size_bytes)))
        size_bytes -= length
    return out
