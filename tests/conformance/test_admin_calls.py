# SPDX-License-Identifier: Apache-2.0
"""What every implementation of AdminApi does alike."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from dataclasses import replace
from typing import Any

from kvgrpc import api
from kvgrpc.core.errors import Reason
from kvgrpc.core.types import Held, Quota, Role, SpaceRef, TokenRange, Warmed, WritePolicy
from tests.conformance.engine import Engine, refused, tokens
from tests.conformance.places import CHUNK, L1_BYTES, Place


def fingerprint(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()[:16]


async def test_status(place: Place, engine: Engine) -> None:
    await engine.store(tokens(3))
    await engine.lookup(tokens(3))
    status = await place.admin.get_status()
    assert (status.chunk_tokens, status.draining, status.calls_in_flight) == (CHUNK, False, 0)
    arena = status.arena
    parts = (arena.free_bytes, arena.writing_bytes, arena.ready_bytes, arena.pinned_bytes)
    assert sum(parts) + arena.doomed_bytes + arena.settling_bytes == arena.total_bytes == L1_BYTES
    assert arena.pinned_bytes >= 3 * engine.registered.object_bytes
    assert status.pins >= 3
    assert status.clients >= 2
    assert status.counters["stores"] >= 1
    if not place.is_shared:
        assert (status.chunks, status.spaces, status.engines, status.clients) == (3, 1, 1, 2)
        assert (status.jobs, status.pins) == (1, 3)
    bound = [client_id for executor in status.executors for client_id in executor.clients]
    assert f"worker-{engine.name}" in bound
    assert len(bound) == len(set(bound))


async def test_engines_are_listed_without_their_secret(place: Place, engine: Engine) -> None:
    await engine.store(tokens(2))
    await engine.lookup(tokens(2))
    listed = await place.admin.list_engines()
    assert engine.engine_id not in repr(listed)
    (mine,) = [one for one in listed if one.engine == fingerprint(engine.engine_id)]
    assert (mine.jobs, mine.pins, mine.draining) == (1, 2, False)
    worker, scheduler = mine.clients
    assert (worker.client_id, worker.role, worker.attached, worker.registered) == (
        f"worker-{engine.name}",
        Role.WORKER,
        True,
        True,
    )
    assert worker.memory_bytes == engine.image.tensor_bytes
    assert (scheduler.role, scheduler.registered, scheduler.memory_bytes) == (Role.SCHEDULER, False, 0)


async def test_spaces_are_listed_without_the_salt(place: Place, engine: Engine) -> None:
    salt = f"tenant-{engine.name}"
    await engine.store(tokens(2))
    await engine.store(tokens(3), space=SpaceRef(engine.space.space_base, "adapter", salt))
    listed = await place.admin.list_spaces()
    assert salt not in repr(listed)
    plain, salted = [one for one in listed if one.space_base == engine.space.space_base]
    assert plain.identity == replace(engine.identity, stored_form=engine.registered.stored_form)
    assert (plain.lora, plain.salt_fingerprint, plain.chunks) == ("", "", 2)
    assert (salted.lora, salted.salt_fingerprint, salted.chunks) == ("adapter", fingerprint(salt), 3)
    assert salted.bytes >= 3 * engine.registered.object_bytes


async def test_clear_by_each_target(place: Place, engine: Engine) -> None:
    salt = f"tenant-{engine.name}"
    salted = replace(engine.space, cache_salt=salt)
    targets = [
        (api.ClearTarget(space=engine.space), 2),
        (api.ClearTarget(cache_salt=salt), 3),
        (api.ClearTarget(model=engine.identity.model), 5),
    ]
    for target, removed in targets:
        await engine.store(tokens(2))
        await engine.store(tokens(3), space=salted)
        before = (await engine.hit(tokens(2)), await engine.hit(tokens(3), space=salted))
        assert before == (2 * CHUNK, 3 * CHUNK)
        cleared = await place.admin.clear(target)
        assert (cleared.removed_chunks, cleared.still_pinned_chunks) == (removed, 0)
        after = (await engine.hit(tokens(2)), await engine.hit(tokens(3), space=salted))
        assert sum(before) - sum(after) == removed * CHUNK
    await engine.store(tokens(2))
    assert (await place.admin.clear(api.ClearTarget(all=True))).removed_chunks >= 2
    assert await engine.hit(tokens(2)) == 0


async def test_what_is_pinned_when_it_is_cleared_can_still_be_read(place: Place, engine: Engine) -> None:
    await engine.store(tokens(2))
    job_id = (await engine.lookup(tokens(2))).job_id
    cleared = await place.admin.clear(api.ClearTarget(space=engine.space))
    assert (cleared.removed_chunks, cleared.still_pinned_chunks) == (2, 2)
    assert await engine.retrieve(job_id, TokenRange(0, 32)) == [(0, 2, "LOADED", "")]
    assert await engine.hit(tokens(2)) == 0


async def test_new_generations(place: Place, engine: Engine) -> None:
    await engine.store(tokens(2))
    first = await place.admin.bump_generation(model=engine.identity.model)
    assert (first.removed_chunks, await engine.hit(tokens(2))) == (2, 0)
    await engine.store(tokens(1))
    second = await place.admin.bump_generation(space_base=engine.space.space_base)
    assert (second.removed_chunks, second.generation) == (1, first.generation + 1)
    assert await refused(place.admin.bump_generation(model=secrets.token_hex(8))) is Reason.SPACE_UNKNOWN
    assert await refused(place.admin.bump_generation(space_base=b"?" * 16)) is Reason.SPACE_UNKNOWN


async def test_pins_of_operators(place: Place, engine: Engine) -> None:
    assert await place.admin.pin(engine.space, tokens(2), 60_000) == Held(b"", 0)
    await engine.store(tokens(2))
    held = await place.admin.pin(engine.space, tokens(3), 60_000)
    assert (len(held.pin_id), held.pinned_tokens) == (16, 2 * CHUNK)
    assert (await place.admin.get_status()).arena.held_bytes >= 2 * engine.registered.object_bytes
    assert await place.admin.unpin(held.pin_id) == 2
    assert await refused(place.admin.unpin(held.pin_id)) is Reason.PIN_UNKNOWN
    assert await refused(place.admin.pin(SpaceRef(b"?" * 16), tokens(1), 1000)) is Reason.SPACE_UNKNOWN


async def test_warm_says_what_is_there(place: Place, engine: Engine) -> None:
    await engine.store(tokens(2))
    assert await place.admin.warm(engine.space, tokens(3), 2000) == Warmed(2 * CHUNK)
    assert (await place.admin.get_status()).pins == 0
    assert await refused(place.admin.warm(SpaceRef(b"?" * 16), tokens(1), 1000)) is Reason.SPACE_UNKNOWN


async def test_inspect_says_what_is_there_and_who_keeps_it(place: Place, engine: Engine) -> None:
    assert [one.ready_ranks for one in (await place.admin.inspect(engine.space, tokens(2))).chunks] == [0, 0]
    await engine.store(tokens(3))
    await engine.lookup(tokens(2), "request-7")
    held = await place.admin.pin(engine.space, tokens(1), 60_000)
    found = await place.admin.inspect(engine.space, tokens(4))
    assert [(one.ready_ranks, one.writing_ranks, one.pins, one.holds) for one in found.chunks] == [
        (1, 0, 1, 1),
        (1, 0, 1, 0),
        (1, 0, 0, 0),
        (0, 0, 0, 0),
    ]
    assert all(one.bytes >= engine.registered.object_bytes for one in found.chunks[:3])
    by_pin, by_lookup = found.keepers
    assert (by_pin.pin_id, by_pin.chunks, by_pin.engine) == (held.pin_id, 1, "")
    assert (by_lookup.engine, by_lookup.request_id, by_lookup.chunks) == (fingerprint(engine.engine_id), "request-7", 2)
    assert 0 < by_lookup.left_ms <= 60_000 and 0 < by_pin.left_ms <= 60_000
    assert (found.more_keepers, found.asked_objects, found.silent_tiers) == (False, 0, ())
    again = await place.admin.inspect(engine.space, api.Hashes((found.chunks[2].key, b"?" * 32), 0))
    assert [(one.key, one.ready_ranks) for one in again.chunks] == [(found.chunks[2].key, 1), (b"?" * 32, 0)]
    assert again.keepers == ()
    assert await refused(place.admin.inspect(SpaceRef(b"?" * 16), tokens(1))) is Reason.SPACE_UNKNOWN


async def test_a_recording_has_calls_and_no_contents(place: Place, engine: Engine) -> None:
    salted = replace(engine.space, cache_salt=f"tenant-{engine.name}")
    await engine.store(tokens(2))
    recording: Any = place.admin.record_trace()
    assert (await anext(recording)).calls == ()
    other: Any = place.admin.record_trace()
    assert (await anext(other)).chunk_tokens == CHUNK
    await engine.lookup(tokens(3.5), "r1")
    await engine.lookup(tokens(3.5), "r1")
    await engine.store(tokens(3))
    await engine.hit(tokens(3), space=salted)
    calls: list[api.TracedCall] = []
    while len(calls) < 3:
        calls += (await asyncio.wait_for(anext(recording), 10)).calls
    looked, stored, elsewhere = calls
    assert (looked.kind, looked.num_tokens, looked.prefix_chunks, len(looked.chunks)) == (
        api.CallKind.LOOKUP,
        int(3.5 * CHUNK),
        2,
        3,
    )
    assert (stored.kind, stored.prefix_chunks, list(stored.chunks)) == (api.CallKind.STORE, 0, list(looked.chunks))
    assert looked.chunk_bytes == stored.chunk_bytes == engine.registered.object_bytes
    assert (elsewhere.space, elsewhere.prefix_chunks) == (looked.space + 1, 0)
    assert set(elsewhere.chunks).isdisjoint(looked.chunks), "one prompt in two spaces is not seen to be one"
    theirs: list[api.TracedCall] = []
    while len(theirs) < 3:
        theirs += (await asyncio.wait_for(anext(other), 10)).calls
    assert set(theirs[0].chunks).isdisjoint(looked.chunks), "nor in two recordings"
    keys = [
        int.from_bytes(one.key[:8], "little") for one in (await place.admin.inspect(engine.space, tokens(3))).chunks
    ]
    assert set(keys).isdisjoint(looked.chunks), "keys themselves do not go out: prompts could be guessed and tried"
    await recording.aclose()
    await other.aclose()


async def test_so_many_recordings_and_no_more(place: Place, engine: Engine) -> None:
    running: list[Any] = []
    for _ in range(4):
        running.append(place.admin.record_trace())
        await anext(running[-1])
    more: Any = place.admin.record_trace()
    assert await refused(anext(more)) is Reason.CALL_LIMIT
    for each in running:
        await each.aclose()


async def test_quotas(place: Place, engine: Engine) -> None:
    """Set, asked for, lowered below what is there, and taken away; other tenants notice nothing."""
    space = replace(engine.space, cache_salt=f"tenant-{engine.name}")
    salt = space.cache_salt
    await engine.store(tokens(4), space=space)
    size = engine.registered.object_bytes
    used = (await place.admin.get_quota(salt)).used_bytes
    assert used >= 4 * size
    set_ = await place.admin.set_quota(salt, 3 * size)
    assert set_.size_bytes == 3 * size
    assert set_.used_bytes <= 3 * size
    assert await place.admin.get_quota(salt) == set_
    assert 0 < await engine.hit(tokens(4), space=space) < 4 * CHUNK
    assert (await place.admin.set_quota(salt, None)).size_bytes is None
    await engine.store(tokens(4), space=space)
    assert await engine.hit(tokens(4), space=space) == 4 * CHUNK
    assert await place.admin.get_quota(secrets.token_hex(8)) == Quota(None, 0)


async def test_an_engine_is_drained(place: Place, engine: Engine) -> None:
    await engine.store(tokens(2))
    job_id = (await engine.lookup(tokens(2))).job_id
    assert await place.admin.drain_engine(fingerprint(engine.engine_id), wait_ms=5000)
    for stream in engine.streams:
        assert (await anext(stream)).draining
    assert await refused(engine.lookup(tokens(2), "r2")) is Reason.ENGINE_DRAINING
    assert await refused(engine.store(tokens(1, first=9))) is Reason.ENGINE_DRAINING
    assert await refused(engine.scheduler.query(engine.engine_id, job_id)) is Reason.JOB_UNKNOWN
    async with Engine(place, model=engine.identity.model) as other:
        assert await other.hit(tokens(2)) == 2 * CHUNK
    assert await refused(place.admin.drain_engine(secrets.token_hex(8))) is Reason.ENGINE_UNKNOWN


async def test_write_policies(place: Place) -> None:
    """Of a model, of all others, and taken away; what is in force is answered."""
    admin, model = place.admin, f"model-{secrets.token_hex(4)}"
    assert await admin.set_write_policy(model, WritePolicy.NONE) is WritePolicy.NONE
    assert await admin.set_write_policy("", WritePolicy.SECOND_USE) is WritePolicy.SECOND_USE
    assert await admin.set_write_policy(f"{model}-other", None) is WritePolicy.SECOND_USE
    assert await admin.set_write_policy(model, WritePolicy.EVICTION) is WritePolicy.EVICTION
    assert await admin.set_write_policy(model, None) is WritePolicy.SECOND_USE
    assert await admin.set_write_policy("", None) is WritePolicy.THROUGH
