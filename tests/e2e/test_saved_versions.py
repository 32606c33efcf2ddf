# SPDX-License-Identifier: Apache-2.0
"""What was cleared is kept in the order in which it was cleared, whoever gives up waiting for it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from kvgrpc.api import ClearTarget
from kvgrpc.client.aio import AioClient
from kvgrpc.client.channel import ChannelOptions
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import NO_VERSIONS, Versions
from kvgrpc.tiers.version_file import keep, load, save
from tests.e2e.harness import local_server, until


async def test_a_clear_that_was_given_up_does_not_undo_the_next_one(tmp_path: Path):
    """Where versions are kept answers late to the first Clear, whose client has gone by then. After a restart the
    server must go on behind the second one, which was answered."""
    file, begun, may_end = tmp_path / "versions.json", threading.Event(), threading.Event()
    kept: list[Versions] = []

    def first_is_slow(before: Versions, after: Versions) -> None:
        if not begun.is_set():
            begun.set()
            may_end.wait(30)
        save(file, before, after)
        kept.append(after)

    keep(file, NO_VERSIONS)
    async with local_server(tmp_path) as server:
        server.driver.hands.save_versions = first_is_slow
        impatient = AioClient(server.address, options=ChannelOptions(call_s=0.3))
        try:
            with pytest.raises(Refusal) as gone:
                await impatient.clear(ClearTarget(all=True))
            assert gone.value.reason is Reason.DEADLINE
            assert begun.is_set()
            second = asyncio.ensure_future((await server.admin()).clear(ClearTarget(all=True)))
            await asyncio.wait({second}, timeout=0.5)  # it may have to wait for the first
            may_end.set()
            await second
            await until(lambda: len(kept) == 2)
            assert load(file) == server.book.versions.snapshot() == kept[-1] != kept[0]
        finally:
            may_end.set()
            await impatient.close()
