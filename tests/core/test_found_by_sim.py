# SPDX-License-Identifier: Apache-2.0
"""The smallest ways to faults that the simulation found."""

from __future__ import annotations

from kvgrpc.core import types as t
from tests.core.desk import CHUNK, OBJECT, Desk
from tests.core.test_eviction import present


def test_a_store_does_not_evict_the_prefix_before_its_range():
    """Seed 100322: an engine that computed the end of a prompt stores it; its beginning is of no less use."""
    desk = Desk(chunks=4)
    e = desk.engine()
    e.store("a", 3)
    assert e.store("a", 6, start=3 * CHUNK) == "1 STORED, 2 REFUSED NO_ROOM"
    assert present(e, "a") == [0, 1, 2, 3]


def test_a_job_whose_last_pin_goes_between_two_slices_is_not_leased_any_more():
    """Found by the state machine: the end of the hit was freed while its beginning was being read, slice by slice."""
    desk = Desk(auto=False, limits=t.CoreLimits(slice_bytes=OBJECT, pin_share=1.0))
    e = desk.engine()
    e.store("a", 2)
    desk.run_copies()
    job = e.lookup("a", 2)
    assert e.retrieve(job) == "waiting"
    assert e.free(job, start=1, end=2) == 1
    desk.report()  # the first chunk is read; the second, though freed, is still being copied
    assert (desk.book.counts().pins, e.ended()) == (0, "waiting")
    desk.report()
    assert e.ended() == "2 LOADED"
