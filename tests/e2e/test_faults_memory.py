# SPDX-License-Identifier: Apache-2.0
"""Field report 9: L1 is full all the time, and stores go on."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

from kvgrpc import api
from kvgrpc.core.types import MIB, ChunkOutcome, CoreLimits
from tests.e2e.harness import CHUNK, Engine, LocalServer, local_server, outcomes, tokens_of
from tests.kvdata import BLOCKS_OUTERMOST, Kv

L1_BYTES = 4 * MIB
PAGE_BYTES = 4096
LIMITS = CoreLimits(chunk_tokens=CHUNK, page_bytes=PAGE_BYTES, pin_share=1.0)
SIZES = [Kv(layers=layers, planes=2, heads=4, head_dim=64) for layers in (1, 3, 7)]
"""16, 48 and 112 KiB a chunk."""
HALF = Kv(layers=1, planes=1, heads=64, head_dim=1024)
"""A chunk of half of L1."""
BLOCKS = list(range(1, 16, 2))
"""Two chunks."""
CLIENTS = 8


def at_rest(server: LocalServer) -> None:
    arena = server.book.arena_status()
    assert arena.free_bytes + arena.ready_bytes == arena.total_bytes == L1_BYTES
    assert server.book.counts().pins == 0
    server.check()


class Load:
    """What the clients did. Every stored chunk is looked up; one lookup in ten is aborted, the rest are retrieved."""

    def __init__(self) -> None:
        self.chance = random.Random(9)
        self.stored_bytes = 0
        self.taken: list[bool] = []
        """Of each chunk after warm-up, whether it was stored."""

    async def run(self, engine: Engine, number: int) -> None:
        at = 0
        while self.stored_bytes < 10 * L1_BYTES:
            at += 1
            tokens = tokens_of(number * 100_000 + at, 2 * CHUNK)
            results = outcomes(await engine.store(tokens, BLOCKS))
            if self.stored_bytes > L1_BYTES:
                self.taken += [outcome == "STORED" for outcome in results]
            self.stored_bytes += results.count("STORED") * engine.object_bytes
            await self.use(engine, tokens)

    async def use(self, engine: Engine, tokens: api.Tokens) -> None:
        request = engine.lookup_request(tokens)
        if self.chance.random() < 0.1:
            asking = asyncio.ensure_future(engine.scheduler.lookup(request))
            await asyncio.sleep(self.chance.random() * 0.003)
            asking.cancel()
            await asyncio.wait((asking,))
            await engine.scheduler.end_request(engine.engine_id, request.request_id)
            return
        answer = await engine.scheduler.lookup(request)
        hit = answer.status.hit_tokens // CHUNK
        if hit:
            results = await engine.retrieve(answer, BLOCKS[: hit * 4])
            assert outcomes(results) == ["LOADED"] * hit
            assert engine.image.wrong_tokens(BLOCKS[: hit * 4]) == []


async def test_full_l1_takes_stores_for_ever(tmp_path: Path) -> None:
    """Stores of ten times L1, sizes 1:3:7, aborted lookups: 99 % of chunks are taken, nothing is lost on the way, and
    an object of half of L1 fits at the end."""
    async with local_server(tmp_path, l1_bytes=L1_BYTES, limits=LIMITS) as server:
        engines = [
            await server.engine(
                kv=SIZES[number % 3], model=f"model-{number % 3}", arrangement=BLOCKS_OUTERMOST, num_blocks=16
            )
            for number in range(CLIENTS)
        ]
        load = Load()
        await asyncio.gather(*(load.run(engine, number) for number, engine in enumerate(engines)))
        assert len(load.taken) > 200
        assert sum(load.taken) / len(load.taken) >= 0.99
        at_rest(server)

        big = await server.engine(kv=HALF, model="big", num_blocks=8, arrangement=BLOCKS_OUTERMOST)
        assert big.object_bytes == L1_BYTES // 2
        tokens = tokens_of(1, CHUNK)
        assert outcomes(await big.store(tokens, [1, 3, 5, 7])) == ["STORED"]
        assert outcomes(await big.retrieve(await big.lookup(tokens), [0, 2, 4, 6])) == ["LOADED"]
        assert big.image.wrong_tokens([0, 2, 4, 6]) == []
        at_rest(server)


async def test_all_of_l1_pinned(tmp_path: Path) -> None:
    """A store is refused by name and at once, while everything is pinned; when the pins go it is taken."""
    async with local_server(tmp_path, l1_bytes=L1_BYTES, limits=LIMITS) as server:
        engine = await server.engine(kv=SIZES[0], arrangement=BLOCKS_OUTERMOST, num_blocks=1024)
        count = L1_BYTES // engine.object_bytes
        tokens = tokens_of(1, count * CHUNK)
        assert outcomes(await engine.store(tokens, range(1024))) == ["STORED"] * count
        answer = await engine.lookup(tokens)
        assert (answer.status.hit_tokens, answer.status.pinned) == (count * CHUNK, True)
        arena = server.book.arena_status()
        assert arena.pinned_bytes == arena.total_bytes
        times: list[float] = []
        for number in range(20):
            started = time.monotonic()
            results = await engine.store(tokens_of(2 + number, 2 * CHUNK), range(8))
            times.append(time.monotonic() - started)
            assert [(r.outcome, r.reason) for r in results] == [(ChunkOutcome.REFUSED, "NO_ROOM")]
        assert sorted(times)[10] < 0.1
        assert server.book.arena_status() == arena
        await engine.free(answer)
        assert outcomes(await engine.store(tokens_of(99, 2 * CHUNK), range(8))) == ["STORED"] * 2
        at_rest(server)
