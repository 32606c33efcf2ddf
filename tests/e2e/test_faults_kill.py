# SPDX-License-Identifier: Apache-2.0
"""Engines killed with SIGKILL while the server copies from or into their memory."""

from __future__ import annotations

import asyncio
import gc
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvgrpc import api
from kvgrpc.core.types import CoreLimits, Direction
from kvgrpc.transfer.gates import Gate
from kvgrpc.wire import cache as cache_wire
from kvgrpc.wire import engine as engine_wire
from tests.e2e.dying import Nursery, order
from tests.e2e.harness import CHUNK, Engine, LocalServer, local_server, outcomes, tokens_of, until
from tests.e2e.probes import mapped
from tests.kvdata import MHA
from tests.served import stand_still

ROUNDS = 20
CHUNKS = 8
BLOCKS = list(range(0, 64, 2))
"""Not neighbours, which would be moved as one run."""
RUNS_A_CHUNK = 24
"""3 layers, 2 planes, 4 blocks."""
OBJECT_BYTES = CHUNK * MHA.token_bytes
LIMITS = CoreLimits(chunk_tokens=CHUNK, page_bytes=4096, slice_bytes=OBJECT_BYTES)
"""A slice a chunk, so that a store that is killed has some chunks done, one torn and some not begun."""


def leftovers(server: LocalServer) -> dict[str, Any]:
    """Everything that a dead client might leave behind."""
    counts, arena = server.book.counts(), server.book.arena_status()
    return {
        "pins": counts.pins,
        "jobs": counts.jobs,
        "calls": counts.calls_in_flight,
        "clients": counts.clients,
        "sessions": len(server.book.sessions.clients),
        "engines": counts.engines,
        "bytes neither free nor ready": arena.total_bytes - arena.free_bytes - arena.ready_bytes,
        "mappings": mapped(server),
        "open shared memory": server.open_shared_memory(),
        "mapped shared memory": sorted(line.split()[-1] for line in shared_maps()),
    }


def shared_maps() -> list[str]:
    """But for those of earlier tests, which have no name any more and go when they are collected."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "/dev/shm/" in line and not line.endswith(" (deleted)")]


def mortal(server: LocalServer, survivor: Engine, seed: int) -> Engine:
    """An engine of the survivor's space that will run in a process of its own; its bytes are unlike any others."""
    engine = Engine(server, kv=replace(MHA, seed=seed), scheduler=False)
    engine.space = survivor.space
    engine.image.write(BLOCKS)
    return engine


def order_of(server: LocalServer, engine: Engine, act: str, tokens: api.Tokens) -> dict[str, str]:
    lookup = engine.lookup_request(tokens, request_id=f"{engine.worker.client_id}-{act}")
    return order(
        server.address,
        act,
        engine.worker.client_id,
        engine.engine_id,
        register=engine_wire.encode_register_request(engine.registration()),
        store=cache_wire.encode_store_request(engine.store_request(tokens, BLOCKS)),
        lookup=cache_wire.encode_lookup_request(lookup),
        retrieve=cache_wire.encode_retrieve_request(engine.retrieve_request(bytes(16), BLOCKS)),
    )


async def reached(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.wait_reached, 20), "no copy came to the gate"


async def session_ended(server: LocalServer, engine: Engine) -> None:
    client_id = engine.worker.client_id
    await until(lambda: client_id not in server.book.sessions.clients, what="the end of the session")


async def back_to(server: LocalServer, before: dict[str, Any]) -> float:
    """Seconds until nothing is left over."""
    return await until(lambda: leftovers(server) == before, what="the state before")


async def served_right(engine: Engine, tokens: api.Tokens, seed: int) -> int:
    """Chunks that a lookup finds; they can be retrieved, and every byte is right."""
    request = engine.lookup_request(tokens)
    answer = await engine.scheduler.lookup(request)
    chunks = answer.status.hit_tokens // CHUNK
    if chunks:
        target = BLOCKS[: chunks * 4]
        assert outcomes(await engine.retrieve(answer, target)) == ["LOADED"] * chunks
        engine.image.kv = replace(MHA, seed=seed)
        assert engine.image.wrong_tokens(target) == [], "bytes that nobody stored"
    await engine.scheduler.end_request(engine.engine_id, request.request_id)
    return chunks


