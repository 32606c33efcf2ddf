# SPDX-License-Identifier: Apache-2.0
"""SchedulerClient without a server, or with one that is frozen, gone, or says no: misses, soon, until it is back. Field
reports 34, 46, 47."""

from __future__ import annotations

import logging
import signal
import socket
import time
from pathlib import Path

import pytest

from kvgrpc.breaker import BreakerSettings
from kvgrpc.client import LookupResult
from kvgrpc.core.types import S
from tests.client.conftest import MakeScheduler
from tests.client.fakes import FakeServer, Knobs, fake_process, wait_until
from tests.client.memory import tokens
from tests.served import stand_still


def test_no_server_is_a_miss_until_it_appears(server: FakeServer, make_scheduler: MakeScheduler) -> None:
    client = make_scheduler(server.address)
    assert not client.start(wait_s=0.1)
    times: list[float] = []
    for i in range(100):
        start = time.perf_counter()
        assert client.lookup(f"r{i}", tokens(32)).hit_tokens == 0
        assert client.try_lookup(f"t{i}", tokens(32)) is not None
        times.append(time.perf_counter() - start)
    assert sorted(times)[90] < 0.2
    server.start()
    took_s = wait_until(lambda: client.lookup(f"again {time.monotonic()}", tokens(32)).hit_tokens == 32)
    assert took_s < 5


def test_a_frozen_server_costs_three_bounded_waits_and_then_nothing(
    folder: Path, make_scheduler: MakeScheduler
) -> None:
    address = f"unix:{folder}/s"
    with fake_process(address) as process:
        client = make_scheduler(address)
        assert client.start()
        stand_still(process.pid)
        times: list[float] = []
        for i in range(3):
            start = time.perf_counter()
            assert client.lookup(f"r{i}", tokens(32), timeout_s=0.2).hit_tokens == 0
            times.append(time.perf_counter() - start)
        assert 0.15 < min(times) < 1.0 and max(times) < 5.0, times
        # each its own request: one that was asked while the breaker was closed keeps its answer
        wait_until(lambda: client.lookup(f"open? {time.monotonic()}", tokens(32)).reason == "BREAKER_OPEN", 10)
        times = []
        for i in range(100):
            start = time.perf_counter()
            client.lookup(f"s{i}", tokens(32))
            times.append(time.perf_counter() - start)
        # the breaker lets one caller try every second or more; it waits its 200 ms
        assert sorted(times)[90] < 0.001
        time.sleep(1.5)  # so that the delay has doubled and the hang is longer than a lookup may take
        process.send_signal(signal.SIGCONT)
        took_s = wait_until(lambda: client.lookup(f"back {time.monotonic()}", tokens(32)).hit_tokens == 32)
        assert took_s < 5


def test_internal_errors_open_the_breaker_and_a_good_server_closes_it(
    server: FakeServer, make_scheduler: MakeScheduler
) -> None:
    cache = server.start(Knobs(refuse={"lookup": "INTERNAL"}))
    client = make_scheduler(server.address, breaker=BreakerSettings(first_delay_ns=60 * S, longest_delay_ns=60 * S))
    client.start()
    reasons = [client.lookup(f"r{i}", tokens(32), timeout_s=10).reason for i in range(20)]
    assert reasons == ["INTERNAL"] * 3 + ["BREAKER_OPEN"] * 17
    assert len(cache.asked("lookup")) == 3
    server.stop()
    wait_until(lambda: not client.attached)
    server.start()
    assert wait_until(lambda: client.lookup(f"back {time.monotonic()}", tokens(32), timeout_s=10).hit_tokens == 32) < 5


def test_refusals_are_misses_that_leave_the_breaker_closed(server: FakeServer, make_scheduler: MakeScheduler) -> None:
    cache = server.start(Knobs(refuse={"lookup": "TP_SIZE_MISMATCH"}))
    client = make_scheduler(server.address)
    client.start()
    assert [client.lookup(f"r{i}", tokens(32), timeout_s=10).reason for i in range(10)] == ["TP_SIZE_MISMATCH"] * 10
    cache.knobs.refuse.clear()
    assert client.lookup("good", tokens(32), timeout_s=10).hit_tokens == 32


