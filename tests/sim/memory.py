# SPDX-License-Identifier: Apache-2.0
"""Memory with contents: the arena and the engines' paged blocks, in cells that say whose bytes they hold.

A cell stands for ``CELL_BYTES`` bytes: what one token leaves in one family of layers. An object is its cells group by
group, family by family, token by token, so engines of different block sizes share objects.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from kvgrpc.core.types import Extent, Geometry, GroupGeometry
from tests.sim.loop import PromiseError, Signal

CELL_BYTES = 64

Cell = Hashable
"""What a cell holds: ``(space, version, key, kv_rank, index in the object)``; anything else belongs to no object."""


@dataclass(frozen=True)
class Group:
    """One KV group: ``families`` x ``block_size`` cells a block."""

    families: int
    block_size: int
    num_blocks: int


@dataclass(frozen=True)
class Shape:
    """The geometry of an engine's memory."""

    chunk_tokens: int
    groups: tuple[Group, ...]

    @property
    def geometry(self) -> Geometry:
        return Geometry(
            tuple(
                GroupGeometry(g.block_size, g.num_blocks, g.families * g.block_size * CELL_BYTES) for g in self.groups
            )
        )

    @property
    def alignment(self) -> int:
        return max(g.block_size for g in self.groups)

    def places(self) -> list[tuple[int, int, int]]:
        """Where each cell of an object lies: (group, block of the chunk, cell of the block)."""
        return [
            (index, token // group.block_size, family * group.block_size + token % group.block_size)
            for index, group in enumerate(self.groups)
            for family in range(group.families)
            for token in range(self.chunk_tokens)
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
            for block in ids:
                self.owners.setdefault((group, block), set()).add(call_id)

    def give_back(self, call_id: int, blocks: Sequence[Sequence[int]], scribble: Cell | None) -> None:
        """The engine has the blocks again, and uses them at once for something else when ``scribble`` is given."""
        for group, ids in enumerate(blocks):
            for block in set(ids):
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
