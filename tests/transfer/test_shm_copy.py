# SPDX-License-Identifier: Apache-2.0
"""What becomes of a copy when the engine takes its memory away, and of the memory when the engine goes."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kvgrpc.api import BlockForm, KvGroup, Layout, Runs, SharedMemory
from kvgrpc.core.types import Direction, Piece, RunSlice, SliceReport
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.gates import Gates
from kvgrpc.transfer.shm import SharedMemoryMover
from tests.kvdata import GQA, LAYERS_OUTERMOST, Image, shared_memory
from tests.transfer.pages import ME, PAGE, RETRIEVE, STORE, layout, open_files, slice_of
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
    assert mover.copy(slice_of(STORE, (1, 0), (2,), (0,))) == SliceReport(1, "MEMORY_TRUNCATED", False)
    assert mover.copy(slice_of(STORE, (0, 3), (1,))) == SliceReport(0, "MEMORY_TRUNCATED", False)


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


def test_bytes_that_were_moved_and_are_gone_again_are_no_success(arena: Arena, tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(bytes(4 * PAGE))
    gates = Gates()
    mover = SharedMemoryMover(arena, 64, {ME}, str(tmp_path), gates)
    mover.map(1, layout("good"))
    gate = gates.hold(1)
    reports: list[SliceReport] = []
    thread = threading.Thread(target=lambda: reports.append(mover.copy(slice_of(RETRIEVE, (3, 0)))))
    thread.start()
    assert gate.wait_reached(10)
    os.truncate(tmp_path / "good", 3 * PAGE)  # block 3 has been written, block 0 is still there
    gate.release()
    thread.join(10)
    assert reports == [SliceReport(0, "MEMORY_TRUNCATED", True)]
    assert (tmp_path / "good").stat().st_size == 3 * PAGE
    mover.close()


def open_fd_of(path: Path) -> int:
    """The file descriptor by which this process holds the file."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # one that was closed meanwhile
            if os.path.samefile(f"/proc/self/fd/{fd}", path):
                return fd
    raise AssertionError(f"{path} is not open")


@pytest.mark.parametrize("direction", [STORE, RETRIEVE])
def test_memory_that_faults_at_its_full_size_is_an_io_failure(
    mover: SharedMemoryMover, tmp_path: Path, direction: Direction
) -> None:
    """As when the system has no page for a hole. Here the file whose size is looked at is another one."""
    mover.map(1, layout("good"))
    other = os.memfd_create("other")
    os.ftruncate(other, 4 * PAGE)
    os.dup2(other, open_fd_of(tmp_path / "good"))
    os.truncate(tmp_path / "good", 0)
    report = mover.copy(slice_of(direction, (0, 2)))
    assert (report.completed, report.reason) == (0, "MEMORY_IO")
    os.ftruncate(other, 0)
    assert mover.copy(slice_of(direction, (0, 2))) == SliceReport(0, "MEMORY_TRUNCATED", False)
    os.close(other)


def test_a_slice_that_names_what_is_not_there_is_a_bug_and_moves_nothing(
    mover: SharedMemoryMover, arena: Arena, tmp_path: Path
) -> None:
    mover.map(1, layout("good"))
    for wrong in (
        Piece(1, ((0, 4 * PAGE),), (0, 4 * PAGE), (0,), ((4,),)),
        Piece(1, ((0, 4 * PAGE),), (0, 4 * PAGE), (3,), ((0, 1),)),
        Piece(1, ((arena.size_bytes - PAGE, 4 * PAGE),), (0, 4 * PAGE), (0,), ((0,),)),
        Piece(1, ((0, PAGE),), (0, 4 * PAGE), (0,), ((0,),)),
    ):
        good = slice_of(STORE, (0, 1, 2, 3)).pieces
        with pytest.raises(ValueError):
            mover.copy(replace(slice_of(STORE), pieces=(*good, wrong)))
        assert bytes(arena.view(0, 4 * PAGE)) == bytes(4 * PAGE)


def test_nothing_stays_mapped_or_open(mover: SharedMemoryMover, tmp_path: Path) -> None:
    def maps() -> str:
        return Path("/proc/self/maps").read_text()

    before = open_files(tmp_path)
    for number in range(3):
        (tmp_path / f"kv{number}").write_bytes(bytes(4 * PAGE))
        mover.map(number, layout(f"kv{number}"))
        mover.copy(slice_of(RETRIEVE, (0, 1), mapping_id=number))
    assert maps().count(str(tmp_path)) == 3
    mover.unmap(1)
    assert str(tmp_path / "kv1") not in maps()
    assert mover.copy(slice_of(STORE, (0, 1), mapping_id=2)) == SliceReport(1)
    mover.close()
    assert str(tmp_path) not in maps()
    assert open_files(tmp_path) == before


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


def test_thousands_of_runs_of_four_bytes(arena: Arena) -> None:
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
