# SPDX-License-Identifier: Apache-2.0
"""The tier in a Mooncake Store: a real master, memory held by another process, TCP on the loopback, and faults."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.breaker import BreakerSettings
from kvgrpc.core.types import ObjectName
from kvgrpc.tiers import mooncake as tiers
from kvgrpc.tiers.base import FaultReason, Tier, TierFault
from kvgrpc.tiers.envelope import HEADER_BYTES
from kvgrpc.tiers.guarded import Guarded, GuardSettings
from kvgrpc.tiers.mooncake import MooncakeTier, object_key
from tests.e2e.harness import until
from tests.ports import free_port
from tests.tiers.conformance import TierConformance, data, fault_of, object_name, parts, read, write
from tests.tiers.mooncakes import Mooncake, client_of, mooncake

DEADLINE_S = 20.0
LONG_NS = 60_000_000_000
"""That a breaker stays open, however busy the machine is."""
SMALL_PIECE = 16 << 10


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    with mooncake(tmp_path_factory.mktemp("mooncake")) as one:
        yield one


@pytest.fixture(scope="module")
def outside(store: Mooncake) -> Iterator[Any]:
    client = client_of(store.master)
    yield client
    client.close()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that objects of some hundred KiB have several."""
    monkeypatch.setattr(tiers, "PIECE_BYTES", SMALL_PIECE)


class TestMooncake(TierConformance):
    @pytest.fixture
    async def tier(self, store: Mooncake, outside: Any) -> AsyncIterator[MooncakeTier]:
        outside.remove_all(True)
        self.outside = outside
        tier = MooncakeTier(store.master, DEADLINE_S)
        yield tier
        await tier.close()

    async def put_raw(self, tier: Tier, name: str, kept: bytes) -> None:
        self.outside.remove(object_key(name), True)
        assert self.outside.put(object_key(name), kept) == 0

    async def get_raw(self, tier: Tier, name: str) -> bytes:
        return self.outside.get(object_key(name))

    @pytest.mark.parametrize("kept", [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 63])
    async def test_short_bytes_are_a_fault(self, tier: Tier, kept: int) -> None:
        """Of no bytes the store keeps nothing."""
        await super().test_short_bytes_are_a_fault(tier, kept)


@pytest.mark.usefixtures("small_pieces")
class TestMooncakeInPieces(TestMooncake):
    """What is larger than one piece takes several calls."""

    @pytest.mark.parametrize("size_bytes", [SMALL_PIECE, SMALL_PIECE + 1, 20 * SMALL_PIECE + 17])
    async def test_many_pieces(self, tier: MooncakeTier, size_bytes: int) -> None:
        object = object_name("a", size_bytes)
        await tier.write(object, parts(data("a", size_bytes), 5, 7000))
        assert await read(tier, object, 1000, 9000) == data("a", size_bytes)
        await tier.remove(object.name)
        assert self.outside.is_exist(object_key(object.name)) == 0

    @pytest.mark.parametrize("kept", [SMALL_PIECE, SMALL_PIECE + 1, 3 * SMALL_PIECE])
    async def test_short_in_a_later_piece(self, tier: MooncakeTier, kept: int) -> None:
        object = await write(tier, "a", 5 * SMALL_PIECE)
        await self.put_raw(tier, object.name, (await self.get_raw(tier, object.name))[:kept])
        assert await fault_of(tier, object) is FaultReason.SHORT

    async def test_flipped_in_a_later_piece_it_goes(self, tier: MooncakeTier) -> None:
        """Although a reader's lease is on it."""
        object = await write(tier, "a", 5 * SMALL_PIECE)
        raw = bytearray(await self.get_raw(tier, object.name))
        raw[4 * SMALL_PIECE] ^= 1
        await self.put_raw(tier, object.name, bytes(raw))
        assert await fault_of(tier, object) is FaultReason.CORRUPT
        assert await tier.exists([object.name]) == [False]
        assert tier.counters["damaged_objects"] == 1


# ---- faults ----


def guarded(master: str, deadline_s: float, wait_s: float = DEADLINE_S, delay_ns: int = 50_000_000) -> Guarded:
    settings = GuardSettings(deadline_s, 1.0, BreakerSettings(3, delay_ns, 2 * delay_ns))
    return Guarded(MooncakeTier(master, wait_s), settings)


