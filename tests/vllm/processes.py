# SPDX-License-Identifier: Apache-2.0
"""Servers and engines that are processes of their own, so that they can be killed, stopped and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvgrpc.client import Client, ServerStatus
from tests.served import stop, wait_until
from tests.vllm.engine import Said

ROOT = Path(__file__).resolve().parent.parent.parent
ENGINE_START_S = 600.0
ANSWER_S = 300.0


class Server:
    """`kvgrpc serve` at one socket, again and again."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.socket, self.log_file = folder / "s", folder / "log"
        self._flags = flags
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"

    def start(self, *more: str, module: str = "kvgrpc") -> None:
        """``more``: flags that come last, so that they count."""
        command = [sys.executable, "-m", module, "serve", "--socket", str(self.socket), *self._flags, *more]
        self.log_file.write_text("")
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        wait_until(lambda: '"started"' in self.log_file.read_text(), 30)

    def replace(self, *more: str, module: str = "kvgrpc") -> None:
        """Kills it, and starts another one at its place."""
        self.signal(signal.SIGKILL)
        self.start(*more, module=module)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            stop(self.process)

    def status(self) -> ServerStatus:
        with Client(self.address) as client:
            return client.get_status()

    def count(self, name: str) -> int:
        return self.status().counters.get(name, 0)


class EngineProcess:
    """tests.vllm.engine as a program."""

    def __init__(self, model: str, address: str, log: Path, **options: Any) -> None:
        self.variables: dict[str, str] = options.pop("variables", {})
        words = json.dumps({"address": address, "kv_cache_memory_bytes": 128 << 20, **options})
        command = [sys.executable, "-m", "tests.vllm.engine", model, words]
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=self._environment(),
            )
        self._lines: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()
        self._answers = 0
        self.preemptions = 0
        """vLLM's count, as of the last answer."""

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), **self.variables}

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                self._lines.append(json.loads(line[1:]))

    def wait_ready(self) -> EngineProcess:
        assert self._next(ENGINE_START_S) == {"ready": True}
        return self

    def _next(self, timeout_s: float) -> dict[str, Any]:
        self._answers += 1
        wait_until(lambda: len(self._lines) >= self._answers or self.process.poll() is not None, timeout_s)
        assert len(self._lines) >= self._answers, f"the engine has ended: {self.log.read_text()[-3000:]}"
        return self._lines[self._answers - 1]

    def ask(self, *prompts: Sequence[int], **words: Any) -> None:
        """Sends a batch; ``answered`` fetches what it was answered with."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": [list(each) for each in prompts], **words}) + "\n")
        self.process.stdin.flush()

    def answered(self, timeout_s: float = ANSWER_S) -> list[Said]:
        answer = self._next(timeout_s)
        assert answer["left"] in (0, None), "blocks are still in use"
        self.preemptions = answer["preemptions"]
        return [Said(tuple(tokens), cached, seconds) for tokens, cached, seconds in answer["said"]]

    def say(self, *prompts: Sequence[int], **words: Any) -> list[Said]:
        self.ask(*prompts, **words)
        return self.answered()

    def end(self, number: int = signal.SIGTERM) -> None:
        """Closes its input, which ends it; after SIGKILL there is nothing to end."""
        if number == signal.SIGKILL:
            self.process.kill()
        elif self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def engine_process(model: str, address: str, log: Path, **options: Any) -> Iterator[EngineProcess]:
    engine = EngineProcess(model, address, log, **options)
    try:
        yield engine.wait_ready()
    finally:
        engine.end()
