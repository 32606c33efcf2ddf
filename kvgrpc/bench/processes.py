# SPDX-License-Identifier: Apache-2.0
"""The processes that are measured: started in a folder of their own, ended with the context that started them."""

from __future__ import annotations

import atexit
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

START_S = 60.0
STOP_S = 30.0


class BenchError(Exception):
    """What should be measured does not run; the text says what."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A process that listens on ``address``. It reads lines from ``process.stdin`` if it reads any."""

    process: subprocess.Popen[str]
    address: str


@contextmanager
def running(module: str, *arguments: str) -> Generator[subprocess.Popen[str], None, None]:
    """``python -m module arguments`` with pipes for its lines; its errors go to the terminal."""
    command = [sys.executable, "-m", module, *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)  # noqa: S603  (our own modules)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


@contextmanager
def listening(module: str, *arguments: str) -> Generator[Serving, None, None]:
    """A module that takes a socket's path as its last argument, when it listens there."""
    with tempfile.TemporaryDirectory(prefix="kvgrpc-") as folder:
        socket = Path(folder) / "s"
        with running(module, *arguments, str(socket)) as process:
            wait_until(lambda: socket.exists() or process.poll() is not None, f"{module} to listen")
            if process.poll() is not None:
                raise BenchError(f"{module} did not start")  # it has said why
            yield Serving(process, f"unix:{socket}")


def serving(l1_size: str, *flags: str) -> AbstractContextManager[Serving]:
    """``kvgrpc serve`` with its defaults, but for these flags, and this much memory."""
    return listening("kvgrpc", "serve", "--log-level", "warning", "--l1-size", l1_size, *flags, "--socket")


def ask(process: subprocess.Popen[str], line: str) -> None:
    """Sends a line; ``answer`` takes what comes back."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise BenchError("a process of the benchmark ended early")  # it has said why
    return line


def say(line: str) -> None:
    """The other end of ``answer``."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def unwind_at_sigterm() -> None:
    """Makes SIGTERM an exit that leaves contexts, so that it ends the processes of this one too."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(1)

    signal.signal(signal.SIGTERM, leave)
    atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)  # what is ending already needs no other end


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise BenchError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.002)
