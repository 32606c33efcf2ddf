# SPDX-License-Identifier: Apache-2.0
"""Field report 54: one client, one thread; no two clients share one while another is free."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvgrpc.runtime import affinity
from kvgrpc.runtime.affinity import AffinityExecutor


def test_eight_clients_on_eight_threads_each_in_order() -> None:
    executor = AffinityExecutor(8)
    ran: dict[str, list[tuple[int, str]]] = {f"client-{n}": [] for n in range(8)}
    for client in ran:
        executor.bind(client)
    futures = [
        executor.submit(client, lambda c=client, n=n: ran[c].append((n, threading.current_thread().name)))
        for n in range(50)
        for client in ran
    ]
    for future in futures:
        future.result(10)
    executor.close()
    threads = {client: {name for _, name in work} for client, work in ran.items()}
    assert all(len(names) == 1 for names in threads.values())
    assert len(set.union(*threads.values())) == 8
    assert all([n for n, _ in work] == list(range(50)) for work in ran.values())


def test_a_slow_client_delays_nobody_else() -> None:
    executor = AffinityExecutor(8)
    gate = threading.Event()
    for n in range(8):
        executor.bind(f"client-{n}")
    slow = executor.submit("client-0", gate.wait, 30)
    for _ in range(20):
        for n in range(1, 8):
            executor.submit(f"client-{n}", int).result(10)
    assert not slow.done()
    assert executor.longest_busy_s() > 0
    gate.set()
    slow.result(10)
    executor.close()


def test_clients_spread_evenly_and_leave_nothing_behind() -> None:
    executor = AffinityExecutor(8)
    for n in range(64):
        executor.bind(f"client-{n}")
    sizes = [len(clients) for _, clients, _ in executor.lanes()]
    assert max(sizes) - min(sizes) <= 1
    for n in range(1000):
        executor.bind(f"passing-{n}")
        executor.release(f"passing-{n}")
    for n in range(64):
        executor.release(f"client-{n}")
    assert [clients for _, clients, _ in executor.lanes()] == [()] * 8
    assert executor.thread_of("client-0") is None
    executor.close()


def test_binding_twice_keeps_the_thread() -> None:
    executor = AffinityExecutor(3)
    first = executor.bind("a")
    executor.bind("b")
    assert executor.bind("a") == first
    assert executor.thread_of("a") == first


def test_work_of_a_client_that_is_not_bound_leaves_no_binding() -> None:
    executor = AffinityExecutor(1)
    assert executor.submit("nobody", int).result(10) == 0
    assert executor.thread_of("nobody") is None
    executor.close()
    assert executor.lanes() == [(0, (), 0)]


def test_zero_threads_make_no_sense() -> None:
    with pytest.raises(ValueError, match="max_workers"):
        AffinityExecutor(0)


def test_queue_and_busy_time_return_to_nothing() -> None:
    executor = AffinityExecutor(1)
    executor.bind("a")
    gate = threading.Event()
    futures = [executor.submit("a", gate.wait, 30) for _ in range(3)]
    assert executor.lanes()[0][2] == 3
    gate.set()
    for future in futures:
        future.result(10)
    executor.close()
    assert executor.lanes()[0][2] == 0
    assert executor.longest_busy_s() == 0


def test_two_threads_that_give_a_lane_its_first_waits_do_so_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop may hand over what one client has launched while the thread itself does so for another."""

    class SlowToMake(ThreadPoolExecutor):
        def __init__(self, *args: Any, **more: Any) -> None:
            time.sleep(0.05)
            super().__init__(*args, **more)

    monkeypatch.setattr(affinity, "ThreadPoolExecutor", SlowToMake)
    executor = AffinityExecutor(1)
    for client in "ab":
        executor.bind(client)
    both, ran = threading.Barrier(2), list[threading.Thread]()

    def wait_for(client: str) -> None:
        both.wait(10)
        executor.submit_wait(client, lambda: ran.append(threading.current_thread()))

    executor.submit("a", wait_for, "a")
    wait_for("b")
    executor.close()
    assert len(ran) == 2 and len(set(ran)) == 1
