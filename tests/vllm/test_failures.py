# SPDX-License-Identifier: Apache-2.0
"""Whatever becomes of the server, the engine says the same and goes on. One engine, which is never touched."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.served import wait_until
from tests.vllm.bench import NO_CACHE, prompt
from tests.vllm.processes import EngineProcess, Server, engine_process

REQUESTS = 50
EXTRA_S = 5.0
"""Most that a fault may add to a batch: lookups until the breaker opens, and the copies that have to be fenced."""

SHARED = prompt(3, 128)
BATCH = [SHARED + prompt(7 + at, 70 + at % 40) for at in range(REQUESTS)]
LOCAL, ALL = 128, 192
"""Cached tokens of each prompt: what vLLM shares within the batch by itself, and whole chunks."""


@dataclass
class World:
    server: Server
    engine: EngineProcess
    cold: list[tuple[int, ...]]
    cold_s: float
    """What the batch takes and says without a cache."""

    def check(self, **words: object) -> list[int]:
        """Says the batch; the cached tokens of each answer."""
        self.engine.ask(*BATCH, tokens=4, **words)
        return self.answered()

    def answered(self, extra_s: float = EXTRA_S) -> list[int]:
        said = self.engine.answered()
        assert [each.tokens for each in said] == self.cold
        assert said[0].seconds < 2 * self.cold_s + extra_s, "a fault cost too much"
        return [each.cached for each in said]

    def wait_for_hits(self) -> None:
        """Until the server has stored the batch and the engine finds it, without anybody touching the engine."""
        end = time.monotonic() + 90
        while min(self.check()) < ALL:
            assert time.monotonic() < end, "the engine does not find the server again"


@pytest.fixture(scope="module")
def world(llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The engine starts before the server."""
    with tempfile.TemporaryDirectory(prefix="kvgrpc-") as folder:
        server = Server(Path(folder), "--chunk-tokens", "64", "--l1-size", "256MiB")
        log = tmp_path_factory.mktemp("engine") / "log"
        try:
            with engine_process(llama, server.address, log) as engine:
                cold = engine.say(*BATCH, tokens=4, params=NO_CACHE)
                yield World(server, engine, [each.tokens for each in cold], cold[0].seconds)
        finally:
            server.end()


@pytest.fixture
def running(world: World) -> World:
    """The world with a server that has stored the batch, and an engine that has found it."""
    if world.server.process is None or world.server.process.poll() is not None:
        world.server.start()
    world.wait_for_hits()
    return world


def test_without_a_server_the_engine_starts_and_serves(world: World):
    assert world.server.process is None
    assert max(world.check()) <= LOCAL


def test_a_server_killed_under_traffic(running: World):
    running.engine.ask(*BATCH, tokens=4)
    retrieves = running.server.count("retrieves")
    wait_until(lambda: running.server.count("retrieves") > retrieves + 3, 30)
    running.server.signal(signal.SIGKILL)
    running.answered()
    assert max(running.check()) <= LOCAL


def test_a_server_killed_while_it_stores(running: World):
    running.server.replace()
    wait_until(lambda: running.server.status().clients == 2, 10)
    stores = running.server.count("stores")
    running.engine.ask(*BATCH, tokens=4)
    wait_until(lambda: running.server.count("stores") > stores + 3, 30)
    running.server.signal(signal.SIGKILL)
    running.answered()


def test_a_server_restarted_under_traffic_is_found_again(running: World):
    running.engine.ask(*BATCH, tokens=4)
    running.server.replace()
    running.answered()
    running.wait_for_hits()


def test_a_server_that_stands_still(running: World):
    """20 seconds: what is being copied waits, everything else goes on, and what was copied late hurts nobody."""
    running.server.signal(signal.SIGSTOP)
    resume = threading.Timer(20, lambda: running.server.signal(signal.SIGCONT))
    resume.start()
    try:
        said = running.engine
        said.ask(*BATCH, tokens=4, settle=False)
        running.answered()
        assert not resume.finished.is_set(), "the engine waited for the server"
    finally:
        resume.join()
    running.wait_for_hits()


def test_a_server_that_stops_in_the_middle_of_copies(running: World):
    running.engine.ask(*BATCH, tokens=4)
    retrieves = running.server.count("retrieves")
    wait_until(lambda: running.server.count("retrieves") > retrieves + 3, 30)
    running.server.signal(signal.SIGSTOP)
    resume = threading.Timer(5, lambda: running.server.signal(signal.SIGCONT))
    resume.start()
    running.answered(extra_s=5 + EXTRA_S)
    resume.join()
    running.wait_for_hits()


def test_a_slow_server(running: World):
    """It runs a tenth of the time."""
    over = threading.Event()

    def hinder() -> None:
        while not over.is_set():
            running.server.signal(signal.SIGSTOP)
            over.wait(0.18)
            running.server.signal(signal.SIGCONT)
            over.wait(0.02)

    hindering = threading.Thread(target=hinder)
    hindering.start()
    try:
        running.check()
    finally:
        over.set()
        hindering.join()


def test_a_full_server(running: World):
    """It has room for some of the batch."""
    running.server.replace("--l1-size", "4MiB")
    wait_until(lambda: running.server.status().clients == 2, 10)
    for _ in range(3):
        running.check()
    status = running.server.status()
    assert status.counters["evicted_chunks"] > 0
    assert status.counters["loaded_chunks"] > 0
    running.server.signal(signal.SIGKILL)


def test_a_server_of_another_protocol_version(running: World):
    running.server.replace(module="tests.vllm.other_protocol")
    assert max(running.check()) <= LOCAL
    wait_until(lambda: "PROTOCOL_VERSION" in running.engine.log.read_text(), 10)
    running.server.replace()
    running.wait_for_hits()
