# SPDX-License-Identifier: Apache-2.0
"""Models whose chunks are in parts, in every lower tier."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import hybrid_server
from tests.e2e.disk_server import DiskServer
from tests.e2e.hybrids import FLAGS, hybrid_engine
from tests.e2e.remote_server import RemoteServer, shared_folder
from tests.e2e.test_mooncake_server import flags
from tests.tiers.mooncakes import mooncake, variables
from tests.tiers.stores import keys, valkey_program


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskServer]:
    with contextlib.closing(DiskServer(tmp_path)) as one:
        yield one


def test_they_come_back_from_a_disk_after_a_kill(disk: DiskServer) -> None:
    hybrid_server.hybrids_come_back_after_a_kill(disk)


def test_they_come_back_from_an_object_store(tmp_path: Path) -> None:
    url = shared_folder(tmp_path / "objects")
    with contextlib.closing(RemoteServer(tmp_path, "--object-store-url", url)) as server:
        hybrid_server.hybrids_come_back_after_a_kill(server)


def test_they_come_back_from_valkey(tmp_path: Path) -> None:
    with keys(tmp_path, valkey_program()) as store:
        flag = ("--valkey-url", store.url)
        with contextlib.closing(RemoteServer(tmp_path, *flag)) as server:
            hybrid_server.hybrids_come_back_after_a_kill(server)


def test_they_come_back_from_mooncake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables().items():
        monkeypatch.setenv(name, value)
    with mooncake(tmp_path) as store:
        with contextlib.closing(RemoteServer(tmp_path, *flags(tmp_path, store))) as server:
            hybrid_server.hybrids_come_back_after_a_kill(server)


def test_what_the_engine_had_not_is_not_below(disk: DiskServer) -> None:
    hybrid_server.what_the_engine_had_not_is_not_below(disk)


def test_clear_holds(disk: DiskServer) -> None:
    hybrid_server.clear_holds_for_hybrids(disk)


def test_under_constant_eviction_every_hit_is_right(disk: DiskServer) -> None:
    hybrid_server.under_constant_eviction_every_hybrid_hit_is_right(disk)


def test_files_that_are_lost_or_cut_make_hits_shorter_and_no_wrong_byte(disk: DiskServer) -> None:
    """Field reports 14 and 21: file after file goes, whichever part it is; what is found is right in every group."""
    disk.start(*FLAGS)
    with hybrid_engine(disk.address, 9) as one:
        one.store(1)
        disk.wait_written(hybrid_server.ALL, 60)
        disk.kill()
    hits: list[int] = []
    for number, file in enumerate(disk.files()):
        if number % 2:
            file.write_bytes(file.read_bytes()[:-1])
        else:
            file.unlink()
        if number % 3 == 0:
            disk.start(*FLAGS)
            with hybrid_engine(disk.address, 10 + number) as one:
                hits.append(one.load(1))
            disk.kill()
    assert hits == sorted(hits, reverse=True)
    assert hits[-1] == 0
