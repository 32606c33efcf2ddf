# SPDX-License-Identifier: Apache-2.0
"""Retention and operator pins: a bounded time, one byte budget, and nothing more than "not evicted"."""

from __future__ import annotations

from kvgrpc.core import types as t
from kvgrpc.core.errors import Reason
from kvgrpc.core.types import Held, Policy, S
from tests.core.desk import CHUNK, OBJECT, Desk, refused

KEEP = Policy(retention_ns=30 * S)


def test_a_pin_keeps_a_prefix_until_its_time():
    desk = Desk(chunks=8)
    e = desk.engine()
    e.store("a", 2)
    assert e.pin("a", 4, ttl_ns=60 * S) == Held(b"pin", 2 * CHUNK)
    assert desk.arena.held_bytes == 2 * OBJECT
    e.store("b", 8)
    assert e.ended() == "6 STORED, 2 REFUSED NO_ROOM"
    desk.pass_time(60 * S - 1)
    e.store("c", 8)
    assert e.hits("a", 2) == 2
    desk.pass_time(1)
    assert desk.arena.held_bytes == 0
    e.store("d", 8)
    assert e.hits("a", 2) == 0


def test_a_pin_of_nothing_is_no_pin():
    desk = Desk()
    e = desk.engine()
    assert e.pin("a", 4) == Held(b"", 0)
    with refused(Reason.PIN_UNKNOWN):
        desk.book.unpin(desk.now, b"pin")


def test_a_pin_holds_only_what_all_ranks_have():
    desk = Desk()
    e = desk.engine(tp_size=2, kv_tp_size=2)
    e.store("a", 4, worker=0)
    e.store("a", 2, worker=1)
    assert e.pin("a", 4).pinned_tokens == 2 * CHUNK


def test_unpin_ends_it_once():
    desk = Desk()
    e = desk.engine()
    e.store("a", 4)
    e.pin("a", 4)
    assert desk.book.unpin(desk.now, b"pin") == 4
    with refused(Reason.PIN_UNKNOWN):
        desk.book.unpin(desk.now, b"pin")
    assert (desk.arena.held_bytes, desk.book.next_wake(desk.now)) == (0, None)


def test_pinning_and_unpinning_leaves_nothing_behind():
    desk = Desk()
    e = desk.engine()
    e.store("a", 4)
    for number in range(50):
        e.pin("a", 4, ttl_ns=3600 * S, pin_id=bytes([number]))
        if number % 2:
            desk.book.unpin(desk.now, bytes([number]))
            desk.book.unpin(desk.now, bytes([number - 1]))
    desk.step()
    assert desk.book.holds.next_end() is None


def test_the_byte_budget_of_holds():
    desk = Desk(chunks=16, limits=t.CoreLimits(hold_share=0.25))
    e = desk.engine()
    e.store("a", 8)
    with refused(Reason.HOLD_LIMIT):
        e.pin("a", 5)
    assert desk.arena.held_bytes == 0, "all or none"
    e.pin("a", 4, pin_id=b"1")
    e.pin("a", 4, pin_id=b"2")
    assert desk.arena.held_bytes == 4 * OBJECT, "what is held twice counts once"
    with refused(Reason.HOLD_LIMIT):
        e.pin("a", 5)
    desk.book.unpin(desk.now, b"1")
    assert desk.arena.held_bytes == 4 * OBJECT


def test_pins_have_a_limit():
    desk = Desk(limits=t.CoreLimits(pins=2))
    e = desk.engine()
    e.store("a", 1)
    e.pin("a", 1, pin_id=b"1")
    e.pin("a", 1, pin_id=b"2")
    with refused(Reason.PIN_LIMIT):
        e.pin("a", 1, pin_id=b"3")


def test_retention_keeps_what_a_store_wrote_and_the_prefix_before_it():
    desk = Desk(chunks=16)
    e = desk.engine()
    e.store("a", 2)
    e.store("a", 4, start=2 * CHUNK, policy=KEEP)
    assert desk.arena.held_bytes == 4 * OBJECT
    e.store("b", 16)
    assert e.hits("a", 4) == 4
    desk.pass_time(30 * S)
    e.store("c", 16)
    assert (e.hits("a", 4), desk.arena.held_bytes) == (0, 0)


def test_retention_keeps_heads_as_far_as_the_budget_reaches():
    desk = Desk(chunks=16, limits=t.CoreLimits(hold_share=0.25))
    e = desk.engine()
    assert e.store("a", 8, policy=KEEP) == "8 STORED"
    e.store("b", 16)
    assert e.hits("a", 8) == 4


def test_retention_under_several_ranks_stays_in_the_budget():
    """The last rank's store holds the chunks: before that they are not complete, and their bytes not yet there."""
    desk = Desk(chunks=16, limits=t.CoreLimits(hold_share=0.25))
    e = desk.engine(tp_size=2, kv_tp_size=2)
    for prompt in ("a", "b"):
        e.store(prompt, 3, worker=0, policy=KEEP)
    assert desk.arena.held_bytes == 0
    for prompt in ("a", "b"):
        e.store(prompt, 3, worker=1, policy=KEEP)
    assert desk.arena.held_bytes == 4 * OBJECT
    assert desk.arena.held_bytes <= desk.arena.total_bytes * desk.limits.hold_share


def test_retention_of_a_long_prefix_costs_by_its_length():
    desk = Desk(chunks=4096, limits=t.CoreLimits(hold_share=0.01))
    e = desk.engine(num_blocks=1 << 16)
    e.store("a", 4000, policy=KEEP)
    assert desk.arena.held_bytes == 40 * OBJECT


def test_a_retrieve_works_under_a_hold_and_a_hold_under_a_lease():
    desk = Desk(limits=t.CoreLimits(pin_share=1.0))
    e = desk.engine()
    e.store("a", 4)
    job = e.lookup("a", 4)
    e.pin("a", 4)
    assert e.retrieve(job) == "4 LOADED"
    assert desk.states() == "60 free, 4 ready"
    desk.book.unpin(desk.now, b"pin")
    desk.step()
    e.store("b", 62)
    assert e.hits("a") == 2