async def connected_now(tier: Any) -> None:
    """Of a guarded one, whose deadline is shorter than that takes."""
    await asyncio.to_thread(tier._tier._connected)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mooncake]:
    """A store that a test may end; the library gives up after 4 s."""
    for name, value in tiers.bounds(4.0).items():
        monkeypatch.setenv(name, value)
    with mooncake(tmp_path) as one:
        yield one


class Between:
    """The library, and what is done before its n-th read."""

    def __init__(self, client: Any, number: int, act: Any) -> None:
        self._client, self._left, self._act = client, number, act

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def get_into_ranges(self, *args: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            self._act()
        return self._client.get_into_ranges(*args)


async def back_in_use(tier: Tier, object: ObjectName, label: str, within_s: float = 40.0) -> None:
    end = time.monotonic() + within_s
    while True:
        try:
            await tier.write(object, parts(data(label, object.size_bytes)))
            assert await read(tier, object) == data(label, object.size_bytes)
            return
        except TierFault:
            assert time.monotonic() < end, "it does not come back"
            await asyncio.sleep(0.05)


@pytest.mark.usefixtures("small_pieces")
async def test_a_holder_that_dies_in_the_middle_of_a_read(own: Mooncake) -> None:
    """Field reports 14 and 20: a fault, then what it has taken with it is a miss, then the store is in use again."""
    tier = MooncakeTier(own.master, DEADLINE_S)
    object = await write(tier, "a", 20 * SMALL_PIECE)
    tier._client = Between(tier._connected(), 7, own.kill_holder)
    assert await fault_of(tier, object) is FaultReason.IO
    await until(lambda: tier._connected().is_exist(object_key(object.name)) == 0, 30)
    assert await fault_of(tier, object) is FaultReason.MISSING
    await asyncio.to_thread(own.start_holder)
    await back_in_use(tier, object, "other")
    await tier.close()


async def test_a_holder_that_stands_still(own: Mooncake) -> None:
    """Field report 13: bounded by the deadline, then not asked; nothing comes late; in use again when it goes on."""
    tier, quick = guarded(own.master, DEADLINE_S), guarded(own.master, 0.3, delay_ns=LONG_NS)
    object = await write(tier, "a", 4 << 20)
    into = bytearray(object.size_bytes)
    await connected_now(quick)
    own.signal_holder(signal.SIGSTOP)
    try:
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(TierFault, match="TIMEOUT"):
                await quick.read(object, parts(into))
            assert time.monotonic() - began < 3
        into[:] = b"\xa5" * len(into)
        assert await fault_of(quick, object) is FaultReason.SKIPPED
    finally:
        own.signal_holder(signal.SIGCONT)
    await back_in_use(tier, object, "a")
    await quick.close()
    assert into == b"\xa5" * len(into)
    await tier.close()


class Longest:
    """How long the loop had no turn, in seconds."""

    def __init__(self) -> None:
        self._longest_s, self._last = 0.0, time.monotonic()
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            now = time.monotonic()
            self._longest_s, self._last = max(self._longest_s, now - self._last), now

    def end(self) -> float:
        self._watching.cancel()
        return self._longest_s


@pytest.mark.parametrize("connected", [True, False])
async def test_a_master_that_stands_still_holds_up_nobody(own: Mooncake, connected: bool) -> None:
    """The loop goes on, each call ends by its deadline, and so does the tier's own end."""
    tier, quick = guarded(own.master, DEADLINE_S), guarded(own.master, 0.3)
    object = await write(tier, "a", 1 << 20)
    if connected:
        await connected_now(quick)
    watching = Longest()
    own.signal(signal.SIGSTOP)
    try:
        for call in (quick.exists([object.name]), read(quick, object), write(quick, "b", 1 << 20)):
            began = time.monotonic()
            with pytest.raises(TierFault, match="TIMEOUT"):
                await call
            assert time.monotonic() - began < 3
        began = time.monotonic()
        await quick.close()
        assert time.monotonic() - began < 30
    finally:
        own.signal(signal.SIGCONT)
    assert watching.end() < 2.5, "on a busy machine"
    await back_in_use(tier, object, "a")
    await tier.close()


async def test_a_master_that_dies_and_comes_back_empty(own: Mooncake) -> None:
    tier = guarded(own.master, DEADLINE_S)
    object = await write(tier, "a", 1 << 20)
    own.kill_master()
    for _ in range(4):
        assert await fault_of(tier, object) in (FaultReason.IO, FaultReason.SKIPPED)
    assert not tier.healthy
    await asyncio.to_thread(own.start_master)
    await back_in_use(tier, object, "a")
    assert tier.healthy
    await tier.close()


async def test_a_store_that_comes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in tiers.bounds(4.0).items():
        monkeypatch.setenv(name, value)
    late = Mooncake(tmp_path)
    tier = guarded(late.master, DEADLINE_S)
    began = time.monotonic()
    assert await fault_of(tier, object_name("a", 64)) is FaultReason.IO
    assert time.monotonic() - began < 10, "calls fail at once"
    try:
        await asyncio.to_thread(late.start)
        await back_in_use(tier, object_name("a", 1 << 20), "a")
    finally:
        late.kill()
    await tier.close()


@pytest.mark.usefixtures("small_pieces")
async def test_a_cancelled_read_has_let_go(own: Mooncake) -> None:
    tier = MooncakeTier(own.master, DEADLINE_S)
    object = await write(tier, "a", 200 * SMALL_PIECE)
    client, loop = tier._connected(), asyncio.get_running_loop()
    for number in (1, 3, 150):
        reached, into = asyncio.Event(), bytearray(object.size_bytes)
        tier._client = Between(client, number, lambda reached=reached: loop.call_soon_threadsafe(reached.set))
        reading = asyncio.create_task(tier.read(object, parts(into)))
        await reached.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        into[:] = b"\xa5" * len(into)
        tier._client = client
        assert await read(tier, object) == data("a", object.size_bytes)
        assert into == b"\xa5" * len(into), "nothing came late"
    await tier.close()


async def test_a_full_store_is_full_and_can_be_read(tmp_path: Path) -> None:
    with mooncake(tmp_path, 64 << 20) as small:
        tier = MooncakeTier(small.master, DEADLINE_S)
        kept = await write(tier, "kept", 1 << 20)
        assert await read(tier, kept) == data("kept", 1 << 20)  # whose lease keeps it: the master evicts what it can
        with pytest.raises(TierFault, match="FULL"):
            await write(tier, "large", 80 << 20)
        assert await read(tier, kept) == data("kept", 1 << 20)
        await tier.close()


async def test_a_store_that_evicts_gives_whole_objects_or_misses(tmp_path: Path) -> None:
    with mooncake(tmp_path, 64 << 20) as small:
        tier = MooncakeTier(small.master, DEADLINE_S)
        sizes = {f"{number}": (5 << 20) + number for number in range(24)}
        for label, size_bytes in sizes.items():
            with_room = asyncio.ensure_future(write(tier, label, size_bytes))
            await asyncio.wait((with_room,))
            assert with_room.exception() is None or "FULL" in str(with_room.exception())
        got = [await fault_or_right(tier, label, size_bytes) for label, size_bytes in sizes.items()]
        assert set(got) == {None, FaultReason.MISSING}
        await tier.close()


async def fault_or_right(tier: Tier, label: str, size_bytes: int) -> FaultReason | None:
    """None: the right bytes came."""
    try:
        assert await read(tier, object_name(label, size_bytes)) == data(label, size_bytes)
    except TierFault as fault:
        return fault.reason
    return None


async def test_what_another_has_begun_to_write_is_left_to_it(store: Mooncake, outside: Any) -> None:
    tier = MooncakeTier(store.master, DEADLINE_S)
    object = object_name("begun", 1 << 20)
    key = object_key(object.name)
    assert outside.batch_put_session_start([key], [HEADER_BYTES + object.size_bytes]) == [0]
    with pytest.raises(TierFault, match="FULL"):
        await write(tier, "begun", 1 << 20)
    assert await tier.exists([object.name]) == [False], "what is half written is not there"
    assert await fault_of(tier, object) is FaultReason.MISSING
    outside.batch_put_session_revoke([key])
    assert await read(tier, await write(tier, "begun", 1 << 20)) == data("begun", 1 << 20)
    await tier.close()


async def test_without_a_master_calls_fail_at_once() -> None:
    tier = MooncakeTier(f"127.0.0.1:{free_port()}", DEADLINE_S)
    began = time.monotonic()
    with pytest.raises(TierFault, match="IO"):
        await tier.exists(["ab" * 32])
    assert time.monotonic() - began < 5
    await tier.close()
