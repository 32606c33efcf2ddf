# SPDX-License-Identifier: Apache-2.0
"""Bad input: a typed error with code, reason and field; nothing is written anywhere; the next good call works."""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvgrpc import api
from kvgrpc.client.aio import AioClient
from kvgrpc.core.types import CoreLimits, LookupAnswer, Policy, Reader, Role, SpaceRef, TokenRange
from tests.e2e.harness import CHUNK, Engine, LocalServer, local_server, outcomes, tokens_of
from tests.e2e.probes import TINY, nothing_changes, refused

EIGHT = tokens_of(1, 8 * CHUNK)
BLOCKS = range(32)
HASHES = api.Hashes([bytes(32)], CHUNK)
NOBODY = "an engine that nobody has"
LIMITS = CoreLimits(chunk_tokens=CHUNK, page_bytes=4096, keys_per_call=64)


@dataclass
class Scene:
    """Two engines, each with a job of eight chunks in its own space; the first one's memory holds 0xA5."""

    server: LocalServer
    engine: Engine
    other: Engine
    job: LookupAnswer
    theirs: LookupAnswer
    fresh: itertools.count[int] = field(default_factory=lambda: itertools.count(100))

    def store(self, **changes: Any) -> Awaitable[object]:
        return self.engine.worker.store(replace(self.engine.store_request(EIGHT, BLOCKS), **changes))

    def retrieve(self, **changes: Any) -> Awaitable[object]:
        good = self.engine.retrieve_request(self.job.job_id, BLOCKS)
        return self.engine.worker.retrieve(replace(good, **changes))

    def lookup(self, **changes: Any) -> Awaitable[object]:
        return self.engine.scheduler.lookup(replace(self.engine.lookup_request(EIGHT), **changes))

    def free(self, **changes: Any) -> Awaitable[object]:
        return self.engine.free(self.job, **changes)

    async def check_good_calls(self) -> None:
        """A fresh chunk goes in and comes out."""
        tokens, engine = tokens_of(next(self.fresh), CHUNK), self.engine
        assert outcomes(await engine.store(tokens, range(4))) == ["STORED"]
        answer = await engine.lookup(tokens)
        assert outcomes(await engine.retrieve(answer, range(8, 12))) == ["LOADED"]
        assert engine.image.wrong_tokens(range(8, 12)) == [] and engine.image.untouched(range(8, 12))
        engine.image.memory[:] = 0xA5


Act = Callable[[Scene], Awaitable[object]]
Error = tuple[str, str, str]


@contextlib.asynccontextmanager
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with local_server(tmp_path, limits=LIMITS, message_bytes=1 << 20) as server:
        engine, other = await server.engine(kv=TINY), await server.engine(kv=TINY, revision="other")
        for each in (engine, other):
            await each.store(EIGHT, BLOCKS)
            each.image.memory[:] = 0xA5
        yield Scene(server, engine, other, await engine.lookup(EIGHT), await other.lookup(EIGHT))


async def assert_refused(scene: Scene, cases: list[tuple[str, Act, Error]]) -> None:
    for name, act, error in cases:
        async with nothing_changes(scene.server, scene.engine, scene.other):
            assert await refused(act(scene)) == error, name
        assert scene.engine.image.untouched()
        await scene.check_good_calls()


def invalid(where: str) -> Error:
    return ("INVALID_ARGUMENT", "INVALID_FIELD", where)


def bad(reason: str, where: str) -> Error:
    return ("INVALID_ARGUMENT", reason, where)


def named(s: Scene, **changes: str) -> SpaceRef:
    return replace(s.engine.space, **changes)


