# SPDX-License-Identifier: Apache-2.0
"""Clear and BumpGeneration: at once for lookups, in bounded turns for memory, and never for a copy in flight."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvgrpc.core import types as t
from kvgrpc.core.errors import Reason
from kvgrpc.core.keys import object_name, space_digest
from kvgrpc.core.types import Cleared, SliceReport
from tests.core.desk import CHUNK, OBJECT, Desk, EngineDesk, refused, show

FREE = "64 free"


def bump(e: EngineDesk) -> Cleared:
    cleared = e.desk.book.bump_generation(e.desk.now, space_base=e.base)
    e.desk.step()
    return cleared


FORGETS: dict[str, Callable[[EngineDesk], Cleared]] = {"clear": EngineDesk.clear, "bump": bump}


@pytest.fixture(params=FORGETS.values(), ids=list(FORGETS))
def forget(request: pytest.FixtureRequest) -> Callable[[EngineDesk], Cleared]:
    return request.param


def held(**limits: object) -> tuple[Desk, EngineDesk]:
    desk = Desk(auto=False, limits=t.CoreLimits(pin_share=1.0, slice_bytes=2 * OBJECT, **limits))  # type: ignore[arg-type]
    return desk, desk.engine()


def stored(chunks: int = 4, **limits: object) -> tuple[Desk, EngineDesk]:
    desk, e = held(**limits)
    e.store("a", chunks)
    desk.run_copies()
    return desk, e


Forget = Callable[[EngineDesk], Cleared]


def test_what_is_ready_is_gone_at_once_and_its_memory_soon(forget: Forget):
    desk, e = stored()
    assert forget(e).removed_chunks == 4
    assert (e.hits("a"), desk.counts.chunks, desk.states()) == (0, 0, "60 free, 4 ready")
    desk.pass_time(t.MS)
    assert desk.states() == FREE
    e.store("a", 4)
    desk.run_copies()
    assert e.hits("a") == 4


def test_memory_comes_back_in_bounded_turns(forget: Forget):
    desk, e = stored(chunks=20, victims_per_turn=8)
    forget(e)
    states = []
    for _ in range(3):
        desk.pass_time(t.MS)
        states.append(desk.states())
    assert states == ["52 free, 12 ready", "60 free, 4 ready", FREE]
    assert desk.book.next_wake(desk.now) is None


def test_memory_comes_back_on_demand_too(forget: Forget):
    desk, e = stored(chunks=64)
    forget(e)
    e.store("b", 64)
    desk.run_copies()
    assert e.ended() == "64 STORED"
    assert desk.book.counters["evicted_chunks"] == 0


@pytest.mark.parametrize("reclaimed", [False, True])
def test_what_is_pinned_serves_its_lease_and_then_goes(forget: Forget, reclaimed: bool):
    desk, e = stored()
    job = e.lookup("a", 4)
    cleared = forget(e)
    assert (cleared.removed_chunks, cleared.still_pinned_chunks) == (4, 4)
    if reclaimed:
        desk.pass_time(t.MS)
        assert desk.states() == "60 free, 4 doomed"
    assert e.hits("a") == 0
    e.retrieve(job, end=2 * CHUNK)
    desk.run_copies()
    assert (e.ended(), desk.counts.pins) == ("2 LOADED", 2)
    e.retrieve(job, end=2 * CHUNK)
    desk.run_copies()
    assert e.ended() == "1 MISSING, 1 FAILED AFTER_FAILURE", "its pins were the last that kept them"
    assert e.free(job) == 2
    desk.pass_time(t.MS)
    assert desk.states() == FREE


@pytest.mark.parametrize("reclaimed", [False, True])
def test_a_retrieve_in_flight_ends_well(forget: Forget, reclaimed: bool):
    desk, e = stored()
    job = e.lookup("a", 4)
    e.retrieve(job)
    forget(e)
    if reclaimed:
        desk.pass_time(t.MS)
    desk.pass_time(desk.limits.lease_ns)
    assert "4 doomed" in desk.states() if reclaimed else True
    desk.run_copies()
    assert (e.ended(), desk.counts.pins) == ("4 LOADED", 0)
    desk.pass_time(t.MS)
    assert desk.states() == FREE


@pytest.mark.parametrize("reclaimed", [False, True])
def test_a_store_in_flight_is_never_found(forget: Forget, reclaimed: bool):
    desk, e = held()
    e.store("a", 6)
    desk.report()
    forget(e)
    if reclaimed:
        desk.pass_time(t.MS)
        assert desk.states() == "60 free, 4 doomed", "two that are there and two that are being written"
    desk.report()
    assert e.ended() == "2 STORED, 4 REFUSED CLEARED"
    assert e.hits("a", 6) == 0
    desk.pass_time(t.MS)
    assert desk.states() == FREE


@pytest.mark.parametrize("reclaimed", [False, True])
def test_a_store_in_flight_that_is_revoked_as_well_settles(forget: Forget, reclaimed: bool):
    desk, e = held()
    e.store("a", 2)
    forget(e)
    if reclaimed:
        desk.pass_time(t.MS)
    e.fence(e.last_call.call_id)
    assert desk.states() == "62 free, 2 settling"
    desk.report()
    assert (e.ended(), desk.states()) == ("2 FAILED REVOKED", FREE)


def test_a_store_in_flight_that_fails_as_well(forget: Forget):
    desk, e = held()
    e.store("a", 2)
    forget(e)
    desk.pass_time(t.MS)
    desk.report(report=SliceReport(1, "X"))
    assert (e.ended(), desk.states()) == ("1 REFUSED CLEARED, 1 FAILED X", FREE)


def test_a_store_queued_before_and_begun_after_is_refused(forget: Forget):
    desk, e = held()
    e.store("a", 2)
    e.store("b", 2, block=100)
    queued = e.last_call.call_id
    forget(e)
    desk.run_copies()
    assert e.ended(queued) == "2 REFUSED CLEARED"
    assert e.hits("b", 2) == 0


def test_a_store_whose_keys_were_made_across_a_clear_stores_nothing():
    desk, e = stored(chunks=2)
    content, tokens = e.content("a", 4), t.TokenRange(0, 64)
    command = t.StoreCommand(e.engine_id, 900, e.space, content, tokens, (range(16),), cleared=True)
    results = desk.book.store(desk.now, e.worker(0), command)
    desk.step()
    assert show(results) == "4 REFUSED CLEARED"
    assert e.hits("a") == 2


def test_the_same_chunk_is_stored_anew_while_the_old_copy_runs(forget: Forget):
    desk, e = held()
    f = desk.engine("f")
    e.store("a", 2)
    old = next(iter(desk.slices.values()))
    forget(e)
    desk.pass_time(t.MS)
    f.store("a", 2)
    new = next(s for s in desk.slices.values() if s is not old)
    taken = [extent for order in (old, new) for piece in order.pieces for extent in piece.extents]
    assert len(set(taken)) == 4, "the old copy's memory is not the new one's"
    desk.report(new)
    assert (f.ended(), f.hits("a", 2)) == ("2 STORED", 2)
    desk.report(old)
    assert (e.ended(), f.hits("a", 2)) == ("2 REFUSED CLEARED", 2)


def test_a_pending_lookup_counts_as_pinning_only_what_is_removed():
    desk = Desk(tiers=("disk",))
    e = desk.engine()
    e.lookup("a", 2)
    desk.answer_probe("disk")
    assert e.clear() == Cleared(0, 0)
    desk.end_reads()
    assert desk.states() == FREE


def test_holds_do_not_keep_what_is_cleared(forget: Forget):
    desk, e = stored()
    e.pin("a", 4)
    assert desk.arena.held_bytes == 4 * OBJECT
    forget(e)
    desk.pass_time(t.MS)
    assert (desk.states(), desk.arena.held_bytes) == (FREE, 0)
    desk.pass_time(60 * t.S)
    assert desk.book.next_wake(desk.now) is None


def test_what_each_target_clears():
    desk = Desk(chunks=64)
    plain, salted = desk.engine("plain"), desk.engine("salted", salt="t1")
    other = desk.engine("other", model="mistral", salt="t1")
    engines = (plain, salted, other)

    def left(**target: object) -> list[int]:
        for engine in engines:
            engine.store("a", 4)
        cleared = desk.book.clear(desk.now, **target)  # type: ignore[arg-type]
        desk.step()
        hits = [engine.hits("a") for engine in engines]
        assert cleared == Cleared(12 - sum(hits), 0)
        return hits

    assert left(space=salted.space) == [4, 0, 4]
    assert left(model="llama") == [0, 0, 4]
    assert left(cache_salt="t1") == [4, 0, 0]
    assert left(cache_salt="") == [0, 4, 4]
    assert left(everything=True) == [0, 0, 0]
    assert left(model="nobody's") == [4, 4, 4]
    with refused(Reason.SPACE_UNKNOWN):
        desk.book.clear(desk.now, space=t.SpaceRef(b"unknown"))


def test_generations_count_up_for_each_identity():
    desk = Desk()
    e, f = desk.engine("e"), desk.engine("f", revision="r2")
    e.store("a", 4)
    f.store("a", 4)
    assert desk.book.bump_generation(0, space_base=e.base) == Cleared(4, 0, 1)
    assert desk.book.bump_generation(0, model="llama") == Cleared(4, 0, 2)
    assert desk.book.bump_generation(0, space_base=f.base).generation == 2
    for target in ({"model": "nobody's"}, {"space_base": b"?"}, {}):
        with refused(Reason.SPACE_UNKNOWN):
            desk.book.bump_generation(0, **target)  # type: ignore[arg-type]


def test_lower_tiers_are_asked_for_other_names_afterwards(forget: Forget):
    desk = Desk(tiers=("disk",))
    e = desk.engine()
    names: list[set[str]] = []
    for _ in range(3):
        e.end(f"r{len(names) - 1}")
        e.lookup("a", 2, request=f"r{len(names)}")
        names.append({name.name for name in desk.probes.popitem()[1].objects})
        forget(e)
    assert len(names[0] | names[1] | names[2]) == 6
    digest = space_digest(e.space)
    assert names[0] == {object_name(digest, 0, key, 0, "") for key in e.content("a", 2).keys}
    assert names[2] == {object_name(digest, 2, key, 0, "") for key in e.content("a", 2).keys}


def test_a_space_that_was_forgotten_meanwhile_does_not_find_what_was_cleared():
    desk = Desk(tiers=("disk",), limits=t.CoreLimits(spaces=2))
    one, two, three = (desk.engine(name, salt=name) for name in ("one", "two", "three"))
    one.lookup("a", 1, request="r")
    before = desk.probes.popitem()[1].objects
    one.end("r")
    one.clear()
    two.store("a", 1)
    three.store("a", 1)  # one's empty space makes room
    three.clear()
    desk.pass_time(t.MS)
    one.lookup("a", 1, request="s")
    assert desk.probes.popitem()[1].objects != before
