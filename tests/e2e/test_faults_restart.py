# SPDX-License-Identifier: Apache-2.0
"""Real servers that are killed, started again and drained, under clients that go on."""

from __future__ import annotations

import contextlib
import itertools
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvgrpc import api
from kvgrpc.client import Client, LookupResult, SchedulerClient, WorkerClient
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import ChunkResult, SpaceIdentity, TokenRange
from tests.e2e.harness import outcomes, tokens_of
from tests.kvdata import LAYERS_OUTERMOST, MHA, Image, shared_memory
from tests.served import serving, stand_still, stop, wait_until

CHUNK = 16
CHUNKS = 8
TOKENS = CHUNKS * CHUNK
BLOCKS = list(range(1, 65, 2))
TARGET = list(range(128, 192, 2))
LOOKUP_S = 0.2
SLACK_S = 0.3
"""What may be added to a deadline until the caller runs again; nearly always, since other work on the machine may keep
it for longer."""
ROUNDS = 3
"""One of them at least is in time, whatever else the machine does."""
DOWN_S = 10.0
BACK_S = 2.0
ENGINE_ID = "engine-of-the-restart-tests"
IDENTITY = SpaceIdentity("model", "", "bfloat16", 1, api.OWN_HASH_ALGORITHM, "token-major:4:8:2")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RestartedServer]:
    with contextlib.closing(RestartedServer(tmp_path)) as restarted:
        yield restarted


