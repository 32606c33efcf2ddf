# SPDX-License-Identifier: Apache-2.0
"""Write-behind: what is copied to lower tiers when, what holds it meanwhile, and what a failing tier costs."""

from __future__ import annotations

import pytest

from kvgrpc.core import types as t
from kvgrpc.core.cache import Bookkeeper
from kvgrpc.core.keys import object_name
from kvgrpc.core.writes import BELIEVED_NS
from tests.core.desk import CHUNK, OBJECT, Desk, EngineDesk

LIMITS = t.CoreLimits(pin_share=1.0, prefetch_share=1.0, write_share=1.0)


def tiered(
    chunks: int = 64, policy: str = "through", tiers: tuple[str, ...] = ("disk",), **limits: float
) -> tuple[Desk, EngineDesk]:
    desk = Desk(chunks, tiers, t.CoreLimits(**{"pin_share": 1.0, "prefetch_share": 1.0, "write_share": 1.0, **limits}))  # type: ignore[arg-type]
    desk.auto_writes = False
    desk.book.set_write_policy("", t.WritePolicy(policy))
    return desk, desk.engine("e")


def names(e: EngineDesk, prompt: str, count: int, version: int = 0) -> list[str]:
    space = e.desk.book.index.spaces[e.space]
    return [object_name(space.digest, version, key, 0, "") for key in e.content(prompt, count).keys]


def ordered(desk: Desk) -> list[str]:
    return [write.object.name for write in desk.writes.values()]


def test_a_store_is_copied_down_once():
    desk, e = tiered()
    assert e.store("a", 3) == "3 STORED"
    assert ordered(desk) == names(e, "a", 3)
    desk.end_writes()
    assert e.store("a", 3) == "3 RESIDENT"
    assert desk.writes == {}
    assert desk.book.counters["written_objects"] == 3


def test_every_tier_gets_it():
    desk, e = tiered(tiers=("disk", "store"))
    e.store("a", 1)
    assert [write.tier for write in desk.writes.values()] == ["disk", "store"]


def test_every_rank_gets_there():
    desk = Desk(64, ("disk",), LIMITS)
    e = desk.engine("e", tp_size=2, kv_tp_size=2)
    e.store("a", 1, worker=0)
    e.store("a", 1, worker=1)
    assert len({write.object.name for write in desk.written}) == 2


def test_without_tiers_nothing_is_written():
    desk = Desk()
    e = desk.engine()
    e.store("a", 3)
    assert desk.written == []


def test_what_is_being_written_is_not_evicted_and_the_rest_is():
    desk, e = tiered(chunks=4, writes_in_flight=2)
    e.store("a", 4)
    assert ordered(desk) == names(e, "a", 4)[:2]
    assert e.store("b", 4) == "2 STORED, 2 REFUSED NO_ROOM"
    desk.end_writes()
    assert e.store("c", 4) == "4 STORED"


def test_what_was_evicted_before_its_turn_is_not_written():
    desk, e = tiered(chunks=4, writes_in_flight=1)
    e.store("a", 4)
    e.store("b", 3)
    desk.end_writes()
    written = [write.object.name for write in desk.written]
    assert written == [names(e, "a", 1)[0], *names(e, "b", 3)]
    assert desk.book.counters["skipped_writes"] == 3


def test_a_clear_dooms_what_is_being_written_until_it_is_reported():
    desk, e = tiered(writes_in_flight=1)
    e.store("a", 2)
    desk.book.clear(desk.now, everything=True)
    desk.pass_time(10 * t.MS)
    assert desk.states() == "63 free, 1 doomed"
    desk.end_write()
    assert (desk.states(), desk.writes) == ("64 free", {})


def test_after_a_clear_objects_have_other_names():
    desk, e = tiered()
    e.store("a", 1)
    desk.book.clear(desk.now, everything=True)
    e.store("a", 1)
    assert ordered(desk) == [names(e, "a", 1)[0], names(e, "a", 1, version=1)[0]]


def test_writes_under_way_are_bounded_by_number_and_bytes():
    desk, e = tiered(chunks=16, write_share=0.25)
    e.store("a", 10)
    assert len(desk.writes) == 4
    desk.end_write()
    assert len(desk.writes) == 4
    desk, e = tiered(chunks=16, writes_in_flight=3)
    e.store("a", 10)
    assert len(desk.writes) == 3
    desk, e = tiered(chunks=16, write_share=0.01)
    e.store("a", 10)
    assert len(desk.writes) == 1, "one always"


def test_the_queue_is_bounded():
    desk, e = tiered(writes_in_flight=1, writes_queued=3)
    e.store("a", 10)
    desk.end_writes()
    assert len(desk.written) == 3
    assert desk.book.counters["skipped_writes"] == 7


