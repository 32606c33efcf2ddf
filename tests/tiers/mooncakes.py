# SPDX-License-Identifier: Apache-2.0
"""A real Mooncake Store for tests: its master, and a process of its own that gives memory to it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.served import stand_still
from tests.tiers.stores import Store

ROOT = Path(__file__).parents[2]
VERBS = ROOT / "build/verbs"
MEMORY_BYTES = 256 << 20
CLIENT_TTL_S = 2
"""A holder that has not been heard of for so long is gone, with its memory."""


def load_verbs() -> None:
    """What the library asks for by name is in this process and its children then, also where the system has none."""
    assert VERBS.exists(), "make verbs"
    for name in ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1"):
        if (VERBS / name).exists():
            ctypes.CDLL(str(VERBS / name), ctypes.RTLD_GLOBAL)
    os.environ["LD_LIBRARY_PATH"] = variables()["LD_LIBRARY_PATH"]


def variables() -> dict[str, str]:
    """The same for processes."""
    return {"LD_LIBRARY_PATH": f"{VERBS}:{os.environ.get('LD_LIBRARY_PATH', '')}", "MC_LOG_LEVEL": "ERROR"}


class Mooncake(Store):
    """The master, and who holds the memory. ``signal`` is for the master."""

    def __init__(self, folder: Path, memory_bytes: int = MEMORY_BYTES) -> None:
        super().__init__(folder / "mooncake.log")
        self.memory_bytes = memory_bytes
        self.holder: subprocess.Popen[bytes] | None = None

    @property
    def master(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self.start_master()
        self.start_holder()

    def start_master(self) -> None:
        package = find_spec("mooncake")
        assert package is not None and package.origin is not None
        program = Path(package.origin).with_name("mooncake_master")
        where = ["-rpc_address", "127.0.0.1", "-rpc_port", str(self.port)]
        where += ["-metrics_host", "127.0.0.1", "-metrics_port", str(free_port()), "-enable_metric_reporting=false"]
        self.run([str(program), *where, f"-client_ttl={CLIENT_TTL_S}"], **variables())

    def start_holder(self) -> None:
        """Returns when its memory is in the store."""
        command = [sys.executable, "-m", "tests.tiers.mooncakes", self.master, str(self.memory_bytes)]
        with self.log_file.open("ab") as log:
            environment = {**os.environ, **variables()}
            pipe = subprocess.PIPE
            holder = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, stderr=log)
        self.holder = holder
        assert holder.stdout is not None
        answer = next((line for line in holder.stdout if line.startswith((b"ready", b"failed"))), b"")
        assert answer.startswith(b"ready"), self.log_file.read_text()

    def kill_master(self) -> None:
        super().kill()

    def kill_holder(self) -> None:
        if self.holder is not None:
            self.holder.kill()
            self.holder.communicate()
            self.holder = None

    def signal_holder(self, number: signal.Signals) -> None:
        """After SIGSTOP it stands still at once."""
        assert self.holder is not None
        if number == signal.SIGSTOP:
            stand_still(self.holder.pid)
        else:
            self.holder.send_signal(number)

    def kill(self) -> None:
        self.kill_master()
        self.kill_holder()


class Spoiler:
    """Between somebody and a server on the loopback; while ``spoils``, answers have flipped bits."""

    def __init__(self, behind: int, seed: int) -> None:
        self._behind = behind
        self._chance = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.spoils = False
        self.spoiled = 0

    def __enter__(self) -> Spoiler:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._behind))
                for source, target, answers in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pass, args=(source, target, answers), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while part := bytearray(source.recv(1 << 16)):
                if answers and self.spoils:
                    self.spoiled += 1
                    for _ in range(1 + len(part) // 64):
                        part[self._chance.randrange(len(part))] ^= 1 << self._chance.randrange(8)
                target.sendall(part)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def client_of(master: str) -> Any:
    """Not the tier's: it sees what a tier has done from outside."""
    from mooncake.store import MooncakeDistributedStore  # needs load_verbs

    client: Any = MooncakeDistributedStore()
    code = client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 32 << 20, "tcp", "", master)
    assert code == 0, code
    return client


@contextlib.contextmanager
def mooncake(folder: Path, memory_bytes: int = MEMORY_BYTES) -> Iterator[Mooncake]:
    store = Mooncake(folder, memory_bytes)
    try:
        store.start()
        yield store
    finally:
        store.kill()


def hold(master: str, memory_bytes: int) -> None:
    """Gives memory to the store until standard input ends, as it does when the test's process does."""
    from mooncake.store import MooncakeDistributedStore

    client: Any = MooncakeDistributedStore()
    code = client.setup("127.0.0.1", "P2PHANDSHAKE", memory_bytes, 0, "tcp", "", master)
    print("ready" if code == 0 else f"failed {code}", flush=True)
    sys.stdin.read()
    os._exit(code != 0)


if __name__ == "__main__":
    hold(sys.argv[1], int(sys.argv[2]))
