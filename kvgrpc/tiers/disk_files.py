# SPDX-License-Identifier: Apache-2.0
"""One object, one file: the envelope's header, then the payload.

Bytes go straight between the file and the buffers, by vectored calls that release the interpreter lock; past the page
cache where buffers and file system allow it. A file is written aside and renamed: under its name it is whole. It is not
synced: a power cut may take objects away, and the checksum notices what it leaves.

Threads: every function blocks, and may run on any thread.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from kvgrpc.core.types import ObjectName
from kvgrpc.tiers.base import FaultReason, TierFault, TierMiss
from kvgrpc.tiers.envelope import HEADER_BYTES, Opening, Sealing

BLOCK_BYTES = 4096
STEP_BYTES = 4 << 20
"""Between two steps a call can be cancelled; a step's bytes are hashed while they are in the cache."""
_IOVECS = 512

Cancelled = Callable[[], bool]
Mark = Callable[[int], object]
"""Marks an open file as used now."""


class CallCancelledError(Exception):
    """Nobody wants the object any more."""


def file_bytes(size_bytes: int) -> int:
    """What an object's file takes on the disk, by whole blocks."""
    return HEADER_BYTES + -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def mark_used(fd: int, last_ns: int) -> int:
    """Marks the file as used later than ``last_ns``, the mark of an earlier use, also when the wall clock was set back
    since; the new mark."""
    now_ns = max(time.time_ns(), last_ns + 1)
    os.utime(fd, ns=(now_ns, now_ns))
    return now_ns


def read_object(
    path: Path, object: ObjectName, into: Sequence[memoryview], direct: bool, cancelled: Cancelled, mark: Mark
) -> None:
    """Fills ``into`` and marks the file as used. Raises TierFault, TierMiss, CallCancelledError, OSError."""
    direct = direct and _aligned(into)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    except FileNotFoundError:
        raise TierMiss(f"{object.name}: not kept") from None
    try:
        _read(fd, object, into, direct, cancelled)
        with suppress(OSError):
            mark(fd)
    finally:
        os.close(fd)


def _read(fd: int, object: ObjectName, into: Sequence[memoryview], direct: bool, cancelled: Cancelled) -> None:
    header, tail = _scratch()
    if _read_step(fd, [header], 0) < HEADER_BYTES:
        raise TierFault(FaultReason.SHORT, f"{object.name}: the file is shorter than a header")
    opening = Opening(object, header)
    body, rest = _split(into, object.size_bytes) if direct else (into, None)
    at = HEADER_BYTES
    for step in _steps(body):
        if cancelled():
            raise CallCancelledError
        size = sum(map(len, step))
        if _read_step(fd, step, at) < size:
            raise TierFault(FaultReason.SHORT, f"{object.name}: the file ends before the object")
        for part in step:
            opening.update(part)
        at += size
    if rest is not None:
        if _read_step(fd, [tail], at) < len(rest):
            raise TierFault(FaultReason.SHORT, f"{object.name}: the file ends before the object")
        rest[:] = tail[: len(rest)]
        opening.update(rest)
    opening.check()


def write_object(
    path: Path,
    aside: Path,
    object: ObjectName,
    data: Sequence[memoryview],
    direct: bool,
    cancelled: Cancelled,
    mark: Mark,
) -> None:
    """Writes the object to ``aside`` and renames that to ``path``. Raises CallCancelledError, OSError."""
    direct = direct and _aligned(data)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    try:
        fd = os.open(aside, flags, 0o600)
        try:
            _allocate(fd, HEADER_BYTES + object.size_bytes, direct)
            _write(fd, object, data, direct, cancelled)
            mark(fd)
        finally:
            os.close(fd)
        _rename(aside, path)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise


def _allocate(fd: int, size_bytes: int, direct: bool) -> None:
    """Where the file system cannot, the C library writes a byte into each block instead, which direct files refuse:
    they get their blocks as they are written."""
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if not direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def _rename(aside: Path, path: Path) -> None:
    try:
        aside.rename(path)
    except FileNotFoundError:
        path.parent.mkdir(exist_ok=True)
        aside.rename(path)


