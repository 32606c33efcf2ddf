# SPDX-License-Identifier: Apache-2.0
"""A server process whose only lower tier is a remote one, and what every such tier must do for it."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import psutil

from kvgrpc import api
from kvgrpc.client import Client
from tests.e2e.disk_server import CHUNKS, TOKENS, DiskServer, engine
from tests.e2e.harness import tokens_of
from tests.served import wait_until
from tests.tiers.stores import Store


def shared_folder(folder: Path) -> str:
    """The URL of an object store in a folder, which the server never makes."""
    folder.mkdir(exist_ok=True)
    return folder.as_uri()


class RemoteServer(DiskServer):
    """Without a disk. The prefetch wait is as long as there, and the tier's deadline is short."""

    def __init__(self, folder: Path, *flags: str, name: str = "s") -> None:
        super().__init__(folder, name)
        self.flags = ["--page-size", "64KiB", "--prefetch-wait-ms", "10000", *flags]


def it_comes_back_after_a_kill(server: RemoteServer) -> None:
    """A fresh arena: right bytes, into other blocks, all from below."""
    server.start()
    with engine(server.address) as one:
        for prompt in range(6):
            assert one.store(prompt) == ["STORED"] * CHUNKS
        server.wait_written(6 * CHUNKS, 60)
        server.kill()
        server.start()
        one.wait_back()
        assert [one.load(prompt) for prompt in range(6)] == [CHUNKS] * 6
        assert server.tier().counters.get("writes", 0) == 0
        assert server.counter("prefetched_objects") == 6 * CHUNKS
        assert one.store(1) == ["RESIDENT"] * CHUNKS


def clear_holds_after_a_kill(server: RemoteServer) -> None:
    """Field report 3: nothing from before is found, whatever the server remembers; what was stored after it is."""
    server.start()
    with engine(server.address) as one, Client(server.address, "operator") as operator:
        one.store(1)
        server.wait_written(CHUNKS, 60)
        operator.bump_generation(model="model")
        assert one.load(1) == 0
        one.store(2)
        server.wait_written(2 * CHUNKS, 60)
        server.kill()
        server.start()
        one.wait_back()
        assert (one.load(1), one.load(2)) == (0, CHUNKS)
        operator.clear(api.ClearTarget(all=True))
        server.kill()
        server.start()
        one.wait_back()
        assert (one.load(1), one.load(2)) == (0, 0)


def stores_and_lookups_go_on_without_it(server: RemoteServer, store: Store) -> None:
    """Field reports 13 and 20: the store hangs, then goes on; it is in use again within 10 s, by itself."""
    server.start()
    with engine(server.address) as one:
        one.store(1)
        server.wait_written(CHUNKS, 60)
        store.signal(signal.SIGSTOP)
        try:
            for prompt in range(2, 10):
                assert one.store(prompt) == ["STORED"] * CHUNKS
                began = time.monotonic()
                assert one.load(prompt) == CHUNKS
                assert time.monotonic() - began < 6, "what is in L1 waits for nobody, and a read for 10 s"
            wait_until(lambda: server.counter("failed_writes") > 0, 20)
        finally:
            store.signal(signal.SIGCONT)
        _used_again(server, one, CHUNKS)


def it_may_be_absent_at_the_start(server: RemoteServer, start_store: object) -> None:
    """Field report 20: the server serves within 5 s, and uses the store within 10 s of its start."""
    assert callable(start_store)
    began = time.monotonic()
    server.start()
    with engine(server.address) as one:
        assert one.store(1) == ["STORED"] * CHUNKS
        assert one.load(1) == CHUNKS
        assert time.monotonic() - began < 25, "on a busy machine"
        start_store()
        _used_again(server, one, CHUNKS)


def sigterm_writes_what_waits(server: RemoteServer) -> None:
    """Field reports 51 and 63: what was acknowledged is there after an orderly stop, also of one that still reads."""
    server.start("--flush-ms", "30000")
    with engine(server.address) as one:
        for prompt in range(4):
            one.store(prompt)
        assert server.terminate() == 0
        server.start("--flush-ms", "30000")
        one.wait_back()
        assert one.load(0) == CHUNKS
        reading = one.scheduler.lookup("reads on", tokens_of(1, TOKENS), timeout_s=0.001)
        assert server.terminate() == 0, reading
        server.start()
        one.wait_back()
        assert [one.load(prompt) for prompt in range(4)] == [CHUNKS] * 4


def under_constant_eviction_every_hit_is_right(server: RemoteServer) -> None:
    """Field reports 9 and 50: L1 holds 4 of 12 prompts; whatever comes back is its own prompt's."""
    server.start(l1_size="4MiB")
    chance, hits = random.Random(50), 0
    with engine(server.address) as one:
        for prompt in range(12):
            assert one.store(prompt) == ["STORED"] * CHUNKS
            server.wait_quiet()
        for round_ in range(40):
            hits += one.load(chance.randrange(12))
            if round_ % 8 == 0:
                one.store(chance.randrange(12))
        assert hits >= 40 * CHUNKS // 2, "most of it is below"
        assert server.tier().counters["reads"] > 0
        wait_until(lambda: server.status().arena.settling_bytes == 0, 30)


def memory_stays_bounded(server: RemoteServer) -> None:
    """Field report 37: twenty times L1 goes through the tier, and memory beside L1 stays under 400 MiB."""
    server.start(l1_size="4MiB")
    with engine(server.address) as one:
        for prompt in range(80):
            assert one.store(prompt) == ["STORED"] * CHUNKS
            if prompt % 8 == 7:
                server.wait_quiet()
        assert sum(one.load(prompt) for prompt in range(0, 80, 8)) > 0
        assert server.process is not None
        assert psutil.Process(server.process.pid).memory_info().rss <= (4 + 400) << 20


def aborted_lookups_give_everything_back(server: RemoteServer, store: Store) -> None:
    """Field report 8: reads that nobody waits for any more hold neither room nor budget."""
    server.start()
    with engine(server.address) as one:
        for prompt in range(4):
            one.store(prompt)
        server.wait_written(4 * CHUNKS, 60)
        server.kill()
        server.start()
        one.wait_back()
        store.signal(signal.SIGSTOP)
        try:
            for number in range(40):
                one.scheduler.lookup(f"given up {number}", tokens_of(number % 4, TOKENS), timeout_s=0.02)
                one.scheduler.discard(f"given up {number}")
        finally:
            store.signal(signal.SIGCONT)

        def at_rest() -> bool:
            status = server.status()
            return not (status.jobs or status.arena.settling_bytes or status.tiers[0].reads_in_flight)

        wait_until(at_rest, 30)
        end = time.monotonic() + 20
        while one.load(1) < CHUNKS:
            assert time.monotonic() < end, "the tier is not used again"


def _used_again(server: RemoteServer, one: object, objects: int) -> None:
    back, written, prompt = time.monotonic(), server.counter("written_objects"), 100
    while server.counter("written_objects") < written + objects:
        assert time.monotonic() - back < 20
        prompt += 1
        assert one.store(prompt) == ["STORED"] * CHUNKS  # type: ignore[attr-defined]
        time.sleep(0.2)
    wait_until(lambda: server.status().arena.settling_bytes == 0, 30)
