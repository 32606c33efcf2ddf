# SPDX-License-Identifier: Apache-2.0
"""Memory with contents: the arena and the engines' paged blocks, in cells that say whose bytes they hold.

A cell stands for ``CELL_BYTES`` bytes: what one token leaves in one family of layers. An object is its cells group by
group, family by family, token by token, so engines of different block sizes share objects.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvgrpc.core.types import ALL, NULL_BLOCK, Extent, Geometry, GroupGeometry, Need
from tests.sim.loop import PromiseError, Signal

CELL_BYTES = 64

Cell = Hashable
"""What a cell holds: ``(space, version, key, kv_rank, index in the object)``; anything else belongs to no object. Of
another part than the first, the index is a pair: part and index."""


@dataclass(frozen=True)
class Group:
    """One KV group: ``families`` x ``block_size`` cells a block."""

    families: int
    block_size: int
    num_blocks: int
    need: Need = ALL

    def tail(self, chunk_tokens: int) -> int:
        """How many of a chunk's last blocks some hit needs, tried out."""
        blocks = chunk_tokens // self.block_size
        starts = [needed_from(self.need, hit * chunk_tokens) for hit in range(1, 16)]
        inside = [start % chunk_tokens for start in starts if start // chunk_tokens < 16]
        whole = [hit for hit, start in enumerate(starts, 1) if start // chunk_tokens < hit - 1]
        return blocks - (0 if whole else min(inside) // self.block_size)


def needed_from(need: Need, tokens: int) -> int:
    """The first token that a hit of so many needs of layers with this need: what they look at to compute the hit's last
    token once more."""
    last = tokens - 1
    if not need.window:
        return 0
    if need.aligned:
        return max(at for at in range(tokens) if at % need.window == 0) if tokens else 0
    return max(0, last - need.window + 1)


@dataclass
class Shape:
    """The geometry of an engine's memory."""

    chunk_tokens: int
    groups: tuple[Group, ...]

    @property
    def geometry(self) -> Geometry:
        return Geometry(
            tuple(
                GroupGeometry(g.block_size, g.num_blocks, g.families * g.block_size * CELL_BYTES, g.need)
                for g in self.groups
            )
        )

    @property
    def alignment(self) -> int:
        return max(g.block_size for g in self.groups)

    @cached_property
    def needs(self) -> list[Need]:
        """Of the parts of a chunk: that of everything first, then as the groups come."""
        found = [group.need for group in self.groups]
        return sorted(dict.fromkeys(found), key=lambda need: need != ALL)

    @property
    def parted(self) -> bool:
        return self.needs != [ALL]

    @cached_property
    def first_blocks(self) -> list[int]:
        """Where in a chunk the objects begin, by group."""
        return [self.chunk_tokens // g.block_size - g.tail(self.chunk_tokens) for g in self.groups]

    def groups_of(self, part: int) -> list[int]:
        return [index for index, group in enumerate(self.groups) if group.need == self.needs[part]]

    def parts_of_hit(self, chunk: int, hit_chunks: int) -> list[int]:
        """Those of the chunk that a hit of so many chunks needs."""
        starts = [needed_from(need, hit_chunks * self.chunk_tokens) for need in self.needs]
        return [part for part, start in enumerate(starts) if start < (chunk + 1) * self.chunk_tokens]

    def places(self) -> list[list[tuple[int, int, int]]]:
        """Where each cell of the object of each part lies: (group, block of the chunk, cell of the block)."""
        return [
            [
                (index, token // group.block_size, family * group.block_size + token % group.block_size)
                for index, group in enumerate(self.groups)
                if group.need == need
                for family in range(group.families)
                for token in range(self.first_blocks[index] * group.block_size, self.chunk_tokens)
            ]
            for need in self.needs
        ]


class EngineMemory:
    """A worker's blocks. ``owners`` names the calls that a block is lent to, from call to answer."""

    def __init__(self, shape: Shape, digest: bytes) -> None:
        self.shape = shape
        self.digest = digest
        self.places = shape.places()
        self.blocks: list[list[list[Cell]]] = [
            [["never written"] * (g.families * g.block_size) for _ in range(g.num_blocks)] for g in shape.groups
        ]
        self.owners: dict[tuple[int, int], set[int]] = {}
        self.free: list[list[int]] = [list(range(g.num_blocks)) for g in shape.groups]
        self.unmapped = Signal()

    def own(self, call_id: int, blocks: Sequence[Sequence[int]]) -> None:
        for group, ids in enumerate(blocks):
            for block in set(ids) - {NULL_BLOCK}:
                self.owners.setdefault((group, block), set()).add(call_id)

    def give_back(self, call_id: int, blocks: Sequence[Sequence[int]], scribble: Cell | None) -> None:
        """The engine has the blocks again, and uses them at once for something else when ``scribble`` is given."""
        for group, ids in enumerate(blocks):
            for block in set(ids) - {NULL_BLOCK}:
                owners = self.owners[(group, block)]
                owners.discard(call_id)
                if owners:
                    continue
                del self.owners[(group, block)]
                self.free[group].append(block)
                if scribble is not None:
                    cells = self.blocks[group][block]
                    cells[:] = [scribble] * len(cells)

    def check_owner(self, call_id: int, group: int, block: int) -> None:
        if call_id not in self.owners.get((group, block), ()):
            raise PromiseError(
                f"a copy of call {call_id} touches block {block} of group {group}, which the engine has back"
            )


def cells_of(extents: Sequence[Extent]) -> list[int]:
    """Cell indexes of an object, in object order."""
    cells: list[int] = []
    for offset, length in extents:
        if offset % CELL_BYTES or length % CELL_BYTES:
            raise PromiseError(f"extent ({offset}, {length}) cuts a cell")
        cells.extend(range(offset // CELL_BYTES, (offset + length) // CELL_BYTES))
    return cells
