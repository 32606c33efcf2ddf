# SPDX-License-Identifier: Apache-2.0
"""The tier in Valkey and Redis: real servers of both, a cluster, and what may go wrong there."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvgrpc.breaker import BreakerSettings
from kvgrpc.core.types import ObjectName, Versions
from kvgrpc.tiers import valkey
from kvgrpc.tiers.base import FaultReason, Tier, TierFault
from kvgrpc.tiers.envelope import HEADER_BYTES
from kvgrpc.tiers.guarded import Guarded, GuardSettings
from kvgrpc.tiers.valkey import Login, ValkeyTier, ValkeyVersions, connect, object_key
from kvgrpc.tiers.versions import begin_at, begin_both, save_at
from tests.e2e.harness import until
from tests.ports import free_port
from tests.tiers.conformance import TierConformance, data, fault_of, object_name, parts, read, write
from tests.tiers.stores import Keys, Proxy, cluster, keys, redis_program, valkey_program

TTL_MS = 600_000
DEADLINE_S = 30.0
LONG_NS = 60_000_000_000
"""That a breaker stays open, however busy the machine is."""
SMALL_PIECE = 16 << 10


@pytest.fixture(scope="module")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keys]:
    with keys(tmp_path_factory.mktemp("valkey"), valkey_program()) as one:
        yield one


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keys]:
    with keys(tmp_path_factory.mktemp("redis"), redis_program()) as one:
        yield one


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Keys]]:
    with cluster(tmp_path_factory.mktemp("cluster"), valkey_program()) as found:
        yield found


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that objects of some hundred KiB have several."""
    monkeypatch.setattr(valkey, "PIECE_BYTES", SMALL_PIECE)


class ValkeyConformance(TierConformance):
    async def put_raw(self, tier: Tier, name: str, kept: bytes) -> None:
        assert isinstance(tier, ValkeyTier)
        await asyncio.to_thread(tier._connected().set, object_key(name), kept)

    async def get_raw(self, tier: Tier, name: str) -> bytes:
        assert isinstance(tier, ValkeyTier)
        return await asyncio.to_thread(tier._connected().get, object_key(name))


class TestValkey(ValkeyConformance):
    @pytest.fixture
    async def tier(self, valkey_server: Keys) -> AsyncIterator[ValkeyTier]:
        async for tier in emptied(valkey_server):
            yield tier


class TestRedis(ValkeyConformance):
    @pytest.fixture
    async def tier(self, redis_server: Keys) -> AsyncIterator[ValkeyTier]:
        async for tier in emptied(redis_server):
            yield tier


class TestCluster(ValkeyConformance):
    @pytest.fixture
    async def tier(self, nodes: list[Keys]) -> AsyncIterator[ValkeyTier]:
        async for tier in emptied(*nodes):
            yield tier

    async def test_objects_are_spread(self, tier: Tier, nodes: list[Keys]) -> None:
        for number in range(30):
            await write(tier, f"{number}", 100)
        held = [node.client().dbsize() for node in nodes]
        assert sum(held) == 30
        assert min(held) > 0


async def emptied(*servers: Keys) -> AsyncIterator[ValkeyTier]:
    for server in servers:
        server.client().flushall()
    tier = ValkeyTier(servers[0].url, TTL_MS, DEADLINE_S)
    yield tier
    await tier.close()


