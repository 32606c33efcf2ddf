# SPDX-License-Identifier: Apache-2.0
"""Field report 43: a large L1 is served from while it is still being allocated."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from kvgrpc.core.index import Chunk
from kvgrpc.core.types import MIB
from kvgrpc.transfer import arena as arenas
from kvgrpc.transfer.arena import Arena
from tests.e2e import harness
from tests.e2e.harness import BLOCK, CHUNK, loaded_chunks, local_server, outcomes, tokens_of, until

PART = MIB
PARTS = 4
PAGE = 4096


async def test_it_serves_from_the_parts_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and from no other; status says how far it is."""
    made: list[Arena] = []

    def make(_: int) -> Arena:
        made.append(Arena(PARTS * PART, first_bytes=PART))
        return made[-1]

    monkeypatch.setattr(arenas, "PART_BYTES", PART)
    monkeypatch.setattr(harness, "Arena", make)
    async with local_server(tmp_path, l1_bytes=PART) as server:
        (arena,), gate, loop = made, threading.Semaphore(0), asyncio.get_running_loop()
        arena.fill(
            lambda ready: loop.call_soon_threadsafe(server.book.grow, ready), lambda *_: gate.acquire(timeout=60)
        )
        engine, operator = await server.engine(), await server.admin()
        blocks, target = [3, 1, 7, 5][: CHUNK // BLOCK], [12, 10, 14, 16][: CHUNK // BLOCK]
        fits = PART // (-(-engine.object_bytes // PAGE) * PAGE)
        seeds = iter(range(100_000))

        for parts in range(1, PARTS + 1):
            await until(lambda parts=parts: server.book.arena_status().total_bytes == parts * PART)
            assert (await operator.get_status()).arena.total_bytes == parts * PART
            stored = [next(seeds) for _ in range(parts * fits + 3)]
            for seed in stored:
                assert outcomes(await engine.store(tokens_of(seed, CHUNK), blocks)) == ["STORED"]
            slots = [slot for table in _tables(server) for chunk in table.values() for slot in chunk.slots.values()]
            assert len(slots) == parts * fits, "all that is there is used"
            assert max(offset + length for slot in slots for offset, length in slot.extents) <= parts * PART
            if parts < PARTS:
                assert os.fstat(arena._fd).st_blocks * 512 <= (parts + 1) * PART, "a part ahead at most"
            answer = await engine.lookup(tokens_of(stored[-1], CHUNK))
            assert loaded_chunks(await engine.retrieve(answer, target)) == [0]
            assert engine.image.wrong_tokens(target) == [] and engine.image.untouched(target)
            gate.release(2 if parts == 1 else 1)  # the first part is prepared, too


def _tables(server: harness.LocalServer) -> list[dict[bytes, Chunk]]:
    return [space.table.chunks for space in server.book.index.spaces.values()]
