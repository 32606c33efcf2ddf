# SPDX-License-Identifier: Apache-2.0
"""The arena: one block of host memory that holds all objects."""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress


class ArenaError(Exception):
    """The arena's memory could not be had; the message names what was asked and what there is."""


class Arena:
    """``size_bytes`` of memory in a sealed memfd: all of it is there from the start and its size cannot change.

    Whether the machine can spare it is for the settings to check beforehand: the kernel would rather end a process than
    refuse. Allocation may take a second for some GiB.

    Threads: views may be used by any thread; who may write where is the core's to say. ``close`` is for the end.

    Raises ArenaError when the memory cannot be had.
    """

    def __init__(self, size_bytes: int) -> None:
        if size_bytes < 1:
            raise ArenaError(f"an arena of {size_bytes} bytes makes no sense; give it at least one byte")
        machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if size_bytes > machine_bytes:
            raise ArenaError(
                f"an arena of {size_bytes} bytes does not fit this machine, which has {machine_bytes} bytes"
            )
        self.size_bytes = size_bytes
        fd = os.memfd_create("kvgrpc-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            _allocate(fd, size_bytes)
            self._map = mmap.mmap(fd, size_bytes)
        finally:
            os.close(fd)
        self._view = memoryview(self._map)

    def view(self, offset: int, length: int) -> memoryview:
        """The bytes [offset, offset + length). Must be dropped before ``close``, or it keeps the memory."""
        assert 0 <= offset <= offset + length <= self.size_bytes, "a view outside the arena"
        return self._view[offset : offset + length]

    def close(self) -> None:
        """Gives the memory back, or leaves that to the last view that is still in use."""
        self._view.release()
        with suppress(BufferError):
            self._map.close()


def _allocate(fd: int, size_bytes: int) -> None:
    """Reserves every page now: later a missing page would be a SIGBUS, not an error."""
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        have = os.fstat(fd).st_blocks * 512
        sentence = (
            f"the arena needs {size_bytes} bytes of shared memory, but only {have} bytes could be allocated: {error}"
        )
        raise ArenaError(sentence) from error
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
