# SPDX-License-Identifier: Apache-2.0
"""A named arena keeps models whose chunks are in parts: whole hits come back, or shorter ones, and no wrong byte."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc import api
from kvgrpc.client import Client
from tests.e2e.arena_server import ArenaServer
from tests.e2e.hybrid_server import ALL, elsewhere
from tests.e2e.hybrids import CHUNK, CHUNKS, FLAGS, hybrid_engine
from tests.e2e.test_restart import end
from tests.pooled import coded

STEP = 4096
"""Runs begin at multiples of it."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ArenaServer]:
    with contextlib.closing(ArenaServer(tmp_path)) as one:
        yield one


@pytest.mark.parametrize("how", ["term", "kill"])
def test_the_next_server_has_them(server: ArenaServer, how: str) -> None:
    """In another process and other blocks, hits of every length; what was cleared before stays away."""
    server.start(*FLAGS)
    with hybrid_engine(server.address, 1) as one, Client(server.address, "operator") as operator:
        one.store(9)
        operator.clear(api.ClearTarget(all=True))
        for prompt in range(3):
            assert one.store(prompt) == ["STORED"] * CHUNKS
        one.store(3, CHUNKS, (0, CHUNKS * CHUNK, 0, 0, CHUNKS * CHUNK))
        server.wait_recorded(3 * ALL + 3 * CHUNKS)
        end(server, how)
    server.start(*FLAGS)
    status = server.wait_checked()
    assert (status.restored_objects, status.refused) == (3 * ALL + 3 * CHUNKS, "")
    assert elsewhere(server, 2, 0, 1, 2, 3, 9) == [CHUNKS, CHUNKS, CHUNKS, 0, 0], "3 has no windows"
    with hybrid_engine(server.address, 3) as one:
        assert [one.load(1, chunks) for chunks in range(1, CHUNKS + 1)] == list(range(1, CHUNKS + 1))
        assert one.store(1) == ["RESIDENT"] * CHUNKS


def test_bits_that_flip_meanwhile_make_no_false_hit(server: ArenaServer) -> None:
    """One bit of the last window, then one of the state before it: what is there without it is the hit."""
    server.start(*FLAGS)
    with hybrid_engine(server.address, 4) as one:
        one.store(1)
        server.wait_recorded(ALL)
        assert server.terminate() == 0
    hits: list[int] = []
    for run in (coded(1, 0, CHUNKS * 4 - 1, STEP, 1), coded(2, 0, (CHUNKS - 1) * 2 - 1, STEP, 1)):
        raw = server.arena.read_bytes()
        (at,) = (at for at in range(0, len(raw), STEP) if raw[at : at + STEP] == run.tobytes())
        with server.arena.open("r+b") as file:
            file.seek(at)
            file.write(bytes([raw[at] ^ 1]))
        server.start(*FLAGS)
        server.wait_checked()
        hits.append(elsewhere(server, 5 + len(hits), 1)[0])
        assert server.terminate() == 0
    assert hits == [CHUNKS - 1, CHUNKS - 2]


def test_after_a_kill_under_eviction_every_hit_is_right(server: ArenaServer) -> None:
    """Records outlive the objects that lay there: 12 prompts go through an arena of 3."""
    server.start(*FLAGS, l1_size="16MiB")
    with hybrid_engine(server.address, 8) as one:
        for prompt in range(12):
            one.store(prompt)
            if prompt % 3 == 0:
                server.wait_recorded(1)
        server.kill()
    server.start(*FLAGS, l1_size="16MiB")
    server.wait_checked()
    hits = elsewhere(server, 9, *range(12))
    assert sum(hits) <= 3 * CHUNKS
    with hybrid_engine(server.address, 10) as one:
        one.store(11)
        assert one.load(11) == CHUNKS