@pytest.mark.usefixtures("small_pieces")
class InPieces:
    @pytest.mark.parametrize("size_bytes", [SMALL_PIECE, SMALL_PIECE + 1, 20 * SMALL_PIECE + 17])
    async def test_many_pieces(self, tier: ValkeyTier, size_bytes: int) -> None:
        object = object_name("a", size_bytes)
        await tier.write(object, parts(data("a", size_bytes), 5, 7000))
        assert await read(tier, object, 1000, 9000) == data("a", size_bytes)
        await tier.remove(object.name)
        assert list(tier._connected().scan_iter()) == []
        assert await tier.usage() == 0

    async def test_a_piece_that_is_gone_is_a_miss_and_the_object_goes(self, tier: ValkeyTier) -> None:
        """Field report 14: exists is right again afterwards."""
        object = await write(tier, "a", 5 * SMALL_PIECE)
        (gone,) = [key for key in tier._connected().scan_iter() if key.endswith(b":3")]
        tier._connected().unlink(gone)
        assert await tier.exists([object.name]) == [True]
        assert await fault_of(tier, object) is FaultReason.MISSING
        assert await tier.exists([object.name]) == [False]
        assert list(tier._connected().scan_iter()) == []
        assert tier.counters["torn_objects"] == 1

    @pytest.mark.parametrize("how", ["short", "long", "flipped", "swapped"])
    async def test_a_damaged_piece(self, tier: ValkeyTier, how: str) -> None:
        object = await write(tier, "a", 5 * SMALL_PIECE)
        client = tier._connected()
        (key,) = [key for key in client.scan_iter() if key.endswith(b":3")]
        kept = client.get(key)
        other = client.get(key[:-1] + b"2")
        damaged = {"short": kept[:-1], "long": kept + b"x", "flipped": kept[:-1] + bytes([kept[-1] ^ 1])}
        client.set(key, damaged.get(how, other))
        assert await fault_of(tier, object) in (FaultReason.CORRUPT, FaultReason.SHORT, FaultReason.FOREIGN)
        assert await tier.exists([object.name]) == [False]

    async def test_a_lying_tail_takes_no_memory(self, tier: ValkeyTier) -> None:
        object = await write(tier, "a", 5 * SMALL_PIECE)
        client, key = tier._connected(), object_key(object.name)
        kept = client.get(key)
        for piece_bytes, count in ((1 << 31, 5), (1, 0xFFFFFFFF), (SMALL_PIECE, 6), (0, 5), (SMALL_PIECE, 4)):
            tail = valkey._TAIL.pack(kept[HEADER_BYTES : HEADER_BYTES + 16], piece_bytes, count)
            client.set(key, kept[:HEADER_BYTES] + tail)
            reason = await fault_of(tier, object)
            assert reason in (FaultReason.CORRUPT, FaultReason.SHORT, FaultReason.FOREIGN, FaultReason.MISSING)
            await write(tier, "a", 5 * SMALL_PIECE)
            kept = client.get(key)

    async def test_nothing_stays_for_ever(self, tier: ValkeyTier) -> None:
        """What a server that died has half written goes with its time, too."""
        await write(tier, "a", 5 * SMALL_PIECE)
        await write(tier, "b", 5)
        ages = [tier._connected().pttl(key) for key in tier._connected().scan_iter()]
        assert len(ages) == 7
        assert all(0 < age <= TTL_MS for age in ages)

    async def test_written_again_leaves_nothing_of_the_old(self, tier: ValkeyTier) -> None:
        for round_ in range(3):
            object = object_name("a", 4 * SMALL_PIECE)
            await tier.write(object, parts(data(f"{round_}", 4 * SMALL_PIECE)))
            assert await read(tier, object) == data(f"{round_}", 4 * SMALL_PIECE)
            assert len(list(tier._connected().scan_iter())) == 5


class TestValkeyInPieces(InPieces):
    @pytest.fixture
    async def tier(self, valkey_server: Keys) -> AsyncIterator[ValkeyTier]:
        async for tier in emptied(valkey_server):
            yield tier


class TestClusterInPieces(InPieces):
    @pytest.fixture
    async def tier(self, nodes: list[Keys]) -> AsyncIterator[ValkeyTier]:
        async for tier in emptied(*nodes):
            yield tier


# ---- faults ----


def guarded(url: str, deadline_s: float, wait_s: float = DEADLINE_S, delay_ns: int = 50_000_000) -> Guarded:
    settings = GuardSettings(deadline_s, 1.0, BreakerSettings(3, delay_ns, 2 * delay_ns))
    return Guarded(ValkeyTier(url, TTL_MS, wait_s), settings)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Keys]:
    """A server that a test may end."""
    with keys(tmp_path, valkey_program()) as one:
        yield one


