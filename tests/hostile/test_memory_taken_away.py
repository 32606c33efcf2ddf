# SPDX-License-Identifier: Apache-2.0
"""Engines that take their shared memory away in the middle of a copy, or never had what they said.

Only the call that needs it fails, and says why; other engines' traffic is right all the time; nothing stays open.
"""

from __future__ import annotations

import random

import pytest

from tests.hostile.engine import PER_CHUNK
from tests.hostile.process import EngineProcess
from tests.hostile.stand import Stand, stand, until
from tests.kvdata import Kv

ROUNDS = 50
SLACK = 40
"""Times as many tries at most for as many copies that were met in the middle: how many are is the machine's matter."""
CHUNKS = 8
BLOCKS = list(range(0, 2 * CHUNKS * PER_CHUNK, 2))
"""Not neighbours, which would be moved as one run."""
RUNS_A_CHUNK = 24
"""3 layers, 2 planes, 4 blocks."""
DONE = {"STORE": "STORED", "RETRIEVE": "LOADED"}
LARGE = Kv(layers=8, planes=2, heads=8, head_dim=16)
"""64 KiB a chunk in 64 runs."""
MANY = 128
MANY_BLOCKS = list(range(0, 2 * MANY * PER_CHUNK, 2))
NEIGHBOUR = 1_000_000
"""Prompts from here on are the neighbour's."""
NEIGHBOUR_ROUNDS = 50
"""At the least."""


def failed_at(runs: int, done: str) -> list[tuple[str, str]]:
    """Outcomes of a copy whose memory goes after so many runs."""
    whole, part = divmod(runs, RUNS_A_CHUNK)
    broken = ("TORN" if part else "FAILED", "MEMORY_TRUNCATED")
    return [(done, "")] * whole + [broken] + [("FAILED", "AFTER_FAILURE")] * (CHUNKS - whole - 1)


def begin(engine: EngineProcess, direction: str, prompt: int) -> None:
    if direction == "STORE":
        engine.do("store", "copy", prompt, CHUNKS, BLOCKS)
    else:
        engine.do("fill")
        engine.do("retrieve", "copy", prompt, CHUNKS, BLOCKS)


class Neighbour:
    """Another engine that works all the time, while somebody misbehaves; then everything is as it was before."""

    def __init__(self, server: Stand) -> None:
        self.server = server
        self.engine = server.engine()
        self.witness = server.engine()
        self.counts = server.counts()
        self.files, self.maps = len(server.files()), server.mappings()

    def __enter__(self) -> Neighbour:
        self.engine.tell("traffic", NEIGHBOUR, NEIGHBOUR_ROUNDS)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            return
        rounds, longest_s = self.engine.stop_traffic()
        print(f"neighbour: {rounds} rounds, the longest {longest_s:.3f} s")
        assert rounds >= NEIGHBOUR_ROUNDS and longest_s < 4
        server = self.server
        until(lambda: server.counts() == self.counts, what="the end of all others")
        until(lambda: server.memory_of() == server.memory_of(self.engine, self.witness), what="the end of all mappings")
        until(lambda: len(server.files()) <= self.files, what="the end of all descriptors")
        assert server.mappings() <= self.maps + 32, "what ended threads leave is all that may have come"
        server.assert_well()


@pytest.mark.parametrize("direction", ["STORE", "RETRIEVE"])
def test_truncated_in_the_middle_of_a_copy(direction: str) -> None:
    chance = random.Random(3)
    with stand(gated=True) as server, Neighbour(server) as beside:
        engine = server.engine()
        for prompt in range(ROUNDS):
            runs = chance.randrange(CHUNKS * RUNS_A_CHUNK)
            if direction == "RETRIEVE":
                beside.witness.do("store", "all", prompt, CHUNKS, BLOCKS)
                assert beside.witness.do("ended", "all") == [("STORED", "")] * CHUNKS
            hold = server.hold(engine, direction, runs)
            begin(engine, direction, prompt)
            hold.wait_reached()
            assert server.calls_of(engine) == 1
            engine.do("truncate", chance.randrange(2) * chance.randrange(200_000))
            hold.release()
            assert engine.do("ended", "copy") == failed_at(runs, DONE[direction])
            left = runs // RUNS_A_CHUNK if direction == "STORE" else CHUNKS
            assert beside.witness.do("load", prompt, CHUNKS, BLOCKS) == left
            engine.do("restore")
            assert engine.do("load", prompt, CHUNKS, BLOCKS) == left
        assert server.memory_of(engine) == 2
        engine.kill()


