# SPDX-License-Identifier: Apache-2.0
"""Clear and BumpGeneration while copies run: what was begun before is never found after."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvgrpc import api
from kvgrpc.client.aio import AioClient
from kvgrpc.core.types import Cleared, CoreLimits, Direction, TokenRange
from kvgrpc.tiers.memory import MemoryTier
from tests.e2e.harness import CHUNK, Engine, local_server, outcomes, tokens_of, until
from tests.e2e.probes import (
    TINY,
    fill_twice,
    found,
    keep_in_tier,
    nothing_changes,
    object_names,
    refused,
    spans,
    store_without_its_keys,
)

MODEL = "test-model"
Forget = Callable[[AioClient, Engine], Awaitable[Cleared]]

FORGETS: dict[str, Forget] = {
    "clear model": lambda admin, _: admin.clear(api.ClearTarget(model=MODEL)),
    "clear space": lambda admin, engine: admin.clear(api.ClearTarget(space=engine.space)),
    "clear salt": lambda admin, engine: admin.clear(api.ClearTarget(cache_salt=engine.salt)),
    "clear all": lambda admin, _: admin.clear(api.ClearTarget(all=True)),
    "bump model": lambda admin, _: admin.bump_generation(model=MODEL),
    "bump base": lambda admin, engine: admin.bump_generation(space_base=engine.space.space_base),
}


@pytest.mark.parametrize("after_runs", [0, 5, 17], ids=["first run", "in a chunk", "last chunk"])
@pytest.mark.parametrize("slice_bytes", [64 << 20, 1000], ids=["one slice", "slices in a chunk"])
@pytest.mark.parametrize("forget", FORGETS.values(), ids=FORGETS)
async def test_nothing_begun_before_it_becomes_visible(
    tmp_path: Path, forget: Forget, slice_bytes: int, after_runs: int
) -> None:
    """Field report 3: Clear(M) with 20 Stores in flight and 4 chunks read-locked: 0 hits at once, counts of removed and
    still locked chunks, no Store begun before becomes visible, the locked chunks vanish on release."""
    limits = CoreLimits(chunk_tokens=CHUNK, page_bytes=4096, slice_bytes=slice_bytes)
    async with local_server(tmp_path, limits=limits) as server:
        engine = await server.engine(salt="tenant")
        old = tokens_of(0, 8 * CHUNK)
        await engine.store(old, range(32))
        locked = await engine.lookup(tokens_of(0, 4 * CHUNK))
        # three chunks each: 18 runs in two groups of consecutive blocks, so that each place of the gate is in flight
        blocks = [*range(0, 12, 2), *range(1, 12, 2)]
        engine.image.write(blocks)
        gate = server.gates.hold(after_runs, Direction.STORE)
        prompts = [tokens_of(seed, 3 * CHUNK) for seed in range(1, 21)]
        storing = [asyncio.create_task(engine.worker.store(engine.store_request(tokens, blocks))) for tokens in prompts]
        await until(lambda: server.counts()[1] == 20, what="20 stores in flight")
        assert await asyncio.to_thread(gate.wait_reached, 10)

        cleared = await forget(await server.admin(), engine)
        assert cleared.removed_chunks == 8
        assert cleared.generation or cleared.still_pinned_chunks == 4
        assert [await engine.hits(tokens) for tokens in (old, *prompts)] == [0] * 21
        gate.release()
        for results in await asyncio.gather(*storing):
            assert outcomes(results) == ["REFUSED"] * 3 and {result.reason for result in results} == {"CLEARED"}
        assert [await engine.hits(tokens) for tokens in (old, *prompts)] == [0] * 21

        # the lock still protects the old bytes for the one who holds it
        target = range(200, 208)
        assert outcomes(await engine.retrieve(locked, target, range=TokenRange(0, 32))) == ["LOADED"] * 2
        assert engine.image.wrong_tokens(target) == []
        assert await engine.hits(old) == 0
        assert await engine.free(locked) == 2
        arena = server.book.arena_status
        await until(lambda: arena().free_bytes == arena().total_bytes, what="all memory free")
        assert server.counts() == (0, 0, 0)
        # the next generation begins
        assert outcomes(await engine.store(old, range(32))) == ["STORED"] * 8
        assert await engine.hits(old) == 8


@pytest.mark.parametrize("forget", FORGETS.values(), ids=FORGETS)
async def test_store_whose_keys_are_still_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget: Forget) -> None:
    """Field report 3: a Store of a long prompt, which is hashed in the pool while Clear answers, began before it."""
    async with local_server(tmp_path) as server:
        engine = await server.engine(salt="tenant")
        tokens = tokens_of(1, 8 * CHUNK)
        engine.image.write(range(32))
        storing, go_on = await store_without_its_keys(server, engine, tokens, monkeypatch)
        assert (await forget(await server.admin(), engine)).removed_chunks == 0
        go_on.set()
        assert spans(await storing) == [(0, 8, "REFUSED", "CLEARED")]
        assert await engine.hits(tokens) == 0
        assert spans(await engine.store(tokens, range(32))) == [(0, 8, "STORED", "")]


async def test_other_spaces_stay(tmp_path: Path) -> None:
    """Field report 3: what was not named is still there, and a target that nobody has clears nothing."""
    async with local_server(tmp_path) as server:
        mine, other_salt = await server.engine(salt="a"), await server.engine(salt="b")
        other_model = await server.engine(model="another", salt="a")
        tokens = tokens_of(1, 4 * CHUNK)
        for engine in (mine, other_salt, other_model):
            await engine.store(tokens, range(16))
        admin = await server.admin()
        assert (await admin.clear(api.ClearTarget(model="nobody"))).removed_chunks == 0
        assert await refused(admin.bump_generation(model="nobody")) == (
            "FAILED_PRECONDITION",
            "SPACE_UNKNOWN",
            "target",
        )
        assert (await admin.clear(api.ClearTarget(space=mine.space))).removed_chunks == 4
        assert [await engine.hits(tokens) for engine in (mine, other_salt, other_model)] == [0, 4, 4]
        assert (await admin.clear(api.ClearTarget(cache_salt="b"))).removed_chunks == 4
        assert [await engine.hits(tokens) for engine in (mine, other_salt, other_model)] == [0, 0, 4]
        assert (await admin.bump_generation(model="another")).generation == 1
        assert (await admin.bump_generation(model="another")).generation == 2
        assert [await engine.hits(tokens) for engine in (mine, other_salt, other_model)] == [0, 0, 0]


@pytest.mark.parametrize("forget", FORGETS.values(), ids=FORGETS)
async def test_prefetch_in_flight_is_not_found_after(tmp_path: Path, forget: Forget) -> None:
    """Field report 3: a prefetch begun before a Clear or a new generation ends as a miss; old objects stay unread."""
    tier = MemoryTier()
    async with local_server(tmp_path, tier=tier) as server:
        engine = await server.engine(kv=TINY)
        tokens = tokens_of(1, 4 * CHUNK)
        names = await keep_in_tier(server, engine, tokens)
        tier.hang()
        looking = asyncio.create_task(found(engine, tokens))
        await until(lambda: tier.reads_in_flight == 4)
        await forget(await server.admin(), engine)
        assert (await found(engine, tokens))[1].hit_tokens == 0
        tier.resume()
        assert (await looking)[1].hit_tokens == 0
        assert (await found(engine, tokens))[1].hit_tokens == 0
        assert tier.reads == 4, "the new generation asks for other names"
        assert not set(object_names(server, engine, tokens, generation=1)) & set(names)
        await until(lambda: server.counts() == (0, 0, 0), what="nothing in flight")


async def test_retrieve_in_flight_ends_with_the_old_bytes(tmp_path: Path) -> None:
    """Field report 3: a Retrieve that runs while its space is cleared ends whole, and its memory comes back."""
    async with local_server(tmp_path, l1_bytes=64 * 8192) as server:
        engine, filler = await server.engine(), await server.engine(model="another")
        tokens = tokens_of(1, 8 * CHUNK)
        await engine.store(tokens, range(32))
        answer = await engine.lookup(tokens)
        gate = server.gates.hold(3, Direction.RETRIEVE)
        target = list(range(231, 199, -1))
        loading = asyncio.create_task(engine.retrieve(answer, target))
        assert await asyncio.to_thread(gate.wait_reached, 10)
        cleared = await (await server.admin()).clear(api.ClearTarget(all=True))
        assert (cleared.removed_chunks, cleared.still_pinned_chunks) == (8, 8)
        # others fill all of L1 meanwhile: the memory that is being read is not theirs
        await fill_twice(server, filler)
        assert server.book.arena_status().doomed_bytes == 8 * 8192
        gate.release()
        assert outcomes(await loading) == ["LOADED"] * 8
        assert engine.image.wrong_tokens(target) == [] and engine.image.untouched(target)
        await until(lambda: server.book.arena_status().doomed_bytes == 0)
        assert server.counts() == (0, 0, 0)


async def test_clear_needs_one_target(tmp_path: Path) -> None:
    """Field report 3: a Clear that names nothing forgets nothing."""
    async with local_server(tmp_path) as server:
        engine = await server.engine()
        await engine.store(tokens_of(1, CHUNK), range(4))
        async with nothing_changes(server, engine):
            code, reason, _ = await refused((await server.admin()).clear(api.ClearTarget()))
            assert (code, reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
        assert await engine.hits(tokens_of(1, CHUNK)) == 1
