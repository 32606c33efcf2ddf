# SPDX-License-Identifier: Apache-2.0
"""Time is an argument: nothing due is missed, nothing is done early. And what has a limit is refused by name."""

from __future__ import annotations

from kvgrpc.core import types as t
from kvgrpc.core.errors import Reason
from tests.core.desk import CHUNK, OBJECT, Desk, EngineDesk, refused

S = t.S


def test_an_idle_desk_wants_no_wake_up():
    desk = Desk()
    assert desk.book.next_wake(0) is None
    e = desk.engine()
    e.store("a", 4)
    assert desk.book.next_wake(0) is None


def test_the_next_wake_up_is_the_earliest_of_all():
    desk = Desk(tiers=("disk",), limits=t.CoreLimits(pin_share=1.0))
    e = desk.engine()
    e.store("a", 4)
    wakes: list[tuple[str, int | None]] = []

    def note(what: str) -> None:
        wakes.append((what, desk.book.next_wake(desk.now)))

    read = e.lookup("a", 4)
    note("its lease")
    e.pin("a", 4, ttl_ns=50 * S)
    note("the hold")
    e.lookup("b", 4, wait_ns=20 * S)
    note("the prefetch deadline")
    e.free(read)
    note("the read record")
    e.die(e.worker(0))
    note("the grace")
    e.clear()
    note("reclaim")
    assert wakes == [
        ("its lease", 60 * S),
        ("the hold", 50 * S),
        ("the prefetch deadline", 20 * S),
        ("the read record", 5 * S),
        ("the grace", S // 2),
        ("reclaim", t.MS),
    ]
    seen: list[int] = []
    while (wake := desk.book.next_wake(desk.now)) is not None:
        seen.append(wake)
        desk.now = wake
        desk.book.tick(wake)
        desk.step()
    assert seen == [t.MS, S // 2, 5 * S, 20 * S, 50 * S, 600 * S]
    assert desk.counts.jobs == 0


def test_a_tick_before_anything_is_due_changes_nothing():
    desk = Desk()
    e = desk.engine()
    e.store("a", 4)
    e.lookup("a", 4)
    e.pin("a", 4)
    e.die(e.worker(0))
    before = (desk.states(), desk.counts, desk.book.next_wake(desk.now))
    for _ in range(3):
        desk.book.tick(desk.now + 499 * t.MS)
        desk.step()
    assert (desk.states(), desk.counts, desk.book.next_wake(desk.now)) == before


def test_a_late_tick_does_everything_that_is_due():
    desk = Desk(tiers=("disk",))
    e = desk.engine()
    e.store("a", 4)
    e.lookup("a", 4)
    e.pin("a", 4)
    e.lookup("b", 4)
    e.die(e.scheduler)
    e.die(e.worker(0))
    desk.now = 10_000 * S
    desk.book.tick(desk.now)
    desk.step()
    assert desk.counts == t.Counts(4, 1, 0, 0, 0, 0, 0)
    assert (desk.arena.held_bytes, desk.book.next_wake(desk.now)) == (0, None)


def test_spaces_have_a_limit_and_empty_ones_make_room():
    desk = Desk(limits=t.CoreLimits(spaces=3))
    engines: list[EngineDesk] = [desk.engine(f"e{at}", salt=f"t{at}") for at in range(5)]
    for engine in engines[:3]:
        engine.store("a", 1)
    with refused(Reason.SPACE_LIMIT):
        engines[3].store("a", 1)
    engines[0].clear()
    assert engines[3].store("a", 1) == "1 STORED"
    with refused(Reason.SPACE_LIMIT):
        engines[4].store("a", 1)
    assert engines[0].hits("a", 1) == 0, "a miss needs no space"
    assert desk.counts.spaces == 3


def test_identities_have_a_limit_and_those_only_named_make_room():
    desk = Desk(limits=t.CoreLimits(spaces=3))
    kept = desk.engine("kept", model="kept")
    plain = kept.identity
    for number in range(10):
        desk.book.space_base(0, t.SpaceIdentity(f"m{number}", "r", "d", 1, "h", "f"))
    assert desk.book.space_base(0, plain) == kept.base
    assert kept.store("a", 1) == "1 STORED"
    for number in range(2):
        desk.engine(f"e{number}", model=f"model{number}")
    with refused(Reason.SPACE_LIMIT):
        desk.engine("one too many", model="model9")
    assert kept.hits("a", 1) == 1


def test_tenants_of_forgotten_identities_are_forgotten_too():
    """Found by review: they stayed where identities ran into their limit, and spaces never did."""
    desk = Desk(tiers=("disk",), limits=t.CoreLimits(spaces=3))
    e = desk.engine("e")
    e.store("a", 1)
    desk.book.set_quota("with a quota", OBJECT)
    for number in range(20):
        named = t.SpaceIdentity(f"model {number}", "", "bf16", 1, "sha256-u32le", "opaque:x:y:4")
        base = desk.book.space_base(desk.now, named)
        desk.book.index.space(t.SpaceRef(base, "", f"tenant {number}"))
        desk.step()
    assert len(desk.book.index.accounts) <= 1 + 3 + 1
    assert {"", "with a quota"} <= {*desk.book.index.accounts}
    assert e.hits("a", 1) == 1


def test_counters_only_grow_and_say_what_happened():
    desk = Desk(chunks=8)
    e = desk.engine()
    e.store("a", 4)
    e.retrieve(e.lookup("a", 6))
    e.store("b", 8)
    e.lookup("b", 8)
    counters = desk.book.counters
    assert {name: counters[name] for name in ("lookups", "lookup_tokens", "hit_tokens", "stores", "retrieves")} == {
        "lookups": 2,
        "lookup_tokens": 14 * CHUNK,
        "hit_tokens": 12 * CHUNK,
        "stores": 2,
        "retrieves": 1,
    }
    assert (counters["stored_chunks"], counters["loaded_chunks"], counters["evicted_chunks"]) == (12, 4, 4)
    assert counters["failed_chunks"] == 0
