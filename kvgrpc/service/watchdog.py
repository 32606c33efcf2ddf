# SPDX-License-Identifier: Apache-2.0
"""The watchdog: ``liveness`` fails while one piece of work has been running for too long.

The event loop itself needs no watching: when it stands still, health answers nothing, and that is a failure too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvgrpc.service.health import Health
from kvgrpc.telemetry.log import logger

log = logger("service")

LOOKS = 4
"""Looks a limit, so that a stall is seen soon after it has become one."""

PERIOD_MOST_S = 1.0


class Watchdog:
    """``busy_s`` answers how long the longest-running piece of work has been running; more than ``limit_s`` is a stall.

    Used on one event loop.
    """

    def __init__(self, health: Health, busy_s: Callable[[], float], limit_s: float) -> None:
        self._health = health
        self._busy_s = busy_s
        self._limit_s = limit_s

    async def run(self) -> None:
        """Until cancelled."""
        period_s = min(self._limit_s / LOOKS, PERIOD_MOST_S)
        alive = True
        while True:
            await asyncio.sleep(period_s)
            busy_s = self._busy_s()
            if (busy_s <= self._limit_s) is alive:
                continue
            alive = not alive
            self._health.set_alive(alive)
            if alive:
                log.info("work goes on")
            else:
                log.error("work stands still", running_s=round(busy_s, 1), limit_s=self._limit_s)
