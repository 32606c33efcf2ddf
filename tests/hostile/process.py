# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own, forked from one that has imported everything and started nothing.

with EngineProcess(Facts(address)) as engine:
    engine.do("start")
    engine.do("store", "s", 1, 8, BLOCKS)  # any method of Engine; what it answers or raises comes back
    engine.do("ended", "s", 10)
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any

from tests.e2e.unprivileged import import_everything
from tests.hostile.engine import Engine, Facts
from tests.hostile.room import join_mounts

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])

NOT_REFUSED = ("", "SERVER_UNREACHABLE", "DEADLINE")
"""Problems of an engine that the server has not answered yet."""
LIFE_S = 300
"""No engine outlives this, whatever becomes of its test."""


def _live(connection: Connection, facts: Facts) -> None:
    signal.alarm(LIFE_S)
    if facts.mounts_of:
        join_mounts(facts.mounts_of)
    if facts.uid:
        import_everything()
        os.setgroups([])
        os.setgid(facts.uid)
        os.setuid(facts.uid)
    engine = Engine(facts)
    while True:
        try:
            act, args = connection.recv()
        except EOFError:
            return
        try:
            more = (connection,) if act == "traffic" else ()
            connection.send((True, getattr(engine, act)(*more, *args)))
        except Exception:  # noqa: BLE001 - the test is told, whatever it is
            connection.send((False, traceback.format_exc()))


class EngineProcess:
    """The test's end of an engine."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._connection, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_live, args=(theirs, facts), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._connection.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/{self.facts.memory}")

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def tell(self, act: str, *args: Any) -> None:
        """``answer`` is to follow."""
        self._connection.send((act, args))

    def answer(self, timeout_s: float = 60.0) -> Any:
        assert self._connection.poll(timeout_s), "the engine does not answer"
        good, answer = self._connection.recv()
        assert good, answer
        return answer

    def do(self, act: str, *args: Any, timeout_s: float = 60.0) -> Any:
        self.tell(act, *args)
        return self.answer(timeout_s)

    def stop_traffic(self) -> tuple[int, float]:
        self.tell("attached")
        answer = self.answer(120)
        assert self.answer() is True
        return answer

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        self._process.kill()
        self._process.join()
