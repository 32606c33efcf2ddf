# SPDX-License-Identifier: Apache-2.0
"""Threads with affinity: everything of one client runs on one thread, in the order it was submitted.

A new client is bound to the thread with the fewest clients, so no two share one while another is free; bind only those
that will have work. Threads start with their first work. All methods belong to the event loop's thread, ``submit_wait``
also to the bound one; what is submitted runs on the bound thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from kvgrpc.runtime.figures import Spread, added_up

P = ParamSpec("P")
T = TypeVar("T")


class _Lane:
    """One thread and its bookkeeping."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.clients: set[str] = set()
        self.submitted = 0  # written by the loop only
        self.ended = 0  # written by the thread only
        self.busy_since_s = [0.0, 0.0]
        # made now, since two threads may submit at once; each starts its thread with its first work
        self.pools = [ThreadPoolExecutor(1, thread_name_prefix=f"{name}-{number}{kind}") for kind in ("", "-wait")]
        self.waited = Spread()  # seconds from submit to begin; written by the thread only

    @property
    def queued(self) -> int:
        return self.submitted - self.ended


class AffinityExecutor:
    """``max_workers`` threads, each with the clients that are bound to it."""

    def __init__(self, max_workers: int, *, name: str = "kvgrpc-affinity") -> None:
        if max_workers < 1:
            raise ValueError("max_workers must be at least 1")
        self._lanes = [_Lane(number, name) for number in range(max_workers)]
        self._bound: dict[str, _Lane] = {}

    def bind(self, client_id: str) -> int:
        """Thread number of the client, bound now if it was not."""
        lane = self._bound.get(client_id)
        if lane is None:
            lane = self._least_loaded()
            lane.clients.add(client_id)
            self._bound[client_id] = lane
        return lane.number

    def _least_loaded(self) -> _Lane:
        return min(self._lanes, key=lambda lane: (len(lane.clients), lane.queued))

    def release(self, client_id: str) -> None:
        """Forgets the client; what it submitted still runs."""
        lane = self._bound.pop(client_id, None)
        if lane is not None:
            lane.clients.discard(client_id)

    def thread_of(self, client_id: str) -> int | None:
        """Thread number, or None for a client that is not bound."""
        lane = self._bound.get(client_id)
        return None if lane is None else lane.number

    def submit(self, client_id: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Runs ``work`` on the client's thread after all it submitted before; for a client that is not bound, on any
        thread. Do not cancel the future: what was submitted runs."""
        return self._run(0, client_id, work, *args, **kwargs)

    def submit_wait(self, client_id: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As ``submit``, but on a second thread of the client's, for what only waits for something that its first one
        has launched; that one goes on meanwhile. May be called from the first one, too."""
        return self._run(1, client_id, work, *args, **kwargs)

    def _run(self, stage: int, client_id: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        lane = self._bound.get(client_id) or self._least_loaded()
        if not stage:
            lane.submitted += 1

        submitted_s = time.monotonic()

        def run() -> T:
            lane.busy_since_s[stage] = time.monotonic()
            if not stage:
                lane.waited.add(lane.busy_since_s[0] - submitted_s)
            try:
                return work(*args, **kwargs)
            finally:
                lane.busy_since_s[stage] = 0.0
                if not stage:
                    lane.ended += 1

        return lane.pools[stage].submit(run)

    def lanes(self) -> list[tuple[int, tuple[str, ...], int]]:
        """(thread, clients bound to it, pieces of work that have not ended) of every thread."""
        return [(lane.number, tuple(sorted(lane.clients)), lane.queued) for lane in self._lanes]

    def waited(self) -> Spread:
        """Seconds that work waited for its thread, of all threads."""
        return added_up(lane.waited for lane in self._lanes)

    def longest_busy_s(self) -> float:
        """How long the longest-running piece of work has been running; 0 when idle. For the watchdog."""
        now = time.monotonic()
        return max((now - since for lane in self._lanes for since in lane.busy_since_s if since), default=0.0)

    def close(self) -> None:
        """Waits for everything that was submitted."""
        for stage in range(2):  # the first may still give something to the second
            for lane in self._lanes:
                lane.pools[stage].shutdown(wait=True)