def test_a_server_that_forgot_the_space_is_told_again(server: FakeServer, make_scheduler: MakeScheduler) -> None:
    cache = server.start(Knobs(refuse={"lookup": "SPACE_UNKNOWN"}))
    client = make_scheduler(server.address)
    client.start()
    assert client.lookup("r1", tokens(32), timeout_s=10).reason == "SPACE_UNKNOWN"
    wait_until(lambda: len(cache.asked("handshake")) > 1)
    cache.knobs.refuse.clear()
    wait_until(lambda: client.lookup(f"again {time.monotonic()}", tokens(32)).hit_tokens == 32)


def test_draining_makes_misses_at_once(server: FakeServer, make_scheduler: MakeScheduler) -> None:
    cache = server.start()
    client = make_scheduler(server.address)
    client.start()
    assert client.lookup("r1", tokens(32), timeout_s=10).hit_tokens == 32
    server.drain()
    wait_until(lambda: client.try_lookup("r1", tokens(32)) == LookupResult(reason="SERVER_DRAINING"))
    asked = len(cache.asked("lookup"))
    assert client.lookup("r2", tokens(32), timeout_s=10).hit_tokens == 0
    assert len(cache.asked("lookup")) == asked


def test_hits_of_a_server_that_is_gone_are_not_remembered(server: FakeServer, make_scheduler: MakeScheduler) -> None:
    server.start()
    client = make_scheduler(server.address)
    client.start()
    old = client.lookup("r1", tokens(32), timeout_s=10)
    server.stop()
    cache = server.start(Knobs(half=True))
    wait_until(lambda: client.attached and cache.asked("attach"))
    wait_until(lambda: client.lookup("r1", tokens(64), timeout_s=10).hit_tokens == 32)
    assert client.lookup("r1", tokens(64)).job_id != old.job_id


def test_an_address_that_swallows_everything(make_scheduler: MakeScheduler) -> None:
    """Field report 46: nobody answers, not even with a refusal."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)  # accepted by the kernel, never by anyone
        client = make_scheduler(f"127.0.0.1:{listener.getsockname()[1]}")
        assert not client.start(wait_s=0.1)
        times: list[float] = []
        for i in range(5):
            start = time.perf_counter()
            assert client.lookup(f"r{i}", tokens(32)).hit_tokens == 0
            times.append(time.perf_counter() - start)
        assert sorted(times)[2] < 0.3, times


def test_a_restart_under_constant_lookups(server: FakeServer, make_scheduler: MakeScheduler) -> None:
    """Field report 47, over restarts that are long enough for the back-off to grow."""
    server.start()
    client = make_scheduler(server.address)
    client.start()
    down: list[float] = []
    back: list[float] = []
    while len(back) < 2 or (sorted(back)[1] >= 2 and len(back) < 4):  # the machine may have other work
        server.stop()
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            start = time.perf_counter()
            client.lookup(f"down {start}", tokens(32), timeout_s=0.2)
            down.append(time.perf_counter() - start)
            time.sleep(0.01)
        server.start()
        back.append(wait_until(lambda: client.lookup(f"up {time.monotonic()}", tokens(32)).hit_tokens == 32))
    assert sorted(back)[1] < 2, back
    assert sorted(down)[len(down) * 9 // 10] < 0.4 and max(down) < 5.0, down


def test_who_is_warned_of_a_lost_server_is_told_of_the_next(
    server: FakeServer, make_scheduler: MakeScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvgrpc.client")
    server.start()
    client = make_scheduler(server.address)
    client.start()
    assert caplog.messages == []  # nothing was lost
    server.stop()
    wait_until(lambda: not client.attached)
    server.start()
    wait_until(lambda: caplog.messages[-1].startswith("attached to unix:"))
    assert caplog.messages[0].startswith("lost unix:")
