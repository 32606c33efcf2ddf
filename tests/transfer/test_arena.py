# SPDX-License-Identifier: Apache-2.0
"""The arena is all there from the start, or says what is missing."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys

import pytest

from kvgrpc.transfer.arena import Arena, ArenaError


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
    before = len(os.listdir("/proc/self/fd"))
    arenas = [Arena(4096) for _ in range(5)]
    for arena in arenas:
        arena.close()
    assert len(os.listdir("/proc/self/fd")) == before


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
