# SPDX-License-Identifier: Apache-2.0
"""Found by reading the code: each is a race that needs a slow moment at the right place, which these tests make."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvgrpc import api
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import Versions
from kvgrpc.runtime.admin import DriverAdmin
from kvgrpc.tiers import version_file
from kvgrpc.transfer.shm import SharedMemoryMover
from tests.e2e.harness import CHUNK, local_server, outcomes, tokens_of, until
from tests.e2e.probes import refused, store_without_its_keys


@pytest.mark.parametrize("again", [False, True], ids=["unregistered", "registered again"])
async def test_store_whose_keys_are_still_made_does_not_read_memory_that_is_shared_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """The answer of Unregister gives the blocks back, and what is in them later is another prompt's. A Store of a long
    prompt, which waited for the pool, took that for its own."""
    async with local_server(tmp_path) as server:
        engine = await server.engine()
        tokens = tokens_of(1, 8 * CHUNK)
        engine.image.write(range(32))
        storing, go_on = await store_without_its_keys(server, engine, tokens, monkeypatch)
        await engine.worker.unregister(engine.engine_id)
        engine.image.write(range(32), first_token=1000)
        if again:
            await engine.worker.register(engine.registration())
        go_on.set()
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


class SlowFirst:
    """A file of versions whose first save stands still until the second has ended, if that begins meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.saved: list[Versions] = []
        self.begun, self._again, self._ended = threading.Event(), threading.Event(), threading.Event()

    def save(self, before: Versions, after: Versions) -> None:
        first = not self.begun.is_set()
        (self.begun if first else self._again).set()
        if first and self._again.wait(0.5):
            assert self._ended.wait(10)
        version_file.save(self.path, before, after)
        self.saved.append(after)
        if not first:
            self._ended.set()


async def test_a_clear_whose_operator_has_gone_is_saved_before_the_next_one_and_never_behind_it(tmp_path: Path) -> None:
    """The operator gives up on a Clear that hangs, and clears again. The first save went on in its thread and put back
    what was there before the second, so that the next server would have found what had been cleared."""
    async with local_server(tmp_path) as server:
        driver, file = server.driver, SlowFirst(tmp_path / "versions.json")
        version_file.keep(file.path, driver.book.versions.snapshot())
        driver.hands.save_versions = file.save
        first = asyncio.create_task(DriverAdmin(driver).clear(api.ClearTarget(all=True)))
        assert await asyncio.to_thread(file.begun.wait, 10)
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        await DriverAdmin(driver).clear(api.ClearTarget(all=True))
        now = driver.book.versions.snapshot()
        await until(lambda: len(file.saved) == 2)
        assert file.saved[-1] == now
        assert version_file.load(file.path) == now


async def test_the_end_waits_for_a_save_that_nobody_waits_for(tmp_path: Path) -> None:
    async with local_server(tmp_path) as server:
        driver, file = server.driver, SlowFirst(tmp_path / "versions.json")
        version_file.keep(file.path, driver.book.versions.snapshot())
        driver.hands.save_versions = file.save
        for _ in range(2):
            clearing = asyncio.create_task(DriverAdmin(driver).clear(api.ClearTarget(all=True)))
            assert await asyncio.to_thread(file.begun.wait, 10)
            clearing.cancel()
            await asyncio.wait((clearing,))
    assert version_file.load(file.path) == driver.book.versions.snapshot()


async def test_a_save_that_fails_says_so_and_is_made_up_for_by_the_next(tmp_path: Path) -> None:
    async with local_server(tmp_path) as server:
        driver, path = server.driver, tmp_path / "away" / "versions.json"
        driver.hands.save_versions = lambda before, after: version_file.save(path, before, after)
        with pytest.raises(Refusal) as caught:
            await DriverAdmin(driver).clear(api.ClearTarget(all=True))
        assert caught.value.reason is Reason.STATE_UNSAVED
        path.parent.mkdir()
        version_file.keep(path, Versions())
        await DriverAdmin(driver).clear(api.ClearTarget(all=True))
        assert version_file.load(path) == driver.book.versions.snapshot()


async def test_memory_of_a_registration_that_nobody_waits_for_is_let_go_of_by_its_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To unmap takes as long as the memory is large, and waits for cards; the event loop did it for a call that ended
    when its mapping was there and had not been told yet."""
    async with local_server(tmp_path) as server:
        engine, mover, affinity = await server.engine(), server.driver.hands.mover, server.driver.hands.affinity
        assert isinstance(mover, SharedMemoryMover)
        submit, unmap, before = affinity.submit, mover.unmap, mover.mapped
        submitted, threads = list[Future[Any]](), list[threading.Thread]()

        def seen(client_id: str, work: Any, *args: Any) -> Future[Any]:
            submitted.append(submit(client_id, work, *args))
            return submitted[-1]

        def noted(mapping_id: int) -> None:
            threads.append(threading.current_thread())
            unmap(mapping_id)

        monkeypatch.setattr(affinity, "submit", seen)
        monkeypatch.setattr(mover, "unmap", noted)
        session = server.driver.client(engine.worker.client_id)
        registering = asyncio.create_task(session.register(engine.registration()))
        await asyncio.sleep(0)
        submitted[0].result(10)  # the event loop stands still until it is mapped
        assert mover.mapped != before
        registering.cancel()
        await asyncio.wait((registering,))
        await until(lambda: mover.mapped == before)
        assert [thread.name.startswith("kvgrpc-affinity") for thread in threads] == [True]
