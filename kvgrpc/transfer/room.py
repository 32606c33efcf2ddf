# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may take, and what engines' memory may still cost it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psutil

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import MIB
from kvgrpc.transfer.arena import Arena

CGROUP_ROOT = Path("/sys/fs/cgroup")
SPARE_BYTES = 64 * MIB
"""Left for the server itself."""


class PageDebt:
    """Pages of engines' memory that nobody has written yet. Whoever touches one first pays for it, and a server that
    pays for more than it has is ended by the kernel. So memory is refused whose missing pages are more than there is
    room for, beside those of the arena and of what was taken before.

    Threads: any.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lock = threading.Lock()
        self._owing: dict[int, list[tuple[int, int]]] = {}
        """(descriptor, registered bytes) of files with missing pages, by mapping."""

    def take(self, mapping_id: int, files: dict[int, int]) -> None:
        """``files``: registered bytes by descriptor, which stays the caller's. Refuses: MEMORY. Whatever it raises, the
        caller drops what was taken until then."""
        missing = sum(_missing_bytes(fd, size) for fd, size in files.items())
        if not missing:
            return
        with self._lock:
            owed = sum(_missing_bytes(fd, size) for owing in self._owing.values() for fd, size in owing)
            growing = self._arena.size_bytes - self._arena.ready_bytes
            room = max(available_memory() - SPARE_BYTES - growing - owed, 0)
            if missing > room:
                sentence = (
                    f"{missing} bytes of the shared memory have no pages yet and would become this server's when it "
                    f"fills them, but it can spare {room}: write the memory, or posix_fallocate it, before it is shared"
                )
                raise Refusal(Reason.MEMORY, sentence, field="memory")
            owing = self._owing[mapping_id] = list[tuple[int, int]]()
            for fd, size in files.items():
                if _missing_bytes(fd, size):
                    owing.append((os.dup(fd), size))

    def drop(self, mapping_id: int) -> None:
        """The mapping is gone. Harmless when nothing was taken."""
        with self._lock:
            for fd, _ in self._owing.pop(mapping_id, ()):
                os.close(fd)


def _missing_bytes(fd: int, size_bytes: int) -> int:
    return max(size_bytes - os.fstat(fd).st_blocks * 512, 0)


def available_memory(cgroup_root: Path = CGROUP_ROOT, proc_cgroup: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that can be taken now: the machine's available memory, or what the tightest control group leaves."""
    return min([psutil.virtual_memory().available, *_cgroup_rooms(cgroup_root, proc_cgroup)])


def free_huge_pages(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes of the default size's reserved huge pages that nobody has taken."""
    facts = dict(line.split(":", 1) for line in _read(meminfo).splitlines() if ":" in line)
    pages, size_kib = (int(facts.get(name, "0").split()[0]) for name in ("HugePages_Free", "Hugepagesize"))
    return pages * size_kib * 1024


def _cgroup_rooms(root: Path, proc_cgroup: Path) -> list[int]:
    rooms: list[int] = []
    for base, path, limit, usage, reclaimable in _memory_groups(root, _read(proc_cgroup)):
        # A container often sees its own group as the root: a path that is not there is looked for from its parents on.
        for folder in (base / path, *(base / path).parents):
            rooms += _room(folder, limit, usage, reclaimable)
            if folder == base:
                break
    return rooms


def _memory_groups(root: Path, text: str) -> list[tuple[Path, str, str, str, str]]:
    """(mount, path below it, names of the limit file, of the usage file and of the reclaimable count) for v2 and v1."""
    groups: list[tuple[Path, str, str, str, str]] = []
    for line in text.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        path = path.strip("/")
        if not controllers:
            groups.append((root, path, "memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            groups.append(
                (root / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            )
    return groups


def _room(folder: Path, limit: str, usage: str, reclaimable: str) -> list[int]:
    most, used = _read(folder / limit), _read(folder / usage)
    if not most.isdecimal() or not used.isdecimal():  # not there, or "max"
        return []
    stat = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    return [max(0, int(most) - int(used) + int(stat.get(reclaimable, "0")))]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