def _write(fd: int, object: ObjectName, data: Sequence[memoryview], direct: bool, cancelled: Cancelled) -> None:
    header, tail = _scratch()
    sealing = Sealing(object)
    body, rest = _split(data, object.size_bytes) if direct else (data, None)
    at = HEADER_BYTES
    for step in _steps(body):
        if cancelled():
            raise CallCancelledError
        for part in step:
            sealing.update(part)
        at += _write_step(fd, step, at)
    if rest is not None:
        sealing.update(rest)
        tail[: len(rest)] = rest
        tail[len(rest) :] = bytes(BLOCK_BYTES - len(rest))
        _write_step(fd, [tail], at)
        os.ftruncate(fd, HEADER_BYTES + object.size_bytes)
    header[:] = sealing.header()
    _write_step(fd, [header], 0)


def can_direct(folder: Path) -> str:
    """Tries direct writing and reading in the folder: "" if it works, else why not."""
    trial, (header, tail) = folder / f"direct-{os.getpid()}-{threading.get_ident()}", _scratch()
    header[:] = b"d" * HEADER_BYTES
    try:
        fd = os.open(trial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT, 0o600)
        try:
            _write_step(fd, [header], 0)
            if _read_step(fd, [tail], 0) < BLOCK_BYTES or tail != header:
                return "what was written does not come back"
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return error.strerror or str(error)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # full, and it could be opened: that says enough
            raise
    finally:
        with suppress(OSError):
            trial.unlink()
    return ""


# ---- buffers --------------------------------------------------------------------------------------------------------

_local = threading.local()


def _scratch() -> tuple[memoryview, memoryview]:
    """A block for the header and one for the tail, aligned, of this thread."""
    if not hasattr(_local, "view"):
        _local.view = memoryview(mmap.mmap(-1, HEADER_BYTES + BLOCK_BYTES))
    view: memoryview = _local.view
    return view[:HEADER_BYTES], view[HEADER_BYTES:]


def _aligned(parts: Sequence[memoryview]) -> bool:
    """Whether the parts may be read and written directly: all begin and, but for the last, end at blocks."""
    for number, part in enumerate(parts, 1):
        if part.readonly or (len(part) % BLOCK_BYTES and number < len(parts)):
            return False
        if not len(part) or ctypes.addressof(ctypes.c_char.from_buffer(part)) % BLOCK_BYTES:
            return False
    return True


def _split(parts: Sequence[memoryview], size_bytes: int) -> tuple[list[memoryview], memoryview | None]:
    """The whole blocks, and what is left of the last part."""
    body, rest = list(parts), size_bytes % BLOCK_BYTES
    if not rest:
        return body, None
    last = body.pop()
    if len(last) > rest:
        body.append(last[:-rest])
    return body, last[-rest:]


def _steps(parts: Sequence[memoryview]) -> list[list[memoryview]]:
    """The parts in pieces, so many together as are one call."""
    steps: list[list[memoryview]] = []
    room = 0
    for part in parts:
        at = 0
        while at < len(part):
            if not room or len(steps[-1]) == _IOVECS:
                steps.append([])
                room = STEP_BYTES
            piece = part[at : at + room]
            steps[-1].append(piece)
            at += len(piece)
            room -= len(piece)
    return steps


def _read_step(fd: int, step: list[memoryview], at: int) -> int:
    """Reads until the step is full or the file ends; how much."""
    done = os.preadv(fd, step, at)
    while done and (left := _behind(step, done)):
        more = os.preadv(fd, left, at + done) if done % BLOCK_BYTES == 0 else 0
        if not more:
            break
        done += more
    return done


def _write_step(fd: int, step: list[memoryview], at: int) -> int:
    done = os.pwritev(fd, step, at)
    while left := _behind(step, done):
        more = os.pwritev(fd, left, at + done)
        if not more:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += more
    return done


def _behind(step: list[memoryview], done: int) -> list[memoryview]:
    left: list[memoryview] = []
    for part in step:
        if done < len(part):
            left.append(part[done:])
        done = max(done - len(part), 0)
    return left
