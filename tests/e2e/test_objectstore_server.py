# SPDX-License-Identifier: Apache-2.0
"""The object store under a real server process: an S3 server of its own, and a local folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import crowds, remote_server
from tests.e2e.disk_server import CHUNKS, engine
from tests.e2e.remote_server import RemoteServer, shared_folder
from tests.tiers.stores import BUCKET, Moto, moto

URL = f"s3://{BUCKET}/kv"


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Moto]:
    with moto(tmp_path) as one:
        for name, value in one.environment().items():
            monkeypatch.setenv(name, value)
        yield one


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RemoteServer]:
    flags = ("--object-store-url", URL, "--tier-deadline-ms", "3000")
    with contextlib.closing(RemoteServer(tmp_path, *flags)) as one:
        yield one


@pytest.fixture
def local(tmp_path: Path) -> Iterator[RemoteServer]:
    url = shared_folder(tmp_path / "objects")
    with contextlib.closing(RemoteServer(tmp_path, "--object-store-url", url)) as one:
        yield one


@pytest.mark.usefixtures("s3")
def test_after_a_kill_everything_that_was_written_is_there(server: RemoteServer) -> None:
    remote_server.it_comes_back_after_a_kill(server)


def test_the_same_from_a_local_folder(local: RemoteServer) -> None:
    remote_server.it_comes_back_after_a_kill(local)


def test_clear_holds_after_a_kill(local: RemoteServer) -> None:
    remote_server.clear_holds_after_a_kill(local)


def test_stores_and_lookups_go_on_while_it_stands_still(server: RemoteServer, s3: Moto) -> None:
    remote_server.stores_and_lookups_go_on_without_it(server, s3)


def test_it_may_be_absent_at_the_start(server: RemoteServer, s3: Moto) -> None:
    s3.kill()
    remote_server.it_may_be_absent_at_the_start(server, s3.start)


def test_sigterm_writes_what_waits(local: RemoteServer) -> None:
    remote_server.sigterm_writes_what_waits(local)


def test_memory_stays_bounded(local: RemoteServer) -> None:
    remote_server.memory_stays_bounded(local)


def test_under_constant_eviction_every_hit_is_right(local: RemoteServer) -> None:
    remote_server.under_constant_eviction_every_hit_is_right(local)


async def test_readers_get_their_own_while_others_write(server: RemoteServer, s3: Moto) -> None:
    await crowds.readers_get_their_own_while_others_write(server, s3)


@pytest.mark.usefixtures("s3")
async def test_lookups_at_once_lose_no_prefetch(server: RemoteServer) -> None:
    await crowds.lookups_at_once_lose_no_prefetch(server)


@pytest.mark.timeout(120 + 40 * crowds.KILLS)
async def test_kills_in_the_middle_of_writes(server: RemoteServer, s3: Moto) -> None:
    await crowds.kills_in_the_middle_of_writes(server, s3, large_mib=9)


def test_deleted_behind_its_back(local: RemoteServer) -> None:
    """Field report 14: what is gone is no hit, and what is before it is."""
    local.start()
    with engine(local.address) as one:
        one.store(1)
        local.wait_written(CHUNKS, 60)
        local.kill()
        files = sorted((local.socket.parent / "objects").glob("objects/??/*"))
        assert len(files) == CHUNKS
        files[3].unlink()
        local.start()
        one.wait_back()
        first = one.load(1)
        assert first < CHUNKS
        assert one.load(1) == first


def test_two_servers_are_one_cache(tmp_path: Path) -> None:
    flags = ("--object-store-url", shared_folder(tmp_path / "objects"))
    a, b = RemoteServer(tmp_path, *flags, name="a"), RemoteServer(tmp_path, *flags, name="b")
    with contextlib.closing(a), contextlib.closing(b):
        a.start()
        b.start()
        with engine(a.address) as one, engine(b.address) as two:
            one.store(1)
            a.wait_written(CHUNKS, 60)
            assert two.load(1) == CHUNKS
