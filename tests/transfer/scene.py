# SPDX-License-Identifier: Apache-2.0
"""A small world for movers: an arena, a mover, engines with mapped memory, and objects laid into extents."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvgrpc.core.types import Direction, Extent, Geometry, Piece, RunSlice, SliceReport
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.base import Mover
from kvgrpc.transfer.cards import Cards
from kvgrpc.transfer.cuda import CopyMode, CudaMover
from kvgrpc.transfer.gates import Gates
from kvgrpc.transfer.layout import check_layout
from kvgrpc.transfer.memory import MemoryMover
from kvgrpc.transfer.shm import SharedMemoryMover
from tests.cards import fake
from tests.kvdata import Arrangement, Image, Kv, shared_memory

MOVERS = ("memory", "shuffled", "shm", "gated shm", "card dma", "card staged", "card direct")
PART_BYTES = 64 << 10


class Scene:
    """Made by ``scene``. ``chance`` is seeded, so that a failure can be repeated."""

    def __init__(self, kind: str, chunk_tokens: int, arena: Arena, stack: ExitStack) -> None:
        self.kind, self.chunk_tokens, self.arena = kind, chunk_tokens, arena
        self.chance = random.Random(f"{kind} {chunk_tokens}")
        self.gates = Gates()
        self._stack = stack
        self._next_mapping = 1
        self._used = 0
        self.memory = MemoryMover(arena, chunk_tokens)
        if kind == "shuffled":
            self.memory.shuffle = random.Random(1)
        gates = self.gates if kind == "gated shm" else None
        shm = SharedMemoryMover(arena, chunk_tokens, allowed_uids={os.getuid()}, gates=gates)
        self.mover: Mover = shm if "shm" in kind else self.memory
        if "card" in kind:
            self.mover = self._card_mover(CopyMode(kind.split()[1]))
            stack.callback(self.mover.close)
        stack.callback(shm.close)
        stack.callback(self.memory.close)

    def _card_mover(self, mode: CopyMode) -> CudaMover:
        """On a fake card, with an arena of many parts."""
        fake.driver()
        cards = Cards(self.arena, PART_BYTES)
        cards.pin_all()
        for card in cards.opened:
            card.copier.load(1)
            card.has_kernel = True
        return CudaMover(cards, self.chunk_tokens, mode)

    def engine(
        self, kv: Kv, arrangement: Arrangement, block_size: int, num_blocks: int, *, lead: int = 0, tail: int = 0
    ) -> Engine:
        """An engine whose memory is mapped."""
        size_bytes = Image(kv, arrangement, block_size, num_blocks, lead=lead, tail=tail).size_bytes
        memory: fake.CardMemory | None = None
        if "card" in self.kind:
            memory = fake.CardMemory(size_bytes)
            self._stack.callback(memory.free)
            name, buffer = "card", memory.buffer
        elif "shm" in self.kind:
            name, buffer = self._stack.enter_context(shared_memory(size_bytes))
        else:
            name, buffer = f"kv{self._next_mapping}", bytearray(size_bytes)
            self.memory.add_memory(name, buffer)
        image = Image(kv, arrangement, block_size, num_blocks, lead=lead, tail=tail, buffer=buffer)
        mapping_id, self._next_mapping = self._next_mapping, self._next_mapping + 1
        shared = image.layout(name)
        self.mover.map(mapping_id, shared if memory is None else memory.layout(shared))
        return Engine(self, image, name, mapping_id)

    def slot(self, size_bytes: int, page_bytes: int = 0) -> tuple[Extent, ...]:
        """Fresh extents: one, or pages in no order with other bytes between them."""
        if not page_bytes:
            return (self._take(size_bytes),)
        pages = [self._take(page_bytes) for _ in range(-(-size_bytes // page_bytes))]
        self.chance.shuffle(pages)
        offset, _ = pages[-1]
        pages[-1] = (offset, size_bytes - page_bytes * (len(pages) - 1))
        return tuple(pages)

    def read(self, extents: Sequence[Extent]) -> bytes:
        """What the arena holds there."""
        return b"".join(bytes(self.arena.view(*extent)) for extent in extents)

    def _take(self, size_bytes: int) -> Extent:
        offset = self._used + 3
        self._used = offset + size_bytes
        return (offset, size_bytes)


class Engine:
    """An image and its mapping."""

    def __init__(self, scene: Scene, image: Image, name: str, mapping_id: int) -> None:
        self.scene, self.image, self.name, self.mapping_id = scene, image, name, mapping_id
        self.geometry: Geometry = check_layout(image.layout(name), scene.chunk_tokens)
        self.object_bytes = self.geometry.object_bytes(scene.chunk_tokens)
        self.chunk_blocks = scene.chunk_tokens // image.block_size

    def pieces(
        self, slots: Sequence[tuple[Extent, ...]], block_ids: Sequence[int], first_block: int = 0, span_bytes: int = 0
    ) -> tuple[Piece, ...]:
        """Pieces for the blocks from ``first_block`` of the first chunk on, one a chunk (or one a span)."""
        found: list[Piece] = []
        at, block = 0, first_block
        while at < len(block_ids):
            chunk, inside = divmod(block, self.chunk_blocks)
            ids = tuple(block_ids[at : at + self.chunk_blocks - inside])
            step = span_bytes or self.object_bytes
            for low in range(0, self.object_bytes, step):
                span = (low, min(low + step, self.object_bytes))
                found.append(Piece(chunk, slots[chunk], span, (inside,), (ids,)))
            at, block = at + len(ids), block + len(ids)
        return tuple(found)

    def copy(self, direction: Direction, pieces: Sequence[Piece]) -> SliceReport:
        """One slice of these pieces."""
        return self.scene.mover.copy(RunSlice(7, "client", self.mapping_id, 1, direction, tuple(pieces)))

    def ids(self, count: int) -> list[int]:
        """Random block ids, none twice."""
        return self.scene.chance.sample(range(self.image.num_blocks), count)


@contextmanager
def scene(kind: str, chunk_tokens: int, arena_bytes: int = 8 << 20) -> Iterator[Scene]:
    """A world with one kind of mover."""
    with ExitStack() as stack:
        arena = Arena(arena_bytes)
        stack.callback(arena.close)
        yield Scene(kind, chunk_tokens, arena, stack)
