# SPDX-License-Identifier: Apache-2.0
"""``kvgrpc serve`` where room is short: ``python -m tests.hostile.room SOCKET [shm=SIZE] [cgroup=FOLDER] FLAGS...``

``shm``: in a mount namespace of its own, whose /dev/shm has that size; who wants to be seen there joins it.
``cgroup``: as a member of this control group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvgrpc.cli.root import main as kvgrpc

CLONE_NEWNS = 0x00020000
MS_REC, MS_PRIVATE = 0x4000, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def small_shm(size: str) -> None:
    """Of this process and its children, from here on."""
    _check(_libc.unshare(CLONE_NEWNS))
    _check(_libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    _check(_libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={size}".encode()))


def join_mounts(pid: int) -> None:
    """Sees the files that process sees. Only before any thread runs."""
    here = os.getcwd()
    with open(f"/proc/{pid}/ns/mnt") as mounts:
        _check(_libc.setns(mounts.fileno(), CLONE_NEWNS))
    os.chdir(here)


def can_mount() -> bool:
    """Whether this user may have mounts of its own."""
    command = [sys.executable, "-c", "from tests.hostile.room import small_shm; small_shm('1m')"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path | None]:
    """A control group (v1 or v2) with this memory limit, or None where this user may not make one."""
    name = f"kvgrpc-test-{secrets.token_hex(4)}"
    for root, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        folder = Path("/sys/fs/cgroup") / root / name
        try:
            folder.mkdir()
            (folder / limit).write_text(str(limit_bytes))
        except OSError:
            with contextlib.suppress(OSError):
                folder.rmdir()
            continue
        try:
            yield folder
        finally:
            folder.rmdir()
        return
    yield None


def main(socket: str, *words: str) -> None:
    flags = list(words)
    if flags and flags[0].startswith("shm="):
        small_shm(flags.pop(0).removeprefix("shm="))
    if flags and flags[0].startswith("cgroup="):
        (Path(flags.pop(0).removeprefix("cgroup=")) / "cgroup.procs").write_text(str(os.getpid()))
    kvgrpc(["serve", "--socket", socket, *flags])


if __name__ == "__main__":
    main(*sys.argv[1:])
