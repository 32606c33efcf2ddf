# SPDX-License-Identifier: Apache-2.0
"""Shared memory that must not be taken, and offsets inside of what is taken."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.api import BlockForm, CudaIpcMemory, KvGroup, Layout, Runs, SharedMemory
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import Piece, RunSlice, SliceReport
from kvgrpc.transfer import shm
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.shm import SharedMemoryMover
from tests.kvdata import shared_memory
from tests.transfer.pages import GROUP, ME, PAGE, RETRIEVE, STORE, layout, open_files, slice_of


def refused(mover: SharedMemoryMover, wanted: Layout) -> Refusal:
    """Maps what must be refused; afterwards nothing is open that was not before, and a good layout still works."""
    gc.collect()  # or what an earlier test left closes its files in between
    before = open_files("/")
    with pytest.raises(Refusal) as caught:
        mover.map(1, wanted)
    assert mover.mapped == frozenset()
    assert open_files("/") == before
    mover.map(2, layout("good"))
    mover.unmap(2)
    assert open_files("/") == before
    return caught.value


# ---- how much is taken ----


def test_objects_are_counted_over_all_registrations(mover: SharedMemoryMover, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "OBJECTS_MOST", 2)
    for mapping_id in (1, 2):
        mover.map(mapping_id, layout("good"))
    with pytest.raises(Refusal, match="1 objects of shared memory beside 2 others; the server maps at most 2") as over:
        mover.map(3, layout("good"))
    assert (over.value.reason, over.value.field) == (Reason.MEMORY, "memory")
    mover.unmap(2)
    with pytest.raises(Refusal, match="cannot be opened"):
        mover.map(4, layout("absent"))
    mover.map(5, layout("good"))
    for mapping_id in (1, 5):
        mover.unmap(mapping_id)


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
    assert "sees no cards" in refusal.message


def test_a_layout_that_does_not_fit(mover: SharedMemoryMover) -> None:
    assert refused(mover, layout("good", size=4 * PAGE - 1)).reason is Reason.LAYOUT


def test_owner_must_be_allowed(arena: Arena, tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(bytes(4 * PAGE))
    mover = SharedMemoryMover(arena, 64, {ME + 1}, str(tmp_path))
    with pytest.raises(Refusal) as caught:
        mover.map(1, layout("good"))
    assert (caught.value.reason, caught.value.field) == (Reason.MEMORY_OWNER, "memory[0].shared.name")
    assert str(ME) in caught.value.message


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


NOT_ROOT = """
import os, sys
from kvgrpc.core.errors import Refusal
from kvgrpc.transfer import shm
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.shm import SharedMemoryMover
from tests.transfer.pages import layout
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
