# SPDX-License-Identifier: Apache-2.0
"""Found by reading the code: each is a race that needs a slow moment at the right place, which these tests make."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from tests.e2e.harness import CHUNK, local_server, outcomes, tokens_of, until
from tests.e2e.probes import refused


@pytest.mark.parametrize("again", [False, True], ids=["unregistered", "registered again"])
async def test_store_whose_keys_are_still_made_does_not_read_memory_that_is_shared_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """The answer of Unregister gives the blocks back, and what is in them later is another prompt's. A Store of a long
    prompt, which waited for the pool, took that for its own."""
    monkeypatch.setattr("kvgrpc.runtime.driver.INLINE_HASH_TOKENS", 0)
    async with local_server(tmp_path) as server:
        engine = await server.engine()
        tokens, pool, hold = tokens_of(1, 8 * CHUNK), server.driver.hands.cpu_pool, threading.Event()
        engine.image.write(range(32))
        for _ in range(2):
            pool.submit(hold.wait, 30)
        storing = asyncio.create_task(engine.worker.store(engine.store_request(tokens, range(32))))
        await until(lambda: pool._work_queue.qsize() == 1, what="the prompt to wait for the pool")  # type: ignore[attr-defined]
        await engine.worker.unregister(engine.engine_id)
        engine.image.write(range(32), first_token=1000)
        if again:
            await engine.worker.register(engine.registration())
        hold.set()
        assert await refused(storing) == ("ABORTED", "CALL_REVOKED", "blocks")
        if not again:
            await engine.worker.register(engine.registration())
        assert await engine.hits(tokens) == 0
        engine.image.write(range(32))
        assert outcomes(await engine.store(tokens, range(32))) == ["STORED"] * 8
        target = range(100, 132)
        answer = await engine.lookup(tokens)
        assert outcomes(await engine.retrieve(answer, target)) == ["LOADED"] * 8
        assert engine.image.wrong_tokens(target) == []
        server.check()
