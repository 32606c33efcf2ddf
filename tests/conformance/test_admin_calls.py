# SPDX-License-Identifier: Apache-2.0
"""What every implementation of AdminApi does alike."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import replace

from kvgrpc import api
from kvgrpc.core.errors import Reason
from kvgrpc.core.types import Held, Quota, Role, SpaceRef, TokenRange, Warmed
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


async def test_quotas(place: Place, engine: Engine) -> None:
    """Set, asked for, lowered below what is there, and taken away; other tenants notice nothing."""
    salt = engine.space.cache_salt
    await engine.store(tokens(4))
    size = engine.registered.object_bytes
    used = (await place.admin.get_quota(salt)).used_bytes
    assert used >= 4 * size
    set_ = await place.admin.set_quota(salt, 3 * size)
    assert set_.size_bytes == 3 * size
    assert set_.used_bytes <= 3 * size
    assert await place.admin.get_quota(salt) == set_
    assert 0 < await engine.hit(tokens(4)) < 4 * CHUNK
    assert (await place.admin.set_quota(salt, None)).size_bytes is None
    await engine.store(tokens(4))
    assert await engine.hit(tokens(4)) == 4 * CHUNK
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
