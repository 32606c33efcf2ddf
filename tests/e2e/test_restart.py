# SPDX-License-Identifier: Apache-2.0
"""A named arena outlives its server: ended in order, killed, damaged, replaced. Whatever comes back is right."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvgrpc import api
from kvgrpc.client import Client
from kvgrpc.core.types import MIB
from tests.e2e.arena_server import PAGE, ArenaServer
from tests.e2e.disk_server import CHUNKS, OBJECT_BYTES, TOKENS, DiskEngine, engine
from tests.e2e.harness import tokens_of
from tests.served import wait_until
from tests.tiers.stores import keys, valkey_program

KILLS = int(os.environ.get("KVGRPC_TEST_KILLS", "6"))
"""`make kills` makes it 30."""
PROMPTS = range(8)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ArenaServer]:
    with contextlib.closing(ArenaServer(tmp_path)) as one:
        yield one


def fill(server: ArenaServer, one: DiskEngine) -> None:
    for prompt in PROMPTS:
        assert one.store(prompt) == ["STORED"] * CHUNKS


def loads(one: DiskEngine) -> list[int]:
    return [one.load(prompt) for prompt in PROMPTS]


ALL = [CHUNKS] * len(PROMPTS)
NONE = [0] * len(PROMPTS)


def test_rolling_upgrade(tmp_path: Path) -> None:
    """A client keeps looking up while one server ends and the next one starts: the same prefix hits again within two
    seconds of its session (in one of three rounds: other work on the machine may spoil some), and nothing is read from
    below."""
    with contextlib.closing(ArenaServer(tmp_path, disk=True)) as server:
        server.start()
        with engine(server.address) as one:
            fill(server, one)
            over, hits, back_s = threading.Event(), list[tuple[float, int]](), list[float]()

            def look() -> None:
                number = 0
                while not over.is_set():
                    number += 1
                    name = f"look-{number}"
                    found = one.scheduler.lookup(name, tokens_of(3, TOKENS), timeout_s=0.5)
                    hits.append((time.monotonic(), found.hit_tokens))
                    one.scheduler.discard(name)
                    time.sleep(0.01)

            looking = threading.Thread(target=look)
            looking.start()
            try:
                while not back_s or (back_s[-1] >= 2 and len(back_s) < 3):
                    wait_until(lambda: hits and hits[-1][1] > 0, 30)
                    assert server.terminate() == 0
                    wait_until(lambda: hits[-1][1] == 0, 30)
                    back = len(hits)
                    server.start()
                    one.wait_back()
                    began = time.monotonic()
                    wait_until(lambda: hits[-1][1] > 0, 30)
                    back_s.append(next(at for at, tokens in hits[back:] if tokens) - began)
            finally:
                over.set()
                looking.join()
            assert back_s[-1] < 2, back_s
            assert loads(one) == ALL
            assert server.counter("prefetched_objects") == 0
            assert server.tier().counters.get("reads", 0) == 0
            status = server.wait_checked()
            assert (status.found_objects, status.restored_objects, status.refused) == (64, 64, "")
            assert one.store(3) == ["RESIDENT"] * CHUNKS


def test_again_and_again(server: ArenaServer) -> None:
    """What a server took over it leaves to the next, in the old order; what is new goes in between."""
    server.start()
    with engine(server.address) as one:
        for round_ in range(3):
            assert one.store(round_) == ["STORED"] * CHUNKS
            assert server.terminate() == 0
            server.start()
            one.wait_back()
            assert server.wait_checked().restored_objects == (round_ + 1) * CHUNKS
            assert [one.load(prompt) for prompt in range(round_ + 1)] == [CHUNKS] * (round_ + 1)


def test_the_oldest_still_goes_first(server: ArenaServer) -> None:
    room = 64 * MIB // OBJECT_BYTES // CHUNKS
    server.start()
    with engine(server.address) as one:
        for prompt in range(room):
            one.store(prompt)
        assert one.load(0) == CHUNKS
        assert server.terminate() == 0
        server.start()
        one.wait_back()
        server.wait_checked()
        assert one.store(1000) == ["STORED"] * CHUNKS
        assert one.load(0) == CHUNKS, "used last"
        assert one.load(1) < CHUNKS, "used least recently"


@pytest.mark.timeout(60 + 40 * KILLS)
def test_kills_in_the_middle_of_stores(server: ArenaServer) -> None:
    """Whatever comes back is right, what had a record does, and L1 turns over meanwhile."""
    server.start(l1_size="16MiB")
    hits, stored = 0, 0
    with engine(server.address) as one:
        for round_ in range(KILLS):
            stored += 1
            one.store(stored)
            server.wait_recorded(1)
            kept = stored
            killer = threading.Timer(0.05 + 0.03 * (round_ % 5), server.kill)
            killer.start()
            while killer.is_alive():
                stored += 1
                one.store(stored)
                if stored % 4 == 0:  # or a quick machine stores so much meanwhile that it is evicted
                    one.scheduler.lookup(f"kept-{stored}", tokens_of(kept, TOKENS), timeout_s=1)
                    one.scheduler.discard(f"kept-{stored}")
            killer.join()
            server.start(l1_size="16MiB")
            one.wait_back()
            status = server.wait_checked()
            assert not status.refused, status
            assert status.restored_objects >= CHUNKS
            hits += one.load(kept)
            for prompt in range(max(1, kept - 12), stored + 1):
                one.load(prompt)  # which compares every byte
    assert hits >= KILLS * CHUNKS // 2


def test_overwritten_after_their_records(server: ArenaServer) -> None:
    """Many times what L1 holds: of each place there are several records, and only the last can hold."""
    server.start(l1_size="4MiB")
    with engine(server.address) as one:
        for prompt in range(40):
            one.store(prompt)
            if prompt % 3 == 0:
                server.wait_recorded(1)
        server.kill()
        server.start(l1_size="4MiB")
        one.wait_back()
        status = server.wait_checked()
        assert 0 < status.restored_objects <= 4 * MIB // OBJECT_BYTES
        found = [one.load(prompt) for prompt in range(40)]
        assert sum(found) <= 4 * MIB // OBJECT_BYTES


def end(server: ArenaServer, how: str) -> None:
    if how == "kill":
        server.wait_recorded(1)
        server.kill()
    else:
        assert server.terminate() == 0


@pytest.mark.parametrize("how", ["term", "kill"])
def test_what_was_cleared_never_comes_back(server: ArenaServer, how: str) -> None:
    server.start()
    with engine(server.address) as one, Client(server.address, "operator") as operator:
        for round_, act in enumerate((
            lambda: operator.clear(api.ClearTarget(all=True)),
            lambda: operator.bump_generation(model="model"),
            lambda: operator.clear(api.ClearTarget(cache_salt="")),
        )):  # fmt: skip
            assert one.store(1) == ["STORED"] * CHUNKS, round_
            server.wait_recorded(CHUNKS)
            act()
            assert one.store(2) == ["STORED"] * CHUNKS
            server.wait_recorded(2 * CHUNKS)
            end(server, how)
            server.start()
            one.wait_back()
            server.wait_checked()
            assert one.load(1) == 0, "what was cleared came back"
            assert one.load(2) == CHUNKS, "what was stored after it is kept"
            act()


@pytest.mark.parametrize("how", ["term", "kill"])
def test_flipped_bytes_are_not_served(server: ArenaServer, how: str) -> None:
    """One bit in each of five objects: those are dropped, and nothing else."""
    server.start()
    with engine(server.address) as one:
        fill(server, one)
        server.wait_recorded(64)
        end(server, how)
        with server.arena.open("r+b") as file:
            for number in (0, 9, 20, 33, 63):
                at = number * OBJECT_BYTES + number * 2000
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1 << number % 8]))
        server.start()
        one.wait_back()
        status = server.wait_checked()
        assert (status.found_objects, status.restored_objects, status.dropped_objects) == (64, 59, 5)
        found = loads(one)
        assert found.count(CHUNKS) == 3, found
        for prompt in PROMPTS:
            assert set(one.store(prompt)) <= {"STORED", "RESIDENT"}
        assert loads(one) == ALL


def cut_arena(server: ArenaServer) -> None:
    os.truncate(server.arena, 40 * MIB + 5)


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)


def other_file(server: ArenaServer) -> None:
    server.arena.write_bytes(b"something else" * 100_000)


DAMAGE: dict[str, tuple[Callable[[ArenaServer], object], str]] = {
    "the arena is cut": (cut_arena, "67108864 are asked for"),
    "the arena is another file": (other_file, "67108864 are asked for"),
    "the arena's mark is flipped": (lambda s: flip(s.arena, 64 * MIB + 20), "mark is damaged"),
    "the index is cut": (lambda s: os.truncate(s.index, s.index.stat().st_size - 100), "cut short"),
    "the index is cut between frames": (lambda s: os.truncate(s.index, s.index.stat().st_size - 32), "cut short"),
    "the index is flipped": (lambda s: flip(s.index, 3000), "index is damaged"),
    "the index is flipped at its begin": (lambda s: flip(s.index, 40), "index"),
    "the index is empty": (lambda s: os.truncate(s.index, 0), "index is damaged"),
    "the index has gone": (lambda s: s.index.unlink(), "index cannot be read"),
    "the versions are gone": (lambda s: s.versions.unlink(), "versions"),
    "the versions are flipped": (lambda s: flip(s.versions, 50), "versions"),
}


@pytest.mark.timeout(600)
def test_damage_is_refused_by_name(server: ArenaServer) -> None:
    """The arena begins empty, the log and the status say why, and from then on all is well."""
    server.start()
    with engine(server.address) as one:
        fill(server, one)
        for damage, sentence in DAMAGE.values():
            assert server.terminate() == 0
            damage(server)
            begins_empty(server, one, sentence)
        assert server.terminate() == 0
        server.start()
        one.wait_back()
        assert server.wait_checked().refused == ""
        assert loads(one) == ALL


def begins_empty(server: ArenaServer, one: DiskEngine, sentence: str, *flags: str, l1_size: str = "64MiB") -> None:
    server.start(*flags, l1_size=l1_size)
    one.wait_back()
    status = server.wait_checked()
    assert sentence in status.refused
    assert "the arena begins empty" in server.log and sentence in server.log
    assert status.restored_objects == 0
    assert loads(one) == NONE
    fill(server, one)
    assert loads(one) == ALL


def test_another_size_other_pages_and_fresh(server: ArenaServer) -> None:
    server.start()
    with engine(server.address) as one:
        fill(server, one)
        assert server.terminate() == 0
        begins_empty(server, one, "has 67108864 bytes, and 50331648 are asked for", l1_size="48MiB")
        assert server.terminate() == 0
        server.flags[-1] = str(2 * PAGE)
        begins_empty(server, one, "another chunk size, page size", l1_size="48MiB")
        assert server.terminate() == 0
        begins_empty(server, one, "--fresh", "--fresh", l1_size="48MiB")


def test_an_older_index_beside_a_newer_arena(server: ArenaServer, tmp_path: Path) -> None:
    """Of the same arena, and of another one."""
    server.start()
    with engine(server.address) as one:
        fill(server, one)
        assert server.terminate() == 0
        old = shutil.copy(server.index, tmp_path / "old")
        server.start()
        one.wait_back()
        for prompt in range(100, 160):
            one.store(prompt)
        assert server.terminate() == 0
        shutil.copy(old, server.index)
        begins_empty(server, one, "another run")
        assert server.terminate() == 0
        server.start("--fresh")
        one.wait_back()
        assert server.terminate() == 0
        shutil.copy(old, server.index)
        begins_empty(server, one, "another arena")


def test_without_a_size_the_arena_keeps_its_own(server: ArenaServer) -> None:
    """Half of what is available is less once the arena has its part."""
    server.start(l1_size="64MiB")
    with engine(server.address) as one:
        fill(server, one)
        assert server.terminate() == 0
        server.start(l1_size="")
        one.wait_back()
        assert server.status().arena.total_bytes == 64 * MIB
        assert loads(one) == ALL


def test_a_shared_tier_that_is_away_at_the_start_costs_no_arena(server: ArenaServer, tmp_path: Path) -> None:
    """Its versions lie there; a copy lies beside the arena. What was cleared stays so."""
    with keys(tmp_path, valkey_program()) as store:
        server.flags += ["--valkey-url", store.url, "--tier-deadline-ms", "1000"]
        server.start()
        with engine(server.address) as one, Client(server.address, "operator") as operator:
            one.store(1)
            operator.bump_generation(model="model")
            one.store(2)
            assert server.terminate() == 0
            store.kill()
            server.start()
            one.wait_back()
            server.wait_checked()
            assert (one.load(1), one.load(2)) == (0, CHUNKS)
            assert str(server.versions) in server.log
            store.start()
            server.kill()
            server.start()
            one.wait_back()
            assert one.load(1) == 0
