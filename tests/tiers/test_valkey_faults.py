# SPDX-License-Identifier: Apache-2.0
"""Valkey behind a line that is slower than any deadline, full, or larger than can be counted at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.tiers import valkey
from kvgrpc.tiers.base import FaultReason
from kvgrpc.tiers.valkey import ValkeyTier, ValkeyVersions
from tests.tiers.conformance import data, fault_of, object_name, parts, read, write
from tests.tiers.stores import Keys, Proxy, keys, valkey_program

TTL_MS = 600_000
SIZE = 3 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Keys]:
    with keys(tmp_path, valkey_program()) as one:
        yield one


async def test_answers_that_come_byte_by_byte_keep_no_thread(store: Keys) -> None:
    """Each byte is in time, the answer never is. A server that ends must not wait for it: it has an index to write."""
    async with Proxy(store.port) as proxy:
        url = f"valkey://127.0.0.1:{proxy.port}"
        tier = ValkeyTier(url, TTL_MS, 1.0)
        object = await write(tier, "a", SIZE)
        proxy.byte_s = 0.05
        began = time.monotonic()
        reads = [asyncio.create_task(fault_of(tier, object)) for _ in range(3)]
        assert await asyncio.gather(*reads) == [FaultReason.IO] * 3
        with pytest.raises(OSError, match="too long"):
            await asyncio.to_thread(ValkeyVersions(url, 1.0).load)
        reading = asyncio.create_task(fault_of(tier, object))
        await asyncio.sleep(0)
        await tier.close()
        await asyncio.gather(reading, return_exceptions=True)
        assert time.monotonic() - began < 20, "three times a second, on a busy machine; the object needs two days"


@pytest.mark.parametrize("size_bytes", [8, SIZE])
async def test_a_server_that_became_a_replica_is_left_for_its_successor(
    store: Keys, tmp_path: Path, size_bytes: int
) -> None:
    """Behind one address, as managed services and Services of Kubernetes have it: the old one goes on answering on its
    connections, but takes no writes."""
    (tmp_path / "next").mkdir()
    with keys(tmp_path / "next", valkey_program()) as successor:
        async with Proxy(store.port) as proxy:
            tier = ValkeyTier(f"valkey://127.0.0.1:{proxy.port}", TTL_MS, 10.0)
            await write(tier, "a", size_bytes)
            store.client().replicaof("127.0.0.1", successor.port)
            proxy.behind = successor.port
            b = await write(tier, "b", size_bytes)
            assert await read(tier, b) == data("b", size_bytes)
            await tier.close()


async def test_what_did_not_fit_leaves_no_pieces(store: Keys) -> None:
    """Else a server that refuses writes when it is full fills with what nobody can read."""
    tier, client = ValkeyTier(store.url, TTL_MS, 30.0), store.client()
    a = await write(tier, "a", SIZE)
    kept = client.dbsize()
    client.config_set("maxmemory", client.info("memory")["used_memory"] + (5 << 19))
    for label in ("b", "c"):
        with pytest.raises(valkey.TierFault, match="FULL"):
            await write(tier, label, SIZE)
        assert client.dbsize() == kept
    assert await read(tier, a) == data("a", SIZE)
    await tier.close()


async def test_a_tier_that_is_still_counted_is_well(store: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been counted is told as soon as there is more; the first count may take minutes."""
    client = store.client()
    for number in range(50):
        client.set(f"kvgrpc:{number}", bytes(1000))
    monkeypatch.setattr(valkey, "PROBES", 5)
    real = valkey._lengths

    def slow(client: object, keys: list[object]) -> int:
        time.sleep(0.5)
        return real(client, keys)

    monkeypatch.setattr(valkey, "_lengths", slow)
    tier = ValkeyTier(store.url, TTL_MS, 30.0)
    seen = [await asyncio.wait_for(tier.usage(), 4.0)]
    assert 0 < seen[0] < 50_000
    await tier.write(object_name("a", 8), parts(bytes(8)))
    while tier._usage._counting is not None:
        seen.append(await asyncio.wait_for(tier.usage(), 4.0))
    assert seen == sorted(seen)
    assert 50_000 < await tier.usage() < 60_000
    await tier.close()
