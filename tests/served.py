# SPDX-License-Identifier: Apache-2.0
"""A real `kvgrpc serve` process for tests: started on a socket of its own, ended by SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

START_S = 60.0
STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class Served:
    """A server that listens. ``log`` is what it wrote to stderr and stdout so far."""

    process: subprocess.Popen[bytes]
    socket: Path
    log_file: Path

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"

    @property
    def log(self) -> str:
        return self.log_file.read_text()


@contextmanager
def serving(*flags: str, module: str = "") -> Iterator[Served]:
    """`kvgrpc serve`, or a module of the tests that takes the socket's path and announces itself in the same way.

    Socket paths must stay short, so the folder is a temporary one of its own and not the test's.
    """
    with tempfile.TemporaryDirectory(prefix="kvgrpc-") as folder:
        socket, log_file = Path(folder) / "s", Path(folder) / "log"
        program = ["kvgrpc", "serve", "--socket", str(socket), *flags] if not module else [module, str(socket), *flags]
        command = [sys.executable, "-m", *program]
        with log_file.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        served = Served(process, socket, log_file)
        try:
            wait_until(lambda: '"started"' in served.log or process.poll() is not None, START_S)
            assert process.poll() is None, served.log
            yield served
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> int:
    """Ends the process that this test started, and answers its exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


def stand_still(pid: int) -> None:
    """SIGSTOP; returns when no thread of the process runs any more, which is some time after the signal was sent."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: not _running(pid), 30)


def _running(pid: int) -> list[str]:
    """States of its threads that are not stopped."""
    states: list[str] = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # a thread that has ended meanwhile
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return [state for state in states if state not in "TtZX"]


def wait_until(condition: object, timeout_s: float) -> None:
    assert callable(condition)
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.02)
