# SPDX-License-Identifier: Apache-2.0
"""Engines whose groups need different things of a prefix, over a real server: all groups alias one memory, as engines
with a pool of pages have it, and every byte is compared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvgrpc import api
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import NULL_BLOCK, ChunkResult, CoreLimits
from tests.e2e.harness import Engine, LocalServer, local_server

CHUNK, PAGE, LAYERS, BLOCKS = 64, 512, 2, 160
FILL = 0xA5
Bytes = NDArray[np.uint8]
RUNS = api.Runs(0, 0, LAYERS, BLOCKS * PAGE, 1, 0, PAGE, 256)


def group(kind: api.GroupKind, block_size: int, run_bytes: int, window: int = 0) -> api.KvGroup:
    runs = (replace(RUNS, run_bytes=run_bytes),)
    return api.KvGroup(block_size, BLOCKS, runs, api.BlockForm.OPAQUE, kind, window, backend="X", layout="Y")


GROUPS = (
    group(api.GroupKind.FULL, 16, 256),
    group(api.GroupKind.SLIDING_WINDOW, 16, 384, 72),
    group(api.GroupKind.RECURRENT, 32, PAGE),
    group(api.GroupKind.CHUNKED_LOCAL, 16, 128, 32),
    group(api.GroupKind.SLIDING_WINDOW, 16, 256, 72),
)
FIRST_NEEDED = (0, 2 * CHUNK - 72 + CHUNK, 3 * CHUNK - 32, 3 * CHUNK - 32, 2 * CHUNK - 72 + CHUNK)
"""Tokens, of a hit of 3 chunks."""
FIRST_STORED = (0, CHUNK, 3 * CHUNK - 32, 3 * CHUNK - 32, CHUNK)
"""The first token in the objects that such a hit has, since whole objects are restored."""


def coded(number: int, layer: int, place: int, length: int) -> Bytes:
    """What a group's block at this place of the prompt holds in one layer."""
    at = np.arange(length, dtype=np.uint64)
    mixed = (at * 0x9E3779B1 + number * 0x85EBCA77 + layer * 0xC2B2AE3D + place * 0x27D4EB2F + 0x165667B1) & 0xFFFFFFFF
    return (mixed >> 13).astype(np.uint8)


