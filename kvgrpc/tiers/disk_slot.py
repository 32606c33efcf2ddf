# SPDX-License-Identifier: Apache-2.0
"""A folder for one server's objects under a directory that servers may share.

    DIRECTORY/slot-000/lock       held by its server as long as that lives
    DIRECTORY/slot-000/aside/     what is being written
    DIRECTORY/slot-000/ab/ab12…   one file an object

A server takes the first folder that nobody holds, with everything that is in it: after a restart it finds its own.
Others read there, and change nothing. Nothing else in the directory is touched.

Threads: every function blocks, and may run on any thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SLOTS_MOST = 256
_SLOT = re.compile(r"slot-\d{3}")
_NAME = re.compile(r"[0-9a-f]{64}")


class Slot:
    """The folder of this server, held until ``close``."""

    def __init__(self, folder: Path, fd: int) -> None:
        self.folder = folder
        self.aside = folder / "aside"
        self._fd = fd
        self._lock = os.fstat(fd)

    def close(self) -> None:
        """Others may take the folder."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def check(self) -> None:
        """Raises OSError when the folder is not there any more, or another is in its place."""
        if not os.path.samestat(os.stat(self.folder / "lock"), self._lock):
            raise OSError(errno.ESTALE, f"{self.folder} is not the folder that was opened")

    def path(self, name: str) -> Path:
        """Where the object is."""
        return object_path(self.folder, name)

    def prepare(self) -> None:
        """Removes what was being written when an earlier server died."""
        self.aside.mkdir(mode=0o700, exist_ok=True)
        for left in self.aside.iterdir():
            with suppress(FileNotFoundError):
                left.unlink()

    def scan(self) -> list[tuple[int, str, int]]:
        """(last use in ns, name, bytes) of every object, least recently used first. Others' files are left alone."""
        found: list[tuple[int, str, int]] = []
        for shard in os.scandir(self.folder):
            if len(shard.name) != 2 or not shard.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(shard.path):
                if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        facts = entry.stat(follow_symlinks=False)
                        found.append((facts.st_mtime_ns, entry.name, facts.st_size))
        found.sort()
        return found


def claim(directory: Path) -> Slot:
    """Takes the first folder that nobody holds. The directory must be there: one that is made where a file system is
    to be mounted would hide what was cleared. Raises OSError."""
    for number in range(SLOTS_MOST):
        folder = directory / f"slot-{number:03}"
        folder.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        except BaseException:
            os.close(fd)
            raise
        slot = Slot(folder, fd)
        try:
            slot.prepare()
        except BaseException:
            slot.close()
            raise
        return slot
    raise OSError(f"all {SLOTS_MOST} slots of {directory} are taken by other servers")


def object_path(folder: Path, name: str) -> Path:
    return folder / name[:2] / name


def other_folders(directory: Path, own: Path) -> Iterator[Path]:
    """Folders of other servers, also of those that are gone."""
    for entry in os.scandir(directory):
        if _SLOT.fullmatch(entry.name) and entry.name != own.name and entry.is_dir(follow_symlinks=False):
            yield Path(entry.path)
