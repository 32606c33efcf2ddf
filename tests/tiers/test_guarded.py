# SPDX-License-Identifier: Apache-2.0
"""Deadline, breaker and counters around a tier, over a tier that fails on request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from kvgrpc.breaker import BreakerSettings
from kvgrpc.tiers.base import FaultReason, Tier, TierFault
from kvgrpc.tiers.faulty import FaultyTier
from kvgrpc.tiers.guarded import Guarded, GuardSettings
from kvgrpc.tiers.memory import MemoryTier
from tests.e2e.harness import until
from tests.tiers.conformance import TierConformance, data, fault_of, object_name, parts, read, write

DELAY_NS = 50_000_000
BREAKER = BreakerSettings(3, DELAY_NS, 4 * DELAY_NS)
SETTINGS = GuardSettings(30.0, 0.05, BREAKER)


class Clock:
    now = 1

    def __call__(self) -> int:
        return self.now


class TestGuardedTier(TierConformance):
    @pytest.fixture
    async def tier(self) -> AsyncIterator[Guarded]:
        tier = Guarded(FaultyTier(MemoryTier()), SETTINGS)
        yield tier
        await tier.close()

    @staticmethod
    def _memory(tier: Tier) -> MemoryTier:
        assert isinstance(tier, Guarded)
        assert isinstance(tier._tier, FaultyTier)
        assert isinstance(tier._tier._tier, MemoryTier)
        return tier._tier._tier

    async def put_raw(self, tier: Tier, name: str, kept: bytes) -> None:
        self._memory(tier).put_raw(name, kept)

    async def get_raw(self, tier: Tier, name: str) -> bytes:
        return self._memory(tier).get_raw(name)


def guarded(settings: GuardSettings = SETTINGS) -> tuple[Guarded, FaultyTier, Clock]:
    faulty, clock = FaultyTier(MemoryTier()), Clock()
    return Guarded(faulty, settings, clock), faulty, clock


async def test_a_failing_tier_is_left_alone_and_asked_again() -> None:
    tier, faulty, clock = guarded()
    object = await write(tier, "a", 64)
    faulty.fault = FaultReason.IO
    for _ in range(3):
        assert await fault_of(tier, object) is FaultReason.IO
    assert not tier.healthy
    calls = faulty.calls
    assert await fault_of(tier, object) is FaultReason.SKIPPED
    assert faulty.calls == calls, "not asked"
    faulty.fault = None
    clock.now += DELAY_NS
    assert await read(tier, object) == data("a", 64)
    assert tier.healthy
    assert tier.counters["breaker_opened"] == 1


async def test_writes_that_fail_do_not_stop_reads() -> None:
    tier, faulty, clock = guarded()
    object = await write(tier, "a", 64)
    faulty.fault = FaultReason.IO
    for _ in range(3):
        with pytest.raises(TierFault):
            await write(tier, "b", 64)
    faulty.fault = None
    assert await read(tier, object) == data("a", 64)
    assert tier.counters["writes_stopped"] == 1
    with pytest.raises(TierFault, match="SKIPPED"):
        await write(tier, "b", 64)
    clock.now += DELAY_NS
    await write(tier, "b", 64)
    assert tier.counters["writes_stopped"] == 0


async def test_objects_that_are_damaged_or_missing_say_nothing_of_the_tier() -> None:
    tier, faulty, _ = guarded()
    object = await write(tier, "a", 64)
    for reason in (FaultReason.CORRUPT, FaultReason.SHORT, FaultReason.FOREIGN):
        faulty.fault = reason
        assert await fault_of(tier, object) is reason
        assert await fault_of(tier, object) is reason
    faulty.fault = None
    assert await fault_of(tier, object_name("absent", 8)) is FaultReason.MISSING
    assert tier.healthy
    assert tier.counters["read_faults_CORRUPT"] == 2


async def test_a_call_that_hangs_ends_at_its_deadline_and_opens_the_breaker() -> None:
    tier, faulty, clock = guarded(GuardSettings(0.5, 0.05, BREAKER))
    object = await write(tier, "a", 64)
    faulty.hang()
    began = time.monotonic()
    assert await asyncio.gather(*(fault_of(tier, object) for _ in range(3))) == [FaultReason.TIMEOUT] * 3
    assert 0.5 <= time.monotonic() - began < 10
    assert await fault_of(tier, object) is FaultReason.SKIPPED
    faulty.resume()
    clock.now += DELAY_NS
    assert await tier.exists([object.name]) == [True]
    assert not tier.healthy, "a probe says nothing about reads"
    assert await read(tier, object) == data("a", 64)
    assert tier.healthy


async def test_reads_that_nobody_waited_for_long_enough_count() -> None:
    """A lookup's own patience is shorter than the deadline: a hanging tier must be noticed all the same."""
    tier, faulty, _ = guarded()
    object = await write(tier, "a", 64)
    faulty.hang()
    for _ in range(3):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(tier.read(object, parts(bytearray(64))), 0.06)
    assert not tier.healthy


async def test_buffers_are_let_go_before_a_read_ends() -> None:
    """A tier that ends its work late ends the call late; the breaker does not wait for it."""

    let_go = asyncio.Event()

    class Stubborn(FaultyTier):
        ended = False

        async def read(self, object: object, into: object) -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await let_go.wait()
                self.ended = True

    stubborn = Stubborn(MemoryTier())
    tier = Guarded(stubborn, GuardSettings(0.02, 1, BreakerSettings(1, DELAY_NS, DELAY_NS)))
    reading = asyncio.create_task(tier.read(object_name("a", 8), parts(bytearray(8))))
    await until(lambda: not tier.healthy)
    assert not reading.done()
    reading.cancel()
    assert not (await asyncio.wait((reading,), timeout=0.1))[0]
    let_go.set()
    with pytest.raises((TierFault, asyncio.CancelledError)):
        await reading
    assert stubborn.ended


async def test_a_slow_tier_takes_its_time() -> None:
    tier, faulty, _ = guarded()
    faulty.bytes_per_s = 1_000_000
    began = time.monotonic()
    await write(tier, "a", 50_000)
    assert time.monotonic() - began >= 0.05
    assert tier.counters["written_bytes"] == 50_000


async def test_who_asks_a_closed_tier_how_much_it_holds_is_told_so() -> None:
    """The last metrics of a server that goes: what lies below may not stand that."""
    tier = Guarded(MemoryTier(), SETTINGS)
    assert await tier.usage() == 0
    await tier.close()
    with pytest.raises(TierFault, match="closed"):
        await tier.usage()
