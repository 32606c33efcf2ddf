# SPDX-License-Identifier: Apache-2.0
"""Each rule of the core that protects data is missed by the world when it is taken out."""

from __future__ import annotations

import pytest

from tests.sim.loop import PromiseError
from tests.sim.mutants import MUTANTS, mutated
from tests.sim.world import World

SEEDS = 500


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_mutant_is_found(name: str) -> None:
    """By a broken promise, not by the core's own invariants, which are not looked at here."""
    with mutated(name):
        for seed in range(SEEDS):
            try:
                World(seed, with_invariants=False).run()
            except PromiseError:
                return
    raise AssertionError(f"{SEEDS} worlds did not notice that {name} is missing")
