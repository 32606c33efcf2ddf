# SPDX-License-Identifier: Apache-2.0
"""Who goes when the arena is full: tails first, by recency, priority and tenant; never what is in use."""

from __future__ import annotations

import pytest

from kvgrpc.core import types as t
from kvgrpc.core.types import Policy, Priority
from tests.core.desk import CHUNK, OBJECT, Desk, EngineDesk

LOW, HIGH = Policy(priority=Priority.LOW), Policy(priority=Priority.HIGH)


def present(engine: EngineDesk, prompt: str, chunks: int = 8) -> list[int]:
    """Which chunks of a prompt are there; looks without using them."""
    space = engine.desk.book.index.spaces[engine.space]
    return [at for at, key in enumerate(engine.content(prompt, chunks).keys) if key in space.table.chunks]


def test_the_least_recently_used_goes_first_and_only_as_much_as_is_needed():
    desk = Desk(chunks=8)
    e = desk.engine()
    e.store("a", 4)
    e.store("b", 4)
    assert e.hits("a") == 4  # a is younger now
    assert e.store("c", 2) == "2 STORED"
    assert (present(e, "a"), present(e, "b"), present(e, "c")) == ([0, 1, 2, 3], [0, 1], [0, 1])
    assert desk.book.counters["evicted_chunks"] == 2


def test_tails_go_before_heads_also_when_heads_are_freed_first():
    desk = Desk(chunks=8, limits=t.CoreLimits(pin_share=1.0))
    e = desk.engine()
    e.store("a", 8)
    job = e.lookup("a", 8)
    assert e.free(job, start=0, end=3) == 3
    assert e.retrieve(job, start=3 * CHUNK, end=8 * CHUNK) == "5 LOADED"
    e.store("b", 2)
    assert present(e, "a") == [0, 1, 2, 3, 4, 5]


def test_tails_go_first_after_the_lease_of_a_part_has_expired():
    desk = Desk(chunks=8, limits=t.CoreLimits(pin_share=1.0))
    e = desk.engine()
    e.store("a", 8)
    e.free(e.lookup("a", 8), start=0, end=4)
    desk.pass_time(desk.limits.lease_ns)
    e.store("b", 3)
    assert present(e, "a") == [0, 1, 2, 3, 4]


def test_a_store_touches_the_prefix_before_it():
    desk = Desk(chunks=8)
    e = desk.engine()
    e.store("a", 3)
    e.store("b", 2)
    e.store("a", 6, start=3 * CHUNK)  # chunks 3 to 5: their heads were used, too
    e.store("c", 2)
    assert (present(e, "a"), present(e, "b")) == ([0, 1, 2, 3, 4, 5], [])


def test_a_store_whose_head_another_call_writes_leaves_no_tail_younger_than_it():
    desk = Desk(chunks=8, auto=False)
    e, f = desk.engine("e"), desk.engine("f")
    e.store("a", 2)
    first = next(iter(desk.slices.values()))
    f.store("a", 4)
    assert f.ended() == "waiting"
    desk.report(first)
    desk.report()
    assert f.ended() == "2 BEING_WRITTEN, 2 STORED"
    desk.auto = True
    e.store("b", 5)
    assert present(e, "a") == [0, 1, 2]


def test_a_store_never_evicts_the_prefix_before_its_range():
    desk = Desk(chunks=8)
    e = desk.engine()
    e.store("a", 4)
    e.store("x", 4)
    assert e.store("a", 10, start=4 * CHUNK) == "4 STORED, 2 REFUSED NO_ROOM"
    assert (present(e, "a", 10), present(e, "x")) == ([0, 1, 2, 3, 4, 5, 6, 7], [])


