# SPDX-License-Identifier: Apache-2.0
"""Recorded calls asked of a live server, under a model name that no engine has; what was stored is cleared at the end.

Keys are made of the recorded numbers, so no prompt is needed. The server evicts what others have stored to make room,
as for any engine.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

from kvgrpc import api
from kvgrpc.bench.engine import Paging, shared_memory
from kvgrpc.cli.trace.file import Recorded
from kvgrpc.cli.trace.replay import Facts, Point
from kvgrpc.client.aio import AioClient
from kvgrpc.client.channel import ChannelOptions
from kvgrpc.client.credentials import Credentials
from kvgrpc.core.types import Role, SpaceIdentity, SpaceRef
from kvgrpc.transfer.host import host_id
from kvgrpc.transfer.layout import stored_form

MODEL = "kvgrpc-trace-replay"
STORE_S = 60.0
WAIT_MS = 10_000


class _Engine:
    """One worker whose memory is one chunk, which every stored chunk is copied from."""

    def __init__(self, client: AioClient, engine_id: str, space: SpaceRef, chunk_tokens: int) -> None:
        self._client, self._engine_id, self._space, self._chunk_tokens = client, engine_id, space, chunk_tokens
        self._calls = 0

    def _content(self, call: Recorded, count: int) -> api.Hashes:
        keys = [call.space.to_bytes(8, "little") + number.to_bytes(8, "little") for number in call.chunks[:count]]
        return api.Hashes(keys, count * self._chunk_tokens)

    async def lookup(self, call: Recorded) -> int:
        """Hit chunks."""
        self._calls += 1
        name, content = str(self._calls), self._content(call, len(call.chunks))
        answer = await self._client.lookup(api.LookupRequest(self._engine_id, name, self._space, content))
        status = answer.status
        while not status.done:
            status = await self._client.query(self._engine_id, answer.job_id, WAIT_MS)
        await self._client.end_request(self._engine_id, name)
        return status.hit_tokens // self._chunk_tokens

    async def store(self, call: Recorded, count: int) -> None:
        self._calls += 1
        content, blocks = self._content(call, count), ([0] * count,)
        request = api.StoreRequest(self._engine_id, self._calls, self._space, content, blocks)
        await self._client.store(request, timeout_s=STORE_S)


@asynccontextmanager
async def _engine(client: AioClient, chunk_tokens: int, chunk_bytes: int) -> AsyncGenerator[_Engine, None]:
    engine_id = secrets.token_hex(16)
    paging = Paging(1, 1, chunk_bytes, 1, chunk_tokens)
    with shared_memory(chunk_bytes) as memory:
        layout = paging.layout(memory.name)
        identity = SpaceIdentity(MODEL, "", "uint8", 1, "kvgrpc-trace", stored_form(layout.groups))
        session = client.attach(engine_id, Role.WORKER, secrets.token_bytes(16))
        await anext(session)
        try:
            request = api.RegisterRequest(engine_id, identity, 0, 0, 1, 1, layout, host_id())
            registered = await client.register(request)
            yield _Engine(client, engine_id, SpaceRef(registered.space_base), chunk_tokens)
            await client.unregister(engine_id)
        finally:
            await session.aclose()


async def replay_live(calls: Iterable[Recorded], facts: Facts, address: str, credentials: Credentials) -> Point:
    """One call after the other. Refusal as for an engine."""
    hits = 0
    options = ChannelOptions(credentials=credentials)
    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(AioClient(address, options=options))
        before = await admin.get_status()
        engines: dict[int, _Engine] = {}
        stack.push_async_callback(admin.clear, api.ClearTarget(model=MODEL))
        for call in calls:
            chunk_bytes = facts.chunk_bytes.get(call.space)
            if not chunk_bytes or not call.chunks:
                continue
            if chunk_bytes not in engines:
                client = await stack.enter_async_context(AioClient(address, options=options))
                making = _engine(client, before.chunk_tokens, chunk_bytes)
                engines[chunk_bytes] = await stack.enter_async_context(making)
            engine = engines[chunk_bytes]
            stored = len(call.chunks)
            if call.kind is not api.CallKind.STORE:
                found = await engine.lookup(call)
                hits += found
                stored = stored if call.kind is None else max(found, call.prefix_chunks)
                if stored == found:
                    continue
            await engine.store(call, stored)
        after = await admin.get_status()
    evicted = after.counters.get("evicted_chunks", 0) - before.counters.get("evicted_chunks", 0)
    return Point(after.arena.total_bytes, hits, hits / max(facts.asked_chunks, 1), evicted)
