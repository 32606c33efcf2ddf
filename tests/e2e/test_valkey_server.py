# SPDX-License-Identifier: Apache-2.0
"""Valkey under a real server process: one server, a cluster, Redis, and both remote tiers together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import crowds, remote_server
from tests.e2e.disk_server import CHUNKS, engine
from tests.e2e.remote_server import RemoteServer, shared_folder
from tests.served import wait_until
from tests.tiers.stores import Keys, cluster, keys, redis_program, valkey_program


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Keys]:
    with keys(tmp_path, valkey_program()) as one:
        yield one


@pytest.fixture
def server(tmp_path: Path, store: Keys) -> Iterator[RemoteServer]:
    flags = ("--valkey-url", store.url, "--tier-deadline-ms", "3000")
    with contextlib.closing(RemoteServer(tmp_path, *flags)) as one:
        yield one


def test_after_a_kill_everything_that_was_written_is_there(server: RemoteServer) -> None:
    remote_server.it_comes_back_after_a_kill(server)


def test_the_same_from_redis(tmp_path: Path) -> None:
    with keys(tmp_path, redis_program()) as store:
        with contextlib.closing(RemoteServer(tmp_path, "--valkey-url", store.url.replace("valkey", "redis"))) as server:
            remote_server.it_comes_back_after_a_kill(server)


def test_the_same_from_a_cluster(tmp_path: Path) -> None:
    with cluster(tmp_path, valkey_program()) as nodes:
        with contextlib.closing(RemoteServer(tmp_path, "--valkey-url", nodes[0].url)) as server:
            remote_server.it_comes_back_after_a_kill(server)
            assert all(node.client().dbsize() for node in nodes)


def test_clear_holds_after_a_kill(server: RemoteServer) -> None:
    remote_server.clear_holds_after_a_kill(server)


def test_stores_and_lookups_go_on_while_it_stands_still(server: RemoteServer, store: Keys) -> None:
    remote_server.stores_and_lookups_go_on_without_it(server, store)


def test_it_may_be_absent_at_the_start(server: RemoteServer, store: Keys) -> None:
    store.kill()
    remote_server.it_may_be_absent_at_the_start(server, store.start)


def test_sigterm_writes_what_waits(server: RemoteServer) -> None:
    remote_server.sigterm_writes_what_waits(server)


def test_memory_stays_bounded(server: RemoteServer) -> None:
    remote_server.memory_stays_bounded(server)


def test_under_constant_eviction_every_hit_is_right(server: RemoteServer) -> None:
    remote_server.under_constant_eviction_every_hit_is_right(server)


async def test_readers_get_their_own_while_others_write(server: RemoteServer, store: Keys) -> None:
    await crowds.readers_get_their_own_while_others_write(server, store)


async def test_lookups_at_once_lose_no_prefetch(server: RemoteServer) -> None:
    await crowds.lookups_at_once_lose_no_prefetch(server)


@pytest.mark.timeout(120 + 40 * crowds.KILLS)
async def test_kills_in_the_middle_of_writes(server: RemoteServer, store: Keys) -> None:
    await crowds.kills_in_the_middle_of_writes(server, store)


def test_aborted_lookups_give_everything_back(server: RemoteServer, store: Keys) -> None:
    remote_server.aborted_lookups_give_everything_back(server, store)


def test_deleted_behind_its_back(server: RemoteServer, store: Keys) -> None:
    """Field report 14: what is gone is no hit; the second lookup does not read it again."""
    server.start()
    with engine(server.address) as one:
        one.store(1)
        server.wait_written(CHUNKS, 60)
        server.kill()
        objects = sorted(key for key in store.client().scan_iter() if b"versions" not in key)
        assert len(objects) == CHUNKS
        store.client().unlink(objects[3])
        server.start()
        one.wait_back()
        first = one.load(1)
        assert first < CHUNKS
        assert one.load(1) == first


def test_with_an_object_store_below_it(tmp_path: Path, store: Keys) -> None:
    """Both are written; what one has lost the other has."""
    flags = ("--valkey-url", store.url, "--object-store-url", shared_folder(tmp_path / "objects"))
    with contextlib.closing(RemoteServer(tmp_path, *flags)) as server:
        server.start()
        with engine(server.address) as one:
            one.store(1)
            wait_until(lambda: server.counter("written_objects") >= 2 * CHUNKS, 60)
            for lost in (False, True):
                server.kill()
                if lost:
                    store.client().flushall()
                server.start()
                one.wait_back()
                assert one.load(1) == CHUNKS
                reads = {tier.name: tier.counters.get("reads", 0) for tier in server.status().tiers}
                assert reads == {"valkey": 0 if lost else CHUNKS, "objectstore": CHUNKS if lost else 0}
