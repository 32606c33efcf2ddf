# SPDX-License-Identifier: Apache-2.0
"""What is old is collected once and then left alone, but only while nobody waits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Generator

import pytest

from kvgrpc.runtime.garbage import BUSY_OBJECTS, BUSY_S, FULL_S, FULL_WAIT_S, YOUNG_COLLECTIONS, Freezer


class World:
    """A freezer, whether a call runs, and the time."""

    def __init__(self) -> None:
        self.idle = True
        self.now_s = 0.0
        self.freezer = Freezer(lambda: self.idle, lambda: self.now_s)


@pytest.fixture
def world() -> Generator[World, None, None]:
    world = World()
    yield world
    world.freezer.close()


class Node:
    """Part of a cycle."""

    def __init__(self) -> None:
        self.me = self


def young() -> None:
    for _ in range(YOUNG_COLLECTIONS):
        gc.collect(0)


def test_what_survives_is_frozen_and_what_does_not_is_collected(world: World) -> None:
    kept, lost = Node(), Node()
    gone = weakref.ref(lost)
    del lost
    before = gc.get_freeze_count()
    world.freezer.step()
    assert gc.get_freeze_count() == before, "it was not worth it"
    young()
    world.freezer.step()
    assert gone() is None
    assert gc.get_freeze_count() > before
    assert not any(one is kept for one in gc.get_objects())


def test_nobody_is_made_to_wait(world: World) -> None:
    before = gc.get_freeze_count()
    world.idle = False
    young()
    world.freezer.step()
    assert gc.get_freeze_count() == before
    world.idle = True
    world.freezer.step()
    assert gc.get_freeze_count() > before


def test_where_a_call_always_runs_what_is_new_is_frozen_all_the_same(world: World) -> None:
    world.idle = False
    kept, lost = Node(), Node()
    gone = weakref.ref(lost)
    del lost
    many = [[kept] for _ in range(BUSY_OBJECTS)]
    young()
    world.now_s = BUSY_S - 1
    world.freezer.step()
    before = gc.get_freeze_count()
    world.now_s = BUSY_S
    world.freezer.step()
    assert gone() is None
    assert gc.get_freeze_count() > before
    assert not any(one is kept for one in gc.get_objects())
    del many
    world.now_s = FULL_S
    young()
    world.freezer.step()
    assert not any(one is kept for one in gc.get_objects()), "the long one waits for a moment without a call"


def test_where_a_call_always_runs_those_of_now_are_not_kept_for_little(world: World) -> None:
    """What is frozen while they run is garbage as soon as they end, and stays."""
    world.idle = False
    calls = [Node() for _ in range(100)]
    gone = [weakref.ref(call) for call in calls]
    young()
    world.now_s = 10 * BUSY_S
    world.freezer.step()
    del calls
    gc.collect()
    assert not any(call() for call in gone)


def test_where_a_call_always_runs_a_cycle_that_was_frozen_goes_as_well(world: World) -> None:
    call = Node()
    gone = weakref.ref(call)
    young()
    world.freezer.step()
    del call
    world.idle = False
    world.now_s = FULL_S + FULL_WAIT_S - 1
    young()
    world.freezer.step()
    assert gone() is not None
    world.now_s += 1
    world.freezer.step()
    assert gone() is None


def test_a_cycle_that_was_frozen_while_it_was_in_use_goes_within_an_hour(world: World) -> None:
    stream = Node()
    gone = weakref.ref(stream)
    young()
    world.freezer.step()
    del stream
    young()
    world.freezer.step()
    assert gone() is not None
    world.now_s = FULL_S
    young()
    world.freezer.step()
    assert gone() is None


def test_the_collector_is_given_back(world: World) -> None:
    world.freezer.close()
    assert gc.get_freeze_count() == 0
