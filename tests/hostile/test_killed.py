# SPDX-License-Identifier: Apache-2.0
"""Engines that get SIGKILL in the middle of a copy: 50 in a Store, 50 in a Retrieve, of one server."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.hostile.engine import PER_CHUNK
from tests.hostile.gated import Hold
from tests.hostile.process import EngineProcess
from tests.hostile.stand import Stand, stand, until
from tests.served import stand_still

ROUNDS = 50
AT_ONCE = 5
"""Engines that die together."""
CHUNKS = 8
BLOCKS = list(range(0, 2 * CHUNKS * PER_CHUNK, 2))
RUNS_A_CHUNK = 24
STORED = [("STORED", "")] * CHUNKS
KEPT = 1_000_000
"""A prompt that is there all the time."""


class Mortal:
    """An engine that is going to be killed while the server copies for it."""

    def __init__(self, server: Stand, direction: str, prompt: int, runs: int) -> None:
        self.server, self.prompt, self.runs = server, prompt, runs
        self.engine: EngineProcess = server.engine()
        self.hold: Hold = server.hold(self.engine, direction, runs)
        if direction == "STORE":
            self.engine.do("store", "copy", prompt, CHUNKS, BLOCKS)
        else:
            self.engine.do("retrieve", "copy", KEPT, CHUNKS, BLOCKS)
        self.hold.wait_reached()
        assert server.calls_of(self.engine) == 1, "no copy is in flight"
        self._free_s = 0.0

    def kill(self) -> None:
        self.engine.kill()
        self._free_s = time.monotonic()

    def release(self) -> None:
        self.hold.release()
        self._free_s = time.monotonic()

    def gone_s(self) -> float:
        """Seconds from its death, or from the end of the copy that outlived it, until nothing of it is left."""
        server, engine = self.server, self.engine
        until(lambda: not server.memory_of(engine), 5, "the end of its mapping")
        until(lambda: not server.has(engine), 5, "the end of its session")
        return time.monotonic() - self._free_s


def served_right(witness: EngineProcess, mortal: Mortal, went_on: bool = False) -> None:
    """What it had stored before its session ended can be found, whole and right; what it had not cannot."""
    found, stored = witness.do("load", mortal.prompt, CHUNKS, BLOCKS), mortal.runs // RUNS_A_CHUNK
    assert found == stored or (went_on and stored < found <= CHUNKS)


@pytest.mark.parametrize("direction", ["STORE", "RETRIEVE"])
def test_fifty_killed_in_the_middle(direction: str) -> None:
    """Every other one's copy goes on for longer than its session."""
    chance, times = random.Random(9), list[float]()
    with stand(gated=True) as server:
        witness = server.engine()
        assert witness.do("store", "kept", KEPT, CHUNKS, BLOCKS) is None
        assert witness.do("ended", "kept") == STORED
        before, files, maps = server.counts(), len(server.files()), server.mappings()
        for wave in range(ROUNDS // AT_ONCE):
            mortals = [
                Mortal(server, direction, wave * AT_ONCE + number, chance.randrange(CHUNKS * RUNS_A_CHUNK))
                for number in range(AT_ONCE)
            ]
            settling = mortals[wave % 2 :: 2]
            for mortal in mortals:
                mortal.kill()
                if mortal not in settling:
                    mortal.release()
            until(lambda settling=settling: not any(server.has(mortal.engine) for mortal in settling), 5)
            assert server.counts()["settling bytes" if direction == "STORE" else "pinned bytes"] > 0
            assert all(server.memory_of(mortal.engine) == 2 for mortal in settling)
            if direction == "STORE":
                for mortal in settling:
                    served_right(witness, mortal)
            for mortal in settling:
                mortal.release()
            times += [mortal.gone_s() for mortal in mortals]
            until(lambda: server.counts() == before, what="the counts before")
            for mortal in mortals if direction == "STORE" else ():
                served_right(witness, mortal, went_on=mortal not in settling)
            assert witness.do("load", KEPT, CHUNKS, BLOCKS) == CHUNKS
        until(lambda: len(server.files()) <= files, what="the end of all descriptors")
        assert server.mappings() <= maps + 32, "a mapping a round stays"
        server.assert_well()
    times.sort()
    print(f"gone after {times[len(times) // 2]:.3f} s, at the latest {times[-1]:.3f} s")
    assert len(times) == ROUNDS
    assert times[ROUNDS // 2] < 1.0 and times[-1] < 5.0, "a machine that is busy with other things takes longer"


def test_killed_while_the_server_stands_still() -> None:
    """Engines die in the middle of copies, and of calls that the server has not read yet: when it goes on, nothing of
    them is left a second later."""
    with stand(gated=True) as server:
        witness = server.engine()
        witness.do("store", "kept", KEPT, CHUNKS, BLOCKS)
        assert witness.do("ended", "kept") == STORED
        before, times = server.counts(), list[float]()
        for wave in range(5):
            mortals = [Mortal(server, ("STORE", "RETRIEVE")[n % 2], wave * AT_ONCE + n, 30) for n in range(AT_ONCE)]
            stand_still(server.served.process.pid)
            for mortal in mortals:
                mortal.engine.do("store_as_it_is", "unread", 999, CHUNKS, BLOCKS)
                mortal.kill()
            server.served.process.send_signal(signal.SIGCONT)
            for mortal in mortals:
                mortal.release()
            times += [mortal.gone_s() for mortal in mortals]
            until(lambda: server.counts() == before, what="the counts before")
            for mortal in mortals[::2]:
                served_right(witness, mortal, went_on=True)
            witness.do("load", 999, CHUNKS, BLOCKS)
            assert witness.do("load", KEPT, CHUNKS, BLOCKS) == CHUNKS
        server.assert_well()
    times.sort()
    assert times[len(times) // 2] < 1.0 and times[-1] < 5.0, times


def test_killed_while_it_registers_memory_that_has_gone() -> None:
    """The mapping fails when nobody waits for it any more: that is nothing to complain of."""
    with stand("--max-workers", "1", gated=True) as server:
        busy, mortal = server.engine(), server.stranger()
        before, hold = server.counts(), server.hold(busy, "STORE", 10)
        busy.do("store", "held", 1, CHUNKS, BLOCKS)
        hold.wait_reached()
        assert not mortal.do("start", 0.3), "it did not wait for the only thread"
        until(lambda: server.has(mortal), what="its session")
        os.unlink(f"/dev/shm/{mortal.facts.memory}")
        mortal.kill()
        until(lambda: not server.has(mortal), what="the end of its session")
        hold.release()
        assert busy.do("ended", "held") == STORED
        until(lambda: server.counts() == before, what="the end of all work")
        assert busy.do("load", 1, CHUNKS, BLOCKS) == CHUNKS
        server.assert_well()