class RestartedServer:
    """`kvgrpc serve` on one socket, again and again."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "s"
        self.address = f"unix:{self.socket}"
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """When the socket took its first connection."""
        command = [sys.executable, "-m", "kvgrpc", "serve", "--socket", str(self.socket), "--chunk-tokens", str(CHUNK)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([*command, "--l1-size", "64MiB"], stdout=log, stderr=log)
        wait_until(self._is_open, 60)
        return time.monotonic()

    def _is_open(self) -> bool:
        with socket.socket(socket.AF_UNIX) as sock:
            try:
                sock.connect(str(self.socket))
            except OSError:
                return False
        return True

    def signal(self, number: signal.Signals) -> None:
        """After SIGSTOP it stands still at once."""
        assert self._process is not None
        if number == signal.SIGSTOP:
            stand_still(self._process.pid)
        else:
            self._process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def close(self) -> None:
        if self._process is not None:
            self.signal(signal.SIGCONT)
            stop(self._process)


@dataclass
class Caller:
    """Looks up one prompt all the time, under ever new request ids, in a thread of its own."""

    scheduler: SchedulerClient
    tokens: api.Tokens
    times: list[float] = field(default_factory=list[float])
    last: LookupResult = field(default_factory=LookupResult)
    errors: list[Exception] = field(default_factory=list[Exception])
    count: int = 0

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for number in itertools.count():
            if self._stop.wait(0.01):
                return
            name, started = f"caller-{number}", time.monotonic()
            try:
                self.last = self.scheduler.lookup(name, self.tokens, timeout_s=LOOKUP_S)
                self.times.append(time.monotonic() - started)
                self.scheduler.discard(name)
            except Exception as error:  # noqa: BLE001 - nothing may be raised, whatever it is
                self.errors.append(error)
            self.count += 1

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


@dataclass
class Members:
    """A worker with its memory and a scheduler, as an engine uses them."""

    worker: WorkerClient
    scheduler: SchedulerClient
    image: Image

    def store(self, tokens: api.Tokens) -> list[str]:
        self.image.write(BLOCKS)
        return outcomes(self.worker.store(tokens, [BLOCKS]).result(30))

    def load(self, name: str, tokens: api.Tokens) -> None:
        """Found, retrieved and right. Lookups that were too late on a busy machine may have opened the breaker."""
        end, attempt = time.monotonic() + 30, 0
        while (found := self.scheduler.lookup(name, tokens, attempt=attempt, timeout_s=5)).hit_tokens != TOKENS:
            assert time.monotonic() < end and found.reason in ("BREAKER_OPEN", "DEADLINE"), found
            attempt += 1
            time.sleep(0.05)
        self.image.memory[:] = 0xA5
        results = self.worker.retrieve(found.job_id, TokenRange(0, TOKENS), [TARGET]).result(30)
        assert outcomes(results) == ["LOADED"] * CHUNKS
        assert self.image.wrong_tokens(TARGET) == []
        assert self.image.untouched(TARGET)
        self.scheduler.discard(name)

    @property
    def attached(self) -> bool:
        return self.worker.attached and self.scheduler.attached

    @property
    def lost(self) -> bool:
        """Both have seen that their server has gone: from here on ``attached`` speaks of the next one."""
        return not self.worker.attached and not self.scheduler.attached


@contextlib.contextmanager
def members(address: str) -> Iterator[Members]:
    plain = Image(MHA, LAYERS_OUTERMOST, 4, 256)
    with shared_memory(plain.size_bytes) as (name, buffer):
        image = Image(MHA, LAYERS_OUTERMOST, 4, 256, buffer=buffer)
        request = api.RegisterRequest(ENGINE_ID, IDENTITY, 0, 0, 1, 1, image.layout(name))
        worker, scheduler = WorkerClient(address, request), SchedulerClient(address, ENGINE_ID, IDENTITY)
        try:
            yield Members(worker, scheduler, image)
        finally:
            scheduler.close()
            worker.close(timeout_s=2)


def test_server_killed_and_started_again_under_a_client_that_looks_up(server: RestartedServer) -> None:
    """Field report 25, and that no call takes longer than its deadline while servers come and go."""
    tokens, back = tokens_of(1, TOKENS), list[float]()
    server.start()
    with members(server.address) as engine:
        assert engine.worker.start(30)
        assert engine.scheduler.start(30)
        assert engine.store(tokens) == ["STORED"] * CHUNKS
        with contextlib.closing(Caller(engine.scheduler, tokens)) as caller:
            for number in range(ROUNDS):
                wait_until(lambda: caller.last.hit_tokens == TOKENS, 30)
                server.kill()
                wait_until(lambda: caller.last.hit_tokens == 0 and engine.lost, 30)
                opened = server.start()
                wait_until(lambda: engine.attached, 30)
                back.append(time.monotonic() - opened)
                assert engine.worker.registration is not None
                assert engine.store(tokens) == ["STORED"] * CHUNKS
                engine.load(f"again-{number}", tokens)
        assert not caller.errors
        assert caller.count > 50
        assert min(back) < BACK_S, back
        *most, longest_s = sorted(caller.times)
        assert most[len(most) * 9 // 10] < LOOKUP_S + SLACK_S and longest_s < LOOKUP_S + 5, (most, longest_s)


def test_server_down_for_long(server: RestartedServer) -> None:
    """Field report 47: many attempts while nobody listens; success within 2 s of the port being open, and what failed
    is not stored twice."""
    back: list[float] = []
    server.start()
    with members(server.address) as engine, Client(server.address, "operator") as operator:
        assert engine.worker.start(30)
        assert engine.scheduler.start(30)
        while not back or (back[-1] >= BACK_S and len(back) < ROUNDS):
            back.append(down_for_long(server, engine, operator, f"round-{len(back)}"))
        assert back[-1] < BACK_S, back


def down_for_long(server: RestartedServer, engine: Members, operator: Client, name: str) -> float:
    """Seconds from the open port until all are served again."""
    tokens, stored = tokens_of(2, TOKENS), list[Future[tuple[ChunkResult, ...]]]()
    server.kill()
    down, attempts = time.monotonic(), 0
    while time.monotonic() - down < DOWN_S or attempts <= 15:
        with pytest.raises(Refusal) as refused:
            operator.get_status()
        assert refused.value.reason is Reason.SERVER_UNREACHABLE
        stored.append(engine.worker.store(tokens, [BLOCKS]))
        assert engine.scheduler.lookup(f"{name}-{attempts}", tokens, timeout_s=LOOKUP_S).hit_tokens == 0
        attempts += 1
        time.sleep(0.1)
    for future in stored:
        assert set(outcomes(future.result(30))) == {"FAILED"}
    wait_until(lambda: engine.lost, 30)

    opened = server.start()
    reachable(operator)
    wait_until(lambda: engine.attached, 30)
    back_s = time.monotonic() - opened
    assert engine.store(tokens) == ["STORED"] * CHUNKS
    engine.load(f"{name}-up", tokens)
    counters = operator.get_status().counters
    assert counters["stored_chunks"] == CHUNKS
    assert counters["stores"] == 1
    return back_s


def reachable(client: Client) -> None:
    """Returns when the server has answered."""
    while True:
        with contextlib.suppress(Refusal):
            client.get_status()
            return
        time.sleep(0.05)


def test_no_server_then_a_frozen_one_then_a_well_one(server: RestartedServer) -> None:
    """Field report 34: a miss within the set wait, then misses at once while the breaker is open; no exception; well
    again within 5 s of the server's being so."""
    tokens = tokens_of(3, TOKENS)
    with members(server.address) as engine:
        assert not engine.scheduler.start(0.1)
        assert not engine.worker.start(0.1)
        assert min(timed_miss(engine, tokens, f"no server {number}") for number in range(5)) < 0.05
        server.start()
        wait_until(lambda: engine.attached, 30)
        assert engine.store(tokens) == ["STORED"] * CHUNKS

        server.signal(signal.SIGSTOP)
        frozen = [timed_miss(engine, tokens, f"frozen-{number}") for number in range(3)]
        assert min(frozen) < LOOKUP_S + SLACK_S and max(frozen) < LOOKUP_S + 5, frozen
        # a trial call of the half-open breaker may take its full time
        quick = sorted(timed_miss(engine, tokens, f"open-{number}") for number in range(50))
        assert quick[25] < 0.001

        server.signal(signal.SIGCONT)
        well = time.monotonic()
        for number in itertools.count():
            if engine.scheduler.lookup(f"well-{number}", tokens, timeout_s=LOOKUP_S).hit_tokens:
                break
            time.sleep(0.02)
        assert time.monotonic() - well < 5
        engine.load("well", tokens)


