# SPDX-License-Identifier: Apache-2.0
"""What every lower tier must do for models whose chunks are in parts: with server processes, and engines in others."""

from __future__ import annotations

import json
import random
import subprocess
import sys

from kvgrpc import api
from kvgrpc.client import Client
from tests.e2e.disk_server import DiskServer
from tests.e2e.hybrids import CHUNK, CHUNKS, FLAGS, OBJECTS, hybrid_engine

ALL = CHUNKS * OBJECTS


def elsewhere(server: DiskServer, seed: int, *prompts: int) -> list[int]:
    """Hit chunks of another engine, in another process and other blocks."""
    command = [sys.executable, "-m", "tests.e2e.hybrids", server.address, str(seed), *map(str, prompts)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=120).stdout)


def hybrids_come_back_after_a_kill(server: DiskServer) -> None:
    """A fresh arena: what a hit needs is read, and no more; all of it is right in another process' blocks."""
    server.start(*FLAGS)
    with hybrid_engine(server.address, 1) as one:
        for prompt in range(3):
            assert one.store(prompt) == ["STORED"] * CHUNKS
        server.wait_written(3 * ALL, 60)
        server.kill()
    server.start(*FLAGS)
    assert elsewhere(server, 2, 0, 1, 2) == [CHUNKS] * 3
    needed = CHUNKS + 2 + 1 + 1  # full, windows, state, local
    assert server.counter("prefetched_objects") == 3 * needed
    assert server.counter("written_objects") == 0
    with hybrid_engine(server.address, 3) as one:
        assert one.load(1, CHUNKS - 1) == CHUNKS - 1, "a shorter hit has windows of its own"
        assert one.load(1) == CHUNKS


def what_the_engine_had_not_is_not_below(server: DiskServer) -> None:
    """The last windows and the last state only: one hit, at the prompt's end."""
    server.start(*FLAGS)
    end = CHUNKS * CHUNK
    with hybrid_engine(server.address, 4) as one:
        lack = (0, end - 2 * CHUNK, end - 32, end - 32, end - 2 * CHUNK)
        assert one.store(5, CHUNKS, lack) == ["STORED"] * CHUNKS
        server.wait_written(CHUNKS + 2 + 1 + 1, 60)
        server.wait_quiet()
        server.kill()
    server.start(*FLAGS)
    with hybrid_engine(server.address, 5) as one:
        assert one.load(5, CHUNKS - 1) == 0
        assert one.load(5) == CHUNKS


def clear_holds_for_hybrids(server: DiskServer) -> None:
    """Field report 3: nothing from before is found after a kill, of any part."""
    server.start(*FLAGS)
    with hybrid_engine(server.address, 6) as one, Client(server.address, "operator") as operator:
        one.store(1)
        server.wait_written(ALL, 60)
        operator.clear(api.ClearTarget(all=True))
        assert one.load(1) == 0
        one.store(2)
        server.wait_written(2 * ALL, 60)
        server.kill()
    server.start(*FLAGS)
    assert elsewhere(server, 7, 1, 2) == [0, CHUNKS]


def under_constant_eviction_every_hybrid_hit_is_right(server: DiskServer) -> None:
    """L1 holds 3 of 10 prompts; whatever comes back is its own prompt's, in every group, and all of it does."""
    server.start(*FLAGS, l1_size="16MiB")
    chance, hits = random.Random(21), 0
    with hybrid_engine(server.address, 8) as one:
        for prompt in range(10):
            one.store(prompt)
            server.wait_quiet()
        for _ in range(25):
            hits += one.load(chance.randrange(10), chance.randint(1, CHUNKS))
    assert hits > 25, "most come back"
    assert server.counter("evicted_chunks") > 0
