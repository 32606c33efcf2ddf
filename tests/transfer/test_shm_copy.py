# SPDX-License-Identifier: Apache-2.0
"""What becomes of a copy when the engine takes its memory away, or the system moves less than it was asked for."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.api import BlockForm, KvGroup, Layout, Runs, SharedMemory
from kvgrpc.core.types import Direction, Piece, RunSlice, SliceReport
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.gates import Gates
from kvgrpc.transfer.shm import SharedMemoryMover
from tests.kvdata import GQA, LAYERS_OUTERMOST, Image, shared_memory
from tests.transfer.pages import ME, PAGE, RETRIEVE, STORE, layout, slice_of
from tests.transfer.scene import scene

# ---- an engine that takes its memory away ----


@pytest.mark.parametrize("direction", [STORE, RETRIEVE])
def test_truncated_before_the_copy_fails_untorn(mover: SharedMemoryMover, tmp_path: Path, direction: Direction) -> None:
    mover.map(1, layout("good"))
    os.truncate(tmp_path / "good", 0)
    assert mover.copy(slice_of(direction, (3, 1), (0, 2))) == SliceReport(0, "MEMORY_TRUNCATED", False)
    assert (tmp_path / "good").stat().st_size == 0


def test_store_from_truncated_memory_stops_at_the_piece(mover: SharedMemoryMover, tmp_path: Path) -> None:
    mover.map(1, layout("good"))
    os.truncate(tmp_path / "good", 2 * PAGE + 100)
    assert mover.copy(slice_of(STORE, (1, 0), (3,), (0,))) == SliceReport(1, "MEMORY_TRUNCATED", False)
    assert mover.copy(slice_of(STORE, (1, 0), (2,), (0,))) == SliceReport(1, "MEMORY_TRUNCATED", True)
    assert mover.copy(slice_of(STORE, (0, 3), (1,))) == SliceReport(0, "MEMORY_TRUNCATED", True)


@pytest.mark.parametrize("length", [0, 100, 4 * PAGE - 1])
def test_retrieve_into_truncated_memory_never_makes_it_longer(
    mover: SharedMemoryMover, tmp_path: Path, length: int
) -> None:
    mover.map(1, layout("good"))
    os.truncate(tmp_path / "good", length)
    before = (tmp_path / "good").read_bytes()
    assert mover.copy(slice_of(RETRIEVE, (0, 2))) == SliceReport(0, "MEMORY_TRUNCATED", False)
    assert (tmp_path / "good").read_bytes() == before


@pytest.mark.parametrize("direction", [STORE, RETRIEVE])
@pytest.mark.parametrize("after_runs", [1, 2, 3])
def test_truncated_in_the_middle_of_a_copy(arena: Arena, tmp_path: Path, direction: Direction, after_runs: int) -> None:
    (tmp_path / "good").write_bytes(bytes(4 * PAGE))
    gates = Gates()
    mover = SharedMemoryMover(arena, 64, {ME}, str(tmp_path), gates)
    mover.map(1, layout("good"))
    gate = gates.hold(after_runs)
    reports: list[SliceReport] = []
    thread = threading.Thread(target=lambda: reports.append(mover.copy(slice_of(direction, (0, 2), (3, 1)))))
    thread.start()
    assert gate.wait_reached(10)
    os.truncate(tmp_path / "good", 0)
    gate.release()
    thread.join(10)
    assert reports == [SliceReport(after_runs // 2, "MEMORY_TRUNCATED", after_runs % 2 == 1)]
    assert (tmp_path / "good").stat().st_size == 0
    mover.close()


def test_truncated_right_after_the_last_write(
    mover: SharedMemoryMover, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes were moved and are gone again: not a success."""
    mover.map(1, layout("good"))
    write = os.pwritev

    def write_and_truncate(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = write(fd, buffers, offset)
        os.truncate(tmp_path / "good", 0)
        return count

    monkeypatch.setattr(os, "pwritev", write_and_truncate)
    assert mover.copy(slice_of(RETRIEVE, (2,))) == SliceReport(0, "MEMORY_TRUNCATED", True)
    assert (tmp_path / "good").stat().st_size == 0


@pytest.mark.parametrize("direction", [STORE, RETRIEVE])
def test_calls_that_move_less_than_asked_are_continued(
    mover: SharedMemoryMover, arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direction: Direction
) -> None:
    """The kernel may move any part of a call (it never moves more than 2 GiB); 1,000 bytes a call here."""
    (tmp_path / "good").write_bytes(bytes(i // 7 % 256 for i in range(4 * PAGE)))
    mover.map(1, layout("good"))
    arena.view(0, 4 * PAGE)[:] = bytes(i // 5 % 256 for i in range(4 * PAGE))
    expected = {STORE: (tmp_path / "good").read_bytes(), RETRIEVE: bytes(arena.view(0, 4 * PAGE))}[direction]
    for name in ("preadv", "pwritev"):
        whole = getattr(os, name)

        def part(fd: int, buffers: Sequence[memoryview], offset: int, whole: Any = whole) -> int:
            return whole(fd, [buffers[0][:1000]], offset)

        monkeypatch.setattr(os, name, part)
    # Blocks side by side in memory and pages apart in the arena make one call with several buffers.
    extents = ((2 * PAGE, PAGE), (0, PAGE), (3 * PAGE, PAGE), (PAGE, PAGE))
    work = replace(slice_of(direction), pieces=(Piece(0, extents, (0, 4 * PAGE), (0,), ((0, 1, 2, 3),)),))
    assert mover.copy(work) == SliceReport(1)
    ordered = b"".join(bytes(arena.view(*extent)) for extent in extents)
    assert ordered == (tmp_path / "good").read_bytes()
    assert (ordered if direction is STORE else bytes(arena.view(0, 4 * PAGE))) == expected


def open_fd_of(path: Path) -> int:
    """The file descriptor by which this process holds the file."""
    fds = [int(name) for name in os.listdir("/proc/self/fd")]
    return next(
        fd for fd in fds if os.path.exists(f"/proc/self/fd/{fd}") and os.path.samefile(f"/proc/self/fd/{fd}", path)
    )


def test_memory_that_the_system_refuses_is_an_io_failure(mover: SharedMemoryMover, tmp_path: Path) -> None:
    """A file that a file system refuses to write (here by its seal) fails the copy, not the server."""
    mover.map(1, layout("good"))
    assert mover.copy(slice_of(RETRIEVE, (0,))) == SliceReport(1)
    sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(sealed, 4 * PAGE)
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.dup2(sealed, open_fd_of(tmp_path / "good"))
    assert mover.copy(slice_of(RETRIEVE, (0,))) == SliceReport(0, "MEMORY_IO", False)
    assert mover.copy(slice_of(STORE, (0,))) == SliceReport(1)
    os.close(sealed)


def test_movers_of_many_engines_work_side_by_side(arena: Arena) -> None:
    """Eight threads, a mapping each, one arena; each finds its own bytes."""
    with scene("shm", 64, 4 << 20) as world:
        engines = [world.engine(replace(GQA, seed=i), LAYERS_OUTERMOST, 8, 16) for i in range(8)]
        slots = [[world.slot(engine.object_bytes, 512) for _ in range(2)] for engine in engines]
        orders = [engine.ids(16) for engine in engines]
        wrong: list[object] = []

        def work(number: int) -> None:
            engine, image = engines[number], engines[number].image
            for _ in range(10):
                image.write(orders[number])
                engine.copy(STORE, engine.pieces(slots[number], orders[number]))
                image.memory[:] = 0xA5
                report = engine.copy(RETRIEVE, engine.pieces(slots[number], orders[number]))
                if report != SliceReport(2) or image.wrong_tokens(orders[number]):
                    wrong.append((number, report))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == []


def test_image_of_a_larger_copy_than_one_call_can_vector(arena: Arena) -> None:
    """More neighbours in memory than one call takes places: 3,000 runs of a block lie side by side."""
    entry = Runs(0, 0, 3000, 4, 1, 0, 12000, 4)
    group = KvGroup(32, 4, (entry,), BlockForm.OPAQUE)
    with shared_memory(48000) as (name, memory):
        memory[:] = bytes(i * 7 % 251 for i in range(48000))
        mover = SharedMemoryMover(arena, 64, {ME})
        mover.map(1, Layout((SharedMemory(name, 0, 48000),), (group,)))
        piece = Piece(0, ((0, 24000),), (0, 24000), (0,), ((2, 1),))
        assert mover.copy(RunSlice(1, "c", 1, 1, STORE, (piece,))) == SliceReport(1)
        expected = b"".join(
            memory[block * 12000 + i * 4 : block * 12000 + i * 4 + 4] for i in range(3000) for block in (2, 1)
        )
        assert bytes(arena.view(0, 24000)) == expected
        before = bytes(memory)
        memory[12000:36000] = bytes(24000)
        assert mover.copy(RunSlice(1, "c", 1, 1, RETRIEVE, (piece,))) == SliceReport(1)
        assert bytes(memory) == before
        mover.close()


def test_fixture_memory_is_what_it_says() -> None:
    image = Image(GQA, LAYERS_OUTERMOST, 8, 4)
    assert image.untouched()
    image.memory[17] = 0
    assert not image.untouched()
