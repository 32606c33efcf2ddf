# SPDX-License-Identifier: Apache-2.0
"""POSIX shared memory by name."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

FOLDER = Path("/dev/shm")  # noqa: S108  (where Linux keeps POSIX shared memory)


def create(name: str, size_bytes: int) -> mmap.mmap:
    """New memory of this user under a name that must be free. OSError when the file system is too small."""
    descriptor = os.open(FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        return mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)


def unlink(name: str) -> None:
    """Removes the name; the memory lives as long as somebody maps it. Harmless when repeated."""
    (FOLDER / name).unlink(missing_ok=True)
