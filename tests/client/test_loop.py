# SPDX-License-Identifier: Apache-2.0
"""The background thread of a client: what is handed to it, in which order, and at what cost to who hands it over."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from kvgrpc.client.loop import LoopThread

BOUND_S = 30.0


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread("test")
    loop.run(_nothing())
    yield loop
    loop.stop()


async def _nothing() -> None: ...


def test_a_post_does_not_give_the_interpreter_lock_away(loop: LoopThread) -> None:
    """In one of five rounds: who wanted the lock since before still takes it."""
    before = sys.getswitchinterval()
    done_meanwhile: list[int] = []
    while not done_meanwhile or (done_meanwhile[-1] and len(done_meanwhile) < 5):
        done: list[int] = []
        over = threading.Event()
        try:
            sys.setswitchinterval(60)  # nobody takes the lock: it is given, by whoever waits or makes a blocking call
            for number in range(100):
                loop.post(done.append, number)
            done_meanwhile.append(len(done))
            loop.post(over.set)
        finally:
            sys.setswitchinterval(before)
        assert over.wait(BOUND_S)
        assert done == list(range(100))
    assert done_meanwhile[-1] == 0, done_meanwhile


def test_what_is_run_is_run_behind_what_was_posted(loop: LoopThread) -> None:
    done: list[str] = []

    async def look() -> list[str]:
        return list(done)

    for number in range(200):
        loop.post(done.append, f"post {number}")
        assert loop.run(look())[-1] == f"post {number}"


def test_what_was_posted_before_the_end_is_done() -> None:
    for _ in range(50):
        loop = LoopThread("test")
        done: list[int] = []
        for number in range(10):
            loop.post(done.append, number)
        loop.stop()
        assert done == list(range(10))
        with pytest.raises(RuntimeError, match="closed"):
            loop.post(done.append, 10)


def test_its_threads_end_with_it() -> None:
    before = set(threading.enumerate())
    loop = LoopThread("test")
    loop.post(int)
    loop.stop()
    for thread in set(threading.enumerate()) - before:
        thread.join(BOUND_S)
    assert set(threading.enumerate()) <= before
