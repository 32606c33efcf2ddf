# SPDX-License-Identifier: Apache-2.0
"""A real `kvgrpc serve` process for tests: started on a socket of its own, ended by SIGTERM."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


def wait_until(condition: object, timeout_s: float) -> None:
    assert callable(condition)
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.02)
