# SPDX-License-Identifier: Apache-2.0
"""An engine in a place: its memory with position-coded data, and its two clients."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from array import array
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Any

import pytest

from kvgrpc import api
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import ChunkResult, LookupAnswer, Role, SpaceIdentity, SpaceRef, TokenRange
from kvgrpc.transfer.host import host_id
from tests.conformance.places import CHUNK, Place
from tests.kvdata import BLOCKS_OUTERMOST_OPAQUE, MHA, Image

BLOCK = 4
NUM_BLOCKS = 128
Outcomes = list[tuple[int, int, str, str]]


class Engine:
    """``worker`` and ``scheduler`` are CacheApi. Each engine has a model of its own, so that tests do not meet."""

    def __init__(self, place: Place, **identity: Any) -> None:
        self.place = place
        self.engine_id = secrets.token_hex(16)
        self.name = secrets.token_hex(4)
        facts = {"model": f"model-{self.name}", "revision": "", "kv_dtype": "bfloat16", "kv_world_size": 1}
        facts |= {"hash_algorithm": "sha256-u32le", "stored_form": ""}
        self.identity = SpaceIdentity(**{**facts, **identity})
        size_bytes = Image(MHA, BLOCKS_OUTERMOST_OPAQUE, BLOCK, NUM_BLOCKS).size_bytes
        self.memory_name, buffer = place.memory(size_bytes)
        self.image = Image(MHA, BLOCKS_OUTERMOST_OPAQUE, BLOCK, NUM_BLOCKS, buffer=buffer)
        self.worker = place.client(f"worker-{self.name}")
        self.scheduler = place.client(f"scheduler-{self.name}")
        self.session_id = secrets.token_bytes(16)
        self.chance = random.Random(0)
        self.call_ids = itertools.count(1)
        self.space = SpaceRef(b"")
        self.streams: list[AsyncGenerator[api.AttachEvent, None]] = []

    async def __aenter__(self) -> Engine:
        await self.attach(self.worker, Role.WORKER)
        await self.attach(self.scheduler, Role.SCHEDULER)
        self.registered = await self.worker.register(self.registration())
        self.space = SpaceRef(self.registered.space_base)
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in self.streams:
            await stream.aclose()

    async def attach(self, client: api.CacheApi, role: Role) -> api.AttachEvent:
        stream: Any = client.attach(self.engine_id, role, self.session_id)
        event = await anext(stream)
        self.streams.append(stream)
        return event

    def registration(self, **changes: Any) -> api.RegisterRequest:
        facts = {"engine_id": self.engine_id, "identity": self.identity, "kv_rank": 0, "tp_rank": 0, "tp_size": 1}
        facts |= {"kv_tp_size": 1, "layout": self.image.layout(self.memory_name), "host_id": host_id()}
        return api.RegisterRequest(**{**facts, **changes})

    def blocks(self, num_tokens: int) -> list[int]:
        """Different block ids in no order."""
        return self.chance.sample(range(NUM_BLOCKS), -(-num_tokens // BLOCK))

    def store_request(self, content: api.Content, blocks: Sequence[int], **changes: Any) -> api.StoreRequest:
        facts = {"engine_id": self.engine_id, "call_id": next(self.call_ids), "space": self.space, "content": content}
        return api.StoreRequest(**{**facts, "blocks": (blocks,), **changes})

    async def store(self, content: api.Content, **changes: Any) -> Outcomes:
        """Prefills other blocks with the right bytes, and stores them."""
        blocks = self.blocks(content.num_tokens)
        self.image.write(blocks)
        return outcomes(await self.worker.store(self.store_request(content, blocks, **changes)))

    def lookup_request(self, content: api.Content, request_id: str = "r", **changes: Any) -> api.LookupRequest:
        facts = {"engine_id": self.engine_id, "request_id": request_id, "space": self.space, "content": content}
        return api.LookupRequest(**{**facts, **changes})

    async def lookup(self, content: api.Content, request_id: str = "r", **changes: Any) -> LookupAnswer:
        return await self.scheduler.lookup(self.lookup_request(content, request_id, **changes))

    async def hit(self, content: api.Content, **changes: Any) -> int:
        """Hit tokens of a request that is over at once."""
        request_id = secrets.token_hex(8)
        answer = await self.lookup(content, request_id, **changes)
        await self.scheduler.end_request(self.engine_id, request_id)
        return answer.status.hit_tokens

    def retrieve_request(self, job_id: bytes, tokens: TokenRange, blocks: Sequence[int]) -> api.RetrieveRequest:
        return api.RetrieveRequest(self.engine_id, next(self.call_ids), job_id, tokens, (blocks,))

    async def retrieve(self, job_id: bytes, tokens: TokenRange) -> Outcomes:
        """Loads into other blocks; checks that what was loaded is right and nothing else was touched."""
        blocks = self.blocks(tokens.end - tokens.start)
        self.image.memory[:] = 0xA5
        found = outcomes(await self.worker.retrieve(self.retrieve_request(job_id, tokens, blocks)))
        if all(outcome == "LOADED" for _, _, outcome, _ in found):
            assert self.image.wrong_tokens(blocks, tokens.start) == []
        assert self.image.untouched(blocks)
        return found


def outcomes(results: Sequence[ChunkResult]) -> Outcomes:
    return [(one.first_chunk, one.count, one.outcome.value, one.reason) for one in results]


def tokens(chunks: float, first: int = 0) -> api.Tokens:
    """A prompt of so many chunks."""
    return api.Tokens(array("I", range(first, first + int(chunks * CHUNK))).tobytes())


async def refused(call: Awaitable[object]) -> Reason:
    with pytest.raises(Refusal) as caught:
        await asyncio.wait_for(call, 10)
    assert caught.value.message
    return caught.value.reason
