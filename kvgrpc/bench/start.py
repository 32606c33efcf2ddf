# SPDX-License-Identifier: Apache-2.0
"""Figures of starting: the server until it serves, what it holds when nobody has come yet, the client's import."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

from kvgrpc.bench.bare import EMPTY_CALL, SERVING
from kvgrpc.bench.processes import START_S, BenchError, Serving, serving
from kvgrpc.bench.results import Figure, figure
from kvgrpc.bench.suite import Effort
from kvgrpc.client.address import parse_address
from kvgrpc.client.channel import ChannelOptions, open_channel

L1 = "4GiB"
IMPORT = (
    "import time; began = time.perf_counter(); import kvgrpc.client as c; [getattr(c, name) for name in c.__all__]; "
    "print(time.perf_counter() - began)"
)
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ .*?(\S*)(?: \(deleted\))?$")


def resident_bytes(pid: int) -> dict[str, int]:
    """Resident memory of a process by what is mapped ("" for anonymous memory), from /proc/PID/smaps."""
    found: dict[str, int] = {}
    name = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if line.startswith("Rss:"):
            found[name] = found.get(name, 0) + int(line.split()[1]) * 1024
        elif (match := _MAPPING.match(line)) is not None:
            name = match[1]
    return found


def arena_bytes(resident: dict[str, int]) -> int:
    """What of it are pages of a server's arena."""
    return sum(size for name, size in resident.items() if "kvgrpc-arena" in name)


async def until_serving(server: Serving) -> None:
    """Returns when health says so."""
    channel = open_channel(parse_address(server.address), ChannelOptions())
    try:
        call = cast("Any", channel).unary_unary(EMPTY_CALL)
        if await call(b"", wait_for_ready=True, timeout=START_S) != SERVING:
            raise BenchError("the server does not serve")
    finally:
        await channel.close()


def start(effort: Effort) -> list[Figure]:
    """Seconds from the start of the process to the first answer SERVING; then its resident memory without the arena's
    pages, in MiB."""
    seconds: list[float] = []
    idle: list[float] = []
    for _ in range(max(1, effort.repetitions // 3)):
        began = time.perf_counter()
        with serving(L1) as server:
            asyncio.run(until_serving(server))
            seconds.append(time.perf_counter() - began)
            found = resident_bytes(server.process.pid)
            idle.append((sum(found.values()) - arena_bytes(found)) / (1 << 20))
    return [
        figure(f"start/until SERVING with {L1}", seconds, "s", goal="<= 1.5"),
        figure("start/memory beside the arena", idle, "MiB", goal="<= 150"),
    ]


def imports(effort: Effort) -> list[Figure]:
    """Importing the client with all that it names, in new interpreters; the best of them."""
    command = [sys.executable, "-c", IMPORT]
    seconds = [
        float(subprocess.run(command, capture_output=True, check=True, timeout=START_S).stdout)  # noqa: S603  (ours)
        for _ in range(effort.repetitions)
    ]
    return [figure("imports/client", seconds, "s", goal="<= 0.4", pick=min)]
