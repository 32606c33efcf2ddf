# SPDX-License-Identifier: Apache-2.0
"""Field reports 6 and 12, their parts without a card: everything at once, while processes are killed all the time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from kvgrpc import api
from kvgrpc.client.aio import AioClient
from kvgrpc.core.types import CoreLimits, Role
from kvgrpc.wire import cache as cache_wire
from kvgrpc.wire import engine as engine_wire
from tests.e2e.dying import Nursery, order
from tests.e2e.harness import CHUNK, Engine, LocalServer, Stream, outcomes, tokens_of
from tests.e2e.heartbeat import Heartbeat
from tests.e2e.probes import TINY
from tests.served import Served, serving

CHURN_S = 12.0
TASKS = 32
MORTALS = 4
PROMPTS = 40
CHUNKS = 4
TOKENS = CHUNKS * CHUNK
BLOCKS = list(range(1, 32, 2))
LIMITS = CoreLimits(chunk_tokens=CHUNK)
LANES = 8
FLAGS = ("--chunk-tokens", str(CHUNK), "--l1-size", "256KiB", "--page-size", "1KiB", "--max-cpu-workers", "1")
"""L1 holds a fifth of what there is, so everything is evicted again and again."""
OF_GRPC = {"event_engine", "grpc_global_tim", "lifeguard"}
"""Threads that come and go with gRPC's own load."""


def remote(address: str, stack: contextlib.AsyncExitStack) -> LocalServer:
    """What the harness's engines need of a server that runs in another process."""
    nothing = cast("Any", None)
    return LocalServer(nothing, nothing, nothing, nothing, LIMITS, None, stack, address)


def prompt(number: int) -> api.Tokens:
    return tokens_of(number, TOKENS)


