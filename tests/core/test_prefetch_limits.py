# SPDX-License-Identifier: Apache-2.0
"""Prefetch within its limits: budgets, room, sizes, priorities."""

from __future__ import annotations

import pytest

from kvgrpc.core import types as t
from kvgrpc.core.prefetch import NAME_BYTES
from kvgrpc.core.types import PrefetchStatus
from tests.core.desk import CHUNK, OBJECT, Desk
from tests.core.test_prefetch import status, tiered


def test_reads_in_flight_have_a_budget_and_lookups_wait_for_it_in_turn():
    desk = Desk(chunks=16, tiers=("disk",), limits=t.CoreLimits(prefetch_share=0.25, pin_share=1.0))
    e = desk.engine()
    one, two = e.lookup("a", 6), e.lookup("b", 6)
    desk.answer_probe("disk")
    desk.answer_probe("disk")
    for _ in range(9):
        assert len(desk.reads) == 4
        desk.end_read()
    assert (e.query(one), e.query(two).done) == (status(6, {"disk": 6}), False)
    desk.end_reads()
    assert e.query(two) == status(6, {"disk": 6})


def test_a_lookup_that_waits_for_others_reads_ends_with_what_is_ready_and_says_so():
    desk = Desk(chunks=16, tiers=("disk",), limits=t.CoreLimits(prefetch_share=0.25, pin_share=1.0))
    e = desk.engine()
    one, two = e.lookup("a", 6), e.lookup("b", 6)
    desk.answer_probe("disk")
    desk.answer_probe("disk")
    desk.end_read()
    desk.pass_time(t.CoreLimits().prefetch_wait_ns)
    assert e.query(one) == status(1, {"disk": 1}, "PREFETCH_TIMEOUT")
    assert e.query(two) == status(0, {}, "PREFETCH_TIMEOUT", pinned=False)
    desk.settle()
    e.free(one)
    desk.pass_time(6 * t.S)
    assert desk.states() == "15 free, 1 ready"


def test_a_read_that_failed_ends_the_prefix_for_who_waits_to_plan_on():
    desk = Desk(chunks=16, tiers=("disk",), limits=t.CoreLimits(prefetch_share=0.25, pin_share=1.0))
    e = desk.engine()
    job = e.lookup("a", 6)
    desk.answer_probe("disk")
    desk.end_read()
    desk.end_read(ok=False)
    desk.end_reads()
    assert e.query(job) == status(1, {"disk": 1}, "PREFETCH_FAILED")


@pytest.mark.parametrize("found", [0, 2])
def test_what_a_tier_did_not_answer_is_not_said_to_be_nowhere(found: int):
    """Else who warms or looks up beside a dead tier is told that it never had anything."""
    desk, e = tiered()
    job = e.lookup("a", 4)
    desk.answer_probe(*["disk"] * found, "", silent=True)
    desk.end_reads()
    expected = status(found, {"disk": found} if found else {}, "PREFETCH_FAILED", pinned=found > 0)
    assert e.query(job) == expected


def test_the_wait_grows_with_what_is_missing_up_to_a_cap():
    limits = t.CoreLimits(prefetch_wait_ns=t.S, prefetch_wait_token_ns=t.MS * 10, prefetch_wait_most_ns=2 * t.S)
    for chunks, waits in ((1, t.S + 16 * 10 * t.MS), (4, t.S + 64 * 10 * t.MS), (20, 2 * t.S)):
        desk = Desk(tiers=("disk",), limits=limits)
        e = desk.engine()
        job = e.lookup("a", chunks)
        desk.pass_time(waits - 1)
        assert not e.query(job).done
        desk.pass_time(1)
        assert e.query(job) == status(0, {}, "PREFETCH_TIMEOUT", pinned=False)


def test_prefetch_keeps_within_the_pin_budget_also_for_what_is_resident_behind_a_hole():
    desk = Desk(chunks=16, tiers=("disk",), limits=t.CoreLimits(pin_share=0.25, prefetch_share=1.0))
    e = desk.engine()
    e.store("a", 10, start=CHUNK)
    job = e.lookup("a", 10)
    desk.answer_probe("disk")
    desk.end_reads()
    assert e.query(job) == status(4, {"disk": 1, "l1": 3}, "PREFETCH_LIMIT")
    assert desk.arena.pinned_bytes == 4 * OBJECT


def test_without_any_pin_budget_left_nothing_is_prefetched():
    desk = Desk(chunks=16, tiers=("disk",), limits=t.CoreLimits(pin_share=0.25))
    e = desk.engine()
    e.store("a", 4)
    e.store("b", 2)
    e.lookup("a", 4)
    assert e.lookup("b", 4).status == status(2, {"l1": 2}, "PREFETCH_LIMIT", pinned=False)
    assert not desk.probes


