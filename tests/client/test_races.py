# SPDX-License-Identifier: Apache-2.0
"""What happens only when two things happen at once: nobody waits for ever, and nothing is taken for something else."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvgrpc import api
from kvgrpc.client import Client, SchedulerClient, WorkerClient, parse_address
from kvgrpc.client import life as lives
from kvgrpc.client import session as sessions
from kvgrpc.client.aio import AioClient
from kvgrpc.client.life import ServerLife, open_pidfd
from kvgrpc.client.loop import LoopThread
from kvgrpc.client.session import Membership, Session
from kvgrpc.core.errors import Reason
from kvgrpc.core.types import ChunkOutcome, ChunkResult, Role, TokenRange
from tests.client.conftest import MakeScheduler, MakeWorker
from tests.client.fakes import ENGINE, IDENTITY, FakeServer, Knobs, fake_process, wait_until
from tests.client.memory import register_request, tokens

RANGE, BLOCKS = TokenRange(0, 32), ((3, 1, 4, 1, 5, 9, 2, 6),)
STORED = (ChunkResult(0, 2, ChunkOutcome.STORED),)


# ---- the loop's thread ----------------------------------------------------------------------------------------------


def test_what_is_handed_over_while_the_loop_stops_runs_or_is_refused() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 1

    for _ in range(30):
        loop, said = LoopThread("test"), list[str]()
        loop.check()

        def submit(loop: LoopThread = loop, said: list[str] = said) -> None:
            try:
                while loop.run(work()):
                    pass
            except RuntimeError as error:
                said.append(str(error))

        threads = [threading.Thread(target=submit, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        loop.stop()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads), "somebody waits for what never runs"
        assert len(said) == 4
        assert set(said) <= {"the client is closed", "the client was closed meanwhile"}


@contextmanager
def standing_still(loop: LoopThread) -> Iterator[None]:
    """Within, the loop's thread does nothing; at the end it is told to stop, before it goes on."""
    stands, go_on = threading.Event(), threading.Event()

    def stand_still() -> None:
        stands.set()
        go_on.wait(10)

    loop.post(stand_still)
    assert stands.wait(10)
    yield
    stopping = threading.Thread(target=loop.stop)
    stopping.start()
    wait_until(lambda: not loop.has_started)
    with loop._lock:  # the stop is in the queue
        pass
    go_on.set()
    stopping.join(10)


def test_a_copy_and_a_lookup_that_never_began_have_an_end(server: FakeServer, make_scheduler: MakeScheduler) -> None:
    cache = server.start()
    worker, scheduler = WorkerClient(server.address, register_request()), make_scheduler(server.address)
    assert worker.start()
    assert scheduler.start()
    with standing_still(worker._loop):
        store = worker.store(tokens(32), BLOCKS, range=RANGE)
    assert store.result(10) == (ChunkResult(0, 2, ChunkOutcome.FAILED, "SERVER_UNREACHABLE"),)
    with standing_still(scheduler._loop):
        assert scheduler.try_lookup("r1", tokens(32)) is None
        lookup = scheduler._queries["r1"].future
    assert lookup.result(10).reason == "SERVER_UNREACHABLE"
    assert not cache.asked("store") + cache.asked("lookup")


def test_closing_ends_the_calls_of_other_threads(server: FakeServer) -> None:
    cache = server.start(Knobs(hang=["handshake"]))
    client, said = Client(server.address), list[str]()

    def call() -> None:
        try:
            client.handshake(api.Hello())
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    wait_until(lambda: cache.asked("handshake"))
    client.close()
    thread.join(10)
    assert said == ["the client was closed meanwhile"]


def test_a_client_that_was_never_used_starts_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(threading.Thread, "start", started.append)
    with Client(f"unix:{folder}/s"):
        pass
    assert not started


