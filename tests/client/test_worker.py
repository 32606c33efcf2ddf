# SPDX-License-Identifier: Apache-2.0
"""WorkerClient: copies as futures, the session that keeps itself, when blocks are free. Field reports 22, 25, 47."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvgrpc import api
from kvgrpc.core.errors import Reason
from kvgrpc.core.types import ChunkOutcome, ChunkResult, TokenRange
from kvgrpc.transfer.host import host_id
from tests.client.conftest import MakeWorker
from tests.client.fakes import FakeServer, Knobs, fake_process, wait_until
from tests.client.memory import tokens
from tests.ports import free_port
from tests.served import stand_still

RANGE, BLOCKS, JOB = TokenRange(0, 32), ((3, 1, 4, 1, 5, 9, 2, 6),), b"j" * 16
STORED, LOADED = ((ChunkResult(0, 2, outcome),) for outcome in (ChunkOutcome.STORED, ChunkOutcome.LOADED))


def failed(reason: str) -> tuple[ChunkResult, ...]:
    return (ChunkResult(0, 2, ChunkOutcome.FAILED, reason),)


def torn(reason: str) -> tuple[ChunkResult, ...]:
    return (ChunkResult(0, 2, ChunkOutcome.TORN, reason),)


def stays_unfinished(future: Future[Any], seconds: float = 0.3) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if future.done():
            return False
        time.sleep(0.01)
    return True


def test_start_registers_and_copies_answer(server: FakeServer, make_worker: MakeWorker) -> None:
    cache = server.start()
    client = make_worker(server.address)
    assert client.start()
    assert client.registration == api.RegisterAnswer(b"\x07" * 16, 16, 1, "opaque:TEST:X:4", 1024)
    assert cache.asked("register")[0].host_id == host_id()
    store = client.store(tokens(32), BLOCKS, range=RANGE, lora="L", cache_salt="S")
    assert store.result(5) == STORED
    assert client.retrieve(JOB, RANGE, BLOCKS).result(5) == LOADED
    request = cache.asked("store")[0]
    assert (request.space.space_base, request.space.lora, request.space.cache_salt) == (b"\x07" * 16, "L", "S")
    assert tuple(request.blocks[0]) == BLOCKS[0]
    assert client.blocks_in_flight() == frozenset()
    ids = [client.store(tokens(32), BLOCKS, range=RANGE).call_id for _ in range(10)]
    assert ids == sorted(set(ids))


def test_each_copy_goes_out_once(server: FakeServer, make_worker: MakeWorker) -> None:
    cache = server.start()
    client = make_worker(server.address)
    client.start()
    futures = [client.store(tokens(32), BLOCKS, range=RANGE) for _ in range(50)]
    assert all(future.result(10) == STORED for future in futures)
    assert sorted(request.call_id for request in cache.asked("store")) == [future.call_id for future in futures]


def test_without_a_server_copies_fail_at_once(server: FakeServer, make_worker: MakeWorker) -> None:
    client = make_worker(server.address)
    assert not client.start(wait_s=0.1)
    # no server was ever seen, so the size of chunks is not known: one result for all
    assert client.store(tokens(64), BLOCKS).result(10) == (
        ChunkResult(0, 1, ChunkOutcome.FAILED, "SERVER_UNREACHABLE"),
    )
    server.start()
    wait_until(lambda: client.attached)
    assert client.store(tokens(32), BLOCKS, range=RANGE).result(5) == STORED
    server.stop()
    wait_until(lambda: not client.attached)
    assert client.store(tokens(70), BLOCKS).result(10) == (
        ChunkResult(0, 4, ChunkOutcome.FAILED, "SERVER_UNREACHABLE"),
    )
    unaligned = TokenRange(20, 60)
    assert client.store(tokens(64), BLOCKS, range=unaligned).result(10)[0].first_chunk == 2
    assert client.store(tokens(64), BLOCKS, range=TokenRange(20, 30)).result(10) == ()
    assert client.retrieve(JOB, unaligned, BLOCKS).result(10) == (
        ChunkResult(1, 3, ChunkOutcome.FAILED, "SERVER_UNREACHABLE"),
    )


@pytest.mark.parametrize("reason", ["BLOCK_IDS", "CALL_LIMIT", "ENGINE_DRAINING"])
def test_refusals_are_results_and_free_the_blocks(server: FakeServer, make_worker: MakeWorker, reason: str) -> None:
    cache = server.start(Knobs(refuse={"store": reason, "retrieve": reason}))
    client = make_worker(server.address)
    client.start()
    assert client.store(tokens(32), BLOCKS, range=RANGE).result(5) == failed(reason)
    assert client.retrieve(JOB, RANGE, BLOCKS).result(5) == failed(reason)
    assert not cache.asked("fence")


def test_copies_in_flight_are_bounded(server: FakeServer, make_worker: MakeWorker) -> None:
    cache = server.start(Knobs(hold=True))
    client = make_worker(server.address, calls=2)
    client.start()
    held = [client.store(tokens(32), BLOCKS, range=RANGE) for _ in range(2)]
    assert client.store(tokens(32), BLOCKS, range=RANGE).result(10) == failed("CALL_LIMIT")
    wait_until(lambda: len(cache.running) == 2)
    server.run(cache.release)
    assert [future.result(5) for future in held] == [STORED] * 2


def test_what_cannot_be_encoded_is_the_callers_error(server: FakeServer, make_worker: MakeWorker) -> None:
    server.start()
    client = make_worker(server.address)
    client.start()
    with pytest.raises(ValueError):
        client.store(tokens(32), ((-1,),), range=RANGE).result(5)
    with pytest.raises(TypeError):
        client.store(tokens(32), (("a block",),), range=RANGE).result(5)  # type: ignore[arg-type]
    assert client.blocks_in_flight() == frozenset()


# ---- blocks ---------------------------------------------------------------------------------------------------------


def test_a_deadline_frees_nothing_until_the_fence_is_answered(server: FakeServer, make_worker: MakeWorker) -> None:
    cache = server.start(Knobs(hold=True))
    client = make_worker(server.address)
    client.start()
    store = client.store(tokens(32), BLOCKS, range=RANGE, timeout_s=0.2)
    load = client.retrieve(JOB, RANGE, ((70, 71, 72, 73, 74, 75, 76, 77),), timeout_s=0.2)
    wait_until(lambda: len(cache.asked("fence")) == 2)
    assert stays_unfinished(store)
    assert not load.done()
    assert client.blocks_in_flight() == {(0, block) for block in (*BLOCKS[0], *range(70, 78))}
    server.run(cache.release)
    assert store.result(5) == failed("DEADLINE")
    assert load.result(5) == torn("DEADLINE"), "the content of its blocks is not known"
    assert client.blocks_in_flight() == frozenset()


def test_a_fence_that_fails_is_sent_again(server: FakeServer, make_worker: MakeWorker) -> None:
    cache = server.start(Knobs(hold=True, refuse={"fence": "CALL_LIMIT"}))
    client = make_worker(server.address)
    client.start()
    store = client.store(tokens(32), BLOCKS, range=RANGE, timeout_s=0.2)
    wait_until(lambda: len(cache.asked("fence")) >= 3)
    assert not store.done()
    cache.knobs.refuse.clear()
    server.run(cache.release)
    assert store.result(5) == failed("DEADLINE")


def test_an_internal_error_frees_nothing_by_itself(server: FakeServer, make_worker: MakeWorker) -> None:
    cache = server.start(Knobs(refuse={"store": "INTERNAL"}, hang=["fence"]))
    client = make_worker(server.address)
    client.start()
    store = client.store(tokens(32), BLOCKS, range=RANGE)
    wait_until(lambda: cache.asked("fence"))
    assert stays_unfinished(store)
    cache.knobs.hang.clear()
    assert store.result(5) == failed("INTERNAL")


def test_cancel_and_fence_ask_the_server_and_wait_for_it(server: FakeServer, make_worker: MakeWorker) -> None:
    cache = server.start(Knobs(hold=True))
    client = make_worker(server.address)
    client.start()
    store = client.store(tokens(32), BLOCKS, range=RANGE)
    wait_until(lambda: cache.running)
    assert not store.cancel()
    wait_until(lambda: cache.asked("fence") == [(store.call_id,)])
    fence = client.fence((store.call_id, 999))
    assert stays_unfinished(fence)
    assert not store.done()
    server.run(cache.release)
    assert store.result(5) == STORED, "the server's own word on how it ended"
    fence.result(5)
    client.fence((store.call_id,)).result(10)
    assert not store.cancel()


def test_a_cut_stream_is_mended_and_a_running_copy_goes_on(server: FakeServer, make_worker: MakeWorker) -> None:
    cache = server.start(Knobs(hold=True))
    client = make_worker(server.address)
    client.start()
    store = client.store(tokens(32), BLOCKS, range=RANGE)
    wait_until(lambda: cache.running)
    server.cut_streams()
    wait_until(lambda: len(cache.asked("register")) == 2)
    assert not store.done()
    server.run(cache.release)
    assert store.result(5) == STORED
    engines = {(engine_id, session_id) for engine_id, _, session_id in cache.asked("attach")}
    assert len(engines) == 1, "the same session is continued"


def cut(connections: Sequence[socket.socket]) -> None:
    """Breaks those that are not broken yet."""
    for end in connections:
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


@contextmanager
def relay(target: Path, path: Path) -> Iterator[list[socket.socket]]:
    """A socket in front of another, whose connections can be cut."""
    pairs: list[socket.socket] = []
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        cut((source, sink))

    def accept() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(str(target))
            pairs.extend((near, far))
            for ends in ((near, far), (far, near)):
                threading.Thread(target=pump, args=ends, daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield pairs
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)
        for end in pairs:
            end.close()


def test_a_lost_connection_frees_nothing_until_the_fence(
    server: FakeServer, make_worker: MakeWorker, folder: Path
) -> None:
    cache = server.start(Knobs(hold=True))
    with relay(server.socket, folder / "relay") as connections:
        client = make_worker(f"unix:{folder}/relay")
        assert client.start()
        store = client.store(tokens(32), BLOCKS, range=RANGE)
        load = client.retrieve(JOB, RANGE, BLOCKS)
        wait_until(lambda: len(cache.running) == 2)
        cut(connections.copy())
        wait_until(lambda: {(store.call_id,), (load.call_id,)} <= set(cache.asked("fence")))
        assert stays_unfinished(store)
        assert client.blocks_in_flight()
        server.run(cache.release)
        assert store.result(5) == failed("SERVER_UNREACHABLE")
        assert load.result(5) == torn("SERVER_UNREACHABLE")
        client.close(timeout_s=5)


def test_a_dead_server_frees_the_blocks_and_a_frozen_one_does_not(folder: Path, make_worker: MakeWorker) -> None:
    address = f"unix:{folder}/s"
    with fake_process(address, hold=True) as process:
        client = make_worker(address)
        assert client.start()
        load = client.retrieve(JOB, RANGE, BLOCKS, timeout_s=0.2)
        time.sleep(0.1)
        stand_still(process.pid)
        assert stays_unfinished(load, 1.0)
        assert client.blocks_in_flight()
        process.kill()
        assert load.result(10) == torn("DEADLINE")
        assert not client.blocks_in_flight()


def test_a_killed_server_is_seen_within_a_second_and_the_next_is_used(folder: Path, make_worker: MakeWorker) -> None:
    address, client = f"unix:{folder}/s", make_worker(f"unix:{folder}/s")
    seen, back = list[float](), list[float]()
    while not seen or ((min(seen) >= 1 or min(back) >= 2) and len(seen) < 3):  # the machine may have other work
        with fake_process(address, hold=True) as process:
            assert client.start()
            store = client.store(tokens(32), BLOCKS, range=RANGE)
            load = client.retrieve(JOB, RANGE, BLOCKS)
            assert stays_unfinished(load, 0.2)
            process.kill()
            start = time.monotonic()
            assert (store.result(10), load.result(10)) == (failed("SERVER_UNREACHABLE"), torn("SERVER_UNREACHABLE"))
            seen.append(time.monotonic() - start)
            wait_until(lambda: not client.attached)
            assert client.store(tokens(32), BLOCKS, range=RANGE).result(10) == failed("SERVER_UNREACHABLE")
        time.sleep(1.5)  # so that the reconnect back-off has grown
        with fake_process(address):
            back.append(wait_until(lambda: client.attached))
            assert client.store(tokens(32), BLOCKS, range=RANGE).result(5) == STORED
        wait_until(lambda: not client.attached)
    assert min(seen) < 1 and min(back) < 2, (seen, back)
    assert client.close(timeout_s=5)


def test_over_tcp_the_next_server_or_refused_connections_tell(make_worker: MakeWorker) -> None:
    address = f"127.0.0.1:{free_port()}"
    with fake_process(address, hold=True) as process:
        client = make_worker(f"grpc://{address}")
        assert client.start()
        load = client.retrieve(JOB, RANGE, BLOCKS)
        assert stays_unfinished(load, 0.2)
        process.kill()
        assert stays_unfinished(load, 1.0), "a refused connection may be a server that stops with copies still running"
        process.wait()
    with fake_process(address, hold=True) as process:
        wait_until(lambda: client.attached)
        assert load.result(10) == torn("SERVER_UNREACHABLE")
        load = client.retrieve(JOB, RANGE, BLOCKS)
        assert stays_unfinished(load, 0.2)
        process.kill()
        assert load.result(10) == torn("SERVER_UNREACHABLE")


# ---- session --------------------------------------------------------------------------------------------------------


def test_a_restarted_server_has_the_registration_in_two_seconds(server: FakeServer, make_worker: MakeWorker) -> None:
    server.start()
    client, back = make_worker(server.address), list[float]()
    client.start()
    for _ in range(5):
        server.stop()
        wait_until(lambda: not client.attached)
        cache = server.start()
        back.append(wait_until(lambda: client.attached))
        assert len(cache.asked("register")) == 1
        assert client.store(tokens(32), BLOCKS, range=RANGE).result(5) == STORED
    assert sorted(back)[2] < 2, back


def test_an_idle_client_stays_attached(server: FakeServer, make_worker: MakeWorker) -> None:
    cache = server.start()
    client = make_worker(server.address)
    client.start()
    time.sleep(1.0)
    assert len(cache.asked("attach")) == 1
    assert client.store(tokens(32), BLOCKS, range=RANGE).result(5) == STORED


def test_a_server_that_forgot_the_client_is_told_again(server: FakeServer, make_worker: MakeWorker) -> None:
    cache = server.start(Knobs(refuse={"store": "NOT_REGISTERED"}))
    client = make_worker(server.address)
    client.start()
    assert client.store(tokens(32), BLOCKS, range=RANGE).result(5) == failed("NOT_REGISTERED")
    wait_until(lambda: len(cache.asked("register")) == 2)
    cache.knobs.refuse.clear()
    wait_until(lambda: client.store(tokens(32), BLOCKS, range=RANGE).result(5) == STORED)


def test_a_registration_that_is_refused_is_told_and_tried_again(server: FakeServer, make_worker: MakeWorker) -> None:
    cache = server.start(Knobs(refuse={"register": "LAYOUT"}))
    client = make_worker(server.address)
    assert not client.start(wait_s=0.3)
    wait_until(lambda: client.problem is not None)
    assert client.problem is not None
    assert client.problem.reason is Reason.LAYOUT
    assert client.store(tokens(32), BLOCKS, range=RANGE).result(10)[0].reason == "LAYOUT"
    wait_until(lambda: not cache.streams)
    cache.knobs.refuse.clear()
    wait_until(lambda: client.attached)
    assert client.problem is None


def test_close_revokes_waits_and_unregisters(server: FakeServer, make_worker: MakeWorker) -> None:
    cache = server.start(Knobs(hold=True))
    client = make_worker(server.address)
    client.start()
    store = client.store(tokens(32), BLOCKS, range=RANGE)
    wait_until(lambda: cache.running)
    assert not client.close(timeout_s=1.0), "the server still copies"
    wait_until(lambda: cache.asked("fence") == [(store.call_id,)])
    assert not store.done()
    with pytest.raises(RuntimeError, match="closed"):
        client.store(tokens(32), BLOCKS)
    server.run(cache.release)

    again = make_worker(server.address)
    cache.knobs.hold = False
    assert again.start()
    assert again.store(tokens(32), BLOCKS, range=RANGE).result(5) == STORED
    assert again.close()
    assert cache.asked("unregister") == [again.engine_id]
    assert again.close()
