# SPDX-License-Identifier: Apache-2.0
"""The end of a server that has lower tiers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from kvgrpc.core.types import ObjectName, WritePolicy
from kvgrpc.tiers.memory import MemoryTier
from tests.e2e.harness import BLOCK, CHUNK, local_server, outcomes, tokens_of


class TellingTier(MemoryTier):
    """Tells when it has written something, in the same breath."""

    def __init__(self) -> None:
        super().__init__()
        self.written = asyncio.Event()

    async def write(self, object: ObjectName, data: Sequence[memoryview]) -> None:
        await super().write(object, data)
        self.written.set()


async def test_a_flush_that_begins_when_the_last_write_has_ended_but_is_not_reported_yet(tmp_path: Path) -> None:
    tier = TellingTier()
    async with local_server(tmp_path, tier=tier, writes=WritePolicy.THROUGH) as server:

        async def flush() -> None:
            await tier.written.wait()
            assert server.driver.below.writes(tier.name) == (1, 0), "it has ended, and nobody was told"
            await server.driver.below.flush(5)

        flushing = asyncio.create_task(flush())
        engine = await server.engine()
        assert outcomes(await engine.store(tokens_of(1, CHUNK), range(CHUNK // BLOCK))) == ["STORED"]
        await flushing
        assert server.driver.below.writes(tier.name) == (0, 0)
        assert server.book.counters["written_objects"] == 1
