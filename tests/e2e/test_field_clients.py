# SPDX-License-Identifier: Apache-2.0
"""Processes that come twice, come again, or come with other memory."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

from kvgrpc.core.types import ChunkResult, CoreLimits, Direction, Role, S, SpaceRef
from tests.e2e.harness import CHUNK, Engine, LocalServer, local_server, outcomes, tokens_of, until
from tests.e2e.probes import TINY, mapped, nothing_changes, refused
from tests.kvdata import BLOCKS_OUTERMOST, HEADS_FIRST_OPAQUE

EIGHT = tokens_of(1, 8 * CHUNK)
TARGET = list(range(40, 8, -1))


# ---- 53: one id, two processes --------------------------------------------------------------------------------------


async def test_second_process_of_one_client_id_is_refused(tmp_path: Path) -> None:
    """Field report 53: two clients send the same client id: the second gets ALREADY_EXISTS, and none of its calls reads
    or writes anything; the owner reconnects and goes on."""
    limits = CoreLimits(chunk_tokens=CHUNK, page_bytes=4096, reattach_grace_ns=60 * S)
    async with local_server(tmp_path, limits=limits) as server:
        owner = await server.engine(kv=TINY)
        twin = Engine(server, kv=TINY)
        twin.worker = server.client(owner.worker.client_id)
        twin.space = owner.space
        await owner.store(EIGHT, range(32))
        answer = await owner.lookup(EIGHT)
        async with nothing_changes(server, owner, twin):
            events = twin.worker.attach(twin.engine_id, Role.WORKER, secrets.token_bytes(16))
            assert (await refused(anext(events)))[:2] == ("ALREADY_EXISTS", "CLIENT_EXISTS")
            events = twin.worker.attach(owner.engine_id, Role.WORKER, secrets.token_bytes(16))
            assert (await refused(anext(events)))[:2] == ("ALREADY_EXISTS", "CLIENT_EXISTS")
            not_its_engine = ("NOT_FOUND", "ENGINE_UNKNOWN", "engine_id")
            for call in (
                twin.worker.register(twin.registration()),
                twin.worker.store(twin.store_request(EIGHT, range(32))),
                twin.worker.retrieve(twin.retrieve_request(answer.job_id, TARGET)),
                twin.worker.fence(twin.engine_id, [1]),
                twin.worker.unregister(twin.engine_id),
            ):
                assert await refused(call) == not_its_engine
        stream = owner.streams[0]
        await stream.close()
        again = await server.attach(owner.worker, owner.engine_id, Role.WORKER, stream.session_id)
        assert again.events[0].resumed
        assert outcomes(await owner.retrieve(answer, TARGET)) == ["LOADED"] * 8
        assert owner.image.wrong_tokens(TARGET) == [] and owner.image.untouched(TARGET)
        assert twin.image.untouched()


async def test_id_is_free_again_when_its_process_is_gone(tmp_path: Path) -> None:
    """Field report 53: after the owner's end the other process may have the id, and loads into its own memory."""
    async with local_server(tmp_path) as server:
        first = await server.engine(kv=TINY)
        await first.store(EIGHT, range(32))
        first.image.memory[:] = 0xA5
        await first.stop()
        ids, sessions = {first.worker.client_id, first.scheduler.client_id}, server.book.sessions
        await until(lambda: not ids & sessions.clients.keys() - sessions.broken, what="its end to be seen")
        second = Engine(server, kv=TINY)
        second.worker, second.scheduler = (
            server.client(first.worker.client_id),
            server.client(first.scheduler.client_id),
        )
        await second.start()
        assert not second.streams[0].events[0].resumed
        answer = await second.lookup(EIGHT)
        assert outcomes(await second.retrieve(answer, TARGET)) == ["LOADED"] * 8
        assert second.image.wrong_tokens(TARGET) == [] and second.image.untouched(TARGET)
        assert first.image.untouched()
        await until(lambda: mapped(server) == 1, what="the first one's mapping to go")
        assert len(server.book.engines()) == 1


