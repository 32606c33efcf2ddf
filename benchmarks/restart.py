# SPDX-License-Identifier: Apache-2.0
"""How long a server with a full named arena is away: ended in order, and killed.

    python -m benchmarks.restart [--json FILE]

4 GiB of objects of 8 MiB in an arena in /dev/shm. A round ends the server and starts the next one, Python included, and
looks up the prompt that was used last, then all. Needs 6 GiB of memory.
"""

from __future__ import annotations

import argparse
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from itertools import count
from pathlib import Path

from rich.console import Console

from kvgrpc import api
from kvgrpc.bench.engine import CHUNK, Paging, shared_memory
from kvgrpc.bench.processes import BenchError, unwind_at_sigterm
from kvgrpc.bench.results import Report, figure
from kvgrpc.cli.bench import as_table
from kvgrpc.client import Client, SchedulerClient, WorkerClient

PAGING = Paging(layers=32, planes=2, run_bytes=8192, num_blocks=1024)
CHUNKS = PAGING.num_blocks * PAGING.block_size // CHUNK
PROMPTS = 8
ROUNDS = 3
WAIT_S = 120.0


def prompt(number: int) -> api.Tokens:
    return api.Tokens(array("I", [number, *range(1, CHUNKS * CHUNK)]).tobytes())


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end_s:
            raise BenchError(f"{what} did not come within {WAIT_S:.0f} s")
        time.sleep(0.002)


class Node:
    """One server after the other on the same socket and arena."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "s"
        flags = ["--socket", str(self.socket), "--arena-path", str(folder / "arena"), "--l1-size", "4608MiB"]
        self._command = [sys.executable, "-m", "kvgrpc", "serve", *flags]
        self._log = (folder / "log").open("ab")
        self.process = self.start()

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"

    def start(self) -> subprocess.Popen[bytes]:
        self.process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        return self.process

    def listens(self) -> bool:
        if self.process.poll() is not None:
            raise BenchError("the server did not start")
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0

    def restart(self) -> api.RestartStatus:
        with Client(self.address, "bench") as operator:
            return operator.get_status().restart

    def checked(self) -> bool:
        return not self.restart().checking

    def recorded(self) -> bool:
        status = self.restart()
        return not status.waiting_objects and not status.checking


class Engine:
    """One worker and one scheduler that come back by themselves, as a real engine's do."""

    def __init__(self, address: str, layout: api.Layout) -> None:
        engine_id, identity = secrets.token_hex(16), PAGING.identity()
        self._worker = WorkerClient(address, api.RegisterRequest(engine_id, identity, 0, 0, 1, 1, layout))
        self._scheduler = SchedulerClient(address, engine_id, identity)
        self._names = count()
        if not (self._worker.start(WAIT_S) and self._scheduler.start(WAIT_S)):
            raise BenchError("no session with the server")

    def store(self, number: int) -> None:
        self._worker.store(prompt(number), [range(PAGING.num_blocks)]).result(WAIT_S)

    def hits(self, number: int) -> int:
        """Chunks of the prompt that are there."""
        name = str(next(self._names))
        found = self._scheduler.lookup(name, prompt(number), timeout_s=1.0)
        self._scheduler.discard(name)
        return found.hit_tokens // CHUNK

    def close(self) -> None:
        self._scheduler.close()
        self._worker.close(timeout_s=2)


def measure(folder: Path) -> Report:
    times: dict[str, list[float]] = {}
    node = Node(folder)
    wait_until(node.listens, "the server")
    try:
        with shared_memory(PAGING.size_bytes) as memory:
            engine = Engine(node.address, PAGING.layout(memory.name))
            try:
                for number in range(PROMPTS):
                    engine.store(number)
                for how in ("ended in order", "killed"):
                    for _ in range(ROUNDS):
                        restart_once(node, engine, how, times)
            finally:
                engine.close()
    finally:
        node.process.terminate()
        node.process.wait(WAIT_S)
    goals = {"first hit": "<= 2"}
    figures = [
        figure(f"{what}, {how}", values, "s", of=OF, goal=goals.get(what))
        for (what, how), values in ((key.split("|"), times[key]) for key in times)
    ]
    return Report("restart", tuple(figures))


OF = f"{PROMPTS * CHUNKS * PAGING.object_bytes >> 30} GiB in {PROMPTS * CHUNKS} objects"


def restart_once(node: Node, engine: Engine, how: str, times: dict[str, list[float]]) -> None:
    def took(what: str, since_s: float) -> None:
        times.setdefault(f"{what}|{how}", []).append(time.monotonic() - since_s)

    wait_until(node.recorded, "the records")
    began_s = time.monotonic()
    if how == "killed":
        node.process.kill()
    else:
        node.process.terminate()
    node.process.wait(WAIT_S)
    took("end", began_s)
    began_s = time.monotonic()
    node.start()
    wait_until(node.listens, "the next server")
    took("listening", began_s)
    wait_until(lambda: engine.hits(PROMPTS - 1) == CHUNKS, "the hit")
    took("first hit", began_s)
    wait_until(node.checked, "the end of checking")
    took("everything found", began_s)
    missing = [number for number in range(PROMPTS) if engine.hits(number) != CHUNKS]
    if missing:
        raise BenchError(f"prompts {missing} did not come back")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file or folder for the figures")
    chosen = parser.parse_args()
    unwind_at_sigterm()
    with tempfile.TemporaryDirectory(prefix="kvgrpc-", dir="/dev/shm") as folder:
        report = measure(Path(folder))
    Console().print(as_table(report.figures))
    if chosen.json is not None:
        report.write(chosen.json)


if __name__ == "__main__":
    main()
