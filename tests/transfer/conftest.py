# SPDX-License-Identifier: Apache-2.0
"""Fixtures of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.shm import SharedMemoryMover
from tests.transfer.pages import ME, PAGE


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
