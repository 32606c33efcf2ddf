# SPDX-License-Identifier: Apache-2.0
"""A Mooncake Store under a real server process: its master, and memory that another process gives."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import crowds, remote_server
from tests.e2e.disk_server import CHUNKS, engine
from tests.e2e.remote_server import RemoteServer, shared_folder
from tests.served import wait_until
from tests.tiers.mooncakes import Mooncake, Spoiler, mooncake, variables


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mooncake]:
    for name, value in variables().items():
        monkeypatch.setenv(name, value)
    with mooncake(tmp_path) as one:
        yield one


def flags(tmp_path: Path, store: Mooncake) -> tuple[str, ...]:
    versions = shared_folder(tmp_path / "of-all-servers")
    return ("--mooncake-master", store.master, "--versions-url", versions, "--tier-deadline-ms", "8000")


@pytest.fixture
def server(tmp_path: Path, store: Mooncake) -> Iterator[RemoteServer]:
    with contextlib.closing(RemoteServer(tmp_path, *flags(tmp_path, store))) as one:
        yield one


def test_after_a_kill_everything_that_was_written_is_there(server: RemoteServer) -> None:
    remote_server.it_comes_back_after_a_kill(server)


def test_clear_holds_after_a_kill(server: RemoteServer) -> None:
    remote_server.clear_holds_after_a_kill(server)


def test_stores_and_lookups_go_on_while_its_master_stands_still(server: RemoteServer, store: Mooncake) -> None:
    remote_server.stores_and_lookups_go_on_without_it(server, store)


def test_it_may_be_absent_at_the_start(server: RemoteServer, store: Mooncake) -> None:
    store.kill()
    remote_server.it_may_be_absent_at_the_start(server, store.start)


def test_sigterm_writes_what_waits(server: RemoteServer) -> None:
    remote_server.sigterm_writes_what_waits(server)


def test_memory_stays_bounded(server: RemoteServer) -> None:
    remote_server.memory_stays_bounded(server)


def test_under_constant_eviction_every_hit_is_right(server: RemoteServer) -> None:
    remote_server.under_constant_eviction_every_hit_is_right(server)


async def test_readers_get_their_own_while_others_write(server: RemoteServer, store: Mooncake) -> None:
    await crowds.readers_get_their_own_while_others_write(server, store)


async def test_lookups_at_once_lose_no_prefetch(server: RemoteServer) -> None:
    await crowds.lookups_at_once_lose_no_prefetch(server)


@pytest.mark.timeout(120 + 40 * crowds.KILLS)
async def test_kills_in_the_middle_of_writes(server: RemoteServer, store: Mooncake) -> None:
    await crowds.kills_in_the_middle_of_writes(server, store)


def test_aborted_lookups_give_everything_back(server: RemoteServer, store: Mooncake) -> None:
    remote_server.aborted_lookups_give_everything_back(server, store)


def test_what_a_holder_takes_with_it_is_a_miss(server: RemoteServer, store: Mooncake) -> None:
    """Field report 14: the second lookup does not ask for it again, and what is stored then comes back."""
    server.start()
    with engine(server.address) as one:
        one.store(1)
        server.wait_written(CHUNKS, 60)
        server.kill()
        store.kill_holder()
        server.start()
        one.wait_back()
        assert one.load(1) == 0
        store.start_holder()
        end = time.monotonic() + 60
        while server.counter("written_objects") < CHUNKS:
            assert time.monotonic() < end, "the store is not used again"
            assert one.load(1) == 0 or one.load(1) == CHUNKS
            one.store(int(time.monotonic() * 1000))
            time.sleep(0.2)


def test_two_servers_are_one_cache(tmp_path: Path, store: Mooncake) -> None:
    given = flags(tmp_path, store)
    a, b = RemoteServer(tmp_path, *given, name="a"), RemoteServer(tmp_path, *given, name="b")
    with contextlib.closing(a), contextlib.closing(b):
        a.start()
        b.start()
        with engine(a.address) as one, engine(b.address) as two:
            one.store(1)
            a.wait_written(CHUNKS, 60)
            assert two.load(1) == CHUNKS


@pytest.mark.parametrize("who", ["master", "holder"])
def test_a_server_ends_in_order_while_the_store_stands_still(server: RemoteServer, store: Mooncake, who: str) -> None:
    stopped = store.signal if who == "master" else store.signal_holder
    server.start("--flush-ms", "500")
    with engine(server.address) as one:
        one.store(1)
        server.wait_written(CHUNKS, 60)
        stopped(signal.SIGSTOP)
        try:
            one.store(2)
            assert server.terminate() == 0
        finally:
            stopped(signal.SIGCONT)


@pytest.mark.parametrize("seed", range(3))
def test_a_master_that_talks_nonsense_does_not_end_the_server(tmp_path: Path, store: Mooncake, seed: int) -> None:
    """The library lives in the server's process: answers of the master have flipped bits, for many calls."""
    with Spoiler(store.port, seed) as between:
        versions = shared_folder(tmp_path / "v")
        given = ("--mooncake-master", f"127.0.0.1:{between.port}", "--versions-url", versions)
        with contextlib.closing(RemoteServer(tmp_path, *given, "--tier-deadline-ms", "1000")) as server:
            server.start()
            with engine(server.address) as one:
                prompt, end = 0, time.monotonic() + 60
                while server.counter("written_objects") < CHUNKS:  # the first may be skipped, until it is connected
                    assert time.monotonic() < end, "the store is not used"
                    prompt += 1
                    assert one.store(prompt) == ["STORED"] * CHUNKS
                    time.sleep(0.1)
                between.spoils = True
                end = time.monotonic() + 60
                while between.spoiled < 12:
                    assert time.monotonic() < end, "nothing more is asked"
                    prompt += 1
                    assert one.store(prompt) == ["STORED"] * CHUNKS
                    assert one.load(prompt) == CHUNKS
                between.spoils = False
                wait_until(lambda: server.status().arena.settling_bytes == 0, 30)
            assert server.terminate() == 0
