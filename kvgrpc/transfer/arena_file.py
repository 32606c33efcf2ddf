# SPDX-License-Identifier: Apache-2.0
"""The file behind an arena: anonymous and sealed, or named and locked."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_128_digest

from kvgrpc.transfer.arena_index import index_path, is_index

MARK_ROOM = 4096
"""A named arena ends in a page of its own with a mark, so that no other file is ever taken for one."""
_MAGIC = b"kvgrpc arena v2\n"
_MARK = struct.Struct("<16s16sQQ?")
_CHECKSUM_BYTES = 16


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


@dataclass(frozen=True, slots=True)
class Mark:
    """Which arena a file is: a random id for as long as its bytes may be of use, the serial of its index, and whether
    its server ended in order."""

    arena: bytes
    serial: int = 0
    clean: bool = False


def new_mark() -> Mark:
    return Mark(secrets.token_bytes(16))


class NamedFile:
    """An open, locked file of ``size_bytes`` and a page with a mark. ``left``: an earlier server's bytes are in it; if
    not, ``refused`` says why nothing was taken over, where something was there."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self.mark = new_mark()
        self.left = False
        self.refused = ""

    def put_mark(self, mark: Mark) -> None:
        """Durably. Raises OSError."""
        os.pwrite(self.fd, _packed(mark, self.size_bytes), self.size_bytes)
        os.fdatasync(self.fd)
        self.mark = mark

    def take_over(self) -> str:
        """Keeps what an earlier server left; else, why not."""
        size = os.fstat(self.fd).st_size - MARK_ROOM
        if size != self.size_bytes:
            return f"the arena has {max(size, 0)} bytes, and {self.size_bytes} are asked for"
        raw = os.pread(self.fd, _MARK.size + _CHECKSUM_BYTES, size)
        _, arena, _, serial, clean = _MARK.unpack_from(raw)
        if raw != _packed(Mark(arena, serial, clean), size):
            return "the arena's mark is damaged, or of another version"
        self.mark, self.left = Mark(arena, serial, clean), True
        return ""

    def empty(self, path: Path) -> None:
        """Begins anew. Raises ArenaError, OSError."""
        space = os.fstatvfs(self.fd)
        room = space.f_bavail * space.f_frsize + os.fstat(self.fd).st_blocks * 512
        if room < self.size_bytes + MARK_ROOM:
            raise ArenaError(f"the arena {path} needs {self.size_bytes} bytes; its file system has {room} bytes left")
        os.ftruncate(self.fd, 0)
        os.ftruncate(self.fd, self.size_bytes + MARK_ROOM)
        self.put_mark(self.mark)


def _packed(mark: Mark, size_bytes: int) -> bytes:
    fields = _MARK.pack(_MAGIC, mark.arena, size_bytes, mark.serial, mark.clean)
    return fields + xxh3_128_digest(fields)


def named_file(path: Path, size_bytes: int, *, fresh: bool = False) -> NamedFile:
    """The file, locked for this process. What an earlier server left in it is kept where it fits and is whole, unless
    ``fresh``; any file that was never an arena is refused and left alone."""
    fd = _locked(path)
    file = NamedFile(fd, size_bytes)
    made = False
    try:
        size = os.fstat(fd).st_size
        made = size == 0  # made just now, most likely; nothing is lost with it
        if size and not (_is_marked(fd, size) or is_index(index_path(path))):
            sentence = f"{path} is a file of {size} bytes that is no arena; name another path, or remove it yourself"
            raise ArenaError(sentence)
        if size:
            file.refused = "it was to begin anew (--fresh)" if fresh else file.take_over()
        if not file.left:
            file.empty(path)
    except (OSError, ArenaError) as error:
        if made:
            with suppress(FileNotFoundError):
                path.unlink()  # while the lock is held: whoever waits for it sees that the name has gone
        os.close(fd)
        if isinstance(error, OSError):
            raise ArenaError(f"the arena {path} cannot be made: {error.strerror}") from error
        raise
    return file


def left_behind(path: Path) -> tuple[int, int]:
    """(size, bytes that it has taken) of an arena that an earlier server left there; zeros when there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return 0, 0
    try:
        found = os.fstat(fd)
        marked = stat.S_ISREG(found.st_mode) and _is_marked(fd, found.st_size)
        return (found.st_size - MARK_ROOM, found.st_blocks * 512) if marked else (0, 0)
    finally:
        os.close(fd)


def _is_marked(fd: int, size: int) -> bool:
    start = _MAGIC[:-3]  # of any version
    return size >= MARK_ROOM and os.pread(fd, len(start), size - MARK_ROOM) == start


def _opened(path: Path) -> int:
    """Makes the file, and the folder that it is in; no more of the path, which may be mistyped. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        return os.open(path, flags, 0o600)


def _locked(path: Path) -> int:
    """Opens or creates the file and locks it; again, if it was removed while the lock was not yet ours."""
    while True:
        try:
            fd = _opened(path)
        except OSError as error:
            why = str(error.strerror)
            if error.errno == errno.ENOENT:
                why = f"there is no {path.parent.parent}, and the server makes the last folder only"
            raise ArenaError(f"the arena {path} cannot be opened: {why}") from error
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