def test_the_end_of_a_hold_makes_nothing_younger():
    desk = Desk(chunks=8)
    e = desk.engine()
    e.store("old", 2)
    e.pin("old", 2)
    e.store("a", 4)
    e.store("x", 3)  # full: the oldest are held, so a's tail goes
    assert (present(e, "old"), present(e, "a")) == ([0, 1], [0, 1, 2])
    desk.book.unpin(desk.now, b"pin")
    desk.step()
    e.store("y", 1)
    assert (present(e, "old"), present(e, "a")) == ([0], [0, 1, 2]), "what the hold kept goes at its old place"


def test_what_was_passed_over_while_in_use_keeps_its_order():
    """Chunks that a search met in use go first when nobody uses them any more, tails before heads."""
    desk = Desk(chunks=8)
    e = desk.engine()
    e.store("a", 4)
    job = e.lookup("a", 4)
    e.store("b", 5)
    assert present(e, "b") == [0, 1, 2, 3], "its own tail found no room"
    e.free(job)
    for kept in ([0, 1, 2], [0, 1], [0], []):
        assert e.store(f"c{len(kept)}", 1) == "1 STORED"
        assert (present(e, "a"), present(e, "b", 4)) == (kept, [0, 1, 2, 3])


def test_a_use_in_between_makes_young_what_was_passed_over():
    desk = Desk(chunks=8)
    e = desk.engine()
    e.store("a", 4)
    job = e.lookup("a", 4)
    e.store("b", 5)
    e.free(job)
    assert e.hits("a") == 4
    e.store("c", 2)
    assert (present(e, "a"), present(e, "b", 4)) == ([0, 1, 2, 3], [0, 1])


def test_low_priority_goes_before_normal_before_high_whatever_the_recency():
    desk = Desk(chunks=6)
    e = desk.engine()
    e.store("high", 2, policy=HIGH)
    e.store("normal", 2)
    e.store("low", 2, policy=LOW)
    left = {}
    for step in range(3):
        e.store(f"new{step}", 2, policy=HIGH)
        left[step] = [name for name in ("low", "normal", "high") if present(e, name)]
    assert left == {0: ["normal", "high"], 1: ["high"], 2: []}


def test_a_use_raises_the_priority_and_never_lowers_it():
    desk = Desk(chunks=4)
    e = desk.engine()
    e.store("a", 2, policy=LOW)
    e.free(e.lookup("a", 2, policy=HIGH))
    e.free(e.lookup("a", 2, policy=LOW))
    e.store("b", 2)
    e.store("c", 2)
    assert (present(e, "a"), present(e, "b")) == ([0, 1], [])


def test_an_unpinned_lookup_counts_as_a_use():
    desk = Desk(chunks=8, limits=t.CoreLimits(pin_share=0.25))
    e = desk.engine()
    e.store("a", 4)
    e.store("b", 4)
    answer = e.lookup("a", 4)
    assert not answer.status.pinned
    e.store("c", 4)
    assert (present(e, "a"), present(e, "b")) == ([0, 1, 2, 3], [])


def test_nothing_in_use_is_evicted_and_the_rest_of_the_store_is_refused():
    desk = Desk(chunks=4, limits=t.CoreLimits(pin_share=1.0))
    e = desk.engine()
    e.store("a", 3)
    job = e.lookup("a", 3)
    assert e.store("b", 3) == "1 STORED, 2 REFUSED NO_ROOM"
    assert e.free(job) == 3
    assert e.store("b", 4) == "1 RESIDENT, 3 STORED"
    assert e.hits("a") == 0
    assert desk.book.counters["refused_no_room"] == 2


def test_a_turn_has_a_limit_of_victims():
    desk = Desk(chunks=8, limits=t.CoreLimits(victims_per_turn=2, page_bytes=4 * OBJECT))
    e = desk.engine()  # four objects share a page
    e.store("a", 8)
    big = desk.engine("big", model="big", block_bytes=1024)
    assert big.store("b", 1) == "1 REFUSED NO_ROOM"
    assert big.store("b", 1) == "1 STORED", "each try gets a turn of its own"
    assert len(present(e, "a")) == 4


