# SPDX-License-Identifier: Apache-2.0
"""Engines on a card that come and go: ``python -m tests.cards.churn cuda 300``, or ``fake`` and fewer seconds.

Processes, eight if not said otherwise, register, store, look up, retrieve prompts of their own and of each other, check
what was loaded, and detach or are killed, all at once, in an L1 that cannot hold everything. Prints how often, and the
longest that any one act took.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile

from tests.cards.engines import EngineProcess, engine_process
from tests.cards.fake import environment
from tests.kvdata import BLOCKS_OUTERMOST_OPAQUE, LAYERS_OUTERMOST, Kv
from tests.served import serving

BLOCK, CHUNK, BLOCKS = 16, 64, 96
KV = Kv(layers=4, planes=2, heads=2, head_dim=64)
PROMPTS = 48
LATE_S = 120
"""What a busy machine may take longer until something was loaded."""
FLAGS = ("--log-format", "json", "--l1-size", "16MiB", "--chunk-tokens", f"{CHUNK}")


@dataclass
class Seen:
    """What all clients did. Threads: each adds under the lock."""

    counts: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def act(self, engine: EngineProcess, what: str, *arguments: object, **more: object) -> object:
        began = time.monotonic()
        answer = getattr(engine, what)(*arguments, **more)
        with self.lock:
            self.counts[what] += 1
            self.longest_s = max(self.longest_s, time.monotonic() - began)
        return answer

    def fault(self, text: str) -> None:
        with self.lock:
            self.wrong.append(text)


def round_of(engine: EngineProcess, seen: Seen, chance: random.Random) -> None:
    """A prompt is stored, and another, or the same, is looked for and loaded into blocks of no meaning."""
    count = chance.choice((1, 2, 4)) * CHUNK
    ids = chance.sample(range(BLOCKS), 2 * count // BLOCK)
    mine, other = ids[: count // BLOCK], ids[count // BLOCK :]
    first = chance.randrange(PROMPTS) * 10_000
    engine.write(mine, first)
    outcomes = seen.act(engine, "store", first, count, mine)
    assert isinstance(outcomes, list)
    if not set(outcomes) <= {"stored", "resident", "being_written", "refused"}:
        seen.fault(f"a store ended as {outcomes}")
    first = chance.choice((first, chance.randrange(PROMPTS) * 10_000))
    found = seen.act(engine, "lookup", first, count)
    assert isinstance(found, tuple)
    job_id, hit = found
    if not hit:
        return
    blocks = other[: hit // BLOCK]
    outcomes = seen.act(engine, "retrieve", job_id, hit, blocks)
    assert isinstance(outcomes, list)
    loaded = len(list(takewhile(lambda one: one == "loaded", outcomes)))
    bad = engine.wrong_tokens(blocks[: loaded * CHUNK // BLOCK], first)
    if bad:
        seen.fault(f"tokens {bad[:4]} of the prompt from {first} on are not what was stored")
    with seen.lock:
        seen.counts["loaded chunks"] += loaded


def client(kind: str, address: str, number: int, until: float, seen: Seen) -> None:
    chance = random.Random(number)
    over = False
    while not over:
        with engine_process(kind) as engine:
            for _ in range(chance.randrange(1, 4)):
                order = chance.choice((LAYERS_OUTERMOST, BLOCKS_OUTERMOST_OPAQUE))
                engine.make(KV, order, BLOCK, BLOCKS)
                problem = seen.act(engine, "start", address, secrets.token_hex(16), name=f"worker-{number}")
                if problem:
                    seen.fault(f"a registration failed: {problem}")
                    return
                for _ in range(chance.randrange(1, 12)):
                    round_of(engine, seen, chance)
                late_s = time.monotonic() - until
                over = late_s > LATE_S or (late_s > 0 and seen.counts["loaded chunks"] > 0)
                if over or chance.random() < 0.7:
                    seen.act(engine, "stop")
                else:
                    engine.kill()
                    break


def churn(kind: str, seconds: float, *flags: str, clients: int = 8) -> Seen:
    """What became of it. AssertionError when an engine was not answered."""
    seen, faults = Seen(), list[BaseException]()
    module = "tests.cards.serve" if kind == "fake" else ""

    def run(number: int, address: str, until: float) -> None:
        try:
            client(kind, address, number, until, seen)
        except BaseException as fault:  # noqa: BLE001 - outermost of the thread: who joins it raises it
            faults.append(fault)

    with serving(*flags, *FLAGS, module=module) as served:
        until = time.monotonic() + seconds
        threads = [threading.Thread(target=run, args=(n, served.address, until)) for n in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert served.process.poll() is None, served.log
    if faults:
        raise faults[0]
    return seen


if __name__ == "__main__":
    if sys.argv[1] == "fake":
        os.environ.update(environment())
    done = churn(sys.argv[1], float(sys.argv[2]), *sys.argv[3:])
    print(json.dumps({"acts": done.counts, "longest_s": round(done.longest_s, 3), "wrong": done.wrong}))
    sys.exit(bool(done.wrong))
