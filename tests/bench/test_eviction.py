# SPDX-License-Identifier: Apache-2.0
"""The trace benchmark: the core's order is what it is said to be, and nothing beats the bound."""

from __future__ import annotations

import random

import pytest

from benchmarks.eviction import POLICIES, TRACE, Bound, Core, Lru, hit_rate, load


@pytest.mark.parametrize("seed", range(3))
def test_the_core_evicts_as_the_model_of_least_recently_used(seed: int) -> None:
    rng = random.Random(seed)
    core, lru = Core(50), Lru(50)
    for number in range(2000):
        family = rng.randrange(20)
        blocks = [family * 1000 + at for at in range(rng.randrange(1, 12))]
        if rng.random() < 0.3:
            blocks.append(100_000 + number)
        found = [block in core for block in blocks]
        assert found == [block in lru for block in blocks]
        assert found == sorted(found, reverse=True), "a head is there as long as its tail"
        for policy in (core, lru):
            policy.use(blocks, sum(found))


def test_figures_of_the_trace() -> None:
    """At 1,000 blocks, on all of it; the whole table is ``python -m benchmarks.eviction``."""
    requests = load(TRACE)
    rates = {name: hit_rate(make(1000), requests) for name, make in POLICIES.items()}
    assert {name: round(rate, 3) for name, rate in rates.items() if name != "s3-fifo"} == {
        "fifo": 0.043,
        "lru": 0.045,
        "core": 0.045,
        "arc": 0.053,
    }
    assert max(rates.values()) < hit_rate(Bound(1000, requests), requests) < 0.2