# ---- tenants ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tenants() -> tuple[Desk, EngineDesk, EngineDesk]:
    desk = Desk(chunks=16)
    return desk, desk.engine("e", salt="t1"), desk.engine("f", salt="t2")


def test_a_quota_evicts_inside_the_tenant_only(tenants: tuple[Desk, EngineDesk, EngineDesk]):
    desk, one, two = tenants
    two.store("old", 4)
    desk.book.set_quota("t1", 4 * OBJECT)
    one.store("a", 4)
    assert one.store("b", 3) == "3 STORED"
    assert (present(one, "a"), present(one, "b"), present(two, "old")) == ([0], [0, 1, 2], [0, 1, 2, 3])
    assert desk.book.index.accounts["t1"].used_bytes == 4 * OBJECT


def test_a_quota_evicts_the_tenants_low_priority_first(tenants: tuple[Desk, EngineDesk, EngineDesk]):
    desk, one, _ = tenants
    desk.book.set_quota("t1", 4 * OBJECT)
    one.store("a", 2)
    one.store("low", 2, policy=LOW)
    one.store("b", 2)
    assert (present(one, "a"), present(one, "low")) == ([0, 1], [])


def test_a_store_that_fills_its_quota_with_itself_keeps_its_head(tenants: tuple[Desk, EngineDesk, EngineDesk]):
    desk, one, _ = tenants
    desk.book.set_quota("t1", 4 * OBJECT)
    assert one.store("a", 6) == "4 STORED, 2 REFUSED QUOTA"
    assert desk.book.counters["refused_quota"] == 2


def test_a_quota_set_at_run_time_holds_for_what_is_there(tenants: tuple[Desk, EngineDesk, EngineDesk]):
    desk, one, two = tenants
    one.store("a", 6)
    two.store("x", 2)
    desk.book.set_quota("t1", 3 * OBJECT)
    assert present(one, "a") == [0, 1, 2, 3, 4, 5], "nothing goes before room is needed"
    assert one.store("b", 1) == "1 STORED"
    assert present(one, "a") == [0, 1]
    assert present(two, "x") == [0, 1]
    desk.book.set_quota("t1", None)
    assert one.store("c", 8) == "8 STORED"
    assert present(one, "a") == [0, 1]


def test_an_object_that_no_quota_can_hold_costs_the_tenant_nothing(tenants: tuple[Desk, EngineDesk, EngineDesk]):
    desk, one, _ = tenants
    one.store("a", 4)
    desk.book.set_quota("t1", 4 * OBJECT)
    big = desk.engine("big", salt="t1", model="big", block_bytes=8 * 256)
    assert big.store("b", 1) == "1 REFUSED QUOTA"
    assert present(one, "a") == [0, 1, 2, 3]


def test_a_quota_counts_what_an_object_takes(tenants: tuple[Desk, EngineDesk, EngineDesk]):
    desk, _, _ = tenants
    odd = desk.engine("odd", salt="t1", model="odd", block_bytes=300)  # 1,200 bytes: two pages
    desk.book.set_quota("t1", 5 * OBJECT)
    assert odd.store("a", 4) == "2 STORED, 2 REFUSED QUOTA"


def test_an_object_larger_than_the_arena_is_refused_by_name():
    desk = Desk(chunks=4)
    small, big = desk.engine("small"), desk.engine("big", model="big", block_bytes=5 * 256)
    small.store("a", 4)
    assert big.store("b", 2) == "2 REFUSED OBJECT_TOO_LARGE"
    assert small.hits("a") == 4


def test_storing_one_rank_never_evicts_the_other_ranks_object_of_the_same_chunk():
    desk = Desk(chunks=4)
    e = desk.engine(tp_size=2, kv_tp_size=2)
    e.store("a", 1, worker=0)
    e.store("b", 3, worker=0)
    assert e.store("a", 1, worker=1) == "1 STORED"
    assert e.hits("a", 1) == 1
    assert present(e, "b") == [0, 1]
