# SPDX-License-Identifier: Apache-2.0
"""The arena: one block of host memory that holds all objects."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from kvgrpc.transfer import _native
from kvgrpc.transfer.arena_file import ArenaError, Mark, anonymous_file, named_file

__all__ = ["Arena", "ArenaError"]

log = structlog.get_logger(__name__)

PART_BYTES = 256 << 20
_STEP_BYTES = 16 << 20
_WARMING_NICENESS = 10
Prepare = Callable[[int, int], bool]


class Arena:
    """``size_bytes`` of shared memory whose size cannot change; the first ``ready_bytes`` of it are there.

    ``first_bytes`` are there when it has been made, all by default; ``grow`` adds parts. It is a sealed memfd, with
    ``huge_pages`` one of reserved huge pages; or, with ``path``, a file under a lock, which ``close`` leaves for the
    next server. ``left``: an earlier one's bytes are in it; ``refused``: why not, where it left some (``arena_file``).

    Whether the machine can spare the memory is for the settings to check beforehand: the kernel would rather end a
    process than refuse.

    Threads: views may be used by any thread; who may write where is the core's to say. ``grow`` by one thread at a
    time, and not after ``fill``. ``close`` is for the end.

    Raises ArenaError when the memory cannot be had.
    """

    def __init__(
        self,
        size_bytes: int,
        *,
        path: Path | None = None,
        fresh: bool = False,
        huge_pages: bool = False,
        first_bytes: int | None = None,
    ) -> None:
        if size_bytes < 1:
            raise ArenaError(f"an arena of {size_bytes} bytes makes no sense; give it at least one byte")
        machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if size_bytes > machine_bytes:
            raise ArenaError(
                f"an arena of {size_bytes} bytes does not fit this machine, which has {machine_bytes} bytes"
            )
        self.size_bytes = size_bytes
        self.ready_bytes = 0
        self._huge_pages = huge_pages
        self._file = None if path is None else named_file(path, size_bytes, fresh=fresh)
        self._fd = anonymous_file(size_bytes, huge_pages) if self._file is None else self._file.fd
        self.left = self._file is not None and self._file.left
        self.refused = "" if self._file is None else self._file.refused
        self._closing = threading.Event()
        self._filling: threading.Thread | None = None
        try:
            if self.left and os.fstat(self._fd).st_blocks * 512 >= size_bytes:
                self.ready_bytes = size_bytes  # to allocate it again would look at every page
            while self.ready_bytes < min(size_bytes, size_bytes if first_bytes is None else first_bytes):
                self.grow()
            self._map = mmap.mmap(self._fd, size_bytes)
        except BaseException:
            if path is not None and not self.left:
                path.unlink(missing_ok=True)  # while the lock is held: whoever waits for it sees that the name has gone
            self._let_go()
            raise
        for advice in (mmap.MADV_DONTDUMP, mmap.MADV_HUGEPAGE):
            with suppress(OSError):  # a kernel without transparent huge pages
                self._map.madvise(advice)
        self._view = memoryview(self._map)

    def grow(self) -> int:
        """Allocates the next part, so that later a missing page is no signal; the new ``ready_bytes``. Takes some
        tenths of a second.
        """
        part = min(PART_BYTES, self.size_bytes - self.ready_bytes)
        if part:
            try:
                os.posix_fallocate(self._fd, self.ready_bytes, part)
            except OSError as error:
                raise self._too_little(error) from error
            self.ready_bytes += part
        return self.ready_bytes

    def fill(self, on_grown: Callable[[int], object] = int, prepare: Prepare | None = None) -> None:
        """Starts a thread that allocates the missing parts, telling the new ``ready_bytes`` after each, and then, at
        low priority, takes the pages into use ahead of the first copies. Once. A part that cannot be had is told in the
        log; the arena stays as it is then.

        ``prepare(begin, end)`` is called for each part, before a new one is told; with False the arena stays as it is.
        """
        assert self._filling is None, "an arena is filled once"
        self._filling = threading.Thread(target=self._fill, args=(on_grown, prepare), name="kvgrpc-arena", daemon=True)
        self._filling.start()

    @property
    def mark(self) -> Mark:
        """Of a named arena."""
        assert self._file is not None, "only a named arena has a mark"
        return self._file.mark

    def put_mark(self, mark: Mark) -> None:
        """Durably. Raises OSError."""
        assert self._file is not None, "only a named arena has a mark"
        self._file.put_mark(mark)

    def view(self, offset: int, length: int) -> memoryview:
        """The bytes [offset, offset + length). Must be dropped before ``close``, or it keeps the memory."""
        assert 0 <= offset <= offset + length <= self.size_bytes, "a view outside the arena"
        return self._view[offset : offset + length]

    def close(self) -> None:
        """Gives the memory back, or leaves that to the last view that is still in use."""
        self._closing.set()
        if self._filling is not None:
            self._filling.join()
        self._view.release()
        with suppress(BufferError):
            self._map.close()
        self._let_go()

    def _too_little(self, error: OSError) -> ArenaError:
        what = "reserved huge pages (vm.nr_hugepages)" if self._huge_pages else "shared memory"
        had = f"only {self.ready_bytes} bytes could be allocated"
        return ArenaError(f"the arena needs {self.size_bytes} bytes of {what}, but {had} ({error.strerror})")

    def _let_go(self) -> None:
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1

    def _fill(self, on_grown: Callable[[int], object], prepare: Prepare | None) -> None:
        told, at = self.ready_bytes, 0 if prepare is not None else self.ready_bytes
        try:
            while at < self.size_bytes and not self._closing.is_set():
                if at == self.ready_bytes:
                    self.grow()
                begin, at = at, min(at + PART_BYTES, self.ready_bytes)
                if prepare is not None and not prepare(begin, at):
                    break
                if at > told:
                    on_grown(at)
        except ArenaError as error:
            log.error("the arena stays smaller", ready_bytes=self.ready_bytes, reason=str(error))
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WARMING_NICENESS)
        at = 0
        while at < self.ready_bytes and not self._closing.is_set():
            end = min(at + _STEP_BYTES, self.ready_bytes)
            with self._view[at:end] as part:
                if not _native.touch(part):
                    return
            at = end
