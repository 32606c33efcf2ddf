# SPDX-License-Identifier: Apache-2.0
"""The soak's engines as processes, forked from one that has imported everything and started nothing."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any

from tests.soak.engine import Engine, Place
from tests.soak.tally import Tally

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])


def _live(connection: Connection, place: Place, numbers: Any, life_s: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.alarm(life_s)
    try:
        Engine(place, Tally(numbers)).run(connection.poll)
    except BaseException:  # noqa: BLE001 - whatever it is, the soak is told
        connection.send(traceback.format_exc())
        os._exit(1)
    connection.send("")


class EngineProcess:
    """One engine, from its start to its end or death."""

    def __init__(self, place: Place, numbers: Any, life_s: int) -> None:
        self.place = place
        self._connection, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_live, args=(theirs, place, numbers, life_s), daemon=True)
        self._process.start()
        theirs.close()

    def problem(self, timeout_s: float = 0.0) -> str | None:
        """What went wrong; "" when it has ended as told; None when it lives."""
        if self._connection.poll(timeout_s):
            try:
                return self._connection.recv()
            except EOFError:
                return f"the engine died by itself: {self.place}"
        return None

    def end(self) -> None:
        """Tells it to finish; ``problem`` says when it has."""
        self._connection.send("end")

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def truncate(self) -> None:
        """Takes its memory away. It dies when it looks at it."""
        os.truncate(f"/dev/shm/{self.place.memory}", 0)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone, and its memory."""
        self._process.kill()
        self._process.join()
        self._connection.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/{self.place.memory}")
