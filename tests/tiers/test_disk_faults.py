# SPDX-License-Identifier: Apache-2.0
"""The tier on disk where the file system or a single file is not as usual."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.tiers import disk, disk_files
from kvgrpc.tiers.base import FaultReason
from kvgrpc.tiers.disk import DiskTier
from kvgrpc.tiers.disk_files import file_bytes
from kvgrpc.tiers.disk_slot import claim
from tests.tiers.conformance import data, fault_of, read, write
from tests.tiers.test_disk import LIMIT, SIZE, aligned, files, object_name, opened, path_of


async def test_a_file_system_that_cannot_allocate_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ext2, ext3 and some on networks: the C library then writes single bytes, which O_DIRECT refuses."""

    def stand_in(fd: int, offset: int, length: int) -> None:
        for at in range(offset, offset + length, 4096):
            os.pwrite(fd, b"\0", at)  # raises EINVAL

    monkeypatch.setattr(disk_files.os, "posix_fallocate", stand_in)
    async with opened(tmp_path / "d") as tier:
        memory, source = aligned(1_000_003)
        memory[:1_000_003] = data("a", 1_000_003)
        object = object_name("a", 1_000_003)
        await tier.write(object, source)
        assert await read(tier, object) == data("a", 1_000_003)
        assert tier.counters["direct_io"] == 1, "the test's folder must be where O_DIRECT works"
        assert await tier.usage() == sum(files(tmp_path / "d").values())


async def test_what_cannot_be_read_is_left_to_other_tiers_until_it_is_written_anew(tmp_path: Path) -> None:
    """A bad block, or a right that was taken away: here a folder in the file's place."""
    async with opened(tmp_path / "d") as tier:
        a, b = await write(tier, "a", SIZE), await write(tier, "b", SIZE)
        path = path_of(tmp_path / "d", a.name)
        path.rename(tmp_path / "away")
        path.mkdir()
        assert await fault_of(tier, a) is FaultReason.IO
        assert await tier.exists([a.name, b.name]) == [False, True]
        path.rmdir()
        assert await write(tier, "a", SIZE) == a
        assert await tier.exists([a.name]) == [True]
        assert await read(tier, a) == data("a", SIZE)
        assert await tier.usage() == 2 * file_bytes(SIZE)


async def test_whoever_gives_up_while_the_directory_is_opened_takes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow mount: each status that was not waited for kept a folder's lock, and the next took another folder."""
    slow = threading.Event()
    monkeypatch.setattr(disk, "claim", lambda directory: slow.wait(20) and claim(directory))
    async with opened(tmp_path / "d") as tier:
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(tier.usage(), 0.05)
        slow.set()
        await write(tier, "a", SIZE)
        assert [path.name for path in (tmp_path / "d").iterdir()] == ["slot-000"]
    slow.clear()
    tier = DiskTier(tmp_path / "d", LIMIT)
    tier.start()
    await asyncio.sleep(0)
    closing = asyncio.create_task(tier.close())
    await asyncio.sleep(0)
    slow.set()
    await closing
    async with opened(tmp_path / "d") as tier:
        assert await tier.usage() == file_bytes(SIZE), "the folder was given back"


@pytest.mark.parametrize("step_s", [-86_400, 86_400], ids=["set back", "set forward, and back"])
async def test_a_wall_clock_that_is_set_changes_no_order_of_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    """The order outlives the server: what was used last goes last."""
    ahead_ns, real_ns = 0, time.time_ns
    monkeypatch.setattr(disk_files.time, "time_ns", lambda: real_ns() + ahead_ns)
    async with opened(tmp_path / "d") as tier:
        a, b = await write(tier, "a", SIZE), await write(tier, "b", SIZE)
        ahead_ns = step_s * 10**9
        c = await write(tier, "c", SIZE)
        await read(tier, a)
    ahead_ns = 0
    async with opened(tmp_path / "d", 3 * file_bytes(SIZE)) as tier:
        assert await tier.usage() == 3 * file_bytes(SIZE)
        d = await write(tier, "d", SIZE)
        assert await tier.exists([one.name for one in (a, b, c, d)]) == [True, False, True, True]
        await read(tier, a)
    async with opened(tmp_path / "d", 3 * file_bytes(SIZE)) as tier:
        assert await tier.usage() == 3 * file_bytes(SIZE)
        await write(tier, "e", SIZE)
        assert await tier.exists([one.name for one in (a, c, d)]) == [True, False, True]


async def test_a_write_that_ends_after_its_deadline_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow disk the last step of a write is under way when nobody waits for it any more: the file is there all the
    same, and with many of them the folder grew beyond its limit."""
    begun, go_on, real = threading.Event(), threading.Event(), disk_files._write_step

    def slow(*args: Any) -> int:
        begun.set()
        assert go_on.wait(30)
        return real(*args)

    async with opened(tmp_path / "d") as tier:
        await tier.usage()
        monkeypatch.setattr(disk_files, "_write_step", slow)
        writing = asyncio.create_task(write(tier, "a", SIZE))
        assert await asyncio.to_thread(begun.wait, 30)
        writing.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert len(files(tmp_path / "d")) == 1
        assert await tier.usage() == file_bytes(SIZE)
