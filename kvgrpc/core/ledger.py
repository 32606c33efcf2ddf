# SPDX-License-Identifier: Apache-2.0
"""What every part of the core shares: the limits, the outbox, the counters."""

from __future__ import annotations

from collections import Counter

from kvgrpc.core.types import Action, CoreLimits


class Ledger:
    """``outbox`` is what the hands have to do; ``counters`` only grow."""

    def __init__(self, limits: CoreLimits) -> None:
        self.limits = limits
        self.outbox: list[Action] = []
        self.counters: Counter[str] = Counter()
        self._next_id = 0

    def next_id(self) -> int:
        """A number that was not used before: of slices, probes, reads."""
        self._next_id += 1
        return self._next_id
