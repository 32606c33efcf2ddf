# SPDX-License-Identifier: Apache-2.0
"""What a worker counts for vLLM's metrics: plain data that vLLM carries to whoever shows it. All of it is summed over
an engine's workers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import cast

Data = dict[str, "int | list[float]"]

COUNTS = {
    "loaded_tokens": "Tokens whose KV was loaded out of kvgrpc, summed over workers.",
    "load_failed_tokens": "Tokens whose KV was to be loaded and could not be, summed over workers.",
    "stored_tokens": "Tokens whose KV was stored into kvgrpc, summed over workers.",
    "store_failed_tokens": "Tokens whose KV was to be stored and could not be, summed over workers.",
}
TIMES = {
    "load_seconds": "From the order to load a request's prefix to its end, as a worker saw it.",
    "store_seconds": "From the order to store chunks to its end, as a worker saw it.",
}
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Tally:
    """Counts and times since the last ``take``."""

    def __init__(self) -> None:
        self._data: Data = {}

    def count(self, name: str, number: int) -> None:
        if number:
            self._data[name] = cast("int", self._data.get(name, 0)) + number

    def time(self, name: str, seconds: float) -> None:
        cast("list[float]", self._data.setdefault(name, [])).append(seconds)

    def take(self) -> Data:
        data, self._data = self._data, {}
        return data


def merge(into: Data, other: Mapping[str, int | list[float]]) -> None:
    """Adds ``other`` to ``into``."""
    for name, value in other.items():
        if isinstance(value, list):
            into[name] = [*cast("list[float]", into.get(name, [])), *value]
        else:
            into[name] = cast("int", into.get(name, 0)) + value


def summary(data: Data) -> dict[str, int | float]:
    """For one line of the log."""
    said: dict[str, int | float] = {}
    for name in COUNTS:
        if name in data:
            said[name.replace("_", " ")] = cast("int", data[name])
    for name in TIMES:
        if times := cast("list[float]", data.get(name, [])):
            what = name.removesuffix("_seconds")
            said[f"{what}s"] = len(times)
            said[f"{what} p50 (ms)"] = round(statistics.median(times) * 1000, 1)
            said[f"{what} worst (ms)"] = round(max(times) * 1000, 1)
    return said
