# SPDX-License-Identifier: Apache-2.0
"""A fixed set of seeds, so that every run of the tests passes through the same worlds; ``make sim`` runs fresh ones."""

from __future__ import annotations

import pytest

from tests.sim.world import World

BATCH = 25


@pytest.mark.parametrize("first", range(0, 150, BATCH))
def test_seeds(first: int) -> None:
    """A failure names its seed: ``python -m tests.sim --verbose SEED`` shows the way there."""
    for seed in range(first, first + BATCH):
        try:
            World(seed).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_same_seed_same_life() -> None:
    """A failure can be lived through again."""
    assert World(7).run() == World(7).run()
