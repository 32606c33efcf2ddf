# SPDX-License-Identifier: Apache-2.0
"""Where time comes from. A clock is any callable that answers nanoseconds and never goes back."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], int]

monotonic_clock: Clock = time.monotonic_ns


class ManualClock:
    """A clock that stands still until it is told otherwise; call ``Driver.tick`` after ``advance``."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def __call__(self) -> int:
        return self._now_ns

    def advance(self, step_ns: int) -> None:
        self._now_ns += step_ns
