# SPDX-License-Identifier: Apache-2.0
"""The tier on disk whose folder goes away while it is in use, whatever is in its place then, and comes back."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path

import pytest

from kvgrpc.tiers.base import FaultReason, TierFault
from kvgrpc.tiers.disk import WRITE_THREADS
from kvgrpc.tiers.disk_files import file_bytes
from kvgrpc.tiers.disk_slot import Slot
from tests.e2e.harness import until
from tests.tiers.conformance import data, fault_of, object_name, read, write
from tests.tiers.test_disk import SIZE, files, opened

GONE = (FaultReason.IO, FaultReason.MISSING)


@pytest.mark.parametrize("empty", [False, True], ids=["nothing there", "an empty folder there"])
async def test_what_was_asked_for_meanwhile_is_found_when_it_is_back(tmp_path: Path, empty: bool) -> None:
    """And counts: the limit holds over what was there all the time."""
    folder, aside = tmp_path / "d", tmp_path / "elsewhere"
    async with opened(folder, 3 * file_bytes(SIZE)) as tier:
        kept = [await write(tier, label, SIZE) for label in "abc"]
        folder.rename(aside)
        if empty:
            folder.mkdir()
        for object in kept:
            assert await fault_of(tier, object) in GONE
        if empty:
            shutil.rmtree(folder)
        aside.rename(folder)
        assert await tier.usage() == 3 * file_bytes(SIZE)
        assert await tier.exists([object.name for object in kept]) == [True] * 3
        assert [await read(tier, object) for object in kept] == [data(label, SIZE) for label in "abc"]
        await write(tier, "d", SIZE)
        assert len(files(folder)) == 3


async def test_writes_of_one_object_that_wait_for_each_other_while_the_folder_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one fails with the folder; the others go on when it is back and was scanned, one after the other."""
    folder, aside = tmp_path / "d", tmp_path / "elsewhere"
    async with opened(folder) as tier:
        await write(tier, "a", SIZE)
        threads_free, back, may_end, listed = (threading.Event() for _ in range(4))
        scan = Slot.scan

        def slow_scan(slot: Slot) -> list[tuple[int, str, int]]:
            found = scan(slot)
            listed.set()
            may_end.wait(30)
            return found

        monkeypatch.setattr(Slot, "scan", slow_scan)
        monkeypatch.setattr(tier, "_admit", lambda: back.wait(30))
        for _ in range(WRITE_THREADS):
            tier._writers.submit(threads_free.wait, 30)
        first, *others = [asyncio.ensure_future(write(tier, "x", SIZE)) for _ in range(3)]
        await until(lambda: len(tier._coming) == 1)
        folder.rename(aside)
        threads_free.set()
        with pytest.raises(TierFault):
            await first
        aside.rename(folder)
        back.set()
        await asyncio.to_thread(listed.wait, 30)
        assert not any(path.startswith(object_name("x", SIZE).name) for path in files(folder)), "not scanned yet"
        may_end.set()
        await asyncio.gather(*others)
        assert await tier.usage() == len(files(folder)) * file_bytes(SIZE) == 2 * file_bytes(SIZE)
        assert await read(tier, object_name("x", SIZE)) == data("x", SIZE)


async def test_who_asks_how_much_it_holds_is_told_that_it_is_away(tmp_path: Path) -> None:
    folder, aside = tmp_path / "d", tmp_path / "elsewhere"
    async with opened(folder) as tier:
        await write(tier, "a", SIZE)
        folder.rename(aside)
        with pytest.raises(TierFault) as caught:
            await tier.usage()
        assert caught.value.reason is FaultReason.IO
        assert not tier.healthy
        assert not folder.exists()
        aside.rename(folder)
        assert await tier.usage() == file_bytes(SIZE)
        assert tier.healthy


async def test_a_copy_in_its_place_is_another_folder(tmp_path: Path) -> None:
    """Whose lock somebody else may hold, and whose objects count."""
    folder, aside = tmp_path / "d", tmp_path / "elsewhere"
    async with opened(folder, 3 * file_bytes(SIZE)) as tier:
        for label in "ab":
            await write(tier, label, SIZE)
        shutil.copytree(folder, tmp_path / "copy")
        for path in files(tmp_path / "copy"):
            (tmp_path / "copy" / "slot-000" / path[:2] / path).unlink()
        folder.rename(aside)
        (tmp_path / "copy").rename(folder)
        async with opened(folder) as other:
            await write(other, "x", SIZE)
            with pytest.raises(TierFault, match="not the folder"):
                await write(tier, "c", SIZE)
            await write(tier, "e", SIZE)
            assert set(files(folder)) >= {object_name(label, SIZE).name for label in "xe"}
            assert [path.name for path in sorted(folder.glob("slot-*"))] == ["slot-000", "slot-001"]
            assert len(list(folder.glob("slot-000/??/*"))) == 1, "that is the other's"
