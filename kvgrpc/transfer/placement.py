# SPDX-License-Identifier: Apache-2.0
"""Which NUMA node a card is at, and which cores are. ``sysfs`` is where the system tells (tests have one of their own).

A system that does not tell has one node, or hides them (a virtual machine): nothing is far then.
"""

from __future__ import annotations

from pathlib import Path

SYSFS = Path("/sys")


def node_of_card(bus_id: str, sysfs: Path = SYSFS) -> int | None:
    """``bus_id`` as the driver writes it (``0000:3B:00.0``); None when the system names no node."""
    text = _read(sysfs / "bus/pci/devices" / bus_id.lower() / "numa_node")
    return int(text) if text.isdecimal() else None


def cpus_of_node(node: int, sysfs: Path = SYSFS) -> frozenset[int]:
    """Empty when the system does not tell."""
    parts = [part.partition("-") for part in _read(sysfs / f"devices/system/node/node{node}/cpulist").split(",")]
    return frozenset(cpu for low, _, high in parts if low for cpu in range(int(low), int(high or low) + 1))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
