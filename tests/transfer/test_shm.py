# SPDX-License-Identifier: Apache-2.0
"""Shared memory that must not be taken, and what becomes of a copy when the engine takes its memory away."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.api import BlockForm, CudaIpcMemory, KvGroup, Layout, Runs, SharedMemory
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import Direction, Piece, RunSlice, SliceReport
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.gates import Gates
from kvgrpc.transfer.shm import SharedMemoryMover
from tests.kvdata import GQA, LAYERS_OUTERMOST, Image, shared_memory
from tests.transfer.scene import scene

PAGE = mmap.PAGESIZE
STORE, RETRIEVE = Direction.STORE, Direction.RETRIEVE
ENTRY = Runs(0, 0, 1, 0, 1, 0, PAGE, PAGE)
GROUP = KvGroup(16, 4, (ENTRY,), BlockForm.OPAQUE)
ME = os.getuid()


def layout(name: str, offset: int = 0, size: int = 4 * PAGE) -> Layout:
    return Layout((SharedMemory(name, offset, size),), (GROUP,))


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(1 << 20)
    yield arena
    arena.close()


@pytest.fixture
def mover(arena: Arena, tmp_path: Path) -> Iterator[SharedMemoryMover]:
    """A mover whose shared memory directory is ``tmp_path``, where "good" lies."""
    (tmp_path / "good").write_bytes(b"\x11" * 4 * PAGE)
    mover = SharedMemoryMover(arena, 64, {ME}, str(tmp_path))
    yield mover
    mover.close()


def refused(mover: SharedMemoryMover, wanted: Layout) -> Refusal:
    """Maps what must be refused; afterwards nothing is open that was not before, and a good layout still works."""
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Refusal) as caught:
        mover.map(1, wanted)
    assert mover.mapped == frozenset()
    assert len(os.listdir("/proc/self/fd")) == before
    mover.map(2, layout("good"))
    mover.unmap(2)
    assert len(os.listdir("/proc/self/fd")) == before
    return caught.value


# ---- what is not taken ----


@pytest.mark.parametrize("name", ["", "/good", "sub/good", "../good", ".", "..", "a\0b", "x" * 256, "é" * 128])
def test_names_that_are_none(mover: SharedMemoryMover, name: str) -> None:
    refusal = refused(mover, layout(name))
    assert (refusal.reason, refusal.field) == (Reason.MEMORY, "memory[0].shared.name")


def test_memory_that_is_not_there(mover: SharedMemoryMover) -> None:
    refusal = refused(mover, layout("absent"))
    assert refusal.reason is Reason.MEMORY
    assert "absent" in refusal.message


def test_symbolic_link_is_not_followed(mover: SharedMemoryMover, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("good")
    (tmp_path / "dangling").symlink_to("absent")
    for name in ("link", "dangling"):
        refusal = refused(mover, layout(name))
        assert refusal.reason is Reason.MEMORY
        assert "symbolic link" in refusal.message


def test_only_regular_files(mover: SharedMemoryMover, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        refusal = refused(mover, layout(name))
        assert refusal.reason is Reason.MEMORY
        assert "not a regular file" in refusal.message


def test_a_missing_directory_is_said(arena: Arena, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="no shared memory directory"):
        SharedMemoryMover(arena, 64, {ME}, str(tmp_path / "nowhere")).map(1, layout("good"))


@pytest.mark.parametrize(
    ("offset", "size"), [(1, 4 * PAGE), (PAGE, 4 * PAGE), (4 * PAGE, 4 * PAGE), (1 << 62, 4 * PAGE)]
)
def test_offset_and_size_lie_inside_the_object(mover: SharedMemoryMover, offset: int, size: int) -> None:
    refusal = refused(mover, layout("good", offset, size))
    assert (refusal.reason, refusal.field) == (Reason.MEMORY, "memory[0].shared.size_bytes")
    assert str(4 * PAGE) in refusal.message
    assert str(offset + size) in refusal.message


def test_cuda_memory_is_refused_in_words(mover: SharedMemoryMover) -> None:
    refusal = refused(mover, Layout((CudaIpcMemory(bytes(64), "GPU-0", 0, 4 * PAGE),), (GROUP,)))
    assert refusal.reason is Reason.CUDA_UNSUPPORTED
    assert "not supported yet" in refusal.message


def test_a_layout_that_does_not_fit(mover: SharedMemoryMover) -> None:
    assert refused(mover, layout("good", size=4 * PAGE - 1)).reason is Reason.LAYOUT


def test_owner_must_be_allowed(arena: Arena, tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(bytes(4 * PAGE))
    mover = SharedMemoryMover(arena, 64, {ME + 1}, str(tmp_path))
    with pytest.raises(Refusal) as caught:
        mover.map(1, layout("good"))
    assert (caught.value.reason, caught.value.field) == (Reason.MEMORY_OWNER, "memory[0].shared.name")
    assert str(ME) in caught.value.message


NOT_ROOT = """
import os, sys
from kvgrpc.core.errors import Refusal
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.shm import SharedMemoryMover
from tests.transfer.test_shm import layout
root, foreign = sys.argv[1], os.getuid()
if foreign == 0:
    for name in ("mine", "readonly"):
        os.chown(os.path.join(root, name), 65534, 65534)
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
own = SharedMemoryMover(Arena(1 << 20), 64, {os.getuid()}, root)
other = own if foreign == 0 else SharedMemoryMover(Arena(1 << 20), 64, {foreign + 1}, root)
def attempt(mover, name):
    try:
        mover.map(1, layout(name))
    except Refusal as refusal:
        return refusal.reason.value
    mover.unmap(1)
    return "taken"