def test_replaced_in_the_middle_of_a_copy() -> None:
    """Removed and made anew under its name: the copy ends in the memory that was registered, the new one is nobody's
    yet. Truncated before that, the copy fails."""
    chance = random.Random(4)
    with stand(gated=True) as server, Neighbour(server) as beside:
        for prompt in range(ROUNDS):
            direction, runs = ("STORE", "RETRIEVE")[prompt % 2], chance.randrange(CHUNKS * RUNS_A_CHUNK)
            truncated = chance.random() < 0.5
            if direction == "RETRIEVE":
                beside.witness.do("store", "all", prompt, CHUNKS, BLOCKS)
                assert beside.witness.do("ended", "all") == [("STORED", "")] * CHUNKS
            engine = server.engine()
            hold = server.hold(engine, direction, runs)
            begin(engine, direction, prompt)
            hold.wait_reached()
            if truncated:
                engine.do("truncate", 0)
            engine.do("replace")
            hold.release()
            ended = engine.do("ended", "copy")
            if truncated:
                assert ended == failed_at(runs, DONE[direction])
            else:
                assert ended == [(DONE[direction], "")] * CHUNKS
                assert engine.do("wrong", prompt, BLOCKS) == []
            assert engine.do("second_untouched")
            whole = direction == "RETRIEVE" or not truncated
            assert beside.witness.do("load", prompt, CHUNKS, BLOCKS) == (CHUNKS if whole else runs // RUNS_A_CHUNK)
            engine.do("leave")
            until(lambda engine=engine: not server.memory_of(engine), what="the end of its mapping")
            engine.kill()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("direction", ["STORE", "RETRIEVE"])
def test_truncated_under_all_threads(direction: str) -> None:
    """The same while the server copies as it does in service, 8 MiB with nothing to hold it; only rounds whose copy was
    met in the middle count."""
    chance, met, tries = random.Random(5), 0, 0
    with stand("--slice-size", "1MiB", "--copy-threads", "3") as server, Neighbour(server):
        facts = {"model": "large", "kv": LARGE, "tinted": True, "num_blocks": 2 * MANY * PER_CHUNK}
        engine, witness = server.engine(**facts), server.engine(**facts)
        while met < ROUNDS:
            prompt = tries = tries + 1
            assert tries < ROUNDS * SLACK, f"only {met} copies were met in the middle"
            size = chance.choice((0, 4_000_000))
            if direction == "STORE":
                engine.do("store", "copy", prompt, MANY, MANY_BLOCKS)
                engine.do("truncate_when_storing", prompt, MANY, size)
            else:
                witness.do("store", "all", prompt, MANY, MANY_BLOCKS)
                assert witness.do("ended", "all") == [("STORED", "")] * MANY
                engine.do("fill")
                engine.do("retrieve", "copy", prompt, MANY, MANY_BLOCKS)
                engine.do("truncate_when_loading", chance.choice(MANY_BLOCKS[: MANY // 2]), size)
            ended = engine.do("ended", "copy")
            whole = ended.count((DONE[direction], ""))
            assert ended[whole : whole + 1] in ([], [("TORN", "MEMORY_TRUNCATED")], [("FAILED", "MEMORY_TRUNCATED")])
            assert ended[whole + 1 :] == [("FAILED", "AFTER_FAILURE")] * (MANY - whole - 1)
            met += 0 < whole < MANY
            assert witness.do("load", prompt, MANY, MANY_BLOCKS) == (whole if direction == "STORE" else MANY)
            engine.do("restore")
        print(f"{met} of {tries} copies were met in the middle")
        engine.kill()
        witness.kill()
