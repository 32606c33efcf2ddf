# SPDX-License-Identifier: Apache-2.0
"""The disk tier under a real server process: restarts, kills, limits, damage, and directories that go away."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc import api
from kvgrpc.client import Client
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import SpaceRef, Warmed, WritePolicy
from kvgrpc.tiers.disk_files import file_bytes
from kvgrpc.tiers.envelope import HEADER_BYTES
from tests.e2e import crowds
from tests.e2e.disk_server import CHUNKS, OBJECT_BYTES, TOKENS, DiskServer, engine
from tests.e2e.harness import tokens_of
from tests.e2e.test_field_untrusted import pickles
from tests.hostile.room import can_mount
from tests.served import wait_until

FILE = file_bytes(OBJECT_BYTES)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DiskServer]:
    with contextlib.closing(DiskServer(tmp_path)) as one:
        yield one


def test_after_a_kill_everything_that_was_written_is_there(server: DiskServer) -> None:
    """Field report 45: found again, byte-equal, and not written anew."""
    server.start()
    with engine(server.address) as one:
        for prompt in range(8):
            assert one.store(prompt) == ["STORED"] * CHUNKS
        server.wait_written(8 * CHUNKS)
        server.kill()
        before = {path: path.stat().st_ino for path in server.files()}
        server.start()
        one.wait_back()
        assert server.tier().used_bytes == 8 * CHUNKS * FILE
        assert [one.load(prompt) for prompt in range(8)] == [CHUNKS] * 8
        assert {path: path.stat().st_ino for path in server.files()} == before
        assert server.tier().counters.get("writes", 0) == 0
        assert server.counter("prefetched_objects") == 8 * CHUNKS
        assert one.store(1) == ["RESIDENT"] * CHUNKS


def test_thirty_kills_in_the_middle_of_writes(server: DiskServer) -> None:
    """Field report 52: whatever a kill leaves is whole or a miss; usage is what is there."""
    server.start()
    hits = 0
    with engine(server.address) as one:
        for round_ in range(30):
            for prompt in range(4):
                one.store(round_ * 4 + prompt)
            server.wait_written(round_ % 7)
            server.kill()
            server.start()
            one.wait_back()
            assert server.tier().used_bytes == server.bytes_on_disk() == len(server.files()) * FILE
            hits += sum(one.load(round_ * 4 + prompt) for prompt in range(4))
    assert hits > 0


async def test_readers_get_their_own_while_others_write(tmp_path: Path) -> None:
    """While the disk evicts, too."""
    with contextlib.closing(DiskServer(tmp_path, disk_size=str(300 * file_bytes(crowds.SMALL_BYTES)))) as server:
        await crowds.readers_get_their_own_while_others_write(server)


async def test_lookups_at_once_lose_no_prefetch(server: DiskServer) -> None:
    await crowds.lookups_at_once_lose_no_prefetch(server)


def test_damaged_files_are_misses_and_go(server: DiskServer) -> None:
    """Field reports 1, 14 and 52: cut, flipped, swapped, another's, empty, gone."""
    server.start()
    with engine(server.address) as one:
        for prompt in range(8):
            one.store(prompt)
            server.wait_written((prompt + 1) * CHUNKS)  # so that files of one prompt follow those of another
        server.kill()
        files = server.files()
        by_prompt = [files[number * CHUNKS : (number + 1) * CHUNKS] for number in range(8)]
        cut, flipped, swap_a, swap_b, other, empty, gone = (by_prompt[number][3] for number in range(7))
        cut.write_bytes(cut.read_bytes()[:-1])
        raw = bytearray(flipped.read_bytes())
        raw[-5000] ^= 16
        flipped.write_bytes(raw)
        swapped = swap_a.read_bytes()
        swap_a.write_bytes(swap_b.read_bytes())
        swap_b.write_bytes(swapped)
        other.write_bytes(by_prompt[7][0].read_bytes())
        empty.write_bytes(b"")
        gone.unlink()
        server.start()
        one.wait_back()
        loaded = [one.load(prompt) for prompt in range(8)]
        assert loaded[7] == CHUNKS
        assert all(count < CHUNKS for count in loaded[:7]), loaded
        assert [one.load(prompt) for prompt in range(7)] == loaded[:7]
        assert server.tier().counters["damaged_objects"] == 6
        assert not any(path.exists() for path in (cut, flipped, swap_a, swap_b, other, empty))
        for prompt in range(8):
            one.store(prompt)
        server.wait_quiet()
        server.kill()
        server.start()
        one.wait_back()
        assert [one.load(prompt) for prompt in range(8)] == [CHUNKS] * 8