def timed_miss(engine: Members, tokens: api.Tokens, name: str) -> float:
    started = time.monotonic()
    assert engine.scheduler.lookup(name, tokens, timeout_s=LOOKUP_S).hit_tokens == 0
    return time.monotonic() - started


def test_killed_with_copies_in_flight() -> None:
    """Copies that a server's death interrupts end as not done; their blocks are free only once it is dead."""
    tokens = tokens_of(4, TOKENS)
    with serving("0.01", module="tests.e2e.slow") as slow, members(slow.address) as engine:
        assert engine.worker.start(30)
        assert engine.scheduler.start(30)
        assert engine.store(tokens) == ["STORED"] * CHUNKS  # takes about 2 s
        found = engine.scheduler.lookup("r", tokens, timeout_s=5)
        store = engine.worker.store(tokens_of(5, TOKENS), [BLOCKS])
        retrieve = engine.worker.retrieve(found.job_id, TokenRange(0, TOKENS), [TARGET])
        with Client(slow.address, "operator") as operator:
            wait_until(lambda: operator.get_status().calls_in_flight == 2, 5)
        assert not store.done()
        assert not retrieve.done()
        assert {block for _, block in engine.worker.blocks_in_flight()} == {*BLOCKS, *TARGET}
        slow.process.kill()
        assert set(outcomes(store.result(10))) == {"FAILED"}
        assert set(outcomes(retrieve.result(10))) == {"TORN"}
        assert engine.worker.blocks_in_flight() == frozenset()


def test_sigterm_lets_a_running_store_end() -> None:
    """A drain: the store is answered and was done, new work is refused, clients know; exit code 0, no socket left."""
    tokens = tokens_of(6, TOKENS)
    with serving("0.03", module="tests.e2e.slow") as slow, members(slow.address) as engine:  # takes about 6 s
        assert engine.worker.start(30)
        assert engine.scheduler.start(30)
        store = engine.worker.store(tokens, [BLOCKS])
        with Client(slow.address, "operator") as operator:
            wait_until(lambda: operator.get_status().calls_in_flight == 1, 5)
            slow.process.send_signal(signal.SIGTERM)
            wait_until(lambda: operator.get_status().draining, 5)
            late: Any = engine.worker.store(tokens_of(7, TOKENS), [TARGET]).result(5)
            assert {(result.outcome.value, result.reason) for result in late} == {("FAILED", "SERVER_DRAINING")}
            missed = engine.scheduler.lookup("late", tokens)
            assert (missed.hit_tokens, missed.reason) == (0, "SERVER_DRAINING")
            assert not store.done()
        assert outcomes(store.result(30)) == ["STORED"] * CHUNKS
        assert slow.process.wait(30) == 0, slow.log
        assert not slow.socket.exists()
        assert "Traceback" not in slow.log
