# SPDX-License-Identifier: Apache-2.0
"""``kvgrpc serve`` whose copies can be held from another process: ``python -m tests.hostile.gated SOCKET FLAGS...``
(``uid=NUMBER`` before the flags: it becomes that user).

Everything is the real server's but for the gates of its mover. A client that has no gate is copied for as always, by
all threads.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from kvgrpc import app
from kvgrpc.cli.root import main as kvgrpc
from kvgrpc.core.types import Direction, RunSlice
from kvgrpc.transfer.gates import Gate, Gates
from kvgrpc.transfer.shm import SharedMemoryMover
from tests.e2e.unprivileged import import_everything

HELD_S = 60.0


class SteeredGates(Gates):
    """One gate a client and direction, set and released from outside."""

    def __init__(self) -> None:
        super().__init__()
        self._steered: dict[tuple[str, str], Gate] = {}

    def obey(self, act: str, client_id: str, direction: str, after_runs: int) -> bool:
        key = (client_id, direction)
        match act:
            case "hold":
                self._steered[key] = Gate(after_runs, Direction[direction], client_id, HELD_S)
            case "reached":
                return self._steered[key].wait_reached(0)
            case "release":
                self._steered.pop(key).release()
            case _:
                raise AssertionError(act)
        return True

    def pacer(self, work: RunSlice) -> Callable[[], None] | None:
        gate = self._steered.get((work.client_id, work.direction.name))
        return None if gate is None else partial(gate.pass_one, work)


GATES = SteeredGates()


def control_of(socket: str) -> str:
    return f"{socket}.gates"


def listen(address: str) -> None:
    with Listener(address) as listener:
        while True:
            with listener.accept() as connection:
                obey_all(connection)


def obey_all(connection: Connection) -> None:
    try:
        while True:
            connection.send(GATES.obey(*connection.recv()))
    except EOFError:
        return


def become(uid: int, socket: str) -> None:
    """Another user, who owns the socket's folder and may be unable to read where Python lies."""
    import_everything()
    os.chown(os.path.dirname(socket), uid, uid)
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


def main(socket: str, *flags: str) -> None:
    if flags[0].startswith("uid="):
        become(int(flags[0].removeprefix("uid=")), socket)
        flags = flags[1:]
    mover: Any = partial(SharedMemoryMover, gates=GATES)
    app.SharedMemoryMover = mover
    threading.Thread(target=listen, args=(control_of(socket),), daemon=True).start()
    kvgrpc(["serve", "--socket", socket, *flags])


@dataclass(frozen=True, slots=True)
class Hold:
    """A gate as the test sees it: the first copy that wants to move a run after so many others waits at it."""

    connection: Connection
    client_id: str
    direction: str

    def _ask(self, act: str, after_runs: int = 0) -> bool:
        self.connection.send((act, self.client_id, self.direction, after_runs))
        return self.connection.recv()

    def set(self, after_runs: int) -> Hold:
        self._ask("hold", after_runs)
        return self

    def reached(self) -> bool:
        """Whether a copy stands at the gate: it is in flight until ``release``."""
        return self._ask("reached")

    def wait_reached(self, timeout_s: float = 30.0) -> None:
        """Returns when a copy stands at the gate."""
        end = time.monotonic() + timeout_s
        while not self.reached():
            assert time.monotonic() < end, f"no copy of {self.client_id} came to the gate"
            time.sleep(0.001)

    def release(self) -> None:
        self._ask("release")


def connect(socket: str) -> Connection:
    return Client(control_of(socket))


if __name__ == "__main__":
    main(*sys.argv[1:])
