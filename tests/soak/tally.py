# SPDX-License-Identifier: Apache-2.0
"""Counts of the soak's engines, in memory that outlives them: each engine has a row, and nobody else writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = (
    "steps",
    "stores",
    "stored_chunks",
    "lookups",
    "asked_chunks",
    "found_chunks",
    "retrieves",
    "loaded_chunks",
    "right_bytes",
    "wrong_places",
    "torn_chunks",
    "failed_chunks",
    "expired_copies",
    "cancelled_copies",
    "canary_looks",
    "sessions",
)


class Tally:
    """Rows of counts over a raw array of ``len(NAMES)`` unsigned 64-bit numbers each."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers

    @staticmethod
    def size(rows: int) -> int:
        return rows * len(NAMES)

    def add(self, row: int, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            self.numbers[row * len(NAMES) + NAMES.index(name)] += count

    def of(self, row: int) -> dict[str, int]:
        return dict(zip(NAMES, self.numbers[row * len(NAMES) : (row + 1) * len(NAMES)], strict=True))

    def total(self) -> dict[str, int]:
        return {name: sum(self.numbers[at :: len(NAMES)]) for at, name in enumerate(NAMES)}
