# SPDX-License-Identifier: Apache-2.0
"""A server process under attack: what it has, as its operator and the kernel see it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvgrpc.client import Client
from tests.hostile.engine import Facts
from tests.hostile.gated import Hold, connect
from tests.hostile.process import EngineProcess
from tests.served import Served, serving

FLAGS = ("--chunk-tokens", "16", "--page-size", "4KiB", "--slice-size", "6144")
"""A slice a chunk of the tests' MHA."""


COMPLAINTS = ('"level": "error"', "Traceback", "Fatal")
HARMLESS = "ExecuteBatchError"
"""What grpc.aio logs when a client has given a call up at the instant of its answer."""


def complaints(log: str) -> list[str]:
    """Lines that should not be in a server's log."""
    found = [line for line in log.splitlines() if any(word in line for word in COMPLAINTS)]
    return [line for line in found if HARMLESS not in line]


@dataclass
class Stand:
    """``kvgrpc serve`` with an operator; whatever it starts ends with it."""

    served: Served
    operator: Client
    stack: contextlib.ExitStack
    gates: Connection | None = None

    def engine(self, **facts: Any) -> EngineProcess:
        """An engine that runs, attached and registered."""
        engine = self.stranger(**facts)
        assert engine.do("start", 30.0), engine.do("problem")
        return engine

    def stranger(self, **facts: Any) -> EngineProcess:
        """An engine that has not said anything yet."""
        return self.stack.enter_context(EngineProcess(Facts(self.served.address, **facts)))

    def hold(self, engine: EngineProcess, direction: str, after_runs: int) -> Hold:
        assert self.gates is not None
        return Hold(self.gates, engine.facts.worker_id, direction).set(after_runs)

    # ---- what it has ------------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Everything that a client may leave behind, as the operator sees it."""
        status = self.operator.get_status()
        arena = status.arena
        return {
            "clients": status.clients,
            "engines": status.engines,
            "jobs": status.jobs,
            "pins": status.pins,
            "calls": status.calls_in_flight,
            "queued": sum(executor.queued for executor in status.executors),
            "bytes being written": arena.writing_bytes,
            "pinned bytes": arena.pinned_bytes,
            "doomed bytes": arena.doomed_bytes,
            "settling bytes": arena.settling_bytes,
            "lost bytes": arena.total_bytes
            - sum(
                (
                    arena.free_bytes,
                    arena.ready_bytes,
                    arena.pinned_bytes,
                    arena.writing_bytes,
                    arena.doomed_bytes,
                    arena.settling_bytes,
                )
            ),
        }

    def calls_of(self, engine: EngineProcess) -> int:
        """Copies of an engine that have not answered."""
        clients = [client for one in self.operator.list_engines() for client in one.clients]
        return sum(client.calls_in_flight for client in clients if client.client_id == engine.facts.worker_id)

    def has(self, engine: EngineProcess) -> bool:
        """Whether the engine's worker has a session."""
        clients = [client for one in self.operator.list_engines() for client in one.clients]
        return any(client.client_id == engine.facts.worker_id for client in clients)

    def memory_of(self, *engines: EngineProcess) -> int:
        """Mappings and descriptors of engines' memory that the server has; of all engines when none is named."""
        names = [engine.facts.memory for engine in engines] or ["kvgrpc-test-"]
        return sum(name in line for line in (*self.maps(), *self.files()) for name in names)

    def files(self) -> list[str]:
        """What its descriptors are."""
        found: list[str] = []
        for fd in os.listdir(f"/proc/{self.served.process.pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/{self.served.process.pid}/fd/{fd}"))
        return found

    def maps(self) -> list[str]:
        return Path(f"/proc/{self.served.process.pid}/maps").read_text().splitlines()

    def mappings(self) -> int:
        """How many it has, less the four that a thread may have: pools grow when they are used, and gRPC's threads come
        and go."""
        return len(self.maps()) - 4 * len(os.listdir(f"/proc/{self.served.process.pid}/task"))

    # ---- claims -----------------------------------------------------------------------------------------------------

    def assert_well(self, apart_from: str = "") -> None:
        """It lives and has nothing to complain of, or nothing but that."""
        assert self.served.process.poll() is None, self.served.log
        found = [line for line in complaints(self.served.log) if not apart_from or apart_from not in line]
        assert not found, found


@contextlib.contextmanager
def stand(
    *flags: str, gated: bool = False, uid: int = 0, room: tuple[str, ...] = (), l1: str = "64MiB"
) -> Iterator[Stand]:
    """The real server; with ``gated`` the one whose copies can be held, which becomes another user if wanted; with
    ``room`` (what tests.hostile.room takes) in a place with little of it. Of a flag that is repeated the last counts.
    """
    module = "tests.hostile.gated" if gated else "tests.hostile.room" if room else ""
    words = (*((f"uid={uid}",) if uid else ()), *room, *FLAGS, *(("--l1-size", l1) if l1 else ()), *flags)
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(serving(*words, module=module))
        operator = stack.enter_context(Client(served.address, "operator"))
        gates = stack.enter_context(connect(str(served.socket))) if gated else None
        yield Stand(served, operator, stack, gates)


def until(condition: Callable[[], object], timeout_s: float = 30.0, what: str = "it") -> float:
    """Seconds until the condition is true."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"{what} did not come true within {timeout_s} s"
        time.sleep(0.005)
    return time.monotonic() - began


def refusal_of(*words: str, folder: Path, prefix: tuple[str, ...] = ()) -> str:
    """What a server says that does not start."""
    command = [*prefix, sys.executable, "-m", "kvgrpc", "serve", "--socket", str(folder / "s"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done
    return done.stderr