print(os.getuid(), attempt(own, "mine"), attempt(own, "readonly"), attempt(other, "others"), attempt(own, "mine"))
"""


def test_another_owners_and_read_only_memory_as_a_user_other_than_root() -> None:
    """A server in a process of its own, as nobody when the tests run as root."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        Path(root).chmod(0o755)
        for name, mode in (("mine", 0o600), ("readonly", 0o400), ("others", 0o600)):
            (Path(root) / name).write_bytes(bytes(4 * PAGE))
            (Path(root) / name).chmod(mode)
        command = [sys.executable, "-c", NOT_ROOT, root]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.split() == [str(ME or 65534), "taken", "MEMORY", "MEMORY_OWNER", "taken"]


# ---- identity of the memory ----


def test_digest_follows_the_object_and_not_its_name(mover: SharedMemoryMover, tmp_path: Path) -> None:
    first = mover.map(1, layout("good"))
    assert mover.map(2, layout("good")) == first
    assert mover.map(3, layout("good", size=4 * PAGE)) == first
    (tmp_path / "good").rename(tmp_path / "old")
    (tmp_path / "good").write_bytes(bytes(4 * PAGE))
    assert mover.map(4, layout("good")) != first


def test_memory_outlives_its_name(mover: SharedMemoryMover, tmp_path: Path) -> None:
    mover.map(1, layout("good"))
    (tmp_path / "good").unlink()
    assert mover.copy(slice_of(STORE, (0,))) == SliceReport(1)
    mover.unmap(1)
    mover.unmap(1)
    assert mover.mapped == frozenset()


# ---- offsets in a larger object ----


def test_tensors_inside_a_larger_object_leave_their_neighbours_alone(arena: Arena) -> None:
    """Three tensors of one object at offsets 0, 4160 and an odd page; the last two are shared."""
    block, tensor = 1000, 4000
    starts = (0, 4160, 3 * PAGE)
    with shared_memory(6 * PAGE) as (name, memory):
        memory[:] = b"\xa5" * len(memory)
        entry = Runs(0, 0, 1, 0, 1, 0, block, block)
        memories = tuple(SharedMemory(name, start, tensor) for start in starts[1:])
        group = KvGroup(16, 4, (entry, replace(entry, memory_index=1)), BlockForm.OPAQUE)
        mover = SharedMemoryMover(arena, 64, {ME})
        mover.map(1, Layout(memories, (group,)))
        for number, start in enumerate(starts[1:]):
            for i in range(4):
                memory[start + i * block : start + (i + 1) * block] = bytes([16 * number + i + 1]) * block
        stored = bytes(memory)
        ids = (3, 0, 2, 1)
        piece = Piece(0, ((5, 8 * block),), (0, 8 * block), (0,), (ids,))
        assert mover.copy(RunSlice(1, "c", 1, 1, STORE, (piece,))) == SliceReport(1)
        expected = b"".join(bytes([16 * number + i + 1]) * block for number in range(2) for i in ids)
        assert bytes(arena.view(5, 8 * block)) == expected
        assert bytes(memory) == stored
        for start in starts[1:]:
            memory[start : start + tensor] = b"\xa5" * tensor
        assert mover.copy(RunSlice(1, "c", 1, 1, RETRIEVE, (piece,))) == SliceReport(1)
        assert bytes(memory) == stored
        beyond = tuple(SharedMemory(name, start, tensor) for start in (4160, 6 * PAGE - tensor + 1))
        with pytest.raises(Refusal) as caught:
            mover.map(2, Layout(beyond, (group,)))
        assert (caught.value.reason, caught.value.field) == (Reason.MEMORY, "memory[1].shared.size_bytes")
        strided = KvGroup(16, 4, (replace(entry, block_stride_bytes=1001),), BlockForm.OPAQUE)
        with pytest.raises(Refusal) as caught:
            mover.map(2, Layout(memories, (strided,)))
        assert caught.value.reason is Reason.LAYOUT
        mover.close()


# ---- an engine that takes its memory away ----


def slice_of(direction: Direction, *chunks: tuple[int, ...], mapping_id: int = 1) -> RunSlice:
    pieces = tuple(Piece(i, ((i * 4 * PAGE, 4 * PAGE),), (0, 4 * PAGE), (0,), (ids,)) for i, ids in enumerate(chunks))
    return RunSlice(1, "client", mapping_id, 1, direction, pieces)


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
    expected = {
        STORE: (tmp_path / "good").read_bytes(),
        RETRIEVE: bytes(arena.view(0, 4 * PAGE)),
    }[direction]
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


def test_an_object_replaced_while_it_is_opened_is_not_taken(
    mover: SharedMemoryMover, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def open_and_replace(path: str, flags: int, *args: Any, **named: Any) -> int:
        fd = opened(path, flags, *args, **named)
        if path == "victim" and flags & os.O_PATH:
            (tmp_path / "victim").unlink()
            (tmp_path / "victim").write_bytes(bytes(4 * PAGE))
        return fd

    (tmp_path / "victim").write_bytes(bytes(4 * PAGE))
    monkeypatch.setattr(os, "open", open_and_replace)
    refusal = refused(mover, layout("victim"))
    assert refusal.reason is Reason.MEMORY
    assert "replaced" in refusal.message


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
