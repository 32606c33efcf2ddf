# SPDX-License-Identifier: Apache-2.0
"""A pool of pages that five groups share, as engines with one memory for layers of all kinds have it: what it is as a
layout, position-coded bytes in it, and a round of calls by two processes that compares every byte."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvgrpc.api import BlockForm, GroupKind, KvGroup, Layout, Runs, SharedMemory
from kvgrpc.core.types import NULL_BLOCK
from tests.cards import engines

CHUNK, LAYERS, BLOCKS = 64, 2, 96
PROMPT = 3 * CHUNK
Bytes = NDArray[np.uint8]
Ids = list[list[int]]


@dataclass(frozen=True)
class Pool:
    """``page`` bytes of each block in each of two layers; groups differ in how much of a page they use. The second
    piece of memory is the second layer of the first piece, by which the last group knows it."""

    page: int

    @property
    def size_bytes(self) -> int:
        return LAYERS * BLOCKS * self.page

    @property
    def groups(self) -> tuple[KvGroup, ...]:
        def group(kind: GroupKind, block_size: int, run: int, window: int = 0, apart: bool = False) -> KvGroup:
            stride = BLOCKS * self.page
            one = Runs(0, 0, 1, 0, 1, 0, self.page, run), Runs(1, 0, 1, 0, 1, 0, self.page, run)
            runs = one if apart else (Runs(0, 0, LAYERS, stride, 1, 0, self.page, run),)
            return KvGroup(block_size, BLOCKS, runs, BlockForm.OPAQUE, kind, window, backend="X", layout="Y")

        return (
            group(GroupKind.FULL, 16, self.page // 2),
            group(GroupKind.SLIDING_WINDOW, 16, self.page * 3 // 4, 72),
            group(GroupKind.RECURRENT, 32, self.page),
            group(GroupKind.CHUNKED_LOCAL, 16, self.page // 4, 32),
            group(GroupKind.SLIDING_WINDOW, 16, self.page // 2, 72, apart=True),
        )

    def layout(self, name: str = "kv") -> Layout:
        half = self.size_bytes // LAYERS
        return Layout((SharedMemory(name, 0, self.size_bytes), SharedMemory(name, half, half)), self.groups)

    def take(self, seed: int, lack_below: Sequence[int] = (0,) * 5) -> Ids:
        """Different blocks of every group for the prompt, null blocks below these tokens; block 0 is nobody's."""
        free = random.Random(seed).sample(range(1, BLOCKS), BLOCKS - 1)
        return [
            [NULL_BLOCK if (at + 1) * one.block_size <= below else free.pop() for at in range(PROMPT // one.block_size)]
            for one, below in zip(self.groups, lack_below, strict=True)
        ]

    def put(self, memory: Bytes, ids: Ids, seed: int, first: Sequence[int] = (0,) * 5) -> None:
        """What each group's blocks hold from these tokens on."""
        pages = memory[: self.size_bytes].reshape(LAYERS, BLOCKS, self.page)
        for number, (one, blocks, start) in enumerate(zip(self.groups, ids, first, strict=True)):
            length = one.runs[0].run_bytes
            for place, block in enumerate(blocks):
                if block != NULL_BLOCK and (place + 1) * one.block_size > start:
                    for layer in range(LAYERS):
                        pages[layer, block, :length] = coded(seed, number, layer, place, length)


def coded(seed: int, number: int, layer: int, place: int, length: int) -> Bytes:
    """What a group's block at this place of the prompt holds in one layer."""
    at = np.arange(length, dtype=np.uint64)
    mixed = at * 0x9E3779B1 + number * 0x85EBCA77 + layer * 0xC2B2AE3D + place * 0x27D4EB2F + seed * 0x165667B1
    return ((mixed & 0xFFFFFFFF) >> 13).astype(np.uint8)


FIRST_NEEDED = (0, PROMPT - 72, PROMPT - 32, PROMPT - 32, PROMPT - 72)
"""Tokens of the prompt, group by group."""
FIRST_STORED = (0, CHUNK, PROMPT - 32, PROMPT - 32, CHUNK)
"""The first token in the objects that a hit of it has: whole objects are restored."""


def round_trip(kind: str, address: str, page: int) -> None:
    """Two processes: what one stores of all groups, the other loads into other blocks; null blocks are neither read
    nor written, and nothing else is touched."""
    pool, first = Pool(page), secrets.randbelow(1 << 30)
    with engines.engine_process(kind) as writer, engines.engine_process(kind) as reader:
        for engine in (writer, reader):
            engine.make_pool(page)
            assert engine.start(address, secrets.token_hex(16)) == ""
        for seed, stored, lacks in (
            (1, (0,) * 5, (0,) * 5),
            (2, (0,) * 5, FIRST_NEEDED),
            (3, (0, CHUNK, CHUNK, CHUNK, CHUNK), FIRST_NEEDED),  # windows of the first chunk have gone
        ):
            ids, others = pool.take(seed, stored), pool.take(100 + seed, lacks)
            writer.put(ids, seed)
            begin = first + seed * PROMPT
            assert writer.store_groups(begin, PROMPT, ids) == [0b00001 if stored[1] else 0b11111, 0b11111, 0b11111]
            if stored[1]:
                assert reader.lookup(begin, CHUNK)[1] == 0
            job_id, hit = reader.lookup(begin, PROMPT)
            assert hit == PROMPT
            reader.clear()
            assert reader.retrieve_groups(job_id, PROMPT, others) == ["loaded"] * 3
            assert reader.holds(others, seed, FIRST_STORED)
        assert writer.stop() and reader.stop()