def test_a_full_arena_limits_a_prefetch():
    desk = Desk(chunks=4, tiers=("disk",), limits=t.CoreLimits(pin_share=1.0, prefetch_share=1.0))
    e, f = desk.engine("e"), desk.engine("f")
    desk.auto = False
    e.store("x", 2)
    job = f.lookup("a", 4)
    desk.answer_probe("disk")
    desk.end_reads()
    assert f.query(job) == status(2, {"disk": 2}, "PREFETCH_LIMIT")
    desk.run_copies()
    assert e.ended() == "2 STORED"


def test_prefetch_evicts_what_nobody_uses():
    desk, e = tiered(chunks=8)
    e.store("old", 8)
    job = e.lookup("a", 6)
    desk.answer_probe("disk")
    desk.end_reads()
    assert e.query(job).hit_tokens == 6 * CHUNK
    assert e.lookup("old", 2).status.hit_tokens == 2 * CHUNK, "its head is still there"


def test_without_known_object_sizes_the_tiers_are_not_asked():
    desk = Desk(tiers=("disk",))
    e = desk.engine(register=False)
    assert e.lookup("a", 4) == t.LookupAnswer(b"", PrefetchStatus(True))
    assert (desk.probes, desk.counts.jobs) == ({}, 0)


def test_a_probe_asks_for_a_bounded_number_of_objects():
    desk = Desk(tiers=("disk",), limits=t.CoreLimits(keys_per_call=6, pin_share=1.0, prefetch_share=1.0))
    e = desk.engine(tp_size=4, kv_tp_size=4)
    job = e.lookup("a", 6)
    assert len(desk.probes[next(iter(desk.probes))].objects) == 8, "whole chunks"
    desk.answer_probe("disk")
    desk.end_reads()
    assert e.query(job).hit_tokens == 2 * CHUNK


def test_objects_whose_length_changed_since_the_tiers_were_asked_are_not_read():
    desk, e = tiered()
    e.lookup("a", 2)
    e.share(0, geometry=t.Geometry((t.GroupGeometry(4, 1024, 512),)))
    desk.answer_probe("disk")
    assert (desk.reads, desk.counts.jobs) == ({}, 0)


def test_making_room_for_one_rank_never_evicts_the_other_of_the_same_chunk():
    desk, e = tiered(chunks=2, tp_size=2, kv_tp_size=2)
    e.store("a", 1, worker=0)
    e.store("x", 1, worker=0)
    job = e.lookup("a", 1)
    desk.answer_probe("disk")
    desk.end_reads()
    assert e.query(job).hit_tokens == CHUNK


def test_priority_of_the_lookup_goes_to_what_it_prefetched():
    desk, e = tiered(chunks=4)
    job = e.lookup("a", 2, policy=t.Policy(priority=t.Priority.HIGH))
    desk.answer_probe("disk")
    desk.end_reads()
    e.free(job)
    e.store("b", 2)
    e.store("c", 2)
    there = desk.book.index.spaces[e.space].table.chunks.keys()
    assert there == {*e.content("a", 2).keys, *e.content("c", 2).keys}, "b went, though a is older"


def test_names_that_pending_lookups_ask_for_take_no_more_memory_than_records():
    """A name takes more than its key's record, and a key has one for each KV rank: what such lookups took was not
    bounded. Who comes late is answered with what is in L1."""
    most = 64 << 10
    desk = Desk(chunks=64, tiers=("disk",), limits=t.CoreLimits(records_bytes=most))
    e = desk.engine(stages=32)
    e.store_all("here", 1)
    jobs = [e.lookup(f"p{number}", 2) for number in range(100)]
    asked = sum(len(probe.objects) for probe in desk.probes.values())
    assert most < asked * NAME_BYTES <= most + 64 * NAME_BYTES
    assert {job.status.limited_by for job in jobs if job.status.done} == {"PREFETCH_LIMIT"}
    late = e.lookup("here", 3).status
    assert (late.done, late.hit_tokens, late.limited_by) == (True, CHUNK, "PREFETCH_LIMIT")
    warmed = desk.book.lookups.warm(desk.now, e.space, e.content("here", 3).keys, t.S, b"w" * 16)
    assert warmed == t.Warmed(CHUNK, "PREFETCH_LIMIT")
    while desk.probes:
        desk.answer_probe("")
    assert not e.lookup("here", 3).status.done, "there is room again"