async def test_a_server_that_dies_in_the_middle_of_a_read(own: Keys) -> None:
    """Field reports 14 and 20: a fault, then what it has lost are misses, then it is in use again."""
    async with Proxy(own.port) as proxy:
        tier = guarded(f"valkey://127.0.0.1:{proxy.port}", DEADLINE_S)
        object = await write(tier, "a", 24 << 20)
        proxy.bytes_per_s, proxy.passed = 2_000_000, 0
        reading = asyncio.create_task(fault_of(tier, object))
        await until(lambda: proxy.passed > 100_000)
        own.kill()
        proxy.bytes_per_s = None
        assert await reading is FaultReason.IO
        for _ in range(2):
            await fault_of(tier, object)
        assert not tier.healthy
        await asyncio.to_thread(own.start)
        end = time.monotonic() + 30
        while await fault_of(tier, object) is not FaultReason.MISSING:
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        assert await read(tier, await write(tier, "a", 2 << 20)) == data("a", 2 << 20)
        await tier.close()


async def test_a_server_that_stands_still(own: Keys) -> None:
    """Field report 13: bounded by the deadline, then not asked; nothing comes late; in use again when it goes on."""
    tier, quick = guarded(own.url, DEADLINE_S), guarded(own.url, 0.3, 2.0, LONG_NS)
    object = await write(tier, "a", 4 << 20)
    into = bytearray(object.size_bytes)
    own.signal(signal.SIGSTOP)
    try:
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(TierFault, match="TIMEOUT"):
                await quick.read(object, parts(into))
            assert time.monotonic() - began < 3
        into[:] = b"\xa5" * len(into)
        assert await fault_of(quick, object) is FaultReason.SKIPPED
    finally:
        own.signal(signal.SIGCONT)
    assert await read(tier, object) == data("a", 4 << 20)
    await quick.close()
    assert into == b"\xa5" * len(into)
    await tier.close()


async def test_a_cancelled_read_has_let_go(own: Keys) -> None:
    async with Proxy(own.port) as proxy:
        tier = ValkeyTier(f"valkey://127.0.0.1:{proxy.port}", TTL_MS, DEADLINE_S)
        object = await write(tier, "a", 12 << 20)
        for passed in (1, 3 << 20, 7 << 20):
            into, proxy.passed, proxy.bytes_per_s = bytearray(object.size_bytes), 0, 20_000_000
            reading = asyncio.create_task(tier.read(object, parts(into)))
            await until(lambda passed=passed: proxy.passed >= passed)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            into[:] = b"\xa5" * len(into)
            proxy.bytes_per_s = None
            assert await read(tier, object) == data("a", object.size_bytes)
            assert into == b"\xa5" * len(into), "nothing came late"
        await tier.close()


async def test_a_cut_answer_is_never_short_data(own: Keys) -> None:
    async with Proxy(own.port) as proxy:
        tier = ValkeyTier(f"valkey://127.0.0.1:{proxy.port}", TTL_MS, DEADLINE_S)
        object = await write(tier, "a", 3 << 20)
        for cut in (5000, 1 << 20):
            tier._connected().connection_pool.disconnect()
            proxy.cut_after = cut
            assert await fault_of(tier, object) is FaultReason.IO
        proxy.cut_after = None
        assert await read(tier, object) == data("a", 3 << 20)
        await tier.close()


async def test_a_full_server_is_full_and_can_be_read(own: Keys) -> None:
    tier = ValkeyTier(own.url, TTL_MS, DEADLINE_S)
    kept = await write(tier, "kept", 1 << 20)
    own.client().config_set("maxmemory", 3 << 20)
    with pytest.raises(TierFault, match="FULL"):
        await write(tier, "large", 16 << 20)
    assert await read(tier, kept) == data("kept", 1 << 20)
    await tier.close()


async def test_a_server_that_evicts_gives_whole_objects_or_misses(own: Keys) -> None:
    own.client().config_set("maxmemory", 24 << 20)
    own.client().config_set("maxmemory-policy", "allkeys-lru")
    tier = ValkeyTier(own.url, TTL_MS, DEADLINE_S)
    sizes = {f"{number}": (2 << 20) + number for number in range(16)}
    for label, size_bytes in sizes.items():
        await write(tier, label, size_bytes)
    reasons = [await fault_or_right(tier, label, size_bytes) for label, size_bytes in sizes.items()]
    assert set(reasons) == {None, FaultReason.MISSING}
    await tier.close()


