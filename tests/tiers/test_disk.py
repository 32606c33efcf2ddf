# SPDX-License-Identifier: Apache-2.0
"""The tier on disk: files, limits, restarts, neighbours and what may happen to a directory."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest

from kvgrpc.core.types import ObjectName
from kvgrpc.tiers import disk_files
from kvgrpc.tiers.base import FaultReason, Tier, TierFault, TierMiss
from kvgrpc.tiers.disk import DiskTier
from kvgrpc.tiers.disk_files import BLOCK_BYTES, file_bytes
from kvgrpc.tiers.envelope import HEADER_BYTES, about_of
from tests.e2e.harness import until
from tests.tiers.conformance import TierConformance, data, fault_of, object_name, parts, read, write

LIMIT = 1 << 30
SIZE = 100_000


def made(folder: Path) -> None:
    if not folder.exists():
        folder.mkdir()


@asynccontextmanager
async def opened(folder: Path, limit_bytes: int = LIMIT, direct: bool = True) -> AsyncIterator[DiskTier]:
    await asyncio.to_thread(made, folder)
    tier = DiskTier(folder, limit_bytes, direct=direct)
    tier.start()
    try:
        yield tier
    finally:
        await tier.close()


def files(folder: Path) -> dict[str, int]:
    """Name and bytes on the disk of every object."""
    return {path.name: path.stat().st_blocks * 512 for path in folder.glob("slot-*/??/*")}


def path_of(folder: Path, name: str) -> Path:
    (path,) = folder.glob(f"slot-*/??/{name}")
    return path


class DiskConformance(TierConformance):
    async def put_raw(self, tier: Tier, name: str, kept: bytes) -> None:
        self._path(tier, name).write_bytes(kept)

    async def get_raw(self, tier: Tier, name: str) -> bytes:
        return self._path(tier, name).read_bytes()

    @staticmethod
    def _path(tier: Tier, name: str) -> Path:
        assert isinstance(tier, DiskTier)
        assert tier._slot is not None
        return tier._slot.path(name)


class TestDirectDisk(DiskConformance):
    @pytest.fixture
    async def tier(self, tmp_path: Path) -> AsyncIterator[DiskTier]:
        async with opened(tmp_path / "d") as tier:
            await tier.usage()
            yield tier


class TestDiskThroughThePageCache(DiskConformance):
    @pytest.fixture
    async def tier(self, tmp_path: Path) -> AsyncIterator[DiskTier]:
        async with opened(tmp_path / "d", direct=False) as tier:
            await tier.usage()
            yield tier


# ---- direct ----


def aligned(size_bytes: int, *cuts: int) -> tuple[mmap.mmap, list[memoryview]]:
    memory = mmap.mmap(-1, -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES)
    edges = [0, *cuts, size_bytes]
    view = memoryview(memory)
    return memory, [view[low:high] for low, high in pairwise(edges)]


@pytest.mark.parametrize("size_bytes", [1, 4096, 8191, 1_000_003, 9 << 20])
@pytest.mark.parametrize("direct", [True, False])
async def test_arena_memory_comes_back(tmp_path: Path, size_bytes: int, direct: bool) -> None:
    async with opened(tmp_path / "d", direct=direct) as tier:
        cuts = [cut for cut in (4096, 65536, 5 << 20) if cut < size_bytes]
        memory, source = aligned(size_bytes, *cuts)
        memory[:size_bytes] = data("a", size_bytes)
        object = object_name("a", size_bytes)
        await tier.write(object, source)
        memory, into = aligned(size_bytes, *cuts)
        await tier.read(object, into)
        assert memory[:size_bytes] == data("a", size_bytes)
        assert not any(memory[size_bytes:]), "nothing behind the object is touched"


async def test_without_direct_io_it_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A file system that refuses O_DIRECT, by a shim: the one of tests may have it."""
    real_open, refused = os.open, []

    def no_direct(path: str | Path, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(22, "Invalid argument")
        return real_open(path, flags, *rest)

    monkeypatch.setattr(disk_files.os, "open", no_direct)
    async with opened(tmp_path / "d") as tier:
        memory, source = aligned(1_000_003)
        memory[:1_000_003] = data("a", 1_000_003)
        object = object_name("a", 1_000_003)
        for _ in range(3):
            await tier.write(object, source)
            await tier.remove(object.name)
        await tier.write(object, source)
        assert await read(tier, object) == data("a", 1_000_003)
        assert tier.counters["direct_io"] == 0
    assert len(refused) == 1, "asked once"
    assert "".join(capfd.readouterr()).count("no direct I/O here") == 1


async def test_a_file_says_what_it_holds(tmp_path: Path) -> None:
    async with opened(tmp_path / "d") as tier:
        object = ObjectName(object_name("a", 8).name, 8, '{"space": "ab", "kv_rank": 1}')
        await tier.write(object, parts(data("a", 8)))
        raw = path_of(tmp_path / "d", object.name).read_bytes()
        assert about_of(raw) == '{"space": "ab", "kv_rank": 1}'
        assert await read(tier, ObjectName(object.name, 8)) == data("a", 8)


# ---- limit ----


async def test_the_limit_is_never_exceeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at whenever a file gets its room, with all others standing still for that."""
    folder, limit, real, lock = tmp_path / "d", 10 * file_bytes(SIZE) + 5, os.posix_fallocate, threading.Lock()
    seen: list[int] = []

    def on_disk() -> int:
        by_inode: dict[int, int] = {}
        for path in folder.glob("slot-*/*/*"):
            with suppress(FileNotFoundError):
                facts = path.stat()
                by_inode[facts.st_ino] = facts.st_blocks * 512
        return sum(by_inode.values())

    def fallocate(fd: int, offset: int, length: int) -> None:
        with lock:
            real(fd, offset, length)
            seen.append(on_disk())

    monkeypatch.setattr(disk_files.os, "posix_fallocate", fallocate)
    async with opened(folder, limit) as tier:
        rng = random.Random(1)
        for round_ in range(15):
            sizes = [rng.choice((SIZE, SIZE // 3, 1, 2 * SIZE)) for _ in range(4)]
            await asyncio.gather(*(write(tier, f"{round_}-{n}", size) for n, size in enumerate(sizes)))
            assert await tier.usage() == sum(files(folder).values()) <= limit
        assert len(seen) == 60
        assert max(seen) <= limit
        assert tier.counters["evicted_objects"] > 0


async def test_what_was_used_last_stays(tmp_path: Path) -> None:
    async with opened(tmp_path / "d", 3 * file_bytes(SIZE)) as tier:
        a, b, c = [await write(tier, label, SIZE) for label in "abc"]
        await read(tier, a)
        d = await write(tier, "d", SIZE)
        assert await tier.exists([one.name for one in (a, b, c, d)]) == [True, False, True, True]


async def test_an_object_beyond_the_limit_is_refused_and_costs_nobody_a_place(tmp_path: Path) -> None:
    async with opened(tmp_path / "d", 3 * file_bytes(SIZE)) as tier:
        a = await write(tier, "a", SIZE)
        with pytest.raises(TierFault, match="FULL"):
            await write(tier, "b", 4 * SIZE)
        assert await read(tier, a) == data("a", SIZE)


# ---- restart ----


async def test_after_a_restart_usage_and_order_are_those_of_before(tmp_path: Path) -> None:
    limit = 3 * file_bytes(SIZE)
    async with opened(tmp_path / "d", limit) as tier:
        a, b, c = [await write(tier, label, SIZE) for label in "abc"]
        await read(tier, a)
        used = await tier.usage()
    (next((tmp_path / "d").glob("slot-*")) / "aside" / "left").write_bytes(b"half")
    async with opened(tmp_path / "d", limit) as tier:
        assert await tier.usage() == used
        assert not list((tmp_path / "d").glob("slot-*/aside/*")), "what was half written is gone"
        assert [await read(tier, one) for one in (c, a)] == [data("c", SIZE), data("a", SIZE)]
    async with opened(tmp_path / "d", limit) as tier:
        d = await write(tier, "d", SIZE)
        assert await tier.exists([one.name for one in (a, b, c, d)]) == [True, False, True, True]


def let_time_of_files_move(probe: Path) -> None:
    """Of two files of one time either may be the older."""
    probe.touch()
    now_ns = probe.stat().st_mtime_ns
    while probe.stat().st_mtime_ns == now_ns:
        probe.touch()


async def test_a_smaller_limit_holds_from_the_first_write_on(tmp_path: Path) -> None:
    async with opened(tmp_path / "d") as tier:
        for number in range(10):
            await write(tier, str(number), SIZE)
            let_time_of_files_move(tmp_path / "probe")
    async with opened(tmp_path / "d", 4 * file_bytes(SIZE)) as tier:
        await write(tier, "new", SIZE)
        assert await tier.usage() <= 4 * file_bytes(SIZE)
        assert await read(tier, object_name("9", SIZE)) == data("9", SIZE)


# ---- neighbours ----


async def test_servers_on_one_directory_read_each_other_and_keep_to_their_own(tmp_path: Path) -> None:
    async with opened(tmp_path / "d") as one, opened(tmp_path / "d", 2 * file_bytes(SIZE)) as two:
        a = await write(one, "a", SIZE)
        for label in "bcd":
            await write(two, label, SIZE)
        assert await read(two, a) == data("a", SIZE)
        assert await read(one, object_name("d", SIZE)) == data("d", SIZE)
        assert await two.usage() == 2 * file_bytes(SIZE)
        assert await one.usage() == file_bytes(SIZE)
        await two.remove(a.name)
        assert await read(one, a) == data("a", SIZE), "a neighbour's object is not removed"


async def test_a_neighbours_damaged_object_is_asked_for_once(tmp_path: Path) -> None:
    async with opened(tmp_path / "d") as one, opened(tmp_path / "d") as two:
        a = await write(one, "a", SIZE)
        await two.usage()
        path = path_of(tmp_path / "d", a.name)
        path.write_bytes(path.read_bytes()[:-BLOCK_BYTES])
        assert await two.exists([a.name]) == [True]
        assert await fault_of(two, a) is FaultReason.SHORT
        assert await two.exists([a.name]) == [False]
        assert path.exists()


async def test_neighbours_write_one_object_at_a_time_whole(tmp_path: Path) -> None:
    """Both write and read the same names for a while; every read is whole, or a miss."""
    async with opened(tmp_path / "d", 4 * file_bytes(SIZE)) as one, opened(tmp_path / "d", 4 * file_bytes(SIZE)) as two:

        async def live(tier: DiskTier, seed: int) -> int:
            rng, hits = random.Random(seed), 0
            for _ in range(150):
                label = rng.choice("abcdefgh")
                if rng.random() < 0.5:
                    await write(tier, label, SIZE)
                    continue
                with suppress(TierMiss):
                    assert await read(tier, object_name(label, SIZE)) == data(label, SIZE)
                    hits += 1
            return hits

        assert all(await asyncio.gather(*(live(tier, seed) for seed, tier in enumerate((one, two, one, two)))))


# ---- damage and trouble ----


async def test_a_damaged_object_is_removed_and_counted(tmp_path: Path) -> None:
    async with opened(tmp_path / "d") as tier:
        a = await write(tier, "a", SIZE)
        path = path_of(tmp_path / "d", a.name)
        raw = bytearray(path.read_bytes())
        raw[HEADER_BYTES + 500] ^= 4
        path.write_bytes(raw)
        assert await fault_of(tier, a) is FaultReason.CORRUPT
        assert await tier.exists([a.name]) == [False]
        assert (path.exists(), await tier.usage(), tier.counters["damaged_objects"]) == (False, 0, 1)
        await write(tier, "a", SIZE)
        assert await read(tier, a) == data("a", SIZE)


async def test_a_file_that_is_gone_is_a_miss_and_forgotten(tmp_path: Path) -> None:
    async with opened(tmp_path / "d") as tier:
        a = await write(tier, "a", SIZE)
        path_of(tmp_path / "d", a.name).unlink()
        assert await tier.exists([a.name]) == [True]
        assert await fault_of(tier, a) is FaultReason.MISSING
        assert await tier.exists([a.name]) == [False]
        assert await tier.usage() == 0


async def test_a_directory_that_cannot_be_had_yet(tmp_path: Path) -> None:
    (tmp_path / "d").write_text("in the way")
    async with opened(tmp_path / "d") as tier:
        with pytest.raises(TierFault, match="IO"):
            await write(tier, "a", SIZE)
        assert not tier.healthy
        (tmp_path / "d").unlink()
        with pytest.raises(TierFault, match="No such file"):
            await write(tier, "a", SIZE)
        assert not (tmp_path / "d").exists(), "a file system may be missing there"
        (tmp_path / "d").mkdir()
        a = await write(tier, "a", SIZE)
        assert await read(tier, a) == data("a", SIZE)


async def test_a_directory_that_is_taken_away_is_used_again_when_it_is_there(tmp_path: Path) -> None:
    async with opened(tmp_path / "d") as tier:
        a = await write(tier, "a", SIZE)
        (tmp_path / "d").rename(tmp_path / "elsewhere")
        for _ in range(2):
            with pytest.raises(TierFault):
                await write(tier, "b", SIZE)
        (tmp_path / "d").mkdir()
        b = await write(tier, "b", SIZE)
        assert await read(tier, b) == data("b", SIZE)
        assert await fault_of(tier, a) is FaultReason.MISSING
        assert await tier.usage() == file_bytes(SIZE)


async def test_a_full_device_makes_room_among_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path / "d") as tier:
        a = await write(tier, "a", SIZE)
        real, left = disk_files.os.posix_fallocate, [1]

        def full(fd: int, offset: int, length: int) -> None:
            if left:
                left.pop()
                raise OSError(28, "No space left on device")
            real(fd, offset, length)

        monkeypatch.setattr(disk_files.os, "posix_fallocate", full)
        b = await write(tier, "b", SIZE)
        assert await read(tier, b) == data("b", SIZE)
        assert await tier.exists([a.name]) == [False]
        assert not list((tmp_path / "d").glob("slot-*/aside/*"))


async def test_a_cancelled_read_has_ended(tmp_path: Path) -> None:
    async with opened(tmp_path / "d") as tier:
        size_bytes = 64 << 20
        memory, source = aligned(size_bytes)
        object = object_name("big", size_bytes)
        await tier.write(object, source)
        for delay_s in (0.0, 0.001, 0.01):
            memory, into = aligned(size_bytes)
            reading = asyncio.create_task(tier.read(object, into))
            await asyncio.sleep(delay_s)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            memory[:] = b"\xa5" * size_bytes
            await tier.read(object_name("big", size_bytes), aligned(size_bytes)[1])
            assert memory[:] == b"\xa5" * size_bytes, "nothing came late"


async def test_a_cancelled_write_leaves_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path / "d") as tier:
        _, source = aligned(64 << 20)
        await tier.usage()
        aside, number = list[Path](), 0
        while True:  # until one is met in the middle
            object = object_name(f"big{number}", 64 << 20)
            writing = asyncio.create_task(tier.write(object, source))

            def begun(writing: asyncio.Task[None] = writing) -> bool:
                aside[:] = (tmp_path / "d").glob("slot-*/aside/*")
                return bool(aside) or writing.done()

            await until(begun)
            if aside:
                break
            await writing
            await tier.remove(object.name)
            number += 1
            assert number < 100, "no write was met in the middle"
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        assert not list((tmp_path / "d").glob("slot-*/aside/*"))
        if not await tier.usage():
            assert files(tmp_path / "d") == {}
