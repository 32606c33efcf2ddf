# SPDX-License-Identifier: Apache-2.0
"""A shared memory object of four pages, a block each: the smallest thing that can be mapped and taken away."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

from kvgrpc.api import BlockForm, KvGroup, Layout, Runs, SharedMemory
from kvgrpc.core.types import Direction, Piece, RunSlice

PAGE = mmap.PAGESIZE
STORE, RETRIEVE = Direction.STORE, Direction.RETRIEVE
ENTRY = Runs(0, 0, 1, 0, 1, 0, PAGE, PAGE)
GROUP = KvGroup(16, 4, (ENTRY,), BlockForm.OPAQUE)
ME = os.getuid()


def open_files(begin: Path | str) -> list[str]:
    """What descriptors of this process are of files whose names begin so: others of it, as gRPC's, come and go."""
    found: list[str] = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(path for path in found if path.startswith(str(begin)))


def layout(name: str, offset: int = 0, size: int = 4 * PAGE) -> Layout:
    return Layout((SharedMemory(name, offset, size),), (GROUP,))


def slice_of(direction: Direction, *chunks: tuple[int, ...], mapping_id: int = 1) -> RunSlice:
    pieces = tuple(Piece(i, ((i * 4 * PAGE, 4 * PAGE),), (0, 4 * PAGE), (0,), (ids,)) for i, ids in enumerate(chunks))
    return RunSlice(1, "client", mapping_id, 1, direction, pieces)
