# SPDX-License-Identifier: Apache-2.0
"""When a server's garbage is collected.

A cached chunk is a handful of objects that live for hours, and the core makes no cycles; a full collection looks at all
of them, on the event loop: half a second for half a million chunks. Cycles come from calls alone (gRPC makes a small
one for each, a refusal a larger one). So whenever no call is running, what is old is collected and then frozen:
collections look no more at it. Where there is always one, it is done all the same once so much has come that it
would take longer to wait on; not sooner, since the cycles of all calls that run are frozen with it. Those, and what was
frozen with a stream that ended later, are found by a full collection once an hour, which waits for a moment without a
call, though not for ever.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

STEP_S = 1.0
YOUNG_COLLECTIONS = 10
"""So many collections of young objects, some thousand objects, are worth a freeze."""
BUSY_S = 5.0
"""Longest wait for a moment without a call, once there are BUSY_OBJECTS."""
BUSY_OBJECTS = 200_000
"""Some 30,000 chunks, which take the collector 50 ms. Each freeze keeps the calls of the moment: of eight busy engines
0.2 MiB."""
FULL_S = 3600.0
FULL_WAIT_S = 600.0
"""Longest wait of a full collection for a moment without a call."""


class Freezer:
    """``idle`` answers whether no call is running. Used on one event loop; owns the process's collector."""

    def __init__(self, idle: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._idle = idle
        self._clock = clock
        self._full_at_s = clock() + FULL_S
        gc.collect()
        self._freeze()

    def _freeze(self) -> None:
        gc.freeze()
        self._collections = self._collected()
        self._frozen_at_s = self._clock()

    def _collected(self) -> int:
        return sum(generation["collections"] for generation in gc.get_stats())

    def step(self) -> None:
        """Collects and freezes if it is worth it and nobody waits, or somebody always does."""
        if self._collected() - self._collections < YOUNG_COLLECTIONS:
            return
        now_s, idle = self._clock(), self._idle()
        full = now_s >= self._full_at_s + (0.0 if idle else FULL_WAIT_S)
        if not (idle or full) and (now_s < self._frozen_at_s + BUSY_S or len(gc.get_objects()) < BUSY_OBJECTS):
            return
        if full:
            self._full_at_s = now_s + FULL_S
            gc.unfreeze()
        gc.collect()
        self._freeze()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(STEP_S)
            self.step()

    def close(self) -> None:
        """Gives the collector back as it was."""
        gc.unfreeze()