def test_a_failing_tier_gets_one_object_at_a_time_until_one_succeeds():
    desk, e = tiered()
    e.store("a", 20)
    desk.end_write(ok=False)
    assert desk.book.counters["skipped_writes"] == 13, "the failed one, and those that waited"
    desk.end_writes(ok=False)
    for prompt in "bcd":
        e.store(prompt, 5)
        assert len(desk.writes) == 1
        desk.end_write(ok=False)
        assert desk.writes == {}
    e.store("e", 2)
    desk.end_writes()
    e.store("f", 5)
    assert len(desk.writes) == 5


def test_an_object_that_found_no_room_says_nothing_about_the_others():
    desk, e = tiered(writes_in_flight=1)
    e.store("a", 3)
    write = desk.writes.popitem()[1]
    desk.book.write_done(desk.now, write.write_id, ok=False, no_room=True)
    desk.step()
    desk.end_writes()
    assert len(desk.written) == 2


def test_a_tier_that_hangs_keeps_only_what_it_was_given():
    """Stores and lookups go on; the rest of the arena serves."""
    desk, e = tiered(chunks=16, write_share=0.25)
    for prompt in "abcdefgh":
        assert e.store(prompt, 6) == "6 STORED"
        hit = e.lookup(prompt, 6)
        assert hit.status.hit_tokens == 6 * CHUNK
        e.free(hit)
    assert len(desk.writes) == 4


def test_second_use():
    desk, e = tiered(policy="second-use")
    e.store("a", 3)
    assert desk.writes == {}
    e.free(e.lookup("a", 2))
    assert ordered(desk) == names(e, "a", 2)
    e.free(e.lookup("a", 3))
    assert ordered(desk) == names(e, "a", 3)


def test_no_copy_where_none_is_wanted_and_models_may_differ():
    desk, e = tiered(policy="none")
    e.store("a", 3)
    e.free(e.lookup("a", 3))
    assert desk.writes == {}
    model = desk.book.index.spaces[e.space].facts.identity.model
    desk.book.set_write_policy(model, t.WritePolicy.THROUGH)
    e.store("b", 1)
    assert ordered(desk) == names(e, "b", 1)


def test_a_use_offers_again_what_was_offered_long_ago():
    """A tier does not tell what it drops. It is asked for an object once in ten minutes of use, not at each lookup."""
    desk, e = tiered(tiers=("disk", "store"))
    e.store("a", 3)
    desk.end_writes()
    for _ in range(3):
        e.free(e.lookup("a", 3))
    desk.pass_time(BELIEVED_NS - 1)
    e.free(e.lookup("a", 3))
    assert desk.writes == {}, "it is believed until then"
    desk.pass_time(1)
    e.free(e.lookup("a", 2))
    again = [(write.tier, write.object.name) for write in desk.writes.values()]
    head, second = names(e, "a", 2)
    assert again == [("disk", head), ("disk", second), ("store", head), ("store", second)]
    desk.end_writes()
    e.free(e.lookup("a", 2))
    assert desk.writes == {}, "and from then on"


def test_what_found_no_turn_gets_one_at_a_later_use():
    desk, e = tiered(writes_queued=2, writes_in_flight=1)
    desk.pass_time(BELIEVED_NS)
    e.store("a", 5)
    desk.end_writes()
    assert ordered(desk) == [] and len(desk.written) == 2
    e.free(e.lookup("a", 5))
    desk.end_writes()
    e.free(e.lookup("a", 5))
    desk.end_writes()
    assert [write.object.name for write in desk.written] == names(e, "a", 5)


def test_what_waits_or_is_being_written_is_not_offered_twice():
    desk, e = tiered(writes_in_flight=1)
    e.store("a", 3)
    desk.pass_time(BELIEVED_NS)
    e.free(e.lookup("a", 3))
    desk.end_write()
    desk.end_write()
    assert len(desk.writes) == 1, "nothing waits, the last one is under way"
    e.free(e.lookup("a", 3))
    desk.end_writes()
    assert sorted(write.object.name for write in desk.written) == sorted([*names(e, "a", 3), *names(e, "a", 2)])


@pytest.mark.parametrize("policy", ["eviction", "none"])
def test_a_use_writes_nothing_where_that_is_not_wanted(policy: str):
    desk, e = tiered(chunks=16, policy=policy)
    e.store("a", 8)
    desk.pass_time(BELIEVED_NS)
    e.free(e.lookup("a", 8))
    assert desk.writes == {}