def assert_within_a_second(times: list[float]) -> None:
    """Most of them; a busy machine may keep some of them for longer."""
    assert sorted(times)[len(times) * 3 // 4] < 1.0 and max(times) < 5.0, times


@pytest.mark.parametrize("while_held", [False, True], ids=["ends while dying", "ends after the session"])
async def test_killed_in_the_middle_of_a_store(tmp_path: Path, while_held: bool) -> None:
    """Field report 12: no mapping, page or pin of a dead engine stays; what it left half stored is never found."""
    chance, times = random.Random(7), list[float]()
    async with local_server(tmp_path, limits=LIMITS) as server, Nursery() as nursery:
        survivor = await server.engine()
        kept = tokens_of(1, CHUNKS * CHUNK)
        await survivor.store(kept, BLOCKS)
        for number in range(ROUNDS // 2):
            engine = mortal(server, survivor, seed := 100 + number)
            tokens = tokens_of(seed, CHUNKS * CHUNK)
            runs = chance.randrange(CHUNKS * RUNS_A_CHUNK)
            before = leftovers(server)
            gate = server.gates.hold(runs, Direction.STORE, engine.worker.client_id)
            pid = await nursery.start(order_of(server, engine, "store", tokens))
            await reached(gate)
            assert server.book.counts().calls_in_flight == 1
            assert server.book.arena_status().writing_bytes > 0, "the copy is not in flight"
            await nursery.kill(pid)
            if while_held:
                await session_ended(server, engine)
                assert server.book.arena_status().settling_bytes > 0, "a slot that is still written was given away"
                assert mapped(server) == before["mappings"] + 1
                assert await served_right(survivor, tokens, seed) == runs // RUNS_A_CHUNK
            gate.release()
            times.append(await back_to(server, before))
            server.check()
            assert await served_right(survivor, tokens, seed) >= runs // RUNS_A_CHUNK
        assert await served_right(survivor, kept, MHA.seed) == CHUNKS
    assert_within_a_second(times)


@pytest.mark.parametrize("while_held", [False, True], ids=["ends while dying", "ends after the session"])
async def test_killed_in_the_middle_of_a_retrieve(tmp_path: Path, while_held: bool) -> None:
    """Field report 12: the same, with chunks pinned by the dead engine; they are right for everybody else."""
    chance, times = random.Random(8), list[float]()
    async with local_server(tmp_path, limits=LIMITS) as server, Nursery() as nursery:
        survivor = await server.engine()
        kept = tokens_of(1, CHUNKS * CHUNK)
        await survivor.store(kept, BLOCKS)
        before = leftovers(server)
        arena = server.book.arena_status()
        for number in range(ROUNDS // 2):
            engine = mortal(server, survivor, 200 + number)
            before = leftovers(server)
            gate = server.gates.hold(
                chance.randrange(CHUNKS * RUNS_A_CHUNK), Direction.RETRIEVE, engine.worker.client_id
            )
            pid = await nursery.start(order_of(server, engine, "retrieve", kept))
            await reached(gate)
            assert server.book.counts().calls_in_flight == 1
            assert server.book.counts().pins > 0
            await nursery.kill(pid)
            if while_held:
                await session_ended(server, engine)
                assert server.book.arena_status().pinned_bytes > 0, "a chunk that is still read can be evicted"
                assert mapped(server) == before["mappings"] + 1
            gate.release()
            times.append(await back_to(server, before))
            assert server.book.arena_status() == arena
            server.check()
        assert await served_right(survivor, kept, MHA.seed) == CHUNKS
    assert_within_a_second(times)


async def test_killed_right_after_register(tmp_path: Path) -> None:
    """Field report 12: an engine killed before its first copy leaves nothing mapped either."""
    async with local_server(tmp_path, limits=LIMITS) as server, Nursery() as nursery:
        survivor, times = await server.engine(), list[float]()
        while not times or (times[-1] >= 3 and len(times) < 3):  # the machine may have other work
            engine = mortal(server, survivor, len(times))
            before = leftovers(server)
            pid = await nursery.start(order_of(server, engine, "idle", tokens_of(1, CHUNK)))
            await until(lambda before=before: mapped(server) > before["mappings"])
            await nursery.kill(pid)
            times.append(await back_to(server, before))
        assert times[-1] < 3, times


async def test_killed_while_its_register_waits_and_its_memory_has_gone(tmp_path: Path) -> None:
    """Nobody is left to be told that the memory is not there, and it is no error of the server."""
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    async with local_server(tmp_path, limits=LIMITS, workers=1) as server, Nursery() as nursery:
        survivor = await server.engine()
        kept = tokens_of(1, CHUNKS * CHUNK)
        gate = server.gates.hold(0, Direction.STORE)
        storing = asyncio.ensure_future(survivor.store(kept, BLOCKS))
        await reached(gate)
        engine = mortal(server, survivor, 1)
        gc.collect()  # or what earlier tests left is given back in between
        before = leftovers(server)
        affinity = server.driver.hands.affinity
        pid = await nursery.start(order_of(server, engine, "idle", kept))
        await until(lambda: affinity.lanes()[0][2] == 2, what="the Register behind the copy")
        memory = Path("/dev/shm") / engine.memory_name
        memory.rename(memory.with_suffix(".gone"))
        await nursery.kill(pid)
        await session_ended(server, engine)
        gate.release()
        assert outcomes(await storing) == ["STORED"] * CHUNKS
        await until(lambda: affinity.lanes()[0][2] == 0, what="the end of the Register")
        memory.with_suffix(".gone").rename(memory)
        gc.collect()  # a failure that nobody asks for is told when it is collected
        assert leftovers(server) == before | {"calls": 0, "bytes neither free nor ready": 0}
        assert await served_right(survivor, kept, MHA.seed) == CHUNKS
    assert unhandled == []


async def test_stopped_engine_keeps_its_session(tmp_path: Path) -> None:
    """An engine that stands still (SIGSTOP) is not dead: its memory stays mapped, and it goes on where it was."""
    async with local_server(tmp_path, limits=replace(LIMITS, reattach_grace_ns=50_000_000)) as server:
        async with Nursery() as nursery:
            survivor = await server.engine()
            engine = mortal(server, survivor, seed := 5)
            tokens = tokens_of(seed, CHUNKS * CHUNK)
            gate = server.gates.hold(30, Direction.STORE, engine.worker.client_id)
            pid = await nursery.start(order_of(server, engine, "store", tokens))
            await reached(gate)
            stand_still(pid)
            await asyncio.sleep(0.2)  # four graces
            gate.release()
            await until(lambda: server.book.counts().calls_in_flight == 0)
            assert await served_right(survivor, tokens, seed) == CHUNKS
            nursery.signal(pid, signal.SIGCONT)
            assert server.book.counts().clients == 3
