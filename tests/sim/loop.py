# SPDX-License-Identifier: Apache-2.0
"""Simulated time: a heap of wake-ups and processes written as generators.

A process yields a number of nanoseconds (sleep) or a Signal (wait until it fires; the yield's value is the signal's).
Nothing runs at the same time as anything else; ties go by order of arrival, so a seed always gives the same run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from typing import Any


class PromiseError(AssertionError):
    """The core did something that a user would suffer from."""


class Signal:
    """Fires once, with a value; whoever waits for it, or will wait, gets the value."""

    def __init__(self) -> None:
        self.fired = False
        self.value: Any = None
        self.waiting: list[Task] = []


Process = Generator["int | Signal", Any, None]


class Task:
    """A running process; ``end`` makes it never run again. ``done`` fires when it has come to its own end."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.alive = True
        self.done = Signal()

    def end(self) -> None:
        self.alive = False

    def advance(self, value: Any) -> int | Signal | None:
        """Runs it to its next yield; None when it is over."""
        assert self.alive
        try:
            return self._process.send(value)
        except StopIteration:
            self.alive = False
            return None


class Loop:
    """The clock and the queue. Time in nanoseconds."""

    def __init__(self) -> None:
        self.now = 1
        self.events = 0
        self._heap: list[tuple[int, int, Callable[[Any], None], Any]] = []
        self._order = 0

    def at(self, when: int, act: Callable[[Any], None], value: Any = None) -> None:
        """Calls ``act(value)`` at ``when`` (now, when that has passed)."""
        self._order += 1
        heapq.heappush(self._heap, (max(when, self.now), self._order, act, value))

    def spawn(self, process: Process, delay_ns: int = 0) -> Task:
        task = Task(process)
        self.at(self.now + delay_ns, lambda _: self._step(task, None))
        return task

    def fire(self, signal: Signal, value: Any = None) -> None:
        if signal.fired:
            return
        signal.fired, signal.value = True, value
        for task in signal.waiting:
            self.at(self.now, lambda v, t=task: self._step(t, v), value)
        signal.waiting.clear()

    def run(self, until_ns: int, after_each: Callable[[], None]) -> None:
        """Runs everything that is due up to ``until_ns``, then sets the clock there."""
        while self._heap and self._heap[0][0] <= until_ns:
            when, _, act, value = heapq.heappop(self._heap)
            self.now = when
            self.events += 1
            act(value)
            after_each()
        self.now = max(self.now, until_ns)

    def _step(self, task: Task, value: Any) -> None:
        if not task.alive:
            return
        want = task.advance(value)
        if want is None:
            self.fire(task.done)
            return
        if isinstance(want, Signal):
            if want.fired:
                self.at(self.now, lambda v: self._step(task, v), want.value)
            else:
                want.waiting.append(task)
        else:
            self.at(self.now + want, lambda _: self._step(task, None))