def calls_of(worker: AioClient, scheduler: AioClient, engine_id: str, s: Scene) -> dict[str, Awaitable[object]]:
    """One good call of each method that needs an engine, but for who sends it and in whose name."""
    engine = s.engine
    blocks = engine.retrieve_request(s.job.job_id, BLOCKS, engine_id=engine_id)
    return {
        "lookup": scheduler.lookup(engine.lookup_request(EIGHT, engine_id=engine_id)),
        "query": scheduler.query(engine_id, s.job.job_id),
        "store": worker.store(engine.store_request(EIGHT, BLOCKS, engine_id=engine_id)),
        "retrieve": worker.retrieve(blocks),
        "free": scheduler.free(api.FreeRequest(engine_id, s.job.job_id, 1)),
        "end_request": scheduler.end_request(engine_id, "request-1"),
        "fence": worker.fence(engine_id, [1]),
        "register": worker.register(replace(engine.registration(), engine_id=engine_id)),
        "unregister": worker.unregister(engine_id),
    }


async def test_who_calls_in_whose_name(tmp_path: Path) -> None:
    """Unknown engine, another client's engine, an engine id of a wrong length, a client that is not attached, a missing
    or malformed client id: for every method."""
    async with scene(tmp_path) as s:
        engine = s.engine
        silent, wordy, stranger = (s.server.client(f"stranger-{at}") for at in range(3))
        silent._named = ()  # type: ignore[assignment]
        wordy._named = (("kvgrpc-client-id", "two words"),)
        own = (engine.worker, engine.scheduler)
        not_its_own: Error = ("NOT_FOUND", "ENGINE_UNKNOWN", "engine_id")
        malformed = bad("CLIENT_ID_MISSING", "kvgrpc-client-id")
        cases: list[tuple[tuple[AioClient, AioClient], str, Error]] = [
            (own, NOBODY, not_its_own),
            (own, s.other.engine_id, not_its_own),
            (own, "short", invalid("engine_id")),
            (own, "", invalid("engine_id")),
            (own, "e" * 65, invalid("engine_id")),
            ((stranger, stranger), engine.engine_id, ("FAILED_PRECONDITION", "NOT_ATTACHED", "")),
            ((silent, silent), engine.engine_id, malformed),
            ((wordy, wordy), engine.engine_id, malformed),
        ]
        for (worker, scheduler), engine_id, error in cases:
            async with nothing_changes(s.server, engine, s.other):
                for name, call in calls_of(worker, scheduler, engine_id, s).items():
                    assert await refused(call) == error, name
            assert engine.image.untouched()
            await s.check_good_calls()


async def test_lookup(tmp_path: Path) -> None:
    """Ranks, sizes, spaces and content of Lookup; a wrong salt is a miss."""
    cases: list[tuple[str, Act, Error]] = [
        ("tp_size 0", lambda s: s.lookup(tp_size=0), invalid("tp_size")),
        ("tp_size 129", lambda s: s.lookup(tp_size=129), invalid("tp_size")),
        ("tp_size not the engine's", lambda s: s.lookup(tp_size=2), bad("TP_SIZE_MISMATCH", "tp_size")),
        ("rank beyond the world", lambda s: s.lookup(kv_ranks=(1,)), bad("RANK", "kv_ranks")),
        ("rank twice", lambda s: s.lookup(kv_ranks=(0, 0)), bad("RANK", "kv_ranks")),
        ("no request id", lambda s: s.lookup(request_id=""), invalid("request_id")),
        ("long request id", lambda s: s.lookup(request_id="r" * 129), invalid("request_id")),
        ("wait too long", lambda s: s.lookup(prefetch_wait_ms=60_001), invalid("prefetch_wait_ms")),
        ("short space", lambda s: s.lookup(space=SpaceRef(b"short")), invalid("space.space_base")),
        (
            "unknown space",
            lambda s: s.lookup(space=SpaceRef(b"u" * 16)),
            ("FAILED_PRECONDITION", "SPACE_UNKNOWN", "space.space_base"),
        ),
        (
            "space of another engine",
            lambda s: s.lookup(space=s.other.space),
            ("FAILED_PRECONDITION", "SPACE_MISMATCH", "space.space_base"),
        ),
        ("long salt", lambda s: s.lookup(space=named(s, cache_salt="s" * 513)), invalid("space.cache_salt")),
        ("long adapter", lambda s: s.lookup(space=named(s, lora="l" * 513)), invalid("space.lora")),
        ("hashes for tokens", lambda s: s.lookup(content=HASHES), bad("CONTENT_KIND", "content")),
        ("short hash", lambda s: s.lookup(content=api.Hashes([bytes(15)], CHUNK)), invalid("content.hashes.hashes")),
        ("too many chunks", lambda s: s.lookup(content=tokens_of(1, 65 * CHUNK)), invalid("content")),
    ]
    async with scene(tmp_path) as s:
        await assert_refused(s, cases)
        async with nothing_changes(s.server, s.engine, s.other):
            miss = await s.engine.lookup(EIGHT, space=replace(s.engine.space, cache_salt="wrong"))
            assert (miss.job_id, miss.status.hit_tokens) == (b"", 0)


