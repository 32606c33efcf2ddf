# SPDX-License-Identifier: Apache-2.0
"""What tests of WriteChunks send, and what must be left of it."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvgrpc import api
from kvgrpc.api import ChunkPart, WriteChunksRequest
from kvgrpc.client import object_order
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import MIB, CoreLimits
from tests.e2e.harness import BLOCK, CHUNK, Engine, LocalServer, until
from tests.kvdata import Kv

PER_CHUNK = CHUNK // BLOCK
SMALL = Kv(layers=1, planes=1, heads=1, head_dim=4, itemsize=1)
BIG = Kv(layers=8, planes=2, heads=8, head_dim=1024)  # 4 MiB a chunk
WHOLE = CoreLimits(chunk_tokens=CHUNK, page_bytes=4096)


def chunks_of(engine: Engine, first: int, count: int) -> dict[int, bytes]:
    """Objects of the prompt's chunks, by the test's own arithmetic; the engine's memory is scratch."""
    blocks = range(count * PER_CHUNK)
    engine.fill(blocks, first * CHUNK)
    return {
        first + at: engine.image.object_bytes(list(blocks[at * PER_CHUNK : (at + 1) * PER_CHUNK]))
        for at in range(count)
    }


def writing(engine: Engine, tokens: api.Content, **changes: Any) -> WriteChunksRequest:
    layout = engine.image.layout("none")
    asked = WriteChunksRequest(engine.engine_id, engine.space, tokens, engine.object_bytes, object_order(layout.groups))
    return replace(asked, **changes)


def parts_of(found: dict[int, bytes]) -> list[ChunkPart]:
    return [
        ChunkPart(chunk, offset, len(data), zlib.crc32(data[offset : offset + MIB]), data[offset : offset + MIB])
        for chunk, data in sorted(found.items())
        for offset in range(0, len(data), MIB)
    ]


async def sent(parts: Sequence[ChunkPart]) -> AsyncIterator[ChunkPart]:
    for part in parts:
        yield part


async def refused(asking: Any) -> Reason:
    with pytest.raises(Refusal) as refusal:
        await asking
    return refusal.value.reason


async def nothing_left(server: LocalServer) -> None:
    await until(lambda: not server.driver.writes.running and not server.book.calls.streams)
    arena = server.book.arena_status()
    assert arena.writing_bytes == arena.settling_bytes == arena.doomed_bytes == 0
    server.check()