def test_what_goes_next_is_written_again_if_it_was_used_long_after_it_was_written():
    desk, e = tiered(chunks=16, policy="eviction", write_ahead_share=0.25)
    e.store("a", 8)
    e.store("b", 6)
    desk.end_writes()
    assert [write.object.name for write in desk.written] == names(e, "a", 8)[:5:-1]
    desk.pass_time(BELIEVED_NS)
    e.free(e.lookup("a", 8))
    e.store("b", 7)
    desk.end_writes()
    e.free(e.lookup("b", 7))
    e.store("c", 1)
    desk.end_writes()
    assert [write.object.name for write in desk.written].count(names(e, "a", 8)[7]) == 2


def test_on_eviction_what_goes_next_is_written_while_there_is_time():
    desk, e = tiered(chunks=16, policy="eviction", write_ahead_share=0.25)
    e.store("a", 8)
    assert desk.writes == {}, "there is room"
    e.store("b", 6)
    assert ordered(desk) == names(e, "a", 8)[:5:-1], "the two that would go first, tails first"
    desk.end_writes()
    e.store("c", 2)
    desk.end_writes()
    assert [write.object.name for write in desk.written] == names(e, "a", 8)[:3:-1]
    e.store("d", 4)
    assert desk.book.counters["evicted_chunks"] == 4
    assert desk.book.counters["skipped_writes"] == 0


def test_what_came_from_a_tier_is_not_written_back_to_it():
    desk, e = tiered(policy="second-use", tiers=("disk", "store"))
    job = e.lookup("a", 2)
    desk.answer_probe("disk", "store")
    desk.end_reads()
    e.free(job)
    e.free(e.lookup("a", 2))
    head, tail = names(e, "a", 2)
    assert [(write.tier, write.object.name) for write in desk.writes.values()] == [("disk", tail), ("store", head)]


def restart(desk: Desk, e: EngineDesk) -> tuple[Desk, EngineDesk]:
    after = Desk(desk.chunks, desk.tiers, desk.limits)
    after.book = Bookkeeper(after.limits, after.chunks * OBJECT, after.tiers, desk.book.versions.snapshot())
    return after, after.engine("e")


def probed(desk: Desk, e: EngineDesk, prompt: str, count: int) -> list[str]:
    e.lookup(prompt, count)
    return [object.name for object in desk.probes.popitem()[1].objects]


@pytest.mark.parametrize("how", ["everything", "space", "model", "salt", "bump"])
def test_after_a_restart_names_are_those_of_before(how: str):
    """What was stored before a Clear or a new generation is never asked for again, also not by the next server."""
    desk, e = tiered()
    e.store("a", 2)
    old = ordered(desk)
    book, facts = desk.book, desk.book.index.spaces[e.space].facts
    acts = {
        "everything": lambda: book.clear(0, everything=True),
        "space": lambda: book.clear(0, space=e.space),
        "model": lambda: book.clear(0, model=facts.identity.model),
        "salt": lambda: book.clear(0, cache_salt=""),
        "bump": lambda: book.bump_generation(0, space_base=facts.base),
    }
    acts[how]()
    e.store("a", 2)
    new = ordered(desk)[2:]
    assert not set(new) & set(old)
    desk, e = restart(desk, e)
    assert probed(desk, e, "a", 2) == new
    desk, e = restart(desk, e)
    assert probed(desk, e, "a", 2) == new


@pytest.mark.parametrize("named_before", [True, False])
def test_new_weights_of_a_model_reach_its_identities_that_nobody_has_named_yet(named_before: bool):
    """One identity of the model is back after a restart, another comes later: its objects are of the old weights."""
    desk, _ = tiered()
    f = desk.engine("f", stages=2)
    f.store_all("a", 1)
    old = ordered(desk)
    if named_before:  # else its version is that of all that were never cleared
        desk.book.bump_generation(0, space_base=f.base)
        f.store_all("a", 1)
        old = ordered(desk)
    after = Desk(desk.chunks, desk.tiers, desk.limits)
    after.book = Bookkeeper(after.limits, after.chunks * OBJECT, after.tiers, desk.book.versions.snapshot())
    after.engine("e")
    assert after.book.bump_generation(0, model="llama").generation == 1
    f = after.engine("f", stages=2)
    assert not set(probed(after, f, "a", 1)) & set(old)


def test_clears_before_an_engine_is_back_reach_what_it_will_ask_for():
    desk, e = tiered()
    e.store("a", 1)
    desk.book.clear(0, space=e.space)
    e.store("a", 1)
    old = ordered(desk)
    after = Desk(desk.chunks, desk.tiers, desk.limits)
    after.book = Bookkeeper(after.limits, after.chunks * OBJECT, after.tiers, desk.book.versions.snapshot())
    after.book.clear(0, everything=True)
    e = after.engine("e")
    assert not set(probed(after, e, "a", 1)) & set(old)
