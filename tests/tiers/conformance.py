# SPDX-License-Identifier: Apache-2.0
"""What every tier must do. A tier's test module subclasses TierConformance and gives it a fixture ``tier``.

class TestMyTier(TierConformance):
    @pytest.fixture
    async def tier(self): ...
    async def put_raw(self, tier, name, kept): ...   # replaces the kept bytes (header included) behind the tier's back
    async def get_raw(self, tier, name): ...         # the kept bytes
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from itertools import pairwise

import pytest

from kvgrpc.core.types import ObjectName
from kvgrpc.tiers.base import FaultReason, Tier, TierFault, TierMiss
from kvgrpc.tiers.envelope import HEADER_BYTES, seal


def object_name(label: str, size_bytes: int) -> ObjectName:
    return ObjectName(hashlib.sha256(label.encode()).hexdigest(), size_bytes)


def data(label: str, size_bytes: int) -> bytes:
    return random.Random(label).randbytes(size_bytes)


def parts(data: bytes | bytearray, *cuts: int) -> list[memoryview]:
    """Views of ``data``, cut at these places."""
    edges = [0, *cuts, len(data)]
    return [memoryview(data)[low:high] for low, high in pairwise(edges)]


async def write(tier: Tier, label: str, size_bytes: int) -> ObjectName:
    object = object_name(label, size_bytes)
    await tier.write(object, parts(data(label, size_bytes)))
    return object


async def read(tier: Tier, object: ObjectName, *cuts: int) -> bytes:
    into = bytearray(object.size_bytes)
    await tier.read(object, parts(into, *cuts))
    return bytes(into)


async def fault_of(tier: Tier, object: ObjectName) -> FaultReason:
    with pytest.raises(TierFault) as caught:
        await read(tier, object)
    return caught.value.reason


class TierConformance:
    async def put_raw(self, tier: Tier, name: str, kept: bytes) -> None:
        raise NotImplementedError

    async def get_raw(self, tier: Tier, name: str) -> bytes:
        raise NotImplementedError

    async def test_it_has_a_name_and_is_healthy(self, tier: Tier) -> None:
        assert tier.name
        assert tier.healthy

    @pytest.mark.parametrize("size_bytes", [1, 4095, 4096, 100_003])
    async def test_bytes_come_back(self, tier: Tier, size_bytes: int) -> None:
        object = await write(tier, "a", size_bytes)
        assert await read(tier, object) == data("a", size_bytes)

    async def test_cuts_of_buffers_do_not_matter(self, tier: Tier) -> None:
        object = object_name("a", 10_000)
        await tier.write(object, parts(data("a", 10_000), 1, 5000, 5000, 9999))
        assert await read(tier, object, 4096, 8192) == data("a", 10_000)

    async def test_exists_answers_in_order(self, tier: Tier) -> None:
        names = [object_name(label, 8).name for label in "abcd"]
        await write(tier, "b", 8)
        await write(tier, "d", 8)
        assert await tier.exists(names) == [False, True, False, True]
        assert await tier.exists([]) == []

    async def test_absent_object_is_a_miss(self, tier: Tier) -> None:
        with pytest.raises(TierMiss):
            await read(tier, object_name("absent", 8))

    async def test_write_again_replaces(self, tier: Tier) -> None:
        await write(tier, "a", 64)
        object = object_name("a", 32)
        await tier.write(object, parts(data("other", 32)))
        assert await read(tier, object) == data("other", 32)

    async def test_remove_forgets_and_is_harmless_twice(self, tier: Tier) -> None:
        object = await write(tier, "a", 64)
        kept = await write(tier, "b", 64)
        await tier.remove(object.name)
        await tier.remove(object.name)
        assert await tier.exists([object.name, kept.name]) == [False, True]
        assert await fault_of(tier, object) is FaultReason.MISSING
        assert await read(tier, kept) == data("b", 64)

    async def test_usage_follows_what_is_kept(self, tier: Tier) -> None:
        empty = await tier.usage()
        object = await write(tier, "a", 50_000)
        assert await tier.usage() >= empty + 50_000
        await tier.remove(object.name)
        assert await tier.usage() == empty

    async def test_reader_keeps_its_own_bytes(self, tier: Tier) -> None:
        """A buffer may be used for something else as soon as the call has ended."""
        source = bytearray(data("a", 64))
        object = object_name("a", 64)
        await tier.write(object, parts(source))
        source[:] = bytes(64)
        assert await read(tier, object) == data("a", 64)

    async def test_another_length_is_a_fault(self, tier: Tier) -> None:
        object = await write(tier, "a", 64)
        for size_bytes in (63, 65, 1):
            assert await fault_of(tier, ObjectName(object.name, size_bytes)) is FaultReason.FOREIGN
        assert await read(tier, object) == data("a", 64)

    @pytest.mark.parametrize("kept", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 63])
    async def test_short_bytes_are_a_fault(self, tier: Tier, kept: int) -> None:
        object = await write(tier, "a", 64)
        whole = await self.get_raw(tier, object.name)
        await self.put_raw(tier, object.name, whole[:kept])
        assert await fault_of(tier, object) is FaultReason.SHORT

    async def test_another_objects_bytes_are_a_fault(self, tier: Tier) -> None:
        object, other = await write(tier, "a", 64), await write(tier, "b", 64)
        await self.put_raw(tier, object.name, await self.get_raw(tier, other.name))
        assert await fault_of(tier, object) is FaultReason.FOREIGN
        assert await read(tier, other) == data("b", 64)

    async def test_bytes_of_something_else_are_a_fault(self, tier: Tier) -> None:
        object = await write(tier, "a", 64)
        for raw in (bytes(HEADER_BYTES + 64), b"\xff" * (HEADER_BYTES + 64)):
            await self.put_raw(tier, object.name, raw)
            assert await fault_of(tier, object) is FaultReason.FOREIGN

    async def test_no_flipped_bit_is_ever_data(self, tier: Tier) -> None:
        object = await write(tier, "a", 8)
        whole = await self.get_raw(tier, object.name)
        bits = [*range(0, 256 * 8, 5), *range(256 * 8, HEADER_BYTES * 8, 997), *range(HEADER_BYTES * 8, len(whole) * 8)]
        for bit in bits:
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            await self.put_raw(tier, object.name, bytes(damaged))
            reason = await fault_of(tier, object)
            assert reason in (FaultReason.FOREIGN, FaultReason.CORRUPT), f"bit {bit}"
            if bit >= HEADER_BYTES * 8:
                assert reason is FaultReason.CORRUPT

    async def test_payload_of_the_right_length_from_another_write_is_a_fault(self, tier: Tier) -> None:
        object = await write(tier, "a", 64)
        header = seal(object, parts(data("a", 64)))
        await self.put_raw(tier, object.name, header + data("b", 64))
        assert await fault_of(tier, object) is FaultReason.CORRUPT

    async def test_many_at_once(self, tier: Tier) -> None:
        objects = await asyncio.gather(*(write(tier, f"o{i}", 1000 + i) for i in range(50)))
        back = await asyncio.gather(*(read(tier, object) for object in objects))
        assert back == [data(f"o{i}", 1000 + i) for i in range(50)]
