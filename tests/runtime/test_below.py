# SPDX-License-Identifier: Apache-2.0
"""A driver and its lower tiers: what they are asked, and the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from structlog.testing import capture_logs

from kvgrpc.core.types import MIB, CoreLimits, ObjectName, WritePolicy
from kvgrpc.core.writes import BELIEVED_NS
from kvgrpc.runtime import admin
from kvgrpc.tiers.faulty import FaultyTier
from kvgrpc.tiers.memory import MemoryTier
from tests.e2e.harness import BLOCK, CHUNK, loaded_chunks, local_server, outcomes, tokens_of, until


class TellingTier(MemoryTier):
    """Tells when it has written something, in the same breath."""

    def __init__(self) -> None:
        super().__init__()
        self.written = asyncio.Event()

    async def write(self, object: ObjectName, data: Sequence[memoryview]) -> None:
        await super().write(object, data)
        self.written.set()


async def test_a_flush_that_begins_when_the_last_write_has_ended_but_is_not_reported_yet(tmp_path: Path) -> None:
    tier = TellingTier()
    async with local_server(tmp_path, tier=tier, writes=WritePolicy.THROUGH) as server:

        async def flush() -> None:
            await tier.written.wait()
            assert server.driver.below.writes(tier.name) == (1, 0), "it has ended, and nobody was told"
            await server.driver.below.flush(5)

        flushing = asyncio.create_task(flush())
        engine = await server.engine()
        assert outcomes(await engine.store(tokens_of(1, CHUNK), range(CHUNK // BLOCK))) == ["STORED"]
        await flushing
        assert server.driver.below.writes(tier.name) == (0, 0)
        assert server.book.counters["written_objects"] == 1


async def test_what_a_tier_has_dropped_is_written_again_when_it_is_used(tmp_path: Path) -> None:
    """L1 holds it, so nobody reads it below; without its copy it would be lost when L1 needs the room."""
    ahead_ns, tier = 0, MemoryTier()
    chunks, source, target = 4, list(range(0, 64, 2)), list(range(129, 193, 2))
    tokens, blocks = tokens_of(1, chunks * CHUNK), chunks * CHUNK // BLOCK

    async with local_server(
        tmp_path, tier=tier, writes=WritePolicy.THROUGH, clock=lambda: time.monotonic_ns() + ahead_ns
    ) as server:
        engine = await server.engine()
        assert outcomes(await engine.store(tokens, source[:blocks])) == ["STORED"] * chunks
        await until(lambda: len(tier.names) == chunks)
        dropped = tier.names
        for name in dropped:
            await tier.remove(name)
        assert await engine.hits(tokens) == chunks
        await until(lambda: server.driver.below.writes(tier.name) == (0, 0))
        assert tier.names == frozenset(), "nobody asks at every lookup"

        ahead_ns = BELIEVED_NS
        assert await engine.hits(tokens) == chunks
        await until(lambda: tier.names == dropped)
        writes = tier.writes
        ahead_ns += BELIEVED_NS
        assert await engine.hits(tokens) == chunks
        await until(lambda: server.driver.below.writes(tier.name) == (0, 0))
        assert tier.writes == writes, "what is there is asked for, and not written"

        assert server.book.index.evict(1 << 30, chunks) == chunks
        answer = await engine.lookup(tokens, prefetch_wait_ms=10_000)
        status = await engine.scheduler.query(engine.engine_id, answer.job_id, 10_000)
        assert status.hit_tokens == chunks * CHUNK and status.hit_chunks_by_tier == {tier.name: chunks}
        loaded = await engine.retrieve(answer, target[:blocks])
        assert loaded_chunks(loaded) == list(range(chunks))
        assert engine.image.wrong_tokens(target[:blocks]) == [] and engine.image.untouched(target[:blocks])


async def test_tiers_that_do_not_answer_are_asked_at_once(tmp_path: Path) -> None:
    """Status and inspection take as long as the slowest tier is given, whatever the others do."""
    tier = MemoryTier("quick")
    async with local_server(tmp_path, tier=tier, writes=WritePolicy.THROUGH) as server:
        engine, operator = await server.engine(), await server.admin()
        await engine.store(tokens_of(1, CHUNK), range(CHUNK // BLOCK))
        await until(lambda: len(tier.names) == 1)
        slow = [FaultyTier(MemoryTier(f"slow{number}")) for number in range(5)]
        for one in slow:
            one.hang()
        tiers = server.driver.hands.tiers
        tiers.clear()
        tiers |= {one.name: one for one in (*slow[:3], tier, *slow[3:])}
        began_s = time.monotonic()
        status = await operator.get_status()
        took_s = time.monotonic() - began_s
        assert admin.TIER_ANSWER_S <= took_s < 4 * admin.TIER_ANSWER_S, "five, one after the other?"
        said = {one.name: (one.healthy, one.used_bytes > 0, one.counters.get("silent", 0)) for one in status.tiers}
        assert [one.name for one in status.tiers] == list(tiers)
        assert said.pop("quick") == (True, True, 0)
        assert set(said.values()) == {(False, False, 1)}

        began_s = time.monotonic()
        found = await operator.inspect(engine.space, tokens_of(1, CHUNK))
        took_s = time.monotonic() - began_s
        assert admin.TIER_INSPECT_S <= took_s < 4 * admin.TIER_INSPECT_S, "five, one after the other?"
        assert set(found.silent_tiers) == {one.name for one in slow}
        assert found.tier_ranks == ({"quick": 1},)
        for one in slow:
            one.resume()


async def test_a_probe_that_ends_with_a_bug_is_an_answer_and_is_told(tmp_path: Path) -> None:
    """Nobody else would say that the tier was asked: the lookup would wait for its time."""

    class Broken(MemoryTier):
        async def exists(self, names: Sequence[str]) -> list[bool]:
            raise ZeroDivisionError("a bug")

    with capture_logs() as logs:
        async with local_server(tmp_path, tier=Broken()) as server:
            engine = await server.engine()
            await engine.store(tokens_of(1, CHUNK), range(CHUNK // BLOCK))
            answer = await engine.lookup(tokens_of(1, 4 * CHUNK), prefetch_wait_ms=60_000)
            status = await asyncio.wait_for(engine.scheduler.query(engine.engine_id, answer.job_id, 60_000), 30)
            assert (status.done, status.hit_tokens, status.limited_by) == (True, CHUNK, "PREFETCH_FAILED")
    assert [log["exc_info"].args for log in logs if log["event"] == "tier failed"] == [("a bug",)]


class AskedTier(MemoryTier):
    """Reads wait until they are cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = 0
        self.reading_when_closed: int | None = None

    async def read(self, object: ObjectName, into: Sequence[memoryview]) -> None:
        self.reading += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.reading -= 1

    async def close(self) -> None:
        self.reading_when_closed = self.reading
        await super().close()


async def test_at_the_end_nothing_is_read_for_lookups_that_waited_for_their_turn(tmp_path: Path) -> None:
    """A read that is given up makes room for those of others: they ran in a tier that was closed, and changed the books
    while the arena's index was written."""
    tier, chunks = AskedTier(), 8
    limits = CoreLimits(chunk_tokens=CHUNK, page_bytes=4096, prefetch_share=0.02)
    async with local_server(tmp_path, tier=tier, writes=WritePolicy.THROUGH, limits=limits, l1_bytes=2 * MIB) as server:
        engine = await server.engine()
        for seed in range(4):
            await engine.store(tokens_of(seed, chunks * CHUNK), range(chunks * CHUNK // BLOCK))
        await until(lambda: len(tier.names) == 4 * chunks)
        server.book.index.evict(1 << 30, 4 * chunks)
        for seed in range(4):
            await engine.lookup(tokens_of(seed, chunks * CHUNK), prefetch_wait_ms=60_000)
        await until(lambda: tier.reading)
        assert len(server.book.prefetcher.blocked) == 4, "else nobody waits for a turn"
    assert tier.reading_when_closed == tier.reading == 0
    assert not server.book.prefetcher.reads
