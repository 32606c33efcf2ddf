# SPDX-License-Identifier: Apache-2.0
"""Memory whose missing pages the server could not pay for is refused; what is paid for by its engine is not counted."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.transfer import room, shm
from kvgrpc.transfer.shm import SharedMemoryMover
from tests.transfer.pages import PAGE, layout, open_files

SPARE = room.SPARE_BYTES


@pytest.fixture
def folder(mover: SharedMemoryMover, tmp_path: Path) -> Path:
    """With objects "hollow" and "another", which have no pages."""
    for name in ("hollow", "another"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 4 * PAGE)
    return tmp_path


def left(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    monkeypatch.setattr(room, "available_memory", lambda: SPARE + size_bytes)


def test_missing_pages_are_counted_together(
    mover: SharedMemoryMover, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left(monkeypatch, 7 * PAGE)
    mover.map(1, layout("hollow"))
    with pytest.raises(Refusal, match=f"{4 * PAGE} bytes .* it can spare {3 * PAGE}") as refused:
        mover.map(2, layout("another"))
    assert (refused.value.reason, refused.value.field) == (Reason.MEMORY, "memory")
    assert mover.mapped == {1}
    mover.map(2, layout("good"))
    mover.unmap(1)
    mover.map(3, layout("another"))


def test_pages_that_were_written_since_are_not_owed_any_more(
    mover: SharedMemoryMover, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left(monkeypatch, 5 * PAGE)
    mover.map(1, layout("hollow"))
    with (folder / "hollow").open("r+b") as file:
        file.write(bytes(4 * PAGE))
        os.fsync(file.fileno())
    mover.map(2, layout("another"))


def test_a_refusal_leaves_nothing_open(mover: SharedMemoryMover, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left(monkeypatch, 0)
    before = open_files(folder)
    for _ in range(5):
        with pytest.raises(Refusal):
            mover.map(1, layout("hollow"))
    left(monkeypatch, 4 * PAGE)
    mover.map(1, layout("hollow"))
    assert len(open_files(folder)) == len(before) + 2
    mover.unmap(1)
    assert open_files(folder) == before


def test_free_huge_pages(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemFree:  100 kB\nHugePages_Total:  40\nHugePages_Free:   32\nHugepagesize:  2048 kB\n")
    assert room.free_huge_pages(meminfo) == 64 << 20
    meminfo.write_text("MemFree:  100 kB\n")  # a kernel without them
    assert room.free_huge_pages(meminfo) == 0


def test_a_map_that_fails_in_any_way_gives_everything_back(
    mover: SharedMemoryMover, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the process has no descriptor left: an engine tries again and again."""
    real, calls = os.dup, list[int]()

    def dup(fd: int) -> int:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(fd)

    monkeypatch.setattr(os, "dup", dup)
    monkeypatch.setattr(shm, "OBJECTS_MOST", 2)
    two = layout("hollow")
    two = replace(two, memory=(*two.memory, *layout("another").memory))
    before = open_files(folder)
    with pytest.raises(OSError, match="Too many open files"):
        mover.map(1, two)
    assert open_files(folder) == before
    mover.map(2, two)
    mover.unmap(2)
    assert open_files(folder) == before
