# SPDX-License-Identifier: Apache-2.0
"""The file behind an arena: anonymous and sealed, or named and locked."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

_MARK = b"kvgrpc arena v1\n"
_MARK_ROOM = 4096
"""A named arena ends in a page of its own with the mark, so that no other file is ever taken for one."""


class ArenaError(Exception):
    """The arena's memory could not be had; the message names what was asked and what there is."""


def anonymous_file(size_bytes: int, huge_pages: bool) -> int:
    """Descriptor of a memfd of this size, which nothing can change any more. Nothing is allocated yet."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if huge_pages else 0)
    try:
        fd = os.memfd_create("kvgrpc-arena", flags)
    except OSError as error:
        raise ArenaError(f"this system has no memory file for an arena of {size_bytes} bytes: {error}") from error
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        if huge_pages:
            sentence = (
                f"{size_bytes} bytes are no multiple of the system's huge page size (Hugepagesize, /proc/meminfo)"
            )
        else:
            had = "only 0 bytes could be allocated"
            sentence = f"the arena needs {size_bytes} bytes of shared memory, but {had} ({error.strerror})"
        raise ArenaError(sentence) from error
    return fd


def named_file(path: Path, size_bytes: int) -> int:
    """Descriptor of the file, locked for this process, of this size and a page with a mark.

    An arena that another process left behind is taken over, without its data; any other file that is not empty is
    refused and left alone.
    """
    fd = _locked(path)
    taken = False
    try:
        _check_ours(fd, path)
        taken = os.fstat(fd).st_size == 0  # made just now, most likely; nothing is lost with it
        space = os.fstatvfs(fd)
        room = space.f_bavail * space.f_frsize + os.fstat(fd).st_blocks * 512
        if room < size_bytes + _MARK_ROOM:
            raise ArenaError(f"the arena {path} needs {size_bytes} bytes; its file system has {room} bytes left")
        taken = True
        os.ftruncate(fd, 0)
        os.ftruncate(fd, size_bytes + _MARK_ROOM)
        os.pwrite(fd, _MARK, size_bytes)
    except (OSError, ArenaError) as error:
        if taken:
            with suppress(FileNotFoundError):
                path.unlink()  # while the lock is held, as Arena.close does
        os.close(fd)
        if isinstance(error, OSError):
            raise ArenaError(f"the arena {path} cannot be made: {error.strerror}") from error
        raise
    return fd


def _locked(path: Path) -> int:
    """Opens or creates the file and locks it; again, if it was removed while the lock was not yet ours."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise ArenaError(f"the arena {path} cannot be opened: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ArenaError(f"the arena {path} is not a regular file")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
            os.close(fd)
        except FileNotFoundError:
            os.close(fd)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise ArenaError(f"the arena {path} is in use by another server") from error
            raise ArenaError(f"the arena {path} cannot be locked: {error.strerror}") from error
        except ArenaError:
            os.close(fd)
            raise


def _check_ours(fd: int, path: Path) -> None:
    size = os.fstat(fd).st_size
    if size and (size < _MARK_ROOM or os.pread(fd, len(_MARK), size - _MARK_ROOM) != _MARK):
        raise ArenaError(f"{path} is a file of {size} bytes that is no arena; name another path, or remove it yourself")