class Pool(Engine):
    """An engine whose groups share one pool of pages; block 0 is nobody's."""

    def __init__(self, server: LocalServer, seed: int) -> None:
        super().__init__(server, num_blocks=BLOCKS)
        pages = np.frombuffer(self.image.memory, np.uint8)
        assert len(pages) >= LAYERS * BLOCKS * PAGE
        self.pages: Bytes = pages[: LAYERS * BLOCKS * PAGE].reshape(LAYERS, BLOCKS, PAGE)
        self.pages[:] = FILL
        self._rng = random.Random(seed)

    def registration(self) -> api.RegisterRequest:
        memory = (api.SharedMemory(self.memory_name, 0, LAYERS * BLOCKS * PAGE),)
        return replace(super().registration(), layout=api.Layout(memory, GROUPS))

    def take(self, tokens: int, lack_below: Sequence[int] = (0,) * len(GROUPS)) -> list[list[int]]:
        """Different blocks for every group, null blocks below these tokens."""
        free = self._rng.sample(range(1, BLOCKS), BLOCKS - 1)
        return [
            [NULL_BLOCK if (at + 1) * one.block_size <= below else free.pop() for at in range(tokens // one.block_size)]
            for one, below in zip(GROUPS, lack_below, strict=True)
        ]

    def put(self, ids: list[list[int]], pages: Bytes, first: Sequence[int] = (0,) * len(GROUPS)) -> None:
        """Position-coded data from these tokens on, in a copy of the pages."""
        for number, (one, blocks, start) in enumerate(zip(GROUPS, ids, first, strict=True)):
            length = one.runs[0].run_bytes
            for place, block in enumerate(blocks):
                if block != NULL_BLOCK and (place + 1) * one.block_size > start:
                    for layer in range(LAYERS):
                        pages[layer, block, :length] = coded(number, layer, place, length)

    async def keep(self, prompt: api.Tokens, ids: list[list[int]]) -> tuple[ChunkResult, ...]:
        self.put(ids, self.pages)
        return await self.worker.store(replace(self.store_request(prompt, ()), blocks=tuple(ids)))

    async def load(
        self, job_id: bytes, ids: list[list[int]], start: int = 0, end: int = 3 * CHUNK
    ) -> tuple[ChunkResult, ...]:
        blocks = tuple(one[start // g.block_size :] for one, g in zip(ids, GROUPS, strict=True))
        span = api.TokenRange(start, end)
        request = api.RetrieveRequest(self.engine_id, self.next_call_id(), job_id, span, blocks)
        return await self.worker.retrieve(request)


def tokens(count: int) -> api.Tokens:
    return api.Tokens.from_ids(range(7, 7 + count))


async def pool(server: LocalServer, seed: int) -> Pool:
    engine = Pool(server, seed)
    await engine.start()
    return engine


def limits(slice_bytes: int = 64 << 20) -> CoreLimits:
    return CoreLimits(chunk_tokens=CHUNK, page_bytes=4096, slice_bytes=slice_bytes)


@pytest.mark.parametrize("slice_bytes", [64 << 20, 900], ids=["whole", "cut"])
@pytest.mark.parametrize("lacks", [True, False], ids=["null blocks", "every block"])
async def test_exactly_what_the_hit_needs_is_written(tmp_path: Path, lacks: bool, slice_bytes: int) -> None:
    async with local_server(tmp_path, l1_bytes=1 << 20, limits=limits(slice_bytes)) as server:
        writer, reader = await pool(server, 1), await pool(server, 2)
        prompt = tokens(3 * CHUNK)
        results = await writer.keep(prompt, writer.take(3 * CHUNK))
        assert [(one.count, one.outcome.value, one.groups) for one in results] == [(3, "STORED", 0b11111)]
        job = await reader.lookup(prompt)
        assert job.status.hit_tokens == 3 * CHUNK
        ids = reader.take(3 * CHUNK, FIRST_NEEDED if lacks else (0,) * len(GROUPS))
        results = await reader.load(job.job_id, ids)
        assert [(one.count, one.outcome.value, one.groups) for one in results] == [
            (1, "LOADED", 0b00001), (1, "LOADED", 0b10011), (1, "LOADED", 0b11111),
        ]  # fmt: skip
        wanted = np.full_like(reader.pages, FILL)
        reader.put(ids, wanted, FIRST_STORED)
        assert np.array_equal(reader.pages, wanted)
        assert server.book.counts().pins == 0


async def test_a_range_that_begins_inside_the_hit(tmp_path: Path) -> None:
    """The engine has the first tokens itself: nothing before the range is touched."""
    async with local_server(tmp_path, l1_bytes=1 << 20, limits=limits()) as server:
        writer, reader = await pool(server, 3), await pool(server, 4)
        prompt = tokens(3 * CHUNK)
        await writer.keep(prompt, writer.take(3 * CHUNK))
        job = await reader.lookup(prompt)
        ids, start = reader.take(3 * CHUNK), 2 * CHUNK + 32
        await reader.load(job.job_id, ids, start)
        wanted = np.full_like(reader.pages, FILL)
        reader.put(ids, wanted, [max(start, first) for first in FIRST_STORED])
        assert np.array_equal(reader.pages, wanted)


async def test_groups_that_the_writer_lacks_make_no_hit(tmp_path: Path) -> None:
    """Field report 21: the full group is there, the windows and states come later; then as far as they reach."""
    async with local_server(tmp_path, l1_bytes=1 << 20, limits=limits()) as server:
        writer, reader = await pool(server, 5), await pool(server, 6)
        prompt, everything = tokens(3 * CHUNK), 3 * CHUNK
        none = writer.take(3 * CHUNK, (0, everything, everything, everything, everything))
        results = await writer.keep(prompt, none)
        assert [(one.count, one.outcome.value, one.groups) for one in results] == [(3, "STORED", 0b00001)]
        assert await reader.hits(prompt) == 0
        await writer.keep(prompt, writer.take(3 * CHUNK, (0, 0, everything, 0, 0)))
        assert await reader.hits(prompt) == 0
        two = tokens(2 * CHUNK)
        await writer.keep(two, writer.take(2 * CHUNK))
        assert await reader.hits(prompt) == 2


async def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    async with local_server(tmp_path, l1_bytes=1 << 20, limits=limits()) as server:
        writer = await pool(server, 7)
        ids = writer.take(3 * CHUNK)
        ids[0][0] = NULL_BLOCK
        with pytest.raises(Refusal) as refusal:
            await writer.keep(tokens(3 * CHUNK), ids)
        assert (refusal.value.reason, refusal.value.field) == (Reason.BLOCK_IDS, "blocks[0].ids")
        await writer.keep(tokens(3 * CHUNK), writer.take(3 * CHUNK))
        job = await writer.lookup(tokens(3 * CHUNK))
        with pytest.raises(Refusal) as refusal:
            await writer.load(job.job_id, writer.take(3 * CHUNK), end=2 * CHUNK + 32)
        assert refusal.value.reason is Reason.RANGE
