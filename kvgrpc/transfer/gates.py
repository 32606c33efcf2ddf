# SPDX-License-Identifier: Apache-2.0
"""Gates that hold a copy between two runs, for tests and demonstrations of what happens when an engine dies in between.

A mover that was built without gates spends one comparison a piece on them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from kvgrpc.core.types import Direction, RunSlice

T = TypeVar("T")


class Gate:
    """One hold: the first slice that wants to move a run after ``after_runs`` others waits until ``release`` (or
    ``limit_s``, so that a test that fails leaves no thread behind). Made by ``Gates.hold``.

    Threads: any.
    """

    def __init__(self, after_runs: int, direction: Direction | None, client_id: str, limit_s: float) -> None:
        self._lock = threading.Lock()
        self._left = after_runs
        self._direction = direction
        self._client_id = client_id
        self._limit_s = limit_s
        self._reached = threading.Event()
        self._released = threading.Event()
        self.held: RunSlice | None = None
        """The slice that waits or has waited."""

    def wait_reached(self, timeout_s: float) -> bool:
        """Whether a copy has come to the gate within the time."""
        return self._reached.wait(timeout_s)

    def release(self) -> None:
        """Lets the copy go on. For good: the gate holds nothing any more."""
        self._released.set()

    def pass_one(self, work: RunSlice) -> None:
        """Counts a run that is about to be moved; blocks if it is the one to hold."""
        if self._direction not in (None, work.direction) or self._client_id not in ("", work.client_id):
            return
        with self._lock:
            self._left -= 1
            mine = self._left == -1
        if mine:
            self.held = work
            self._reached.set()
            self._released.wait(self._limit_s)


class Gates:
    """The gates of a mover.

    Threads: any; ``pace`` runs on the copying threads.
    """

    def __init__(self) -> None:
        self._gate: Gate | None = None
        self._made: list[Gate] = []

    def hold(
        self, after_runs: int, direction: Direction | None = None, client_id: str = "", limit_s: float = 60.0
    ) -> Gate:
        """Holds the copy that comes after ``after_runs`` more runs (of one direction, of one client); replaces an
        earlier gate, which keeps what it holds.
        """
        self._gate = Gate(after_runs, direction, client_id, limit_s)
        self._made.append(self._gate)
        return self._gate

    def release_all(self) -> None:
        """Releases every gate that was made, so that a test that fails ends at once."""
        for gate in self._made:
            gate.release()

    def pacer(self, work: RunSlice) -> Callable[[], None] | None:
        """What to call before each run of a slice that begins now; None when no gate is set."""
        return None if self._gate is None else partial(self._gate.pass_one, work)

    def pace(self, work: RunSlice, runs: Iterator[T]) -> Iterator[T]:
        """``runs``, held where a gate says so."""
        for run in runs:
            if self._gate is not None:
                self._gate.pass_one(work)
            yield run
