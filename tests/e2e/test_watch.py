# SPDX-License-Identifier: Apache-2.0
"""Watch over a socket: whoever follows it knows what can be found, or is told that it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvgrpc import api
from kvgrpc.api import WatchKind, WatchRequest
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.keys import chunk_keys, space_digest
from kvgrpc.core.types import CoreLimits
from kvgrpc.runtime import watching
from tests.e2e.harness import BLOCK, CHUNK, Engine, LocalServer, local_server, tokens_of, until
from tests.e2e.probes import TINY

OBJECT_BYTES = CHUNK * TINY.token_bytes
LIMITS = CoreLimits(chunk_tokens=CHUNK, page_bytes=1024)


class Router:
    """Follows a stream and keeps what can be found, by space."""

    def __init__(self, events: Any) -> None:
        self.events = events
        self.told: list[api.WatchEvent] = []
        self.known: dict[bytes, set[bytes]] = {}

    async def follow(self) -> None:
        async for event in self.events:
            self.told.append(event)
            keys = self.known.setdefault(event.space, set()) if event.space else set()
            if event.kind is WatchKind.STORED:
                assert keys.isdisjoint(event.keys), "told twice"
                keys.update(event.keys)
            elif event.kind is WatchKind.REMOVED:
                assert keys.issuperset(event.keys), "never told of"
                keys.difference_update(event.keys)
            elif event.kind is WatchKind.CLEARED:
                keys.clear()

    def kinds(self) -> list[str]:
        return [event.kind.value for event in self.told]


@asynccontextmanager
async def following(server: LocalServer, request: WatchRequest | None = None) -> AsyncIterator[Router]:
    watchers = server.driver.watching._watchers
    before = len(watchers)
    router = Router(server.client(f"router-{next(server.names)}").watch(request or WatchRequest()))
    task = asyncio.create_task(router.follow())
    try:
        await until(lambda: router.told or task.done())
        yield router
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await router.events.aclose()
        await until(lambda: len(watchers) == before, what="the watcher's end")
        assert server.book.index.feed.on == bool(before)


def there(server: LocalServer) -> dict[bytes, set[bytes]]:
    """What the server has, by its own books."""
    spaces = server.book.index.spaces.values()
    return {space.digest: {key for key, chunk in space.table.chunks.items() if chunk.complete} for space in spaces}


def keys_of(engine: Engine, tokens: api.Tokens) -> list[bytes]:
    return list(chunk_keys(space_digest(engine.space), tokens.data, CHUNK))


async def store(engine: Engine, seed: int, chunks: int = 4) -> api.Tokens:
    tokens = tokens_of(seed, chunks * CHUNK)
    await engine.store(tokens, range(chunks * CHUNK // BLOCK))
    return tokens


async def test_stored_evicted_cleared_and_bumped(tmp_path: Path) -> None:
    async with local_server(tmp_path, l1_bytes=32 * OBJECT_BYTES, limits=LIMITS) as server:
        engine, other = await server.engine(kv=TINY), await server.engine(kv=TINY, salt="s", model="other")
        admin = await server.admin()
        async with following(server) as router:
            first = router.told[0]
            assert (first.sequence, first.kind, first.chunk_tokens) == (1, WatchKind.STARTED, CHUNK)
            assert first.server_epoch == server.driver.facts.server_epoch
            tokens = await store(engine, 1)
            digest = space_digest(engine.space)
            await until(lambda: router.known.get(digest) == set(keys_of(engine, tokens)))
            told = router.told[-1]
            assert (told.space_base, told.lora, told.salt_fingerprint) == (engine.space.space_base, "", "")
            assert told.tier == "l1"
            for seed in range(2, 20):  # L1 holds eight of them
                await store(engine if seed % 3 else other, seed)
                await until(lambda: router.known == there(server))
            assert "REMOVED" in router.kinds()
            salted = next(event for event in router.told if event.space == space_digest(other.space))
            assert salted.salt_fingerprint and salted.salt_fingerprint != "s"
            await admin.clear(api.ClearTarget(space=engine.space))
            await until(lambda: router.told[-1].kind is WatchKind.CLEARED)
            assert router.told[-1].space == digest and not router.known[digest]
            await admin.bump_generation(model="other")
            await until(lambda: router.told[-1].space == space_digest(other.space))
            assert router.told[-1].kind is WatchKind.CLEARED
            await store(engine, 1)
            await until(lambda: router.known == there(server) and router.known[digest])
            assert [event.sequence for event in router.told] == list(range(1, len(router.told) + 1))


async def test_a_snapshot_comes_first_and_misses_nothing(tmp_path: Path) -> None:
    async with local_server(tmp_path, l1_bytes=64 * OBJECT_BYTES, limits=LIMITS) as server:
        engine, other = await server.engine(kv=TINY), await server.engine(kv=TINY, salt="s")
        await store(engine, 1)
        await store(other, 2)
        async with following(server, WatchRequest(snapshot=True)) as router:
            await until(lambda: "SYNCED" in router.kinds())
            assert router.kinds() == ["STARTED", "STORED", "STORED", "SYNCED"]
            assert router.known == there(server)
            await store(engine, 3)
            await until(lambda: router.known == there(server))


async def test_only_what_was_asked_for(tmp_path: Path) -> None:
    async with local_server(tmp_path, l1_bytes=64 * OBJECT_BYTES, limits=LIMITS) as server:
        plain, salted = await server.engine(kv=TINY), await server.engine(kv=TINY, salt="s")
        other = await server.engine(kv=TINY, model="other")
        by_salt = WatchRequest(cache_salts=frozenset({"s"}))
        by_base = WatchRequest(space_base=other.space.space_base, snapshot=True)
        async with following(server, by_salt) as one, following(server, by_base) as two:
            for at, engine in enumerate((plain, salted, other)):
                await store(engine, at)
            await until(lambda: one.known and two.known)
            assert set(one.known) == {space_digest(salted.space)}
            assert set(two.known) == {space_digest(other.space)}
        with pytest.raises(Refusal) as refused:
            await anext(server.client("c").watch(WatchRequest(space_base=b"short")))
        assert (refused.value.reason, refused.value.field) == (Reason.INVALID_FIELD, "space_base")


async def test_who_is_too_slow_is_told_so_and_slows_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "KEYS_WAITING", 64)
    async with local_server(tmp_path, l1_bytes=32 * OBJECT_BYTES, limits=LIMITS) as server:
        engine = await server.engine(kv=TINY)
        slow: Any = server.driver.client("slow").watch(WatchRequest())
        assert (await anext(slow)).kind is WatchKind.STARTED
        async with following(server) as router:
            for seed in range(40):
                await store(engine, seed)
                await until(lambda: router.known == there(server))
        assert sum(watcher.size for watcher in server.driver.watching._watchers) <= 64
        kinds = [event.kind async for event in slow]
        assert kinds[-1] is WatchKind.LOST
        assert not server.book.index.feed.on


async def test_watchers_have_a_limit(tmp_path: Path) -> None:
    async with local_server(tmp_path, l1_bytes=32 * OBJECT_BYTES, limits=LIMITS) as server:
        streams: list[Any] = [server.driver.client("").watch(WatchRequest()) for _ in range(65)]
        for stream in streams[:64]:
            await anext(stream)
        with pytest.raises(Refusal) as refused:
            await anext(server.client("c").watch(WatchRequest()))
        assert (refused.value.reason, refused.value.resource) == (Reason.CALL_LIMIT, "watchers")
        await streams[0].aclose()
        assert (await anext(streams[64])).kind is WatchKind.STARTED
        for stream in streams[1:]:
            await stream.aclose()


async def test_a_watcher_neither_holds_a_drain_nor_outlives_it(tmp_path: Path) -> None:
    async with local_server(tmp_path, l1_bytes=32 * OBJECT_BYTES, limits=LIMITS) as server:
        async with following(server) as router:
            await asyncio.wait_for(server.server.drain(), 10)
            assert router.kinds() == ["STARTED"]
