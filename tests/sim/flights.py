# SPDX-License-Identifier: Apache-2.0
"""Copies and tier reads on their way: cells move one by one, at any time between the order and its report."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvgrpc.core.slicing import SKIPPED
from kvgrpc.core.types import Direction, ReadTier, RunSlice, SliceReport, WriteObject
from tests.sim.calls import Call
from tests.sim.loop import PromiseError
from tests.sim.memory import CELL_BYTES, Cell, cells_of


class Flight:
    """Moves that are made in order, some at a time: ``plan`` of them, then comes the report."""

    def __init__(self, moves: int, cells: Sequence[int], writes_arena: bool) -> None:
        self.plan = moves
        self.pace = 1.0
        """Chance to get on at an event; 0: all bytes move at the very end."""
        self.cells = frozenset(cells)
        self.writes_arena = writes_arena
        self._done = 0

    def advance(self, moves: int) -> None:
        stop = min(self.plan, self._done + moves)
        while self._done < stop:
            self.move(self._done)
            self._done += 1

    def move(self, number: int) -> None:
        raise NotImplementedError

    def clashes_with(self, other: Flight) -> bool:
        """Both touch the same arena bytes and at least one of them writes."""
        return (self.writes_arena or other.writes_arena) and not self.cells.isdisjoint(other.cells)


class Copy(Flight):
    """A slice under way between an engine's blocks and the arena."""

    def __init__(self, order: RunSlice, call: Call, arena: list[Cell], rng: random.Random) -> None:
        self.order = order
        self.call = call
        self._arena = arena
        self._moves: list[tuple[int, int, int, int, Cell]] = []
        """(arena cell, group, block, cell of the block, what a store should find there)."""
        self._ends: list[int] = []
        for number in range(len(order.pieces)):
            part = self._moves_of(number)
            if rng.random() < 0.3:
                rng.shuffle(part)
            self._moves += part
            self._ends.append(len(self._moves))
        self._report = SliceReport(len(order.pieces))
        super().__init__(len(self._moves), [move[0] for move in self._moves], order.direction is Direction.STORE)

    def _moves_of(self, number: int) -> list[tuple[int, int, int, int, Cell]]:
        piece, call = self.order.pieces[number], self.call
        shape, part = call.memory.shape, self.order.part
        places, groups = call.memory.places[part], shape.groups_of(part)
        addresses = cells_of(piece.extents)
        if len(addresses) < len(places):
            raise PromiseError(f"extents of {len(addresses)} cells for an object of {len(places)}")
        moves: list[tuple[int, int, int, int, Cell]] = []
        for cell in range(piece.span[0] // CELL_BYTES, piece.span[1] // CELL_BYTES):
            group, block, inner = places[cell]
            place = groups.index(group)
            slot = block - shape.first_blocks[group] - piece.first_block[place]
            if 0 <= slot < len(piece.block_ids[place]):
                wanted = call.content(piece.chunk, (part, cell) if part else cell)
                moves.append((addresses[cell], group, piece.block_ids[place][slot], inner, wanted))
        return moves

    def move(self, number: int) -> None:
        address, group, block, inner, wanted = self._moves[number]
        memory = self.call.memory
        memory.check_owner(self.order.call_id, group, block)
        cells = memory.blocks[group][block]
        if not self.writes_arena:
            cells[inner] = self._arena[address]
            return
        if cells[inner] != wanted:
            raise PromiseError(f"store of call {self.order.call_id} reads {cells[inner]} where {wanted} should be")
        self._arena[address] = cells[inner]

    def doom(self, piece: int, share: float) -> None:
        """Lets it fail at ``piece``: untouched when ``share`` is 0, else after that share of the piece's moves."""
        start = self._ends[piece - 1] if piece else 0
        torn_moves = 0 if share == 0 else min(self._ends[piece] - start, 1 + int(share * (self._ends[piece] - start)))
        self._report = SliceReport(piece, reason="COPY_FAILED", torn=torn_moves > 0)
        self.plan = start + torn_moves

    def skip(self) -> None:
        """The slice in front of it stopped early."""
        self._report = SliceReport(0, SKIPPED)
        self.plan = 0

    def moves_of_piece(self, piece: int) -> int:
        return self._ends[piece] - (self._ends[piece - 1] if piece else 0)

    def end(self) -> SliceReport:
        """Makes what is left of the moves; the report."""
        self.advance(len(self._moves))
        return self._report


class TierRead(Flight):
    """An object on its way from a tier into the arena; a failing read leaves a part of it behind."""

    def __init__(self, order: ReadTier, contents: list[Cell], arena: list[Cell]) -> None:
        self.ok = True
        self.order = order
        self._arena = arena
        self._contents = contents
        self._addresses = cells_of(order.extents)
        if len(self._addresses) < len(contents) or order.object.size_bytes != len(contents) * CELL_BYTES:
            raise PromiseError(f"{order.object.size_bytes} bytes are read of an object of {len(contents)} cells")
        super().__init__(len(contents), self._addresses, writes_arena=True)

    def move(self, number: int) -> None:
        self._arena[self._addresses[number]] = self._contents[number]

    def doom(self, share: float) -> None:
        self.ok = False
        self.plan = int(share * len(self._contents))

    def end(self) -> bool:
        """Makes what is left of the moves; whether all is well."""
        self.advance(len(self._contents))
        return self.ok


class TierWrite(Flight):
    """An object on its way from the arena into a tier: cell by cell it takes what lies there."""

    def __init__(self, order: WriteObject, arena: list[Cell]) -> None:
        self.ok = True
        self.order = order
        self.taken: list[Cell] = []
        self._arena = arena
        cells = order.object.size_bytes // CELL_BYTES
        self._addresses = cells_of(order.extents)[:cells]
        if len(self._addresses) < cells:
            raise PromiseError(f"{order.object.size_bytes} bytes are written of a slot that has less")
        super().__init__(cells, self._addresses, writes_arena=False)

    def move(self, number: int) -> None:
        self.taken.append(self._arena[self._addresses[number]])

    def doom(self, share: float) -> None:
        self.ok = False
        self.plan = int(share * len(self._addresses))

    def end(self) -> bool:
        """Takes what is left; whether all is well."""
        self.advance(len(self._addresses))
        return self.ok