async def fault_or_right(tier: Tier, label: str, size_bytes: int) -> FaultReason | None:
    """None: the right bytes came."""
    try:
        assert await read(tier, object_name(label, size_bytes)) == data(label, size_bytes)
    except TierFault as fault:
        return fault.reason
    return None


async def test_access_is_refused_without_the_password(own: Keys) -> None:
    own.client().config_set("requirepass", "of the test")
    tier = ValkeyTier(own.url, TTL_MS, DEADLINE_S)
    for call in (
        tier.exists(["ab" * 32]),
        write(tier, "a", 8),
        read(tier, object_name("a", 8)),
        tier.remove("ab" * 32),
    ):
        with pytest.raises(TierFault, match="IO") as refused:
            await call
        assert "of the test" not in refused.value.message
    await tier.close()
    tier = ValkeyTier(own.url, TTL_MS, DEADLINE_S, Login(password="of the test"))
    assert await read(tier, await write(tier, "a", 8)) == data("a", 8)
    await tier.close()


async def test_a_node_that_dies_takes_its_own_objects_only(tmp_path: Path) -> None:
    with cluster(tmp_path, valkey_program()) as nodes:
        tier = ValkeyTier(nodes[0].url, TTL_MS, DEADLINE_S)
        for number in range(24):
            await write(tier, f"{number}", 1000)
        nodes[2].kill()
        reasons = [await fault_or_right(tier, f"{number}", 1000) for number in range(24)]
        assert set(reasons) == {None, FaultReason.IO}
        await tier.close()


async def test_without_a_server_calls_fail_at_once() -> None:
    tier = ValkeyTier(f"valkey://127.0.0.1:{free_port()}", TTL_MS, DEADLINE_S)
    began = time.monotonic()
    with pytest.raises(TierFault, match="IO"):
        await tier.exists(["ab" * 32])
    assert time.monotonic() - began < 10
    await tier.close()


async def test_a_huge_value_under_the_name_is_not_fetched(own: Keys) -> None:
    tier = ValkeyTier(own.url, TTL_MS, DEADLINE_S)
    object = await write(tier, "a", 64)
    own.client().setrange(object_key(object.name), 64 << 20, b"x")
    assert await fault_of(tier, ObjectName(object.name, 64)) is FaultReason.FOREIGN
    assert own.client().info("commandstats")["cmdstat_getrange"]["calls"] > 0
    assert int(own.client().info("stats")["total_net_output_bytes"]) < 8 << 20
    await tier.close()


# ---- versions ----


@pytest.mark.parametrize("kind", ["one", "cluster"])
def test_versions_of_two_servers_come_together(valkey_server: Keys, nodes: list[Keys], kind: str) -> None:
    url = valkey_server.url if kind == "one" else nodes[1].url
    connect(url, DEADLINE_S).delete(valkey.VERSIONS_KEY)
    place = ValkeyVersions(url, DEADLINE_S)
    begun = begin_at(place)
    assert begun.first, "nobody knows what is there"
    assert begin_at(place) == begun
    one = Versions(begun.first, {b"a" * 32: (1, 7)}, {})
    two = Versions(begun.first, {b"b" * 32: (1, 9)}, {b"s" * 32: (b"b" * 32, 11)})
    for number in range(3):
        save_at(place, begun, one)
        save_at(place, begun, two)
        assert begin_at(place) == Versions(begun.first, {**one.bases, **two.bases}, two.spaces), number
    seen, text = place.load()
    assert not place.swap(seen - 1, text), "somebody was quicker"


def test_without_the_server_a_server_begins_where_nobody_was() -> None:
    place = ValkeyVersions(f"valkey://127.0.0.1:{free_port()}", 1.0)
    assert begin_both(place, None).first != begin_both(place, None).first
    with pytest.raises(OSError, match=r"."):
        save_at(place, Versions(), Versions(first=3))
