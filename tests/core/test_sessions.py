# SPDX-License-Identifier: Apache-2.0
"""Clients: attaching, dying at every point, sharing memory again, and draining."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvgrpc.core import types as t
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.keys import fingerprint
from kvgrpc.core.types import Role
from tests.core.desk import BLOCK, OBJECT, Desk, EngineDesk, refused

GRACE = t.CoreLimits().reattach_grace_ns
FREE = "64 free"


def held() -> tuple[Desk, EngineDesk]:
    desk = Desk(auto=False, limits=t.CoreLimits(pin_share=1.0, slice_bytes=2 * OBJECT))
    return desk, desk.engine()


def mapping_of(e: EngineDesk, worker: int = 0) -> int:
    registration = e.desk.book.sessions.clients[e.worker(worker)].registration
    assert registration is not None
    return registration.mapping_id


# ---- attach ----------------------------------------------------------------------------------------------------------


def test_the_same_session_comes_back_in_its_grace_and_keeps_everything():
    desk, e = held()
    e.store("a", 6, call_id=1)
    e.die(e.worker(0))
    desk.pass_time(GRACE - 1)
    desk.report()
    assert e.attach(e.worker(0), Role.WORKER)
    desk.pass_time(10 * t.S)
    desk.run_copies()
    assert (e.ended(1), desk.unmapped, desk.gone) == ("6 STORED", [], [])


def test_a_second_live_client_of_the_same_id_is_refused():
    desk, e = held()
    with refused(Reason.CLIENT_EXISTS):
        e.attach(e.worker(0), Role.WORKER, b"s2")
    with refused(Reason.CLIENT_EXISTS):
        desk.engine("other").attach(e.worker(0), Role.WORKER, b"s1")
    with refused(Reason.CLIENT_EXISTS):
        e.attach(e.worker(0), Role.SCHEDULER)
    assert e.attach(e.worker(0), Role.WORKER), "the same session may open another stream"


def test_a_new_process_takes_over_in_the_old_ones_grace():
    desk, e = held()
    mapping = mapping_of(e)
    e.die(e.worker(0))
    assert not e.attach(e.worker(0), Role.WORKER, b"s2")
    assert (desk.unmapped, desk.gone) == ([(e.worker(0), mapping)], [e.worker(0)])
    with refused(Reason.NOT_REGISTERED):
        e.store("a", 2)
    e.share(0)
    e.store("a", 2)
    desk.run_copies()
    assert e.ended() == "2 STORED"


@pytest.mark.parametrize("session", [b"s1", b"s2"])
def test_a_client_id_stays_taken_until_the_last_copy_of_its_earlier_session_is_reported(session: bytes):
    desk, e = held()
    e.store("a", 4, call_id=11)
    e.die(e.worker(0))
    if session == b"s1":
        desk.pass_time(GRACE)
    for _ in range(2):
        with refused(Reason.CLIENT_EXISTS) as got:
            e.attach(e.worker(0), Role.WORKER, session)
        assert got.refusal.retry_after_ms == 100
        assert (desk.unmapped, desk.gone) == ([], [])
        desk.step()
    desk.report()
    assert (e.ended(11), desk.gone) == ("4 FAILED REVOKED", [e.worker(0)])
    assert not e.attach(e.worker(0), Role.WORKER, session)
    assert e.fence(11) == (), "nothing of the earlier session runs"


def test_a_stale_detach_changes_nothing():
    desk, e = held()
    e.die(e.worker(0), b"another session")
    e.die("nobody")
    desk.pass_time(GRACE)
    assert desk.gone == []
    e.die(e.worker(0))
    desk.pass_time(GRACE // 2)
    e.die(e.worker(0))
    desk.pass_time(GRACE // 2)
    assert desk.gone == [e.worker(0)], "the grace begins once"


def test_clients_have_a_limit_that_counts_ending_ones():
    desk = Desk(auto=False, limits=t.CoreLimits(clients=3))
    e = desk.engine()
    e.attach("third", Role.WORKER)
    with refused(Reason.CLIENT_LIMIT):
        e.attach("fourth", Role.WORKER)
    e.store("a", 2)
    e.die(e.worker(0))
    desk.pass_time(GRACE)
    with refused(Reason.CLIENT_LIMIT):
        e.attach("fourth", Role.WORKER)
    desk.report()
    assert not e.attach("fourth", Role.WORKER)


def test_counts_of_clients_are_of_those_attached():
    desk, e = held()
    assert (desk.counts.engines, desk.counts.clients) == (1, 2)
    e.die(e.worker(0))
    assert (desk.counts.engines, desk.counts.clients) == (1, 1)
    e.die(e.scheduler)
    desk.pass_time(GRACE)
    assert (desk.counts.engines, desk.counts.clients, desk.book.engines()) == (0, 0, ())


# ---- death -----------------------------------------------------------------------------------------------------------


def test_death_with_calls_queued_and_in_flight():
    desk, e = held()
    mapping = mapping_of(e)
    e.store("a", 6, call_id=1)
    e.store("b", 6, call_id=2)
    desk.report()
    e.die(e.worker(0))
    desk.pass_time(GRACE)
    assert (e.ended(2), e.ended(1)) == ("6 FAILED REVOKED", "waiting")
    assert (desk.unmapped, desk.gone) == ([], []), "the copy still uses the mapping"
    assert desk.states() == "60 free, 2 ready, 2 settling"
    desk.report()
    assert e.ended(1) == "2 STORED, 4 FAILED REVOKED"
    assert (desk.unmapped, desk.gone) == ([(e.worker(0), mapping)], [e.worker(0)])
    assert (desk.states(), desk.counts.calls_in_flight) == ("62 free, 2 ready", 0)
    assert e.hits("a", 6) == 2, "what was committed stays"


def test_death_with_a_retrieve_in_flight():
    desk, e = held()
    e.store("a", 4)
    desk.run_copies()
    job = e.lookup("a", 4)
    e.retrieve(job, call_id=1000)
    e.die(e.worker(0))
    e.die(e.scheduler)
    desk.pass_time(GRACE)
    assert (desk.counts.jobs, desk.counts.pins) == (0, 0)
    assert desk.states() == "60 free, 4 pinned", "the running read still holds them"
    desk.report()
    assert desk.states() == "60 free, 4 ready"
    assert desk.gone == [e.scheduler, e.worker(0)]


def test_death_when_idle_and_registered():
    desk, e = held()
    mapping = mapping_of(e)
    e.die(e.worker(0))
    desk.pass_time(GRACE - 1)
    assert desk.gone == []
    desk.pass_time(1)
    assert (desk.unmapped, desk.gone) == ([(e.worker(0), mapping)], [e.worker(0)])
    with refused(Reason.NOT_ATTACHED):
        e.store("a", 2)


def test_a_schedulers_end_ends_the_engines_jobs_and_a_workers_only_its_own():
    desk = Desk()
    e, other = desk.engine("e"), desk.engine("other")
    e.store("a", 4)
    jobs = [e.lookup("a", client=e.scheduler), e.lookup("a", client=e.worker(0)), other.lookup("a")]
    e.die(e.worker(0))
    desk.pass_time(GRACE)
    assert e.query(jobs[0]).done
    with refused(Reason.JOB_UNKNOWN):
        e.query(jobs[1])
    e.die(e.scheduler)
    desk.pass_time(GRACE)
    assert (desk.counts.jobs, desk.counts.pins) == (1, 4)
    assert other.query(jobs[2]).done


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_registering_the_same_again_changes_nothing():
    desk, e = held()
    mapping = mapping_of(e)
    e.store("a", 6, call_id=1)
    answer = e.share(0)
    assert (answer.changed, answer.registration_epoch, answer.object_bytes) == (False, 1, OBJECT)
    assert (mapping_of(e), desk.unmapped) == (mapping, [])
    desk.run_copies()
    assert e.ended(1) == "6 STORED"


def test_registering_other_memory_ends_calls_and_unmaps_the_old_after_its_copy():
    desk, e = held()
    old = mapping_of(e)
    e.store("a", 6, call_id=1)
    e.store("b", 2, call_id=2)
    answer = e.share(0, layout_digest=b"other")
    assert (answer.changed, answer.registration_epoch) == (True, 2)
    assert (e.ended(2), desk.unmapped) == ("2 FAILED REVOKED", [])
    e.store("c", 2, call_id=3)
    assert len(desk.slices) == 1, "the new call waits for the old copy"
    desk.report()
    assert (e.ended(1), desk.unmapped) == ("6 FAILED REVOKED", [(e.worker(0), old)])
    order = desk.report()
    assert (order.mapping_id, e.ended(3)) == (mapping_of(e), "2 STORED")
    assert order.mapping_id != old


def test_unregistering_names_the_mapping_that_will_be_unmapped():
    desk, e = held()
    mapping = mapping_of(e)
    e.store("a", 2, call_id=1)
    assert desk.book.unregister(desk.now, e.worker(0), e.engine_id) == mapping
    assert desk.book.unregister(desk.now, e.worker(0), e.engine_id) is None
    desk.step()
    with refused(Reason.NOT_REGISTERED):
        e.store("b", 2)
    assert desk.unmapped == []
    desk.report()
    assert (desk.unmapped, e.ended(1), desk.states()) == ([(e.worker(0), mapping)], "2 FAILED REVOKED", FREE)
    assert e.share(0).registration_epoch == 2
    assert desk.book.unregister(desk.now, e.worker(0), e.engine_id) == mapping_of_last(e)
    desk.step()
    assert len(desk.unmapped) == 2


def mapping_of_last(e: EngineDesk) -> int:
    return e.desk._numbers  # the last number given out


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        (Reason.RANK, {"tp_rank": 4}),
        (Reason.RANK, {"tp_rank": -1}),
        (Reason.RANK, {"kv_rank": 4}),
        (Reason.RANK, {"kv_rank": 1}),
        (Reason.TP_SIZE_MISMATCH, {"tp_size": 0}),
        (Reason.TP_SIZE_MISMATCH, {"tp_size": 129}),
        (Reason.TP_SIZE_MISMATCH, {"kv_tp_size": 3}),
        (Reason.TP_SIZE_MISMATCH, {"kv_tp_size": 0}),
        (Reason.TP_SIZE_MISMATCH, {"tp_size": 8, "kv_tp_size": 8}),
        (Reason.TP_SIZE_MISMATCH, {"tp_size": 8}),
    ],
)
def test_a_worker_whose_place_makes_no_sense_is_refused(reason: Reason, changes: dict[str, int]):
    desk = Desk()
    e = desk.engine(tp_size=4, kv_tp_size=4)
    with refused(reason):
        e.share(0, **changes)
    assert mapping_of(e)
    assert e.store("a", 2) == "2 STORED"


def test_workers_of_one_engine_agree_on_the_identity():
    desk = Desk()
    e = desk.engine(tp_size=2, kv_tp_size=2)
    with refused(Reason.SPACE_MISMATCH):
        e.share(1, identity=replace(e.identity, model="another"))
    with refused(Reason.INVALID_FIELD):
        desk.book.register(0, e.scheduler, e.registration(0))


def test_a_lookup_under_another_identity_than_the_workers_says_what_differs():
    """It would be a miss for ever: nothing of this engine is stored there."""
    desk = Desk()
    e = desk.engine()
    e.store("a", 2)
    own, e.base = e.base, desk.book.space_base(desk.now, replace(e.identity, revision="r2", kv_dtype="float16"))
    with pytest.raises(Refusal, match=r"kv_dtype is 'float16' here, 'bfloat16' there") as refusal:
        e.lookup("a", 2)
    assert refusal.value.reason is Reason.SPACE_MISMATCH
    assert "revision is 'r2' here, 'r1' there" in refusal.value.message and "model" not in refusal.value.message
    e.base = own
    assert e.hits("a", 2) == 2


def test_objects_of_one_space_and_rank_have_one_length_while_anybody_has_or_shares_them():
    desk = Desk()
    e = desk.engine()
    with refused(Reason.GEOMETRY_MISMATCH):
        desk.engine("other", block_bytes=512)
    e.store("a", 2)
    double = t.Geometry((t.GroupGeometry(BLOCK, 1024, 512),))
    with refused(Reason.GEOMETRY_MISMATCH):
        e.share(0, geometry=double)
    e.clear()
    assert e.share(0, geometry=double).object_bytes == 2 * OBJECT
    desk.pass_time(t.MS)
    assert e.store("a", 2) == "2 STORED"
    assert desk.states() == "60 free, 4 ready"


@pytest.mark.parametrize("change", [{"geometry": t.Geometry((t.GroupGeometry(BLOCK, 1024, 512),))}, {"order": "other"}])
def test_what_was_pinned_before_a_clear_is_not_copied_in_another_form(change: dict[str, object]):
    desk = Desk(limits=t.CoreLimits(pin_share=1.0))
    e = desk.engine()
    e.store("a", 2)
    job = e.lookup("a", 2)
    e.clear()
    if "order" in change:
        change = {"geometry": t.Geometry((replace(e.registration().geometry.groups[0], **change),))}
    e.share(0, **change)
    with refused(Reason.JOB_UNKNOWN):
        e.retrieve(job, end=BLOCK)
    desk.pass_time(t.MS)
    assert desk.states() == FREE


def test_engines_see_each_others_data_only_in_equal_spaces():
    desk = Desk(chunks=64)
    base = desk.engine("base")
    base.store("a", 4)
    same = desk.engine("same")
    others = [desk.engine("salt", salt="t"), desk.engine("model", model="m2"), desk.engine("revision", revision="r2")]
    assert same.hits("a") == 4
    assert [other.hits("a") for other in others] == [0, 0, 0]
    lora = replace(base.space, lora="adapter@1")
    command = t.LookupCommand(base.engine_id, "r", 0, lora, base.content("a", 4), 1, b"j")
    assert desk.book.lookup(0, base.scheduler, command).status.hit_tokens == 0


# ---- drain and snapshots ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["id", "fingerprint"])
def test_draining_an_engine(by: str):
    desk, e = held()
    other = desk.engine("other")
    e.store("a", 4, call_id=1)
    desk.report()
    e.lookup("a", 2)
    name = e.engine_id if by == "id" else fingerprint(e.engine_id)
    assert desk.book.drain_engine(desk.now, name) == e.engine_id
    assert desk.book.drain_engine(desk.now, name) == e.engine_id
    desk.step()
    assert sorted(desk.draining) == [e.worker(0), e.scheduler]
    assert (desk.counts.jobs, desk.book.engine_idle(e.engine_id)) == (0, False)
    for call in (lambda: e.lookup("a"), lambda: e.store("b"), lambda: e.attach("more", Role.WORKER)):
        with refused(Reason.ENGINE_DRAINING):
            call()
    desk.run_copies()
    assert (e.ended(1), desk.book.engine_idle(e.engine_id)) == ("4 STORED", True)
    assert other.hits("a") == 4
    assert e.end("r") == t.Ended(0, 0)
    assert e.attach(e.worker(0), Role.WORKER), "a broken stream may still come back"
    with refused(Reason.ENGINE_UNKNOWN):
        desk.book.drain_engine(desk.now, "nobody")
    assert desk.book.engine_idle("nobody")


def test_what_an_operator_sees():
    desk = Desk(limits=t.CoreLimits(pin_share=1.0))
    e = desk.engine(tp_size=2, kv_tp_size=2, salt="tenant")
    e.store_all("a", 3)
    e.lookup("a", 2)
    e.die(e.worker(1))
    (engine,) = desk.book.engines()
    assert (engine.engine, engine.jobs, engine.pins, engine.draining) == (fingerprint(e.engine_id), 1, 4, False)
    scheduler, first, second = engine.clients
    assert (scheduler.role, scheduler.registered, scheduler.attached) == (Role.SCHEDULER, False, True)
    assert (first.client_id, first.kv_rank, first.tp_rank, first.registered) == (e.worker(0), 0, 0, True)
    assert (second.kv_rank, second.tp_rank, second.attached) == (1, 1, False)
    (space,) = desk.book.spaces()
    assert (space.chunks, space.bytes, space.pinned_chunks, space.generation) == (3, 6 * OBJECT, 2, 0)
    assert (space.identity, space.salt_fingerprint) == (e.identity, fingerprint("tenant"))
    assert (desk.counts.chunks, desk.counts.spaces, desk.counts.pins) == (3, 1, 4)
    assert desk.book.space_seed(e.space)[1] is False, "this engine brings its own hashes"
    assert desk.book.check_client(e.scheduler, e.engine_id) is None
    assert desk.arena.total_bytes == 64 * OBJECT