async def test_tp_size_that_does_not_divide(tmp_path: Path) -> None:
    """An engine of two KV ranks a group: tp_size 3 is no multiple of it, 4 is not the registered one."""
    async with local_server(tmp_path) as server:
        engine = await server.engine(kv=TINY, kv_world_size=2, parallel=(0, 0, 2, 2))
        for tp_size in (1, 3, 4, 128):
            async with nothing_changes(server, engine):
                assert await refused(engine.lookup(EIGHT, tp_size=tp_size)) == bad("TP_SIZE_MISMATCH", "tp_size")
        assert await engine.hits(EIGHT) == 0


def block_and_range_cases(call: str) -> list[tuple[str, Act, Error]]:
    """What Store and Retrieve check alike."""

    def act(**changes: Any) -> Act:
        return lambda s: getattr(s, call)(**changes)

    ids = list(BLOCKS)
    short, outside = bad("BLOCK_IDS", "blocks[0].ids"), bad("BLOCK_IDS", "blocks[0].ids")
    return [
        ("no block", act(blocks=((),)), short),
        ("one block short", act(blocks=(ids[:31],)), short),
        ("block id at num_blocks", act(blocks=((*ids[:31], 256),)), outside),
        ("first block id outside", act(blocks=((2**32 - 1, *ids[1:]),)), outside),
        ("no group", act(blocks=()), bad("BLOCK_IDS", "blocks")),
        ("two groups", act(blocks=(ids, ids)), bad("BLOCK_IDS", "blocks")),
        ("start not aligned", act(range=TokenRange(2, 64)), bad("RANGE", "range")),
        ("end not aligned", act(range=TokenRange(0, 63)), bad("RANGE", "range")),
        ("reversed", act(range=TokenRange(64, 32)), bad("RANGE", "range")),
        ("longer than a call may be", act(range=TokenRange(0, 65 * CHUNK)), bad("RANGE", "range")),
        ("beyond 32 bits after rounding", act(range=TokenRange(0, 2**32 - 4)), bad("RANGE", "range")),
        ("call id 0", act(call_id=0), invalid("call_id")),
    ]


async def test_store(tmp_path: Path) -> None:
    """Blocks, ranges, spaces, policies and call ids of Store."""
    no_event = ("UNIMPLEMENTED", "READY_EVENT_UNSUPPORTED", "ready_event")
    cases = [
        *block_and_range_cases("store"),
        ("range beyond the content", lambda s: s.store(range=TokenRange(0, 9 * CHUNK)), bad("RANGE", "range.end")),
        (
            "call id of another call",
            lambda s: s.store(call_id=1, range=TokenRange(0, 64)),
            bad("CALL_ID_REUSED", "call_id"),
        ),
        (
            "space of another engine",
            lambda s: s.store(space=s.other.space),
            ("FAILED_PRECONDITION", "SPACE_MISMATCH", "space.space_base"),
        ),
        (
            "unknown space",
            lambda s: s.store(space=SpaceRef(b"u" * 16)),
            ("FAILED_PRECONDITION", "SPACE_UNKNOWN", "space.space_base"),
        ),
        ("event of a card", lambda s: s.store(ready_event=bytes(64)), no_event),
        ("short event", lambda s: s.store(ready_event=b"x"), invalid("ready_event")),
        (
            "kept for years",
            lambda s: s.store(policy=Policy(retention_ns=86_400_001 * 10**6)),
            invalid("policy.retention_ms"),
        ),
        ("hashes for tokens", lambda s: s.store(content=HASHES), bad("CONTENT_KIND", "content")),
        (
            "a scheduler",
            lambda s: s.engine.scheduler.store(s.engine.store_request(EIGHT, BLOCKS)),
            ("FAILED_PRECONDITION", "NOT_REGISTERED", ""),
        ),
        (
            "message too large",
            lambda s: s.store(blocks=(range(1 << 19),)),
            ("RESOURCE_EXHAUSTED", "MESSAGE_TOO_LARGE", ""),
        ),
    ]
    async with scene(tmp_path) as s:
        await assert_refused(s, cases)