async def test_id_stays_taken_while_a_copy_of_its_old_process_runs(tmp_path: Path) -> None:
    """Field report 53: the owner dies in the middle of a Retrieve; a new process with its id is let in when that copy
    has ended, and neither its memory nor its calls ever get anything of the old one's."""
    async with local_server(tmp_path) as server:
        first = await server.engine(kv=TINY)
        await first.store(EIGHT, range(32))
        answer = await first.lookup(EIGHT)
        gate = server.gates.hold(5, Direction.RETRIEVE)
        loading = asyncio.create_task(first.retrieve(answer, TARGET))
        assert await asyncio.to_thread(gate.wait_reached, 10)
        await first.stop()
        second = Engine(server, kv=TINY)
        second.worker = server.client(first.worker.client_id)

        async def attach() -> tuple[str, str, str]:
            return await refused(anext(second.worker.attach(second.engine_id, Role.WORKER, bytes(range(16)))))

        for _ in range(3):
            assert (await attach())[:2] == ("ALREADY_EXISTS", "CLIENT_EXISTS")
        await until(lambda: server.book.counts().engines == 0, what="the end of the old session")
        for _ in range(3):
            assert (await attach())[:2] == ("ALREADY_EXISTS", "CLIENT_EXISTS")
        assert second.image.untouched()
        gate.release()
        await asyncio.wait((loading,))
        await until(lambda: mapped(server) == 0, what="the old mapping to go")
        second.worker = server.client(first.worker.client_id)
        await second.start()
        found = await second.lookup(EIGHT)
        assert outcomes(await second.retrieve(found, TARGET)) == ["LOADED"] * 8
        assert second.image.wrong_tokens(TARGET) == [] and second.image.untouched(TARGET)
        assert server.counts() == (0, 0, 0)


# ---- 62: registering again ------------------------------------------------------------------------------------------


def replacement(server: LocalServer, engine: Engine, **facts: Any) -> Engine:
    """Other memory of the same processes."""
    other = Engine(server, kv=TINY, engine_id=engine.engine_id, **facts)
    other.worker, other.scheduler, other.space = engine.worker, engine.scheduler, engine.space
    other.next_call_id = engine.next_call_id  # type: ignore[method-assign]
    return other


async def test_registering_the_same_again_changes_nothing(tmp_path: Path) -> None:
    """Field report 62: the same message again: the same answer, no second mapping."""
    async with local_server(tmp_path) as server:
        engine = await server.engine(kv=TINY)
        first = await engine.worker.register(engine.registration())
        async with nothing_changes(server, engine):
            for _ in range(3):
                assert await engine.worker.register(engine.registration()) == first
            assert mapped(server) == 1
        assert outcomes(await engine.store(EIGHT, range(32))) == ["STORED"] * 8


async def test_other_segment_and_layout_replace_the_old(tmp_path: Path) -> None:
    """Field report 62: client c registers A, then B with another layout: the epoch grows, all writes go to B, A is
    untouched and unmapped."""
    async with local_server(tmp_path) as server:
        a = await server.engine(kv=TINY)
        b = replacement(server, a, arrangement=BLOCKS_OUTERMOST, block_size=8, num_blocks=64, lead=4160)
        first = await a.worker.register(a.registration())
        await a.store(EIGHT, range(32))
        a.image.memory[:] = 0xA5
        answer = await a.lookup(EIGHT)
        second = await b.worker.register(b.registration())
        assert second.registration_epoch > first.registration_epoch
        assert second.space_base == first.space_base, "token-major data of other block sizes is the same"
        await until(lambda: mapped(server) == 1, what="A to be unmapped")
        opened = [server.open_shared_memory().count(f"/dev/shm/{each.memory_name}") for each in (a, b)]
        assert opened[1] == opened[0] + 1, "beside the test's own, one of B and none of A"
        target = list(range(63, 47, -1))
        assert outcomes(await b.retrieve(answer, target)) == ["LOADED"] * 8
        assert b.image.wrong_tokens(target) == [] and b.image.untouched(target)
        assert a.image.untouched()
        assert outcomes(await b.store(tokens_of(2, 8 * CHUNK), range(16))) == ["STORED"] * 8
        found = await b.lookup(tokens_of(2, 8 * CHUNK), request_id="the new segment's")
        assert outcomes(await b.retrieve(found, target)) == ["LOADED"] * 8
        assert b.image.wrong_tokens(target) == []
        assert a.image.untouched()