def test_pickles_in_files_are_misses(server: DiskServer, tmp_path: Path) -> None:
    """Field report 7: bare, and behind a true header."""
    server.start()
    marker = tmp_path / "marker"
    traps = pickles(marker)
    with engine(server.address) as one:
        for prompt in range(2 * len(traps)):
            one.store(prompt)
            server.wait_written((prompt + 1) * CHUNKS)  # so that files of one prompt follow those of another
        server.kill()
        hit = server.files()[3::CHUNKS]
        for bare, behind, trap in zip(hit[::2], hit[1::2], traps, strict=True):
            true = behind.read_bytes()
            bare.write_bytes(trap)
            behind.write_bytes(true[:HEADER_BYTES] + trap.ljust(len(true) - HEADER_BYTES, b"."))
        server.start()
        one.wait_back()
        assert all(one.load(prompt) < CHUNKS for prompt in range(len(hit)))
        assert server.tier().counters["damaged_objects"] == len(hit)
        assert not marker.exists() and not any(path.exists() for path in hit)


def test_clear_and_new_weights_hold_after_a_kill(server: DiskServer) -> None:
    """Field report 3: nothing from before is found, whatever the server remembers."""
    server.start()
    with engine(server.address) as one, Client(server.address, "operator") as operator:
        for round_, act in enumerate((
            lambda: operator.clear(api.ClearTarget(all=True)),
            lambda: operator.bump_generation(model="model"),
            lambda: operator.clear(api.ClearTarget(model="model")),
            lambda: operator.clear(api.ClearTarget(cache_salt="")),
        )):  # fmt: skip
            written = server.counter("written_objects")
            assert one.store(1) == ["STORED"] * CHUNKS, round_
            server.wait_written(written + CHUNKS)
            act()
            assert one.load(1) == 0
            server.kill()
            server.start()
            one.wait_back()
            assert one.load(1) == 0, "what was cleared came back"
            one.store(2)
            server.wait_written(CHUNKS)
            server.kill()
            server.start()
            one.wait_back()
            assert one.load(1) == 0
            assert one.load(2) == CHUNKS, "what was stored after it is kept"


def test_a_clear_that_cannot_be_kept_says_so(server: DiskServer) -> None:
    server.start()
    with engine(server.address) as one, Client(server.address, "operator") as operator:
        one.store(1)
        server.wait_written(CHUNKS)
        aside = server.disk.with_name("elsewhere")
        server.disk.rename(aside)
        server.disk.write_text("in the way")
        with pytest.raises(Refusal) as refused:
            operator.clear(api.ClearTarget(all=True))
        assert refused.value.reason is Reason.STATE_UNSAVED
        assert one.load(1) == 0
        server.disk.unlink()
        aside.rename(server.disk)
        operator.clear(api.ClearTarget(all=True))
        server.kill()
        server.start()
        one.wait_back()
        assert one.load(1) == 0


@pytest.mark.parametrize("how", ["damaged", "gone", "a pipe"])
def test_without_its_versions_nothing_old_is_found(server: DiskServer, how: str) -> None:
    server.start()
    with engine(server.address) as one:
        one.store(1)
        server.wait_written(CHUNKS)
        server.kill()
        versions = server.disk / "versions.json"
        versions.unlink()
        if how == "damaged":
            versions.write_bytes(b"x")
        elif how == "a pipe":
            os.mkfifo(versions)
        server.start()
        one.wait_back()
        assert one.load(1) == 0
        one.store(1)
        server.wait_written(CHUNKS)
        server.kill()
        server.start()
        one.wait_back()
        assert one.load(1) == CHUNKS


def test_the_limit_holds_and_the_newest_stay(tmp_path: Path) -> None:
    """Field reports 19 and 38: never above it, also after a kill; the oldest go first."""
    limit = 40 * FILE
    with contextlib.closing(DiskServer(tmp_path, disk_size=str(limit))) as server:
        server.start()
        most = 0
        with engine(server.address) as one:
            for prompt in range(20):
                one.store(prompt)
                most = max(most, server.bytes_on_disk())
            server.wait_quiet()
            server.kill()
            used = server.bytes_on_disk()
            server.start()
            one.wait_back()
            assert server.tier().used_bytes == used
            assert [one.load(prompt) for prompt in range(16, 20)] == [CHUNKS] * 4
            for prompt in range(20, 24):
                one.store(prompt)
                server.wait_quiet()
                most = max(most, server.bytes_on_disk())
            assert server.tier().counters["evicted_objects"] >= 20
            server.kill()
            server.start()
            one.wait_back()
            assert [one.load(prompt) for prompt in range(20, 24)] == [CHUNKS] * 4
    assert most <= limit + 8 * FILE, "looked at while files come and go"


def test_sigterm_writes_what_waits(server: DiskServer) -> None:
    """Field report 63: what was acknowledged is there after an orderly stop."""
    server.start()
    with engine(server.address) as one:
        for prompt in range(6):
            one.store(prompt)
        assert server.terminate() == 0
        assert not list(server.disk.glob("slot-*/aside/*"))
        server.start()
        one.wait_back()
        assert [one.load(prompt) for prompt in range(6)] == [CHUNKS] * 6