async def test_retrieve(tmp_path: Path) -> None:
    """Blocks, ranges and jobs of Retrieve."""
    unknown: Error = ("NOT_FOUND", "JOB_UNKNOWN", "job_id")
    cases = [
        *block_and_range_cases("retrieve"),
        ("another engine's job", lambda s: s.retrieve(job_id=s.theirs.job_id), unknown),
        ("nobody's job", lambda s: s.retrieve(job_id=secrets.token_bytes(16)), unknown),
        ("no job", lambda s: s.retrieve(job_id=b""), invalid("job_id")),
        ("long job id", lambda s: s.retrieve(job_id=bytes(17)), invalid("job_id")),
        (
            "a scheduler",
            lambda s: s.engine.scheduler.retrieve(s.engine.retrieve_request(s.job.job_id, BLOCKS)),
            ("FAILED_PRECONDITION", "NOT_REGISTERED", ""),
        ),
    ]
    async with scene(tmp_path) as s:
        await assert_refused(s, cases)
        past = await s.engine.worker.retrieve(
            s.engine.retrieve_request(s.job.job_id, BLOCKS, range=TokenRange(8 * CHUNK, 16 * CHUNK))
        )
        assert outcomes(past) == ["MISSING"] * 8 and s.engine.image.untouched()


async def test_free_query_and_fence(tmp_path: Path) -> None:
    """Jobs, readers, sizes and call ids of the calls that give back."""
    unknown: Error = ("NOT_FOUND", "JOB_UNKNOWN", "job_id")
    cases: list[tuple[str, Act, Error]] = [
        ("free another's job", lambda s: s.free(job_id=s.theirs.job_id), unknown),
        ("free with tp_size 0", lambda s: s.free(tp_size=0), invalid("tp_size")),
        ("free with tp_size 129", lambda s: s.free(tp_size=129), invalid("tp_size")),
        ("free with another tp_size", lambda s: s.free(tp_size=2), bad("TP_SIZE_MISMATCH", "tp_size")),
        ("free for an unknown rank", lambda s: s.free(readers=(Reader(1, 0),)), bad("READER_UNKNOWN", "readers")),
        ("free for an unknown reader", lambda s: s.free(readers=(Reader(0, 1),)), bad("READER_UNKNOWN", "readers")),
        ("free a reversed range", lambda s: s.free(range=TokenRange(32, 16)), bad("RANGE", "range")),
        ("query another's job", lambda s: s.engine.scheduler.query(s.engine.engine_id, s.theirs.job_id), unknown),
        ("query with a short id", lambda s: s.engine.scheduler.query(s.engine.engine_id, b"j"), invalid("job_id")),
        (
            "query for too long",
            lambda s: s.engine.scheduler.query(s.engine.engine_id, s.job.job_id, 60_001),
            invalid("wait_ms"),
        ),
        ("end without a name", lambda s: s.engine.scheduler.end_request(s.engine.engine_id, ""), invalid("request_id")),
        ("fence nothing", lambda s: s.engine.worker.fence(s.engine.engine_id, []), invalid("call_ids")),
        ("fence call 0", lambda s: s.engine.worker.fence(s.engine.engine_id, [7, 0]), invalid("call_ids")),
        ("fence too many", lambda s: s.engine.worker.fence(s.engine.engine_id, range(1, 1026)), invalid("call_ids")),
    ]
    async with scene(tmp_path) as s:
        await assert_refused(s, cases)
        # a call that was fenced before it came is refused, and touches nothing
        await s.engine.worker.fence(s.engine.engine_id, [9999])
        async with nothing_changes(s.server, s.engine, s.other):
            for call in (s.store(call_id=9999), s.retrieve(call_id=9999)):
                assert await refused(call) == ("ABORTED", "CALL_REVOKED", "call_id")


