# SPDX-License-Identifier: Apache-2.0
"""Engines whose shared memory is not what they say: smaller, read-only, or about to be."""

from __future__ import annotations

import os
import random

from tests.e2e.unprivileged import NOBODY
from tests.hostile.engine import PER_CHUNK
from tests.hostile.process import NOT_REFUSED
from tests.hostile.stand import stand, until

ROUNDS = 50
CHUNKS = 8
BLOCKS = list(range(0, 2 * CHUNKS * PER_CHUNK, 2))
STORED = [("STORED", "")] * CHUNKS


def test_more_memory_than_there_is() -> None:
    """Refused at registration with both numbers; the engine is no worse off than before and may tell the truth."""
    chance = random.Random(6)
    with stand() as server:
        good = server.engine()
        assert good.do("store", "s", 1, CHUNKS, BLOCKS) is None and good.do("ended", "s") == STORED
        before, files, maps = server.counts(), len(server.files()), server.mappings()
        for _ in range(ROUNDS):
            claim = chance.choice((2, 1000, 1_000_000))
            liar = server.stranger(claim=claim)
            assert not liar.do("start", 0.05)
            until(lambda liar=liar: liar.do("problem")[0] not in NOT_REFUSED, 20)
            reason, sentence = liar.do("problem")
            size = os.stat(f"/dev/shm/{liar.facts.memory}").st_size
            assert (reason, str(size) in sentence, "offset_bytes + size_bytes" in sentence) == ("MEMORY", True, True)
            until(lambda liar=liar: server.memory_of(liar) == 0, what="the end of an attempt to map it")
            liar.kill()
        assert good.do("load", 1, CHUNKS, BLOCKS) == CHUNKS
        until(lambda: server.counts() == before, what="the end of all liars")
        until(lambda: len(server.files()) <= files, what="the end of all descriptors")
        assert server.mappings() <= maps + 32, "a mapping a round stays"
        server.assert_well()


def test_memory_that_may_only_be_read() -> None:
    """A server that is bound by modes refuses memory of mode 0400 by name. A mode that changes later changes nothing
    for a copy that runs, in either direction."""
    uid = NOBODY if os.geteuid() == 0 else 0
    with stand("--max-workers", "4", gated=True, uid=uid) as server:
        for _ in range(5):
            closed = server.stranger(mode=0o400, uid=uid)
            assert not closed.do("start", 0.05)
            until(lambda closed=closed: closed.do("problem")[0] not in NOT_REFUSED, 20)
            reason, sentence = closed.do("problem")
            assert reason == "MEMORY" and "cannot be opened for reading and writing: Permission denied" in sentence
            until(lambda closed=closed: server.memory_of(closed) == 0, what="the end of an attempt to map it")
            closed.kill()
        engine = server.engine(uid=uid)
        for prompt, direction in enumerate(("STORE", "RETRIEVE") * 5):
            engine.do("chmod", 0o600)
            hold = server.hold(engine, direction, 40)
            if direction == "STORE":
                engine.do("store", "copy", prompt, CHUNKS, BLOCKS)
            else:
                engine.do("fill")
                engine.do("retrieve", "copy", prompt - 1, CHUNKS, BLOCKS)
            hold.wait_reached()
            engine.do("chmod", 0o400)
            hold.release()
            done = "STORED" if direction == "STORE" else "LOADED"
            assert engine.do("ended", "copy") == [(done, "")] * CHUNKS
            assert engine.do("wrong", prompt - prompt % 2, BLOCKS) == []
        server.assert_well()