class Member:
    """One engine that does all sorts of things, one after the other, and knows what bytes each prompt has."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.chance = random.Random(seed)
        self.done: Counter[str] = Counter()

    async def run(self, end: float) -> None:
        acts = [self.store, self.store, self.load, self.load, self.load, self.free, self.abort, self.again, self.rejoin]
        while time.monotonic() < end:
            act = self.chance.choice(acts)
            await act(self.chance.randrange(PROMPTS))
            self.done[act.__name__] += 1
            await asyncio.sleep(self.chance.random() * 0.03)

    async def store(self, number: int) -> None:
        self.engine.image.kv = replace(TINY, seed=number)
        results = await self.engine.store(prompt(number), BLOCKS)
        assert set(outcomes(results)) <= {"STORED", "RESIDENT", "BEING_WRITTEN"}, results

    async def load(self, number: int) -> None:
        request = self.engine.lookup_request(prompt(number))
        answer = await self.engine.scheduler.lookup(request)
        hit = answer.status.hit_tokens // CHUNK
        if hit:
            target = BLOCKS[: hit * 4]
            loaded = outcomes(await self.engine.retrieve(answer, target)).count("LOADED")
            assert loaded == hit or not answer.status.pinned
            self.engine.image.kv = replace(TINY, seed=number)
            assert self.engine.image.wrong_tokens(target[: loaded * 4]) == []
            assert self.engine.image.untouched(target)

    async def free(self, number: int) -> None:
        answer = await self.engine.lookup(prompt(number))
        if answer.job_id:
            await self.engine.free(answer)

    async def abort(self, number: int) -> None:
        request = self.engine.lookup_request(prompt(number))
        asking = asyncio.ensure_future(self.engine.scheduler.lookup(request))
        await asyncio.sleep(self.chance.random() * 0.005)
        asking.cancel()
        await asyncio.wait((asking,))
        await self.engine.scheduler.end_request(self.engine.engine_id, request.request_id)

    async def again(self, _: int) -> None:
        await self.engine.worker.unregister(self.engine.engine_id)
        await self.engine.worker.register(self.engine.registration())

    async def rejoin(self, _: int) -> None:
        """Its stream breaks and is opened again, within the grace: the session goes on. Where the machine took longer
        than that, it has ended, and a client registers anew."""
        old = self.engine.streams[0]
        broken = time.monotonic()
        await old.close()
        self.engine.streams[0] = Stream(self.engine.worker, self.engine.engine_id, Role.WORKER, old.session_id)
        await self.engine.streams[0].open()
        if not self.engine.streams[0].events[0].resumed:
            assert time.monotonic() - broken > LIMITS.reattach_grace_ns / 1e9, "a session continued in time is lost"
            await self.engine.worker.register(self.engine.registration())


def order_of(server: LocalServer, engine: Engine, number: int, generation: int) -> dict[str, str]:
    tokens = prompt(number)
    engine.image.kv = replace(TINY, seed=number)
    engine.image.write(BLOCKS)
    return order(
        server.address,
        "churn",
        f"mortal-{number}-{generation}",
        engine.engine_id,
        register=engine_wire.encode_register_request(engine.registration()),
        store=cache_wire.encode_store_request(engine.store_request(tokens, BLOCKS)),
        lookup=cache_wire.encode_lookup_request(engine.lookup_request(tokens)),
        retrieve=cache_wire.encode_retrieve_request(engine.retrieve_request(bytes(16), BLOCKS)),
    )


async def die_again_and_again(
    server: LocalServer, nursery: Nursery, engine: Engine, number: int, generation: int, end: float
) -> int:
    """Processes of one engine, killed one after the other; how many. What they store and load is one prompt's. From
    this generation on none had their names."""
    chance, deaths = random.Random(number), 0
    while time.monotonic() < end:
        pid = await nursery.start(order_of(server, engine, PROMPTS + number, generation + deaths))
        await asyncio.sleep(0.2 + chance.random())
        await nursery.kill(pid)
        deaths += 1
    return deaths


def threads(server: Served) -> int:
    """Those of the server's that are not gRPC's."""
    names: list[str] = []
    for name in Path(f"/proc/{server.process.pid}/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            names.append(name.read_text().strip())
    return sum(name not in OF_GRPC for name in names)


def shared_memory_of(server: Served) -> int:
    """Descriptors and mappings of engines' memory that the server has."""
    folder = Path(f"/proc/{server.process.pid}")
    links: list[str] = []
    for fd in os.listdir(folder / "fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(folder / "fd" / fd))
    maps = (folder / "maps").read_text().splitlines()
    return sum("/dev/shm/" in text for text in (*links, *maps))


async def test_everything_at_once_while_engines_are_killed() -> None:
    """32 engines store, load, free, abort, register and reconnect; others are killed. Health never has a gap of a
    second (in one of three rounds: the machine may have other work), no call is stuck, every byte is right, and at the
    end there is nothing left of any of them."""
    with serving(*FLAGS) as served:
        async with contextlib.AsyncExitStack() as stack, Nursery() as nursery, AioClient(served.address) as admin:
            server = remote(served.address, stack)
            threads_most = threads(served) + LANES + 1  # each lane's, and the one that hashes
            members = [Member(await server.engine(kv=TINY, num_blocks=64), number) for number in range(TASKS)]
            mortals = [Engine(server, kv=TINY, num_blocks=64) for _ in range(MORTALS)]
            for mortal in mortals:
                mortal.space = members[0].engine.space
            await asyncio.gather(*(member.store(number) for number, member in enumerate(members)))
            killed, gaps_s = 0, list[float]()
            while not gaps_s or (gaps_s[-1] >= 1.0 and len(gaps_s) < 3):
                heartbeat = Heartbeat(server.address)
                await heartbeat.start()
                end = time.monotonic() + CHURN_S
                deaths = [
                    asyncio.ensure_future(die_again_and_again(server, nursery, mortals[number], number, killed, end))
                    for number in range(MORTALS)
                ]
                # a stuck call would outlive this by far
                await asyncio.wait_for(asyncio.gather(*(member.run(end) for member in members)), CHURN_S + 20)
                killed += sum(await asyncio.gather(*deaths))
                beats = await heartbeat.stop()
                assert beats.failures == 0
                assert len(beats.times) > CHURN_S
                gaps_s.append(beats.longest_gap_s)
            assert gaps_s[-1] < 1.0, gaps_s
            assert killed >= MORTALS * 3
            done = sum((member.done for member in members), Counter[str]())
            assert len(done) == 6
            assert min(done.values()) > 20, done
            for number in range(MORTALS):
                await members[number].load(PROMPTS + number)

            for member in members:
                await member.engine.stop()
            end = time.monotonic() + 30
            while True:
                status = await admin.get_status()
                busy = [lane for lane in status.executors if lane.clients or lane.queued]
                owned = (status.engines, status.clients, status.jobs, status.pins, status.calls_in_flight)
                left = (busy, owned, shared_memory_of(served), max(threads(served) - threads_most, 0))
                if left == ([], (0, 0, 0, 0, 0), 0, 0):
                    break
                assert time.monotonic() < end, left
                await asyncio.sleep(0.05)
            assert status.arena.free_bytes + status.arena.ready_bytes == status.arena.total_bytes
            assert status.counters["ended_sessions"] >= killed
            assert len(status.executors) == LANES
            assert '"level": "error"' not in served.log
