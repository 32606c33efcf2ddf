# SPDX-License-Identifier: Apache-2.0
"""A scheduler in a process of its own: ``python -m tests.e2e.elsewhere STORED_FORM COUNT ADDRESS...`` looks the first
COUNT tokens of seed 1 up at each address and prints the hit chunks as a JSON list.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys

from kvgrpc import api
from kvgrpc.client.aio import AioClient
from kvgrpc.core.types import Role, SpaceIdentity, SpaceRef
from tests.e2e.harness import CHUNK, tokens_of


async def hits(address: str, stored_form: str, count: int) -> int:
    identity = SpaceIdentity("test-model", "", "bfloat16", 1, api.OWN_HASH_ALGORITHM, stored_form)
    engine_id = secrets.token_hex(16)
    async with AioClient(address) as client:
        info = await client.handshake(api.Hello(identity=identity))
        session = client.attach(engine_id, Role.SCHEDULER, secrets.token_bytes(16))
        await anext(session)
        request = api.LookupRequest(engine_id, "request", SpaceRef(info.space_base), tokens_of(1, count))
        answer = await client.lookup(request)
        await session.aclose()
        return answer.status.hit_tokens // CHUNK


async def main(stored_form: str, count: str, *addresses: str) -> None:
    print(json.dumps([await hits(address, stored_form, int(count)) for address in addresses]))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
