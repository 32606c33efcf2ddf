# SPDX-License-Identifier: Apache-2.0
"""A scheduler that asks for prompts one after the other. ``python -m kvgrpc.bench.asker ADDRESS`` is one as a process.

The process says "ready", then for each line ``{"kind", "length", "hit", "seconds"}`` looks up for so long and answers
``{"lookups", "seconds"}``. A lookup that hits is ended, which releases its pins, before the next one begins.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from kvgrpc import api
from kvgrpc.bench.engine import LENGTHS, identities, prompt
from kvgrpc.bench.processes import BenchError, say
from kvgrpc.client.aio import AioClient
from kvgrpc.core.types import Role, SpaceRef


class Asker:
    """``lookup`` answers how long it took in seconds; ending what hit is not counted."""

    def __init__(self, client: AioClient, engine_id: str, spaces: dict[str, SpaceRef]) -> None:
        self._client = client
        self._engine_id = engine_id
        self._spaces = spaces
        self._asked = 0

    async def lookup(self, kind: str, content: api.Content, hit: bool) -> float:
        self._asked += 1
        name = str(self._asked)
        began = time.perf_counter()
        answer = await self._client.lookup(api.LookupRequest(self._engine_id, name, self._spaces[kind], content))
        took = time.perf_counter() - began
        if answer.status.hit_tokens != (content.num_tokens if hit else 0):
            raise BenchError(f"a lookup of {content.num_tokens} tokens found {answer.status.hit_tokens}")
        if hit:
            await self._client.end_request(self._engine_id, name)
        return took


@asynccontextmanager
async def attached(address: str) -> AsyncGenerator[Asker, None]:
    """An asker with an open session."""
    engine_id = secrets.token_hex(16)
    async with AioClient(address) as client:
        spaces: dict[str, SpaceRef] = {}
        for kind, identity in identities().items():
            spaces[kind] = SpaceRef((await client.handshake(api.Hello(identity=identity))).space_base)
        session = client.attach(engine_id, Role.SCHEDULER, secrets.token_bytes(16))
        await anext(session)
        try:
            yield Asker(client, engine_id, spaces)
        finally:
            await session.aclose()


async def main(address: str) -> None:
    async with attached(address) as asker:
        say("ready")
        for line in sys.stdin:  # nothing else is to happen meanwhile
            order = json.loads(line)
            kind, hit = order["kind"], order["hit"]
            content = prompt(kind, LENGTHS[order["length"]], hit)
            began, lookups = time.perf_counter(), 0
            while (took := time.perf_counter() - began) < order["seconds"]:
                await asker.lookup(kind, content, hit)
                lookups += 1
            say(json.dumps({"lookups": lookups, "seconds": took}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
