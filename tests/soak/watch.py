# SPDX-License-Identifier: Apache-2.0
"""What the server takes while it is soaked, and whether that grows."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

MIB = 1 << 20


@dataclass
class Watch:
    """Samples of a process: its own memory (without the arena and the memory of engines), files, threads."""

    pid: int
    began: float = field(default_factory=time.monotonic)
    times: list[float] = field(default_factory=list[float])
    own_bytes: list[int] = field(default_factory=list[int])
    files: list[int] = field(default_factory=list[int])
    threads: list[int] = field(default_factory=list[int])

    def look(self) -> None:
        folder = Path(f"/proc/{self.pid}")
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        self.times.append(time.monotonic() - self.began)
        self.own_bytes.append(1024 * sum(int(status[name].split()[0]) for name in ("RssAnon", "RssFile")))
        self.threads.append(int(status["Threads"]))
        self.files.append(len(os.listdir(folder / "fd")))

    def own_at(self, share: float) -> int:
        """Its own memory after this share of the time."""
        return self.own_bytes[min(int(len(self.own_bytes) * share), len(self.own_bytes) - 1)]

    def growth_bytes(self) -> float:
        """Of its own memory from the first quarter to the end, by the straight line through the samples."""
        later = [at for at, time_s in enumerate(self.times) if time_s >= self.times[-1] / 4]
        times = np.array([self.times[at] for at in later])
        slope = np.polyfit(times, np.array([self.own_bytes[at] for at in later], float), 1)[0]
        return float(slope) * float(times[-1] - times[0])


def engine_memory(pid: int) -> int:
    """Mappings and descriptors of engines' memory that the server has."""
    found = Path(f"/proc/{pid}/maps").read_text().splitlines()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            pass  # closed since
    return sum("kvgrpc-test-" in line for line in found)
