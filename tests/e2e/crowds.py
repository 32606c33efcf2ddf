# SPDX-License-Identifier: Apache-2.0
"""Many engines at once on a server whose L1 is small and whose lower tier is real, and kills while that is written.

Chunks are told apart by their bytes: position-coded, and of 1,024 kinds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import numpy as np

from kvgrpc.core.types import LookupAnswer
from tests.e2e.disk_server import DiskServer
from tests.e2e.harness import BLOCK, CHUNK, Engine, outcomes, tokens_of, until
from tests.e2e.probes import found, out_of_reach
from tests.kvdata import FILL, LAYERS_OUTERMOST, Bytes, Image, Kv
from tests.tiers.stores import Store

RETRIEVES = int(os.environ.get("KVGRPC_TEST_RETRIEVES", "400"))
"""`make soak` makes it 100,000."""
KILLS = int(os.environ.get("KVGRPC_TEST_KILLS", "3"))
"""`make kills` makes it 30."""
WRITERS = READERS = 8
KEYS = 500
L1_CHUNKS = 16
PER_CHUNK = CHUNK // BLOCK
SMALL = Kv(layers=4, planes=2, heads=1, head_dim=64)
SMALL_BYTES = SMALL.token_bytes * CHUNK
"""16 KiB."""


class Chunks:
    """What each prompt of one chunk has in its blocks: [block, layer, plane, token, head, byte]."""

    def __init__(self, kv: Kv) -> None:
        self.kv = kv
        self._kinds: list[Bytes] = []
        for seed in range(4):
            image = Image(replace(kv, seed=seed), LAYERS_OUTERMOST, BLOCK, PER_CHUNK)
            image.write(range(PER_CHUNK))
            self._kinds.append(image.blocks.copy())

    def of(self, prompt: int) -> Bytes:
        return self._kinds[prompt >> 8 & 3] + (prompt & 255)  # bytes, which wrap

    async def store(self, engine: Engine, prompt: int, blocks: Sequence[int]) -> list[str]:
        """Stores it, then writes something else over it, as an engine may once it has the answer."""
        engine.image.blocks[list(blocks)] = self.of(prompt)
        request = engine.store_request(tokens_of(prompt, CHUNK), blocks)
        answer = outcomes(await engine.worker.store(request))
        engine.image.memory[:] = FILL
        return answer

    async def load(self, engine: Engine, prompt: int, blocks: Sequence[int]) -> str:
        """Where it was, "" when it was nowhere; in the blocks is what the prompt has, and nothing anywhere else."""
        job_id, status = await found(engine, tokens_of(prompt, CHUNK), prefetch_wait_ms=10_000)
        if not status.hit_tokens:
            return ""
        results = await engine.retrieve(LookupAnswer(job_id, status), blocks)
        loaded = outcomes(results) == ["LOADED"]
        if loaded:
            assert (engine.image.blocks[list(blocks)] == self.of(prompt)).all(), f"other bytes than those of {prompt}"
        assert loaded or not status.pinned, results
        assert engine.image.untouched(blocks)
        return next(iter(status.hit_chunks_by_tier)) if loaded else ""


@contextlib.asynccontextmanager
async def engines(server: DiskServer, *kinds: Kv, num_blocks: int = 16) -> AsyncIterator[list[Engine]]:
    """One for each; those of equal data share it."""
    async with contextlib.AsyncExitStack() as stack:
        place = out_of_reach(server.address, stack)
        facts = [{"kv": kv, "model": f"model-{kv.token_bytes}", "num_blocks": num_blocks} for kv in kinds]
        yield [await place.engine(**each) for each in facts]


# ---- readers beside writers ----


class Crowd:
    """Writers, each of prompts of its own, and readers of whatever was stored lately."""

    def __init__(self) -> None:
        self.chunks = Chunks(SMALL)
        self.recent: dict[int, int] = {}
        self.loaded: Counter[str] = Counter()
        self._stored = 0
        self._looked = 0
        self._prompts = itertools.count()

    @property
    def done(self) -> bool:
        """Whether enough came, and a part of it from below: how much does is the machine's matter."""
        return self.loaded.total() >= RETRIEVES and self.loaded.total() - self.loaded["l1"] >= RETRIEVES // 4

    async def write(self, engine: Engine, chance: random.Random) -> None:
        """No faster than others read: else nearly all goes out of L1 before its turn to be written below."""
        while not self.done:
            prompt = next(self._prompts)
            blocks = chance.sample(range(engine.image.num_blocks), PER_CHUNK)
            if await self.chunks.store(engine, prompt, blocks) == ["STORED"]:
                self.recent[prompt % KEYS] = prompt
                self._stored += 1
            await until(lambda most=prompt - KEYS // 4: self.done or self._looked >= most, 60)

    async def read(self, engine: Engine, chance: random.Random) -> None:
        while not self.done:
            self._looked += 1
            blocks = chance.sample(range(engine.image.num_blocks), PER_CHUNK)
            prompt = chance.choice(list(self.recent.values())) if self.recent else 0
            tier = await self.chunks.load(engine, prompt, blocks)
            self.loaded.update([tier] if tier else [])
            await asyncio.sleep(0)

    async def stall(self, store: Store) -> None:
        """Time and again the store stands still until L1 has been filled anew, with writes to it under way."""
        while not self.done:
            store.signal(signal.SIGSTOP)
            with contextlib.suppress(AssertionError):  # in time, whatever was stored: it is not to be given up
                await until(lambda most=self._stored + 3 * L1_CHUNKS: self._stored >= most, 0.5)
            store.signal(signal.SIGCONT)
            loaded = self.loaded.total() + 40
            await until(lambda most=loaded: self.done or self.loaded.total() >= most, 60)


async def readers_get_their_own_while_others_write(server: DiskServer, store: Store | None = None) -> None:
    """Field report 50: L1 holds 16 chunks; eight write, eight read what was written lately, all at once."""
    server.start("--page-size", "16KiB", "--write-share", "0.25", l1_size=str(L1_CHUNKS * SMALL_BYTES))
    crowd, chance = Crowd(), random.Random(50)
    async with engines(server, *[SMALL] * (WRITERS + READERS)) as members:
        acts = [crowd.write] * WRITERS + [crowd.read] * READERS
        work = [
            asyncio.ensure_future(act(member, random.Random(chance.random())))
            for act, member in zip(acts, members, strict=True)
        ]
        work += [asyncio.ensure_future(crowd.stall(store))] if store is not None else []
        try:
            await asyncio.gather(*work)
        finally:
            for one in work:
                one.cancel()
            await asyncio.wait(work)
    status = server.status()
    assert crowd.loaded[status.tiers[0].name] >= RETRIEVES // 4, crowd.loaded
    assert status.counters["evicted_chunks"] >= RETRIEVES // 4
    assert status.tiers[0].counters.get("damaged_objects", 0) == 0
    await until(lambda: server.status().arena.settling_bytes == 0)


# ---- lookups at once ----

LOOKUPS, LONG = 4, 8


async def lookups_at_once_lose_no_prefetch(server: DiskServer) -> None:
    """Field report 55: four lookups of eight chunks below, while 20 may be read at a time: all end with eight. Where 20
    may be pinned, who gets less is told why, it is counted, and has its eight once others have read theirs."""
    chunks = Chunks(SMALL)
    sizes = ["--page-size", "16KiB", "--metrics-listen", "127.0.0.1:0"]
    server.start(*sizes, l1_size=str(64 * SMALL_BYTES))
    async with engines(server, SMALL, num_blocks=LONG * PER_CHUNK) as (engine,):
        for prompt in range(LOOKUPS):
            engine.image.blocks[:] = long_data(chunks, prompt)
            request = engine.store_request(tokens_of(prompt, LONG * CHUNK), range(LONG * PER_CHUNK))
            assert outcomes(await engine.worker.store(request)) == ["STORED"] * LONG
        await until(lambda: server.counter("written_objects") >= LOOKUPS * LONG, 60)
    for shares, all_at_once in (
        (("--prefetch-share", "0.3125", "--pin-share", "1"), True),
        (("--prefetch-share", "1", "--pin-share", "0.3125"), False),
    ):
        server.kill()
        server.start(*sizes, *shares, l1_size=str(64 * SMALL_BYTES))
        async with engines(server, *[SMALL] * LOOKUPS, num_blocks=LONG * PER_CHUNK) as members:
            hits = await asyncio.gather(*(look(members[n], chunks, n) for n in range(LOOKUPS)))
            assert [count for count, _ in hits] == [LONG] * LOOKUPS or not all_at_once, hits
            assert all(why == ("" if count == LONG else "PREFETCH_LIMIT") for count, why in hits), hits
            assert sum(count for count, _ in hits) >= 20, hits
            missing = LOOKUPS * LONG - sum(count for count, _ in hits)
            assert counted(server, "kvgrpc_miss_chunks_total", "prefetch_limit") == missing
            again = [await look(members[n], chunks, n) for n in range(LOOKUPS)]
            assert again == [(LONG, "")] * LOOKUPS


def long_data(chunks: Chunks, prompt: int) -> Bytes:
    """Of a prompt of several chunks, all different."""
    return np.concatenate([chunks.of(LONG * prompt + at) for at in range(LONG)])


async def look(engine: Engine, chunks: Chunks, prompt: int) -> tuple[int, str]:
    """Looks up, waits and retrieves: chunks that came back right, and what limited them."""
    job_id, status = await found(engine, tokens_of(prompt, LONG * CHUNK), prefetch_wait_ms=30_000)
    count = status.hit_tokens // CHUNK
    blocks = random.Random(prompt).sample(range(LONG * PER_CHUNK), count * PER_CHUNK)
    if count:
        results = await engine.retrieve(LookupAnswer(job_id, status), blocks)
        assert outcomes(results) == ["LOADED"] * count
        assert (engine.image.blocks[blocks] == long_data(chunks, prompt)[: len(blocks)]).all()
    return count, status.limited_by


def counted(server: DiskServer, series: str, reason: str) -> float:
    """Of the metrics that this start of the server shows."""
    address = [part for part in server.log.split('"') if part.endswith("/metrics")][-1]
    with urllib.request.urlopen(address, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    (line,) = (one for one in lines if one.startswith(series + "{") and f'reason="{reason}"' in one)
    return float(line.split()[-1])


# ---- kills ----

PER_ROUND = 8


async def kills_in_the_middle_of_writes(server: DiskServer, store: Store, large_mib: int = 5) -> None:
    """Whatever a kill leaves is whole or a miss, what was reported is there, and the next server writes again.

    Of each round one object is so large that it travels in pieces. In the last the store stands still from before that
    one until after the kill, which so comes before its end on any machine.
    """
    small, large = Chunks(SMALL), Chunks(Kv(layers=4, planes=2, heads=8, head_dim=512 * large_mib))
    kinds, chance = [small] * PER_ROUND + [large], random.Random(52)
    server.start()
    for round_ in range(KILLS + 1):
        stands_still = round_ == KILLS
        reported = 0 if stands_still else round_ % 7
        prompts = list(enumerate(kinds, round_ * (PER_ROUND + 1)))
        async with engines(server, small.kv, large.kv) as members:
            for prompt, kind in prompts:
                if stands_still and kind is large:
                    store.signal(signal.SIGSTOP)
                assert await kind.store(members[kind is large], prompt, range(PER_CHUNK)) == ["STORED"]
            await until(lambda least=reported: server.counter("written_objects") >= least, 60)
            if reported:
                await asyncio.sleep(chance.random() * 0.05)  # anywhere in a write
            server.kill()
            store.signal(signal.SIGCONT)
        server.start()
        async with engines(server, small.kv, large.kv) as members:
            blocks = chance.sample(range(16), PER_CHUNK)
            tiers = {prompt: await kind.load(members[kind is large], prompt, blocks) for prompt, kind in prompts}
            assert set(tiers.values()) <= {server.tier().name, ""}
            assert tiers[prompts[-1][0]] == "" or not stands_still, "the kill came before its end"
            end = time.monotonic() + 30
            while sum(map(bool, tiers.values())) < reported:  # a busy store may answer too late for one lookup
                assert time.monotonic() < end, "what was reported is there"
                for prompt, kind in prompts:
                    tiers[prompt] = tiers[prompt] or await kind.load(members[kind is large], prompt, blocks)
            assert server.tier().counters.get("damaged_objects", 0) == 0
            written = server.counter("written_objects")
            assert await small.store(members[0], 500_000 + round_, range(PER_CHUNK)) == ["STORED"]
            await until(lambda least=written: server.counter("written_objects") > least, 60)