async def test_registering_again_waits_for_the_copy_in_flight(tmp_path: Path) -> None:
    """Field report 62: a Store of A in flight, another queued, when B replaces A: what ended before is A's data, the
    rest failed by name; A is unmapped after its last copy, and nothing of B was stored as A's."""
    limits = CoreLimits(chunk_tokens=CHUNK, page_bytes=4096, slice_bytes=2048)
    async with local_server(tmp_path, limits=limits) as server:
        a, reader = await server.engine(kv=TINY), await server.engine(kv=TINY)
        b = replacement(server, a, arrangement=HEADS_FIRST_OPAQUE)
        a.image.write(range(32))
        gate = server.gates.hold(2, Direction.STORE)
        prompts, storing = (EIGHT, tokens_of(2, 8 * CHUNK)), list[asyncio.Task[tuple[ChunkResult, ...]]]()
        for each in prompts:
            storing.append(asyncio.create_task(a.worker.store(a.store_request(each, range(32)))))
            assert await asyncio.to_thread(gate.wait_reached, 10)  # by the first one
        await until(lambda: server.counts()[1] == 2, what="both stores")
        registering = asyncio.create_task(b.worker.register(b.registration()))
        assert not (await asyncio.wait((registering, *storing), timeout=0.1))[0], "A was given up while it is read"
        gate.release()
        answer = await registering
        for tokens, results in zip(prompts, await asyncio.gather(*storing), strict=True):
            stored = outcomes(results).count("STORED")
            assert outcomes(results) == ["STORED"] * stored + ["FAILED"] * (8 - stored)
            assert stored > 0 or tokens is not EIGHT
            found = await reader.lookup(tokens)
            assert found.status.hit_tokens == stored * CHUNK
            if stored:
                assert outcomes(await reader.retrieve(found, TARGET[: 4 * stored])) == ["LOADED"] * stored
                assert reader.image.wrong_tokens(TARGET[: 4 * stored]) == []
        await until(lambda: mapped(server) == 2, what="A to be unmapped")
        assert server.counts() == (0, 0, 0)
        assert answer.space_base != a.space.space_base
        b.space = SpaceRef(answer.space_base)
        assert outcomes(await b.store(EIGHT, range(32))) == ["STORED"] * 8
        assert a.image.wrong_tokens(range(32)) == []


# ---- 69: restart ----------------------------------------------------------------------------------------------------


async def test_restarted_engine_gets_right_bytes_in_its_own_memory(tmp_path: Path) -> None:
    """Field report 69: 64 blocks in segment A; the process dies; a new one with 48 blocks, segment B and another base
    offset: 8 hits, right bytes, nothing in A. A call under the dead process's client id is refused."""
    async with local_server(tmp_path) as server:
        first = await server.engine(num_blocks=64)
        assert outcomes(await first.store(EIGHT, range(16, 48))) == ["STORED"] * 8
        stale = await first.lookup(EIGHT)
        await first.stop()
        first.image.memory[:] = 0xA5
        second = await server.engine(num_blocks=48, lead=8192 + 64)
        answer = await second.lookup(EIGHT)
        assert answer.status.hit_tokens == 8 * CHUNK
        target = list(range(47, 15, -1))
        assert outcomes(await second.retrieve(answer, target)) == ["LOADED"] * 8
        assert second.image.wrong_tokens(target) == [] and second.image.untouched(target)
        await until(lambda: server.book.counts().engines == 1, what="the dead process to be gone")
        await until(lambda: mapped(server) == 1, what="A to be unmapped")
        async with nothing_changes(server, first, second):
            for call in (
                first.worker.retrieve(first.retrieve_request(stale.job_id, range(32))),
                first.worker.store(first.store_request(EIGHT, range(32))),
                first.lookup(EIGHT),
                first.worker.register(first.registration()),
            ):
                assert (await refused(call))[:2] == ("FAILED_PRECONDITION", "NOT_ATTACHED")
            unknown = ("NOT_FOUND", "JOB_UNKNOWN", "job_id")
            assert await refused(second.worker.retrieve(second.retrieve_request(stale.job_id, range(32)))) == unknown
        assert first.image.untouched()
        assert server.counts() == (0, 0, 0)
