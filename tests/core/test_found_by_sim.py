# SPDX-License-Identifier: Apache-2.0
"""The smallest ways to faults that the simulation found."""

from __future__ import annotations

from tests.core.desk import CHUNK, Desk
from tests.core.test_eviction import present


def test_a_store_does_not_evict_the_prefix_before_its_range():
    """Seed 100322: an engine that computed the end of a prompt stores it; its beginning is of no less use."""
    desk = Desk(chunks=4)
    e = desk.engine()
    e.store("a", 3)
    assert e.store("a", 6, start=3 * CHUNK) == "1 STORED, 2 REFUSED NO_ROOM"
    assert present(e, "a") == [0, 1, 2, 3]
