# SPDX-License-Identifier: Apache-2.0
"""A server whose disk's folder is not there, at its start or later: not mounted, most likely."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from kvgrpc import api
from kvgrpc.client import Client
from kvgrpc.core.errors import Reason, Refusal
from tests.e2e.arena_server import ArenaServer
from tests.e2e.disk_server import CHUNKS, DiskEngine, DiskServer, engine
from tests.served import wait_until


def away(server: DiskServer) -> Path:
    aside = server.disk.with_name("elsewhere")
    server.disk.rename(aside)
    return aside


def write_one(server: DiskServer, one: DiskEngine) -> None:
    """Prompt 1 is on the disk."""
    assert one.store(1) == ["STORED"] * CHUNKS
    server.wait_written(CHUNKS)


def clear_is_refused(operator: Client) -> None:
    with pytest.raises(Refusal) as refused:
        operator.clear(api.ClearTarget(all=True))
    assert refused.value.reason is Reason.STATE_UNSAVED


def wait_open(server: DiskServer, one: DiskEngine) -> None:
    wait_until(lambda: one.load(99) == 0 and server.tier().healthy, 30)


def test_what_was_cleared_meanwhile_does_not_come_back_with_it(tmp_path: Path) -> None:
    with contextlib.closing(DiskServer(tmp_path)) as server:
        server.start()
        with engine(server.address) as one, Client(server.address, "operator") as operator:
            write_one(server, one)
            server.kill()
            aside = away(server)
            server.start()
            one.wait_back()
            assert one.store(2) == ["STORED"] * CHUNKS
            assert one.load(2) == CHUNKS, "it serves without"
            clear_is_refused(operator)
            assert (one.load(1), one.load(2)) == (0, 0)
            assert not server.disk.exists()
            aside.rename(server.disk)
            wait_open(server, one)
            others = iter(range(100, 1000))
            wait_until(lambda: one.store(next(others)) and server.counter("written_objects") > 0, 30)
            server.wait_quiet()
            assert one.store(3) == ["STORED"] * CHUNKS
            server.wait_quiet()
            server.kill()
            server.start()
            one.wait_back()
            assert (one.load(1), one.load(2), one.load(3)) == (0, 0, CHUNKS)


@pytest.mark.parametrize("in_the_way", [False, True], ids=["not there", "a file in the way"])
def test_the_named_arena_is_served_without_it_and_the_disk_when_it_is_back(tmp_path: Path, in_the_way: bool) -> None:
    with contextlib.closing(ArenaServer(tmp_path, disk=True)) as server:
        server.start()
        with engine(server.address) as one:
            assert [one.store(prompt) for prompt in (1, 2)] == [["STORED"] * CHUNKS] * 2
            server.wait_written(2 * CHUNKS)
            assert server.terminate() == 0
            aside = away(server)
            if in_the_way:
                server.disk.write_text("no folder")
            server.start()
            one.wait_back()
            assert server.wait_checked().restored_objects == 2 * CHUNKS
            assert (one.load(1), one.load(2)) == (CHUNKS, CHUNKS)
            assert not server.tier().healthy
            if in_the_way:
                server.disk.unlink()
            aside.rename(server.disk)
            wait_open(server, one)
            assert server.terminate() == 0
            server.arena.unlink()
            server.start()
            one.wait_back()
            assert (one.load(1), one.load(2)) == (CHUNKS, CHUNKS), "from the disk"
            assert server.tier().counters["reads"] == 2 * CHUNKS


def test_what_was_cleared_after_it_went_away_does_not_come_back_with_it(tmp_path: Path) -> None:
    """The server had it, and lost it: the Clear is refused, and holds all the same once the folder is in use again."""
    with contextlib.closing(DiskServer(tmp_path)) as server:
        server.start()
        with engine(server.address) as one, Client(server.address, "operator") as operator:
            write_one(server, one)
            aside = away(server)
            clear_is_refused(operator)
            assert one.load(1) == 0
            assert not server.tier().healthy, "an operator sees that it is away"
            aside.rename(server.disk)
            wait_open(server, one)
            assert one.store(2) == ["STORED"] * CHUNKS
            server.wait_written(CHUNKS * 2)
            server.kill()
            server.start()
            one.wait_back()
            assert (one.load(1), one.load(2)) == (0, CHUNKS)


def test_an_empty_folder_in_its_place_keeps_no_clear(tmp_path: Path) -> None:
    """A mount point, say, whose file system is away."""
    with contextlib.closing(DiskServer(tmp_path)) as server:
        server.start()
        with engine(server.address) as one, Client(server.address, "operator") as operator:
            write_one(server, one)
            aside = away(server)
            server.disk.mkdir()
            clear_is_refused(operator)
            assert list(server.disk.iterdir()) == []
            server.kill()
            server.disk.rmdir()
            aside.rename(server.disk)


@pytest.mark.parametrize("flags", [(), ("--valkey-url", "valkey://127.0.0.1:1")], ids=["disk", "both"])
def test_a_server_with_metrics_ends_in_order_while_tiers_are_away(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """The last ones ask tiers how much they hold when they are closed already."""
    with contextlib.closing(DiskServer(tmp_path)) as server:
        server.disk.rmdir()
        server.start("--metrics-listen", "127.0.0.1:0", *flags)
        assert not any(tier.healthy for tier in server.status().tiers)
        assert server.terminate() == 0
        assert "Traceback" not in server.log