def test_a_callback_that_waits_for_its_own_client_is_told_so(
    server: FakeServer, make_worker: MakeWorker, make_scheduler: MakeScheduler
) -> None:
    server.start()
    worker, scheduler = make_worker(server.address), make_scheduler(server.address)
    worker.start()
    scheduler.start()
    said: Future[list[str]] = Future()

    def told(act: Any) -> str:
        try:
            return str(act())
        except RuntimeError as error:
            return str(error)

    def callback(_: object) -> None:
        said.set_result([told(worker.close), told(worker.start)])

    worker.store(tokens(32), BLOCKS, range=RANGE).add_done_callback(callback)
    assert said.result(5) == ["a callback of this client's futures must not wait for the client"] * 2
    assert worker.store(tokens(32), BLOCKS, range=RANGE).result(5) == STORED

    said = Future()
    waiting = [scheduler.close, lambda: scheduler.lookup("r1", tokens(32))]
    scheduler._loop.post(lambda: said.set_result([told(act) for act in waiting]))
    assert said.result(5) == ["a callback of this client's futures must not wait for the client"] * 2


def test_who_has_a_result_has_its_blocks_and_its_place(
    server: FakeServer, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before the client's own thread has gone on from where it gave the result."""
    server.start()
    client, held = make_worker(server.address, calls=1), threading.Event()
    client.start()
    monkeypatch.setattr(client, "_ended", lambda _: held.wait(10))
    assert client.store(tokens(32), BLOCKS, range=RANGE).result(5) == STORED
    assert client.blocks_in_flight() == frozenset()
    another = client.store(tokens(32), BLOCKS, range=RANGE)
    held.set()
    assert another.result(5) == STORED


# ---- close ----------------------------------------------------------------------------------------------------------


def test_close_takes_no_longer_than_it_is_told(server: FakeServer, make_worker: MakeWorker) -> None:
    cache = server.start(Knobs(hold=True, hang=["unregister"]))
    client = make_worker(server.address)
    client.start()
    client.store(tokens(32), BLOCKS, range=RANGE)
    wait_until(lambda: cache.running)
    timer = threading.Timer(3.0, lambda: server.run(cache.release))
    timer.start()
    start = time.monotonic()
    assert client.close(timeout_s=5.0)
    assert time.monotonic() - start < 7.0, "the copy has 5 s and who unregisters what is left of them"
    assert cache.asked("unregister")
    timer.join()


def test_a_second_close_does_not_cut_the_first_short(server: FakeServer, make_worker: MakeWorker) -> None:
    cache = server.start(Knobs(hold=True))
    client = make_worker(server.address)
    client.start()
    client.store(tokens(32), BLOCKS, range=RANGE)
    wait_until(lambda: cache.running)
    answers: list[bool] = []
    first = threading.Thread(target=lambda: answers.append(client.close(timeout_s=20)))
    first.start()
    wait_until(lambda: cache.asked("fence"))
    assert not client.close(timeout_s=0.2), "the copy still runs"
    server.run(cache.release)
    first.join(10)
    assert answers == [True]
    assert cache.asked("unregister") == [client.engine_id]
    assert client.close()


# ---- lookups --------------------------------------------------------------------------------------------------------


def test_two_threads_that_ask_for_one_request_get_one_answer(server: FakeServer, make_scheduler: MakeScheduler) -> None:
    cache = server.start()
    client = make_scheduler(server.address, in_flight=2)
    client.start()
    for number in range(5):
        both = threading.Barrier(2)

        def content(both: threading.Barrier = both) -> api.Content:
            both.wait(5)
            return tokens(32)

        with_both: list[Any] = []

        def ask(request_id: str = f"r{number}", content: Any = content, found: list[Any] = with_both) -> None:
            found.append(client.lookup(request_id, content, timeout_s=5))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert [result.hit_tokens for result in with_both] == [32, 32]
        assert with_both[0].job_id == with_both[1].job_id
    assert len(cache.asked("lookup")) == 5


# ---- the session ----------------------------------------------------------------------------------------------------


async def test_a_change_between_the_wait_and_its_begin_is_seen(folder: Path) -> None:
    session = Session(AioClient(f"unix:{folder}/s"), Membership(ENGINE, Role.SCHEDULER, identity=IDENTITY))
    waiting = asyncio.ensure_future(session.wait_change())
    session._pulse()
    await asyncio.wait_for(waiting, 10)


def test_a_server_that_was_never_attached_to_holds_no_blocks(
    server: FakeServer, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaced between handshake and attach: what is known of its process may be another's, which lives on."""
    cache = server.start()
    note, replaced = cache.note, list[bytes]()

    async def replacing(name: str, request: Any) -> None:
        await note(name, request)
        if name == "attach" and not replaced:
            replaced.append(cache.epoch)
            cache.epoch = b"n" * 16

    monkeypatch.setattr(cache, "note", replacing)
    client = make_worker(server.address)
    assert client.start()
    assert replaced
    assert client._session is not None
    assert [life.epoch for life in client._session.lives] == [b"n" * 16]


def test_whatever_fails_the_session_is_opened_again(
    server: FakeServer, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.start()
    client = make_worker(server.address)

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(sessions, "ServerLife", fail)
        assert not client.start(wait_s=0.2)
        wait_until(lambda: client.problem is not None)
        assert client.problem is not None
        assert client.problem.reason is Reason.INTERNAL
        assert "too many open files" in client.problem.message
    wait_until(lambda: client.attached)
    assert client.problem is None
    assert client.store(tokens(32), BLOCKS, range=RANGE).result(5) == STORED


def test_no_descriptor_left_costs_the_evidence_only(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.start()

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(lives.socket, "socket", fail)
    assert open_pidfd(parse_address(server.address)) is None


async def test_the_end_of_a_process_is_seen_under_any_descriptor(folder: Path) -> None:
    """Under a number that a closed one had, and beyond what select() can take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else 4096, hard))
    address = parse_address(f"unix:{folder}/s")
    taken: list[int] = []
    try:
        with fake_process(f"unix:{folder}/s") as process:
            first = ServerLife(b"1" * 16, address)
            watching = asyncio.ensure_future(first.watch())
            await asyncio.sleep(0)
            number = first._pidfd
            watching.cancel()
            first.close()
            others = [ServerLife(b"2" * 16, address)]
            while others[-1]._pidfd != number:  # meanwhile something else may have given a lower one back, or taken it
                assert len(others) < 50
                others.append(ServerLife(b"2" * 16, address))
            second = others.pop()
            for other in others:
                other.close()
            while not taken or taken[-1] < 1100:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            third = ServerLife(b"3" * 16, address)
            assert third._pidfd is not None and third._pidfd > 1024
            await asyncio.sleep(0.05)
            assert not second.ended.is_set() and not third.ended.is_set()
            process.kill()
            await asyncio.wait_for(asyncio.gather(second.watch(), third.watch()), 5)
            assert second.ended.is_set() and third.ended.is_set() and not first.ended.is_set()
            second.close()
            third.close()
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---- arguments ------------------------------------------------------------------------------------------------------


def test_a_registration_that_cannot_be_sent_is_refused_when_the_client_is_made(folder: Path) -> None:
    wrong: Any = "zero"
    nothing: Any = None
    address = f"unix:{folder}/s"
    for request in (replace(register_request(), kv_rank=wrong), replace(register_request(), layout=nothing)):
        with pytest.raises((TypeError, AttributeError)):
            WorkerClient(address, request)
    with pytest.raises((TypeError, AttributeError)):
        SchedulerClient(address, ENGINE, wrong)
    with pytest.raises(TypeError):
        SchedulerClient(address, wrong and 5, IDENTITY)  # type: ignore[arg-type]


def test_no_time_at_all_is_not_the_default_time(server: FakeServer, make_worker: MakeWorker) -> None:
    server.start(Knobs(hang=["store"]))
    client = make_worker(server.address)
    client.start()
    results = client.store(tokens(32), BLOCKS, range=RANGE, timeout_s=0).result(15)
    assert results == (ChunkResult(0, 2, ChunkOutcome.FAILED, "DEADLINE"),), "the default is 30 s"