def test_a_directory_that_goes_away_and_comes_back(server: DiskServer) -> None:
    """Field reports 20 and 39: stores and resident lookups go on; the tier is in use again within 10 s, by itself."""
    server.start()
    with engine(server.address) as one:
        one.store(1)
        server.wait_written(CHUNKS)
        aside = server.disk.with_name("elsewhere")
        server.disk.rename(aside)
        server.disk.write_text("in the way")
        for prompt in range(2, 8):
            assert one.store(prompt) == ["STORED"] * CHUNKS
            assert one.load(prompt) == CHUNKS
        wait_until(lambda: server.counter("failed_writes") > 0, 30)
        server.disk.unlink()
        aside.rename(server.disk)
        back, written, prompt = time.monotonic(), server.counter("written_objects"), 100
        while server.counter("written_objects") < written + CHUNKS:
            assert time.monotonic() - back < 10
            prompt += 1
            assert one.store(prompt) == ["STORED"] * CHUNKS
            time.sleep(0.2)
        wait_until(lambda: server.status().arena.doomed_bytes == server.status().arena.settling_bytes == 0, 30)


def test_a_directory_that_is_not_there_at_start(server: DiskServer) -> None:
    server.disk.rmdir()
    server.disk.write_text("in the way")
    server.start()
    with engine(server.address) as one:
        assert one.store(1) == ["STORED"] * CHUNKS
        assert one.load(1) == CHUNKS
        assert not server.tier().healthy
        server.disk.unlink()
        server.disk.mkdir()

        def written() -> bool:
            one.store(int(time.monotonic() * 1000))
            return server.counter("written_objects") > 0

        wait_until(written, 30)
        assert server.tier().healthy


@pytest.mark.skipif(not can_mount(), reason="a file system of its own needs the right to mount")
def test_a_full_file_system(tmp_path: Path) -> None:
    """Field report 39: a limit beyond what is there; the tier makes room among its own and is never more than that."""
    libc, disk = ctypes.CDLL(None, use_errno=True), tmp_path / "small"
    disk.mkdir()
    assert libc.mount(b"tmpfs", bytes(disk), b"tmpfs", 0, b"size=4m") == 0
    try:
        with contextlib.closing(DiskServer(tmp_path, disk=disk)) as server:
            server.start()
            with engine(server.address) as one:
                for prompt in range(10):
                    assert one.store(prompt) == ["STORED"] * CHUNKS
                    assert one.load(prompt) == CHUNKS
                server.wait_quiet()
                used = shutil.disk_usage(disk)
                (disk / "others").write_bytes(bytes(used.free))
                one.store(10)
                server.wait_quiet()
                os.unlink(disk / "others")
                one.store(11)
                server.wait_quiet()
                server.kill()
                server.start()
                one.wait_back()
                assert one.load(11) == CHUNKS
    finally:
        assert libc.umount2(bytes(disk), 2) == 0


def test_warm_reads_ahead_of_traffic(server: DiskServer) -> None:
    server.start()
    with engine(server.address) as one:
        one.store(1)
        server.wait_written(CHUNKS)
        server.kill()
        server.start()
        one.wait_back()
        with Client(server.address, "operator") as operator:
            assert one.worker.registration is not None
            space = SpaceRef(one.worker.registration.space_base)
            assert operator.warm(space, tokens_of(1, TOKENS), 5000) == Warmed(TOKENS)
            reads = server.tier().counters["reads"]
            assert (server.status().pins, reads) == (0, CHUNKS)
            assert one.load(1) == CHUNKS
            assert server.tier().counters["reads"] == reads
            assert operator.warm(space, tokens_of(2, TOKENS), 5000) == Warmed(0)


def test_two_servers_on_one_directory(tmp_path: Path) -> None:
    """Each within its own folder; what one has stored the other finds."""
    with contextlib.closing(DiskServer(tmp_path, "a")) as a, contextlib.closing(DiskServer(tmp_path, "b")) as b:
        a.start()
        b.start()
        with engine(a.address) as one, engine(b.address) as two:
            one.store(1)
            two.store(2)
            a.wait_written(CHUNKS)
            b.wait_written(CHUNKS)
            assert (two.load(1), one.load(2)) == (CHUNKS, CHUNKS)
            with Client(a.address, "operator") as operator:
                operator.clear(api.ClearTarget(all=True))
            assert one.load(1) == 0
            assert two.load(1) == CHUNKS, "it was not told"
            a.kill()
            b.kill()
            b.start()
            a.start()
            one.wait_back()
            two.wait_back()
            assert (one.load(1), two.load(1), one.load(2)) == (0, 0, 0), "whichever folder it took"


def test_a_policy_is_changed_while_the_server_runs(server: DiskServer) -> None:
    server.start()
    with engine(server.address) as one, Client(server.address, "operator") as operator:
        operator.set_write_policy("model", WritePolicy.NONE)
        one.store(1)
        assert one.load(1) == CHUNKS
        operator.set_write_policy("model", WritePolicy.SECOND_USE)
        one.store(2)
        assert one.load(1) == CHUNKS
        server.wait_written(CHUNKS)
        operator.set_write_policy("model", None)
        one.store(3)
        server.wait_written(2 * CHUNKS)
        server.kill()
        server.start()
        one.wait_back()
        assert [one.load(prompt) for prompt in (1, 2, 3)] == [CHUNKS, 0, CHUNKS]
