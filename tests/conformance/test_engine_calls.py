# SPDX-License-Identifier: Apache-2.0
"""Sessions, memory, copies and lookups: what every implementation of CacheApi does alike."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kvgrpc import api
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.keys import chunk_keys, space_digest
from kvgrpc.core.types import (
    ChunkOutcome,
    ChunkResult,
    Ended,
    Policy,
    PrefetchStatus,
    Reader,
    Role,
    SpaceRef,
    TokenRange,
)
from kvgrpc.transfer.host import host_id
from tests.conformance.engine import BLOCK, NUM_BLOCKS, Engine, refused, tokens
from tests.conformance.places import CHUNK, Place
from tests.kvdata import BLOCKS_OUTERMOST_OPAQUE, MHA, Image

# ---- sessions -------------------------------------------------------------------------------------------------------


async def test_handshake(place: Place) -> None:
    client = place.client(f"c-{secrets.token_hex(4)}")
    info = await client.handshake(api.Hello(client_version="test 1"))
    assert (info.protocol_major, info.chunk_tokens, info.hash_algorithm) == (1, CHUNK, "sha256-u32le")
    assert (len(info.server_epoch), info.space_base, info.host_id) == (16, b"", host_id())
    assert info.limits.keys_per_call == 16384
    assert info.limits.reattach_grace_ms == 500
    identity = api.SpaceIdentity("m", "r", "bfloat16", 1, "sha256-u32le", "opaque:A:B:4")
    first = await client.handshake(api.Hello(identity=identity))
    again = await client.handshake(api.Hello(identity=identity))
    other = await client.handshake(api.Hello(identity=replace(identity, revision="")))
    assert first.space_base == again.space_base
    assert len(first.space_base) == 16
    assert other.space_base != first.space_base
    assert await refused(client.handshake(api.Hello(protocol_major=2))) is Reason.PROTOCOL_VERSION


async def test_a_session_is_opened_once_and_can_be_continued(engine: Engine) -> None:
    stranger: Any = engine.place.client(f"worker-{engine.name}").attach(engine.engine_id, Role.WORKER, b"x" * 16)
    assert await refused(anext(stranger)) is Reason.CLIENT_EXISTS
    await engine.streams[0].aclose()
    event = await engine.attach(engine.worker, Role.WORKER)
    assert event.resumed
    assert not event.draining
    assert await engine.store(tokens(1)) == [(0, 1, "STORED", "")], "the registration is still there"


async def test_who_is_not_attached_is_told_so(engine: Engine) -> None:
    nobody = engine.place.client(f"nobody-{engine.name}")
    calls = [
        nobody.register(engine.registration()),
        nobody.lookup(engine.lookup_request(tokens(1))),
        nobody.query(engine.engine_id, b"j" * 16),
        nobody.store(engine.store_request(tokens(1), [0] * 4)),
        nobody.retrieve(engine.retrieve_request(b"j" * 16, TokenRange(0, 16), [0] * 4)),
        nobody.free(api.FreeRequest(engine.engine_id, b"j" * 16, 1)),
        nobody.end_request(engine.engine_id, "r"),
        nobody.fence(engine.engine_id, (1,)),
        nobody.unregister(engine.engine_id),
    ]
    assert [await refused(call) for call in calls] == [Reason.NOT_ATTACHED] * 9


async def test_an_engine_id_is_a_capability(engine: Engine) -> None:
    wrong = secrets.token_hex(16)
    assert await refused(engine.scheduler.lookup(engine.lookup_request(tokens(1), engine_id=wrong))) is (
        Reason.ENGINE_UNKNOWN
    )
    assert await refused(engine.worker.end_request(wrong, "r")) is Reason.ENGINE_UNKNOWN
    assert await refused(engine.worker.fence(wrong, (1,))) is Reason.ENGINE_UNKNOWN


# ---- memory ---------------------------------------------------------------------------------------------------------


async def test_register_is_an_upsert(engine: Engine) -> None:
    first = engine.registered
    assert (first.chunk_tokens, first.object_bytes) == (CHUNK, CHUNK * MHA.token_bytes)
    assert first.stored_form.startswith("opaque:TEST:")
    assert await engine.worker.register(engine.registration()) == first
    same = replace(engine.identity, stored_form=first.stored_form)
    assert (await engine.worker.register(engine.registration(identity=same))).space_base == first.space_base
    name, buffer = engine.place.memory(engine.image.size_bytes)
    engine.image = Image(MHA, BLOCKS_OUTERMOST_OPAQUE, BLOCK, NUM_BLOCKS, buffer=buffer)
    engine.memory_name = name
    moved = await engine.worker.register(engine.registration())
    assert moved.registration_epoch > first.registration_epoch
    assert await engine.store(tokens(1)) == [(0, 1, "STORED", "")]


async def test_unregister_may_be_repeated(engine: Engine) -> None:
    await engine.worker.unregister(engine.engine_id)
    await engine.worker.unregister(engine.engine_id)
    assert await refused(engine.store(tokens(1))) is Reason.NOT_REGISTERED
    await engine.worker.register(engine.registration())
    assert await engine.store(tokens(1)) == [(0, 1, "STORED", "")]


async def test_registrations_that_do_not_fit(engine: Engine) -> None:
    layout = engine.image.layout(engine.memory_name)
    memory = layout.memory[0]
    assert isinstance(memory, api.SharedMemory)
    too_long = replace(layout, memory=(replace(memory, size_bytes=memory.size_bytes + 1),))
    missing = replace(layout, memory=(replace(memory, name="kvgrpc-test-nothing"),))
    more_blocks = replace(layout, groups=(replace(layout.groups[0], num_blocks=NUM_BLOCKS + 1),))
    cuda = replace(layout, memory=(api.CudaIpcMemory(b"h" * 64, "GPU-0", 0, memory.size_bytes),))
    expected = {
        Reason.MEMORY: {"layout": missing},
        Reason.LAYOUT: {"layout": more_blocks},
        Reason.CUDA_UNSUPPORTED: {"layout": cuda},
        Reason.STORED_FORM_MISMATCH: {"identity": replace(engine.identity, stored_form="opaque:other")},
        Reason.HOST_MISMATCH: {"host_id": "0" * 32},
        Reason.RANK: {"kv_rank": 1},
        Reason.TP_SIZE_MISMATCH: {"tp_size": 3, "kv_tp_size": 2},
    }
    for reason, changes in expected.items():
        assert await refused(engine.worker.register(engine.registration(**changes))) is reason
    assert await refused(engine.worker.register(engine.registration(layout=too_long))) is Reason.MEMORY
    assert await engine.store(tokens(1)) == [(0, 1, "STORED", "")], "the good registration is still in force"


# ---- store, lookup, retrieve ----------------------------------------------------------------------------------------


async def test_bytes_come_back(engine: Engine) -> None:
    prompt = tokens(5.5)
    assert await engine.store(prompt) == [(0, 5, "STORED", "")], "a partial tail chunk is skipped"
    assert await engine.store(prompt) == [(0, 5, "RESIDENT", "")]
    answer = await engine.lookup(prompt)
    assert answer.status == PrefetchStatus(True, 5 * CHUNK, True, {"l1": 5})
    assert len(answer.job_id) == 16
    assert await engine.retrieve(answer.job_id, TokenRange(0, 80)) == [(0, 5, "LOADED", "")]


async def test_ranges_begin_and_end_inside_chunks(engine: Engine) -> None:
    await engine.store(tokens(4))
    for start, end, first, count in ((4, 60, 0, 4), (20, 24, 1, 1), (16, 48, 1, 2), (60, 64, 3, 1)):
        answer = await engine.lookup(tokens(4), f"r{start}")
        assert await engine.retrieve(answer.job_id, TokenRange(start, end)) == [(first, count, "LOADED", "")]
    blocks = engine.blocks(40)
    engine.image.write(blocks, first_token=1000 + 12)
    stored = await engine.worker.store(
        engine.store_request(tokens(4, first=1000), blocks, range=TokenRange(12, 52), call_id=99)
    )
    assert [(one.first_chunk, one.count) for one in stored] == [(1, 2)], "whole chunks only"


async def test_a_miss_is_an_answer(engine: Engine) -> None:
    for content in (tokens(3), tokens(0.5), tokens(0)):
        answer = await engine.lookup(content, f"r{content.num_tokens}")
        assert answer.job_id == b""
        assert answer.status == PrefetchStatus(True)
    await engine.store(tokens(2))
    assert await engine.hit(tokens(3)) == 2 * CHUNK
    assert await engine.hit(tokens(3, first=1)) == 0


async def test_salt_adapter_and_model_keep_apart(engine: Engine) -> None:
    await engine.store(tokens(2))
    for space in (
        replace(engine.space, cache_salt="tenant"),
        replace(engine.space, lora="adapter"),
        replace(engine.space, lora="tenant"),
    ):
        assert await engine.hit(tokens(2), space=space) == 0
    salted = replace(engine.space, cache_salt="tenant")
    assert await engine.store(tokens(2), space=salted) == [(0, 2, "STORED", "")]
    assert await engine.hit(tokens(2), space=salted) == 2 * CHUNK
    async with Engine(engine.place) as other:
        assert await other.hit(tokens(2)) == 0


async def test_two_engines_of_one_identity_share(engine: Engine) -> None:
    await engine.store(tokens(3))
    async with Engine(engine.place, model=engine.identity.model) as other:
        answer = await other.lookup(tokens(3))
        assert answer.status.hit_tokens == 3 * CHUNK
        assert await other.retrieve(answer.job_id, TokenRange(0, 48)) == [(0, 3, "LOADED", "")]
        assert await refused(engine.scheduler.query(engine.engine_id, answer.job_id)) is Reason.JOB_UNKNOWN


async def test_hashes_of_the_engine(place: Place) -> None:
    async with Engine(place, hash_algorithm="vllm-sha256_cbor") as engine:
        hashes = [bytes([i]) * 32 for i in range(3)]
        content = api.Hashes(hashes, 3 * CHUNK + 5)
        assert await engine.store(content, range=TokenRange(0, 48)) == [(0, 3, "STORED", "")]
        assert await engine.hit(content) == 3 * CHUNK
        assert await engine.hit(api.Hashes([b"?" * 32, *hashes], 4 * CHUNK)) == 0
        assert await refused(engine.lookup(tokens(3))) is Reason.CONTENT_KIND
        later = engine.store_request(api.Hashes([b"9" * 32], 4 * CHUNK, 3), engine.blocks(16), range=TokenRange(48, 64))
        assert [(r.first_chunk, r.outcome.value) for r in await engine.worker.store(later)] == [(3, "STORED")]


async def test_policies(engine: Engine) -> None:
    refusal = [(0, 2, "REFUSED", "NO_STORE")]
    assert await engine.store(tokens(2), policy=Policy(no_store=True)) == refusal
    assert await engine.hit(tokens(2)) == 0
    await engine.store(tokens(2))
    assert await engine.hit(tokens(2), policy=Policy(no_lookup=True)) == 0
    assert await engine.hit(tokens(2)) == 2 * CHUNK


# ---- repeats and jobs -----------------------------------------------------------------------------------------------


async def test_a_repeated_call_id_gets_the_recorded_result(engine: Engine) -> None:
    blocks = engine.blocks(32)
    engine.image.write(blocks)
    request = engine.store_request(tokens(2), blocks)
    first = await engine.worker.store(request)
    assert await engine.worker.store(request) == first
    assert await refused(engine.worker.store(replace(request, content=tokens(2, first=7)))) is Reason.CALL_ID_REUSED
    answer = await engine.lookup(tokens(2))
    load = engine.retrieve_request(answer.job_id, TokenRange(0, 32), blocks)
    assert await engine.worker.retrieve(load) == await engine.worker.retrieve(load)
    together = engine.store_request(tokens(2, first=50), blocks)
    results = await asyncio.gather(*(engine.worker.store(together) for _ in range(4)))
    assert [one[0].outcome.value for one in results] == ["STORED"] * 4, "repeats join the call"


async def test_a_repeated_lookup_is_the_same_job(engine: Engine) -> None:
    await engine.store(tokens(2))
    first = await engine.lookup(tokens(2))
    assert await engine.lookup(tokens(2)) == first
    assert (await engine.lookup(tokens(2), attempt=1)).job_id != first.job_id
    assert await engine.scheduler.query(engine.engine_id, first.job_id) == first.status
    assert await engine.scheduler.query(engine.engine_id, first.job_id, wait_ms=50) == first.status
    assert await engine.worker.query(engine.engine_id, first.job_id) == first.status, "any client of the engine"


async def test_pins_are_given_back_once(engine: Engine) -> None:
    await engine.store(tokens(4))
    job_id = (await engine.lookup(tokens(4))).job_id
    request = api.FreeRequest(engine.engine_id, job_id, 1)
    assert await refused(engine.scheduler.free(replace(request, tp_size=2))) is Reason.TP_SIZE_MISMATCH
    assert await refused(engine.scheduler.free(replace(request, readers=(Reader(0, 1),)))) is Reason.READER_UNKNOWN
    assert await refused(engine.scheduler.free(replace(request, job_id=b"?" * 16))) is Reason.JOB_UNKNOWN
    assert await engine.scheduler.free(replace(request, range=TokenRange(16, 48))) == 2
    assert await engine.scheduler.free(replace(request, readers=(Reader(0, 0),))) == 2
    assert await engine.scheduler.free(request) == 0
    # what is not pinned any more can still be there
    assert await engine.retrieve(job_id, TokenRange(0, 64)) == [(0, 4, "LOADED", "")]


async def test_end_request_ends_every_attempt(engine: Engine) -> None:
    await engine.store(tokens(2))
    jobs = [(await engine.lookup(tokens(2), attempt=attempt)).job_id for attempt in range(2)]
    assert await engine.scheduler.end_request(engine.engine_id, "r") == Ended(2, 4)
    assert await engine.scheduler.end_request(engine.engine_id, "r") == Ended(0, 0)
    assert await engine.scheduler.end_request(engine.engine_id, "never asked") == Ended(0, 0)
    for job_id in jobs:
        assert await refused(engine.scheduler.query(engine.engine_id, job_id)) is Reason.JOB_UNKNOWN
        assert await refused(engine.retrieve(job_id, TokenRange(0, 32))) is Reason.JOB_UNKNOWN


async def test_the_end_of_the_scheduler_ends_the_engines_jobs(engine: Engine) -> None:
    await engine.store(tokens(2))
    job_id = (await engine.lookup(tokens(2))).job_id
    await engine.streams[1].aclose()

    async def gone() -> bool:
        try:
            await engine.worker.query(engine.engine_id, job_id)
        except Refusal as refusal:
            return refusal.reason is Reason.JOB_UNKNOWN
        return False

    for _ in range(500):
        if await gone():
            break
        await asyncio.sleep(0.01)
    assert await gone()


async def test_fences(engine: Engine) -> None:
    request = engine.store_request(tokens(2), engine.blocks(32))
    await engine.worker.fence(engine.engine_id, (request.call_id, 1000))
    assert await refused(engine.worker.store(request)) is Reason.CALL_REVOKED
    late = engine.retrieve_request(b"j" * 16, TokenRange(0, 16), engine.blocks(16))
    assert await refused(engine.worker.retrieve(replace(late, call_id=1000))) is Reason.CALL_REVOKED
    await engine.worker.fence(engine.engine_id, (request.call_id,))
    assert await engine.store(tokens(2)) == [(0, 2, "STORED", "")]
    done = engine.store_request(tokens(2), engine.blocks(32))
    results = await engine.worker.store(done)
    await engine.worker.fence(engine.engine_id, (done.call_id,))
    assert await engine.worker.store(done) == results, "what had ended stays as it ended"


# ---- bad input ------------------------------------------------------------------------------------------------------


BAD_STORES: list[tuple[Reason, dict[str, Any]]] = [
    (Reason.BLOCK_IDS, {"blocks": ((0, 1, 2),)}),
    (Reason.BLOCK_IDS, {"blocks": ((0, 1, 2, 3, 4, 5, 6, NUM_BLOCKS),)}),
    (Reason.BLOCK_IDS, {"blocks": ()}),
    (Reason.BLOCK_IDS, {"blocks": ((0,) * 8, (0,) * 8)}),
    (Reason.RANGE, {"range": TokenRange(2, 32)}),
    (Reason.RANGE, {"range": TokenRange(32, 16)}),
    (Reason.RANGE, {"range": TokenRange(0, 36)}),
    (Reason.SPACE_UNKNOWN, {"space": SpaceRef(b"?" * 16)}),
    (Reason.CONTENT_KIND, {"content": api.Hashes((b"h" * 32, b"i" * 32), 32)}),
    (Reason.INVALID_FIELD, {"call_id": 0}),
    (Reason.READY_EVENT_UNSUPPORTED, {"ready_event": b"e" * 64}),
]


@pytest.mark.parametrize("at", range(len(BAD_STORES)))
async def test_bad_stores_change_nothing(engine: Engine, at: int) -> None:
    reason, changes = BAD_STORES[at]
    assert await refused(engine.worker.store(replace(engine.store_request(tokens(2), range(8)), **changes))) is reason
    assert await engine.hit(tokens(2)) == 0
    assert await engine.store(tokens(2)) == [(0, 2, "STORED", "")]


async def test_bad_lookups_and_loads_change_nothing(engine: Engine) -> None:
    await engine.store(tokens(2))
    job_id = (await engine.lookup(tokens(2))).job_id
    lookups: list[tuple[Reason, dict[str, Any]]] = [
        (Reason.TP_SIZE_MISMATCH, {"tp_size": 2}),
        (Reason.SPACE_UNKNOWN, {"space": SpaceRef(b"?" * 16)}),
        (Reason.RANK, {"kv_ranks": (1,)}),
        (Reason.CONTENT_KIND, {"content": api.Hashes((b"h" * 32,), 16)}),
    ]
    for reason, changes in lookups:
        assert (
            await refused(engine.scheduler.lookup(replace(engine.lookup_request(tokens(2), "bad"), **changes)))
            is reason
        )
    engine.image.memory[:] = 0xA5
    good = engine.retrieve_request(job_id, TokenRange(0, 32), range(8))
    loads: list[tuple[Reason, dict[str, Any]]] = [
        (Reason.BLOCK_IDS, {"blocks": (tuple(range(7)),)}),
        (Reason.BLOCK_IDS, {"blocks": ((*range(7), NUM_BLOCKS),)}),
        (Reason.RANGE, {"range": TokenRange(0, 30)}),
        (Reason.JOB_UNKNOWN, {"job_id": b"?" * 16}),
    ]
    for reason, changes in loads:
        call_id = next(engine.call_ids)
        assert await refused(engine.worker.retrieve(replace(good, call_id=call_id, **changes))) is reason
    assert engine.image.untouched()
    assert await engine.retrieve(job_id, TokenRange(0, 32)) == [(0, 2, "LOADED", "")]
    past = await engine.retrieve((await engine.lookup(tokens(2), "past")).job_id, TokenRange(0, 48))
    assert past == [(0, 2, "LOADED", ""), (2, 1, "MISSING", "")]


# ---- watching -------------------------------------------------------------------------------------------------------


async def test_what_is_stored_and_cleared_is_told_to_watchers(engine: Engine) -> None:
    watching: Any = engine.place.client(f"router-{engine.name}").watch(api.WatchRequest(engine.space.space_base))
    started = await anext(watching)
    assert (started.sequence, started.kind, started.chunk_tokens) == (1, api.WatchKind.STARTED, CHUNK)
    prompt = tokens(2, first=secrets.randbelow(1 << 30))
    await engine.store(prompt)
    stored = await anext(watching)
    keys = chunk_keys(space_digest(engine.space), prompt.data, CHUNK)
    assert (stored.sequence, stored.kind, stored.tier) == (2, api.WatchKind.STORED, "l1")
    assert (stored.space, stored.keys) == (space_digest(engine.space), tuple(keys))
    await watching.aclose()


async def test_what_was_stored_is_read_as_bytes_and_written_again(engine: Engine) -> None:
    prompt = tokens(2, first=secrets.randbelow(1 << 30))
    blocks, each = engine.blocks(prompt.num_tokens), CHUNK // BLOCK
    engine.image.write(blocks)
    await engine.worker.store(engine.store_request(prompt, blocks))
    answer = await engine.lookup(prompt, secrets.token_hex(8))
    asked = api.ReadChunksRequest(engine.engine_id, answer.job_id, Reader(0, 0), TokenRange(0, 2 * CHUNK))
    reading: Any = engine.scheduler.read_chunks(asked)
    answers = [one async for one in reading]
    objects = [engine.image.object_bytes(blocks[at : at + each]) for at in (0, each)]
    assert [one.data for one in answers[:-1]] == objects
    assert [(one.chunk, one.offset) for one in answers[:-1]] == [(0, 0), (1, 0)]
    assert answers[-1] == (ChunkResult(0, 2, ChunkOutcome.LOADED),)
    parts, other = answers[:-1], tokens(2, first=secrets.randbelow(1 << 30))
    begin = api.WriteChunksRequest(engine.engine_id, engine.space, other, len(objects[0]), parts[0].order)

    async def coming() -> AsyncIterator[api.ChunkPart]:
        for part in parts:
            yield part

    assert await engine.worker.write_chunks(begin, coming()) == (ChunkResult(0, 2, ChunkOutcome.STORED),)
    assert (await engine.lookup(other, secrets.token_hex(8))).status.hit_tokens == 2 * CHUNK
