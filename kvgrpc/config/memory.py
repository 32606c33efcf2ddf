# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may take, and the size of L1 that follows from it.

The arena is a memfd: its pages count as memory of the process and its control group; no file system bounds them.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from kvgrpc.config.settings import SettingsError
from kvgrpc.config.values import GIB, format_size
from kvgrpc.core.types import MIB

L1_DEFAULT_CAP = 4 * GIB
L1_DEFAULT_SHARE = 0.5
CGROUP_ROOT = Path("/sys/fs/cgroup")


def choose_l1_size(asked_bytes: int | None, available_bytes: int, page_bytes: int) -> int:
    """Bytes of L1: as asked, else half of what is available, up to the cap. SettingsError if it does not fit."""
    if asked_bytes is None:
        chosen = min(L1_DEFAULT_CAP, int(available_bytes * L1_DEFAULT_SHARE)) // MIB * MIB
        if chosen < page_bytes:
            raise SettingsError(f"only {format_size(available_bytes)} of memory are available: too little for any L1")
        return chosen
    if asked_bytes > available_bytes:
        raise SettingsError(
            f"--l1-size: {format_size(asked_bytes)} do not fit, {format_size(available_bytes)} are available; "
            "ask for less, or give the container or machine more memory"
        )
    if asked_bytes < page_bytes:
        raise SettingsError(f"--l1-size: {format_size(asked_bytes)} is less than one page (--page-size {page_bytes})")
    return asked_bytes


def available_memory(cgroup_root: Path = CGROUP_ROOT, proc_cgroup: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that can be taken now: the machine's available memory, or what the tightest control group leaves."""
    return min([psutil.virtual_memory().available, *_cgroup_rooms(cgroup_root, proc_cgroup)])


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
