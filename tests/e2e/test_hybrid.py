# SPDX-License-Identifier: Apache-2.0
"""Engines whose groups need different things of a prefix, over a real server: all groups alias one memory, as engines
with a pool of pages have it, and every byte is compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvgrpc import api
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.keys import chunk_keys, space_digest
from kvgrpc.core.types import NULL_BLOCK, ChunkResult, CoreLimits
from tests.e2e.harness import Engine, LocalServer, local_server
from tests.e2e.hybrids import BLOCKS, CHUNK, FILL, OBJECTS, Pages, first_needed, first_stored, groups, tokens

GROUPS = groups()
FIRST_NEEDED = first_needed(3 * CHUNK)
FIRST_STORED = first_stored(3 * CHUNK)


class Pool(Engine, Pages):
    """An engine whose groups share one pool of pages."""

    def __init__(self, server: LocalServer, seed: int) -> None:
        Engine.__init__(self, server, num_blocks=BLOCKS)
        Pages.__init__(self, self.image.buffer, seed)

    def registration(self) -> api.RegisterRequest:
        memory = (api.SharedMemory(self.memory_name, 0, self.size_bytes),)
        return replace(super().registration(), layout=api.Layout(memory, GROUPS))

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


async def test_watchers_tell_parts_from_chunks_by_their_keys(tmp_path: Path) -> None:
    """The first part has the chunk's own; no other's is as long as a chunk's can be."""
    async with local_server(tmp_path, l1_bytes=1 << 20, limits=limits()) as server:
        engine = await pool(server, 1)
        await engine.keep(tokens(2 * CHUNK), engine.take(2 * CHUNK))
        told: list[bytes] = []
        async for event in server.client("router").watch(api.WatchRequest(snapshot=True)):
            told += event.keys
            if event.kind is api.WatchKind.SYNCED:
                break
        chunks = chunk_keys(space_digest(engine.space), tokens(2 * CHUNK).data, CHUNK)
        assert {key for key in told if len(key) <= 64} == {*chunks}
        assert sorted(len(key) for key in told) == [32] * 2 + [66] * 2 * (OBJECTS - 1)
        assert {key[:32] for key in told} == {*chunks}
