# SPDX-License-Identifier: Apache-2.0
"""An engine that stands still (SIGSTOP) for 10 s with a full queue of copies."""

from __future__ import annotations

import signal
import time

from tests.hostile.engine import PER_CHUNK
from tests.hostile.stand import Stand, stand, until
from tests.served import stand_still

STOPPED_S = 10.0
CALLS = 64
"""As many as the engine's client takes at a time."""
NEIGHBOUR = 1_000_000
ROUNDS = 50
"""Of the neighbour, at the least, while the engine stands still."""


def stored(server: Stand) -> int:
    return server.operator.get_status().counters.get("stored_chunks", 0)


def blocks(number: int) -> list[int]:
    return list(range(number * PER_CHUNK, (number + 1) * PER_CHUNK))


def test_stopped_with_a_full_queue() -> None:
    """One of its copies stands in the middle for half of the time, all others wait behind it. Another engine goes on as
    before, nothing that was asked for is lost, and afterwards it works on."""
    stores, loads = range(CALLS // 2), range(CALLS // 2, CALLS)
    with stand(gated=True, l1="256MiB") as server:  # more than a neighbour stores in that time, however quick it is
        engine, neighbour = server.engine(calls=CALLS), server.engine()
        for prompt in loads:
            engine.do("store", "first", prompt, 1, blocks(prompt))
            assert engine.do("ended", "first") == [("STORED", "")]
        neighbour.tell("traffic", NEIGHBOUR)
        engine.do("fill")
        hold = server.hold(engine, "STORE", 1)
        for prompt in stores:
            engine.do("store", f"{prompt}", prompt, 1, blocks(prompt))
        hold.wait_reached()
        for prompt in loads:
            engine.do("retrieve", f"{prompt}", prompt, 1, blocks(prompt))
        engine.do("store", "one too many", CALLS, 1, blocks(CALLS - 1))
        assert engine.do("ended", "one too many") == [("FAILED", "CALL_LIMIT")]
        until(lambda: server.calls_of(engine) == CALLS, what="a full queue")

        stand_still(engine.pid)
        stopped, before = time.monotonic(), stored(server)
        time.sleep(STOPPED_S / 2)
        assert server.calls_of(engine) == CALLS and server.has(engine)
        hold.release()
        until(lambda: server.calls_of(engine) == 0, what="the end of all copies, without the engine")
        time.sleep(max(stopped + STOPPED_S - time.monotonic(), 0))
        until(lambda: stored(server) - before >= len(stores) + 4 * ROUNDS, what="the neighbour's rounds")
        assert server.has(engine) and server.memory_of(engine) == 2
        engine.signal(signal.SIGCONT)

        rounds, longest_s = neighbour.stop_traffic()
        print(f"neighbour: {rounds} rounds, the longest {longest_s:.3f} s")
        assert rounds >= ROUNDS and longest_s < 4
        for prompt in stores:
            assert engine.do("ended", f"{prompt}") == [("STORED", "")]
        for prompt in loads:
            assert engine.do("ended", f"{prompt}") == [("LOADED", "")]
            assert engine.do("wrong", prompt, blocks(prompt)) == []
        for prompt in (*stores, *loads):
            assert engine.do("load", prompt, 1, blocks(prompt)) == 1
            assert neighbour.do("load", prompt, 1, blocks(prompt)) == 1
        until(lambda: server.counts()["pins"] == server.counts()["calls"] == 0)
        server.assert_well()
