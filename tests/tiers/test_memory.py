# SPDX-License-Identifier: Apache-2.0
"""The shipped tier in memory: a tier like any other, and every fault on request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from kvgrpc.core.types import ObjectName
from kvgrpc.tiers.base import FaultReason, Tier, TierFault, TierMiss
from kvgrpc.tiers.memory import Damage, MemoryTier
from tests.tiers.conformance import TierConformance, data, fault_of, object_name, parts, read, write


@pytest.fixture
async def tier() -> AsyncIterator[MemoryTier]:
    tier = MemoryTier()
    yield tier
    await tier.close()


class TestMemoryTier(TierConformance):
    async def put_raw(self, tier: Tier, name: str, kept: bytes) -> None:
        assert isinstance(tier, MemoryTier)
        tier.put_raw(name, kept)

    async def get_raw(self, tier: Tier, name: str) -> bytes:
        assert isinstance(tier, MemoryTier)
        return tier.get_raw(name)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (Damage.SHORT, FaultReason.SHORT),
        (Damage.FLIPPED, FaultReason.CORRUPT),
        (Damage.FOREIGN, FaultReason.FOREIGN),
        (Damage.VANISHED, FaultReason.MISSING),
    ],
)
async def test_damage_is_a_fault_though_exists_says_yes(tier: MemoryTier, how: Damage, reason: FaultReason) -> None:
    object = await write(tier, "a", 64)
    tier.damage(object.name, how)
    assert await tier.exists([object.name]) == [True]
    assert await fault_of(tier, object) is reason
    again = await write(tier, "a", 64)
    assert await read(tier, again) == data("a", 64)


async def test_a_vanished_object_is_a_miss_until_removed(tier: MemoryTier) -> None:
    object = await write(tier, "a", 64)
    tier.damage(object.name, Damage.VANISHED)
    with pytest.raises(TierMiss):
        await read(tier, object)
    await tier.remove(object.name)
    assert await tier.exists([object.name]) == [False]


async def until_reading(tier: MemoryTier) -> None:
    for _ in range(100):
        if tier.reads_in_flight:
            return
        await asyncio.sleep(0)
    raise AssertionError("the read did not begin")


async def test_hang_holds_reads_until_resumed(tier: MemoryTier) -> None:
    object = await write(tier, "a", 64)
    tier.hang()
    reading = asyncio.create_task(read(tier, object))
    await until_reading(tier)
    assert await tier.exists([object.name]) == [True]
    assert not reading.done()
    tier.resume()
    assert await reading == data("a", 64)
    assert tier.reads_in_flight == 0


async def test_cancelled_read_never_touches_its_buffer_again(tier: MemoryTier) -> None:
    object = await write(tier, "a", 64)
    tier.hang()
    into = bytearray(64)
    reading = asyncio.create_task(tier.read(object, parts(into)))
    await until_reading(tier)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    tier.resume()
    assert await read(tier, object) == data("a", 64)
    assert into == bytes(64)
    assert tier.reads_in_flight == 0


async def test_delay_is_waited_for(tier: MemoryTier) -> None:
    object = await write(tier, "a", 64)
    tier.delay_s = 0.2
    started = time.monotonic()
    await asyncio.gather(*(read(tier, object) for _ in range(20)))
    assert 0.19 <= time.monotonic() - started < 3.8, "reads wait beside each other"


async def test_told_fault_hits_every_call_and_writes_leave_nothing(tier: MemoryTier) -> None:
    kept, absent = await write(tier, "a", 64), object_name("b", 64)
    tier.fault = FaultReason.IO
    calls = (
        tier.exists([kept.name]),
        tier.read(kept, parts(bytearray(64))),
        tier.write(absent, parts(data("b", 64))),
        tier.remove(kept.name),
        tier.usage(),
    )
    for call in calls:
        with pytest.raises(TierFault) as caught:
            await call
        assert caught.value.reason is FaultReason.IO
    tier.fault = None
    assert await tier.exists([kept.name, absent.name]) == [True, False]


async def test_counters(tier: MemoryTier) -> None:
    object = await write(tier, "a", 64)
    await read(tier, object)
    await fault_of(tier, ObjectName(object.name, 65))
    await tier.exists([object.name, "x"])
    assert (tier.writes, tier.reads, tier.probes) == (1, 2, 2)
    assert tier.names == {object.name}
