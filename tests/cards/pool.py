# SPDX-License-Identifier: Apache-2.0
"""A pool of pages that five groups share, as engines with one memory for layers of all kinds have it: what it is as a
layout, position-coded bytes in it, and a round of calls by two processes that compares every byte."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from kvgrpc.api import BlockForm, GroupKind, KvGroup, Layout, Runs, SharedMemory
from tests.cards import engines
from tests.pooled import Bytes, Ids, put, take

CHUNK, LAYERS, BLOCKS = 64, 2, 96
PROMPT = 3 * CHUNK


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
        """Blocks for the prompt."""
        return take(random.Random(seed), self.groups, PROMPT, lack_below)

    def put(self, memory: Bytes, ids: Ids, seed: int, first: Sequence[int] = (0,) * 5) -> None:
        """What each group's blocks hold from these tokens on."""
        put(memory[: self.size_bytes].reshape(LAYERS, BLOCKS, self.page), self.groups, ids, first, seed)


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
