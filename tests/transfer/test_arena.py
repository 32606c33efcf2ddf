# SPDX-License-Identifier: Apache-2.0
"""The arena is there part by part, or says what is missing; it takes no file that is not its own."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvgrpc.transfer import _native
from kvgrpc.transfer import arena as arena_module
from kvgrpc.transfer.arena import Arena, ArenaError
from tests.transfer.pages import open_files


def test_views_are_the_arenas_bytes() -> None:
    arena = Arena(10_000)
    arena.view(100, 3)[:] = b"abc"
    assert bytes(arena.view(99, 5)) == b"\0abc\0"
    assert len(arena.view(0, 10_000)) == 10_000
    arena.close()


def test_a_view_outside_is_a_bug() -> None:
    arena = Arena(4096)
    for offset, length in ((-1, 2), (4000, 97), (4097, 0), (5, -1)):
        with pytest.raises(AssertionError):
            arena.view(offset, length)
    arena.close()


def test_close_leaves_the_memory_to_views_in_use() -> None:
    arena = Arena(4096)
    view = arena.view(0, 4)
    view[:] = b"live"
    arena.close()
    assert bytes(view) == b"live"


def test_an_arena_leaves_no_open_file_behind() -> None:
    gc.collect()  # or what an earlier test left closes its file in between
    before = open_files("/memfd:kvgrpc-arena")
    arenas = [Arena(4096) for _ in range(5)]
    for arena in arenas:
        arena.close()
    assert open_files("/memfd:kvgrpc-arena") == before


def test_all_pages_are_there_and_the_size_is_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    close = os.close

    def look_and_close(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:kvgrpc-arena"):
            seen.append((os.fstat(fd).st_blocks * 512, fcntl.fcntl(fd, fcntl.F_GET_SEALS)))
        close(fd)

    monkeypatch.setattr(os, "close", look_and_close)
    Arena(1 << 20).close()
    assert seen == [(1 << 20, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)]


@pytest.mark.parametrize("size_bytes", [0, -1, 1 << 62, 1 << 80])
def test_sizes_that_cannot_be(size_bytes: int) -> None:
    with pytest.raises(ArenaError, match=str(size_bytes)):
        Arena(size_bytes)


def test_memory_that_runs_out_is_an_error_with_both_numbers() -> None:
    """A limit on file sizes stands for a full file system: the same call fails in the same way."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "from kvgrpc.transfer.arena import Arena, ArenaError\n"
        "Arena(65536).close()\n"
        "try:\n"
        "    Arena(1 << 20)\n"
        "except ArenaError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    assert "needs 1048576 bytes" in done.stdout
    assert "only 0 bytes" in done.stdout


# ---- parts ----


def test_parts_become_ready_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "PART_BYTES", 1 << 16)
    arena = Arena((1 << 18) + 5, first_bytes=1 << 16)
    assert arena.ready_bytes == 1 << 16
    arena.view(0, 4)[:] = b"used"
    assert [arena.grow() for _ in range(4)] == [2 << 16, 3 << 16, 4 << 16, (4 << 16) + 5]
    assert arena.grow() == arena.size_bytes
    assert bytes(arena.view(0, 5)) == b"used\0"
    arena.close()


def test_warming_takes_all_pages_and_changes_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "PART_BYTES", 1 << 20)
    touched: list[int] = []
    touch = _native.touch
    monkeypatch.setattr(_native, "touch", lambda part: touched.append(len(part)) or touch(part))
    arena = Arena(4 << 20, first_bytes=1 << 20)
    arena.view(100, 3)[:] = b"abc"
    grown: list[int] = []
    arena.fill(grown.append)
    deadline = time.monotonic() + 20
    while sum(touched) < arena.size_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sum(touched) == arena.size_bytes
    assert bytes(arena.view(99, 5)) == b"\0abc\0"
    assert grown == [2 << 20, 3 << 20, 4 << 20]
    arena.close()


def test_close_does_not_wait_for_warming_to_end() -> None:
    arena = Arena(64 << 20)
    arena.fill()
    arena.close()
    assert "kvgrpc-arena" not in {thread.name for thread in threading.enumerate()}


# ---- a named file ----


def test_a_named_arena_is_a_private_file_while_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    arena = Arena(1 << 20, path=path)
    arena.view(0, 4)[:] = b"seen"
    assert path.read_bytes()[:4] == b"seen"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_blocks * 512 >= 1 << 20
    with pytest.raises(ArenaError, match="in use by another server"):
        Arena(1 << 20, path=path)
    assert path.read_bytes()[:4] == b"seen"
    arena.close()
    assert path.read_bytes()[:4] == b"seen"
    arena = Arena(1 << 20, path=path)
    assert (arena.left, arena.refused, bytes(arena.view(0, 4))) == (True, "", b"seen")
    arena.close()
    arena = Arena(1 << 20, path=path, fresh=True)
    assert not arena.left and "--fresh" in arena.refused
    assert bytes(arena.view(0, 1 << 20)) == bytes(1 << 20)
    arena.close()


def test_an_arena_of_another_size_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    program = (
        "import os, pathlib, sys\n"
        "from kvgrpc.transfer.arena import Arena\n"
        "arena = Arena(1 << 20, path=pathlib.Path(sys.argv[1]))\n"
        "arena.view(0, 4)[:] = b'left'\n"
        "os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=False, timeout=30)
    assert path.read_bytes()[:4] == b"left"
    arena = Arena(2 << 20, path=path)
    assert bytes(arena.view(0, 2 << 20)) == bytes(2 << 20)
    assert not arena.left and arena.refused == "the arena has 1048576 bytes, and 2097152 are asked for"
    arena.close()


def test_an_arena_whose_making_failed_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArenaError, match="only 0 bytes"):
        Arena(1 << 20, path=tmp_path / "arena")
    assert not (tmp_path / "arena").exists()


@pytest.mark.parametrize("content", [b"x", b"precious" * 4096])
def test_no_other_file_is_ever_taken(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "precious"
    path.write_bytes(content)
    with pytest.raises(ArenaError, match="no arena"):
        Arena(1 << 20, path=path)
    assert path.read_bytes() == content
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ArenaError, match="cannot be opened"):
        Arena(1 << 20, path=tmp_path / "link")
    with pytest.raises(ArenaError, match="cannot be opened"):
        Arena(1 << 20, path=tmp_path)
    with pytest.raises(ArenaError, match=f"cannot be opened: there is no {tmp_path}/no, and the server makes"):
        Arena(1 << 20, path=tmp_path / "no" / "folder" / "arena")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArenaError, match="not a regular file"):
        Arena(1 << 20, path=tmp_path / "pipe")


def test_a_file_system_without_room_is_said_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Space:
        f_bavail, f_frsize = 3, 4096

    monkeypatch.setattr(os, "fstatvfs", lambda fd: Space)
    with pytest.raises(ArenaError, match=r"needs 1048576 bytes; its file system has 12288 bytes"):
        Arena(1 << 20, path=tmp_path / "arena")


# ---- huge pages ----


def test_huge_pages_are_used_or_said_to_be_missing() -> None:
    """Whichever this machine has: an arena in huge pages, or a refusal that names what was asked."""
    free = int(Path("/proc/meminfo").read_text().split("HugePages_Free:")[1].split()[0])
    if free:
        arena = Arena(2 << 20, huge_pages=True)
        arena.view(0, 4)[:] = b"huge"
        arena.close()
    else:
        with pytest.raises(ArenaError, match="2097152 bytes"):
            Arena(2 << 20, huge_pages=True)
    with pytest.raises(ArenaError, match="huge page size"):
        Arena(1000, huge_pages=True)