async def test_attach_and_register(tmp_path: Path) -> None:
    """Sessions, roles, hosts and identities."""

    def register(**changes: Any) -> Act:
        return lambda s: s.engine.worker.register(replace(s.engine.registration(), **changes))

    def identity(**changes: Any) -> Act:
        return lambda s: s.engine.worker.register(
            replace(s.engine.registration(), identity=replace(s.engine.identity, **changes))
        )

    def attach(engine_id: str, session_id: bytes) -> Act:
        return lambda s: anext(s.server.client("newcomer").attach(engine_id, Role.WORKER, session_id))

    cases: list[tuple[str, Act, Error]] = [
        ("short session", attach(NOBODY, b"s"), invalid("session_id")),
        ("short engine id", attach("short", bytes(16)), invalid("engine_id")),
        ("another host", register(host_id="elsewhere"), ("FAILED_PRECONDITION", "HOST_MISMATCH", "host_id")),
        ("no host", register(host_id=""), invalid("host_id")),
        ("tp_size 0", register(tp_size=0), invalid("tp_size")),
        ("tp_size 129", register(tp_size=129), invalid("tp_size")),
        ("kv_tp_size 2 of 3", register(tp_size=3, kv_tp_size=2), bad("TP_SIZE_MISMATCH", "kv_tp_size")),
        ("wrong rank", register(kv_rank=1), bad("RANK", "kv_rank")),
        ("wrong tensor-parallel rank", register(tp_rank=1), bad("RANK", "tp_rank")),
        ("no model", identity(model=""), invalid("identity.model")),
        ("long model", identity(model="m" * 513), invalid("identity.model")),
        ("no world", identity(kv_world_size=0), invalid("identity.kv_world_size")),
        ("large world", identity(kv_world_size=1025), invalid("identity.kv_world_size")),
        ("another form", identity(stored_form="opaque:A:B:4"), bad("STORED_FORM_MISMATCH", "identity.stored_form")),
        ("a scheduler", lambda s: s.engine.scheduler.register(s.engine.registration()), invalid("role")),
    ]
    async with scene(tmp_path) as s:
        await assert_refused(s, cases)


async def test_operators(tmp_path: Path) -> None:
    """Targets that are not there, and times out of bounds."""

    def admin(s: Scene) -> AioClient:
        return s.server.client("operator")

    cases: list[tuple[str, Act, Error]] = [
        ("unpin nothing", lambda s: admin(s).unpin(bytes(16)), ("NOT_FOUND", "PIN_UNKNOWN", "pin_id")),
        ("drain nobody", lambda s: admin(s).drain_engine(NOBODY), ("NOT_FOUND", "ENGINE_UNKNOWN", "engine")),
        ("pin for no time", lambda s: admin(s).pin(s.engine.space, EIGHT, 0), invalid("ttl_ms")),
        ("pin for days", lambda s: admin(s).pin(s.engine.space, EIGHT, 86_400_001), invalid("ttl_ms")),
        (
            "pin in an unknown space",
            lambda s: admin(s).pin(SpaceRef(b"u" * 16), EIGHT, 1000),
            ("FAILED_PRECONDITION", "SPACE_UNKNOWN", "space.space_base"),
        ),
        (
            "clear an unknown space",
            lambda s: admin(s).clear(api.ClearTarget(space=SpaceRef(b"u" * 16))),
            ("FAILED_PRECONDITION", "SPACE_UNKNOWN", "space.space_base"),
        ),
        ("clear nothing", lambda s: admin(s).clear(api.ClearTarget()), invalid("target")),
        ("bump nothing", lambda s: admin(s).bump_generation(), invalid("model")),
    ]
    async with scene(tmp_path) as s:
        await assert_refused(s, cases)
