# SPDX-License-Identifier: Apache-2.0
"""One client process of either side: for an order, a line of JSON on standard input, it prints a line with its answer.

    python -m benchmarks.peer_side Ours|Peer

The work is the same code for both sides; only the engine (peer_clients.py) differs. Runs in the peer's environment too,
so nothing of this project may be imported at the top.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import socket
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import peer_clients
from benchmarks.peer_clients import BLOCK, Ids, Shape

LONGEST = 128 << 10
VOCABULARY = 128_000
COPIED_TOKENS = 1024
"""Four chunks; 32 layers of 8 heads x 128 of bf16 make that 128 MiB."""
UNSEEN_S = 10.0
SHAPES = {"small": Shape(1, 1, 8, 1 + LONGEST // BLOCK), "copies": Shape(32, 8, 128, 1 + 2 * COPIED_TOKENS // BLOCK)}
"""Of what is looked up, 8 KiB a chunk, and of what is copied."""


class Work:
    """What a client process does, order by order. Its seed tells the prompts of processes apart."""

    def __init__(self, side: type[peer_clients.Ours] | type[peer_clients.Peer]) -> None:
        self._side = side
        self._engine: Any = None
        self._names = itertools.count(1)

    def load(self, address: str) -> dict[str, Any]:
        """Imports what a client needs, so that ``reach`` waits for the server alone."""
        self._side(address).close()
        return {}

    def reach(self, address: str) -> dict[str, Any]:
        """Answers when a server that is being started has answered its first call."""
        host, port = address.rpartition("/")[2].split(":")
        while True:
            try:
                socket.create_connection((host, int(port))).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.005)
        client = self._side(address)
        client.empty()
        client.close()
        return {}

    def open(self, address: str, mode: str, shape: str, seed: int) -> dict[str, Any]:
        self._engine = self._side(address)
        self._engine.register(mode, SHAPES[shape])
        chance = random.Random(seed)
        self._seed, self._base = seed, tuple(chance.randrange(VOCABULARY) for _ in range(LONGEST))
        self._blocks = list(range(1, SHAPES[shape].num_blocks))
        chance.shuffle(self._blocks)
        return self._side.versions()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def calls(self, seconds: float) -> dict[str, Any]:
        """Empty calls, one after the other."""
        count, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < seconds or not count:
            self._engine.empty()
            count += 1
        return {"us": took / count * 1e6}

    def keep(self) -> dict[str, Any]:
        """Stores the longest prompt; every shorter one is a prefix of it."""
        assert self._engine.store(self._name(), self._base, self._blocks), "the store was refused"
        self._unseen(self._base)
        return {}

    def lookups(self, tokens: int, hit: bool, seconds: float) -> dict[str, Any]:
        """Lookups until the result is there and, on a hit, its locks are free again; one after the other. ``rate`` is
        of that, ``ended`` counts the end of the request as well."""
        count, looked, whole, began = 0, 0.0, 0.0, time.perf_counter()
        while time.perf_counter() - began < seconds or not count:
            name = self._name()
            ids = self._base[:tokens] if hit else self._unknown(tokens)
            prompt = self._engine.prepare(ids)
            start = time.perf_counter()
            found = self._engine.lookup(name, prompt)
            if found:
                self._engine.free(name, ids)
            looked += time.perf_counter() - start
            self._engine.end(name)
            whole += time.perf_counter() - start
            count += 1
            assert found == (tokens if hit else 0), f"{found} of {tokens} tokens hit"
        return {"rate": count / looked, "ended": count / whole}

    def copies(self, count: int) -> dict[str, Any]:
        """Stores a new prompt, finds it, retrieves it into other blocks and compares every word; GB/s of each."""
        found: dict[str, Any] = {"store": [], "retrieve": [], "unseen": 0, "wrong": 0}
        half = COPIED_TOKENS // BLOCK
        source, target = self._blocks[:half], self._blocks[half:]
        planes = self._engine.planes
        size = sum(plane[:, source].nbytes for plane in planes)
        for _ in range(count):
            ids, name = self._unknown(COPIED_TOKENS), self._name()
            words = [self._words(plane[:, source].shape, layer) for layer, plane in enumerate(planes)]
            for plane, content in zip(planes, words, strict=True):
                plane[:, source] = content
                plane[:, target] = -1
            start = time.perf_counter()
            assert self._engine.store(name, ids, source), "the store was refused"
            found["store"].append(size / (time.perf_counter() - start) / 1e9)
            self._engine.end(name)
            found["unseen"] += self._unseen(ids)
            name = self._name()
            assert self._engine.lookup(name, self._engine.prepare(ids)) == len(ids), "was there, and is gone"
            start = time.perf_counter()
            assert self._engine.retrieve(name, ids, target), "the retrieve failed"
            found["retrieve"].append(size / (time.perf_counter() - start) / 1e9)
            same = (np.array_equal(plane[:, target], content) for plane, content in zip(planes, words, strict=True))
            found["wrong"] += not all(same)
            self._engine.end(name)
            self._engine.clear()
        return found

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _name(self) -> str:
        return f"{self._seed}-{next(self._names)}"

    def _unknown(self, tokens: int) -> Ids:
        """A prompt that nobody has stored: its first token is nobody else's."""
        return (VOCABULARY + self._seed * 10_000_000 + next(self._names), *self._base[1:tokens])

    def _words(self, shape: tuple[int, ...], layer: int) -> NDArray[np.int64]:
        """Content that says where it belongs: each word is another one, of a call of its own."""
        return np.arange(np.prod(shape)).reshape(shape) + (layer << 24) + (next(self._names) << 32)

    def _unseen(self, ids: Ids) -> bool:
        """Whether the first lookup after an acknowledged store does not find it; waits until one does."""
        end, misses = time.monotonic() + UNSEEN_S, 0
        while True:
            name = self._name()
            found = self._engine.lookup(name, self._engine.prepare(ids))
            if found:
                self._engine.free(name, ids[:found])
            self._engine.end(name)
            if found == len(ids):
                return misses > 0
            misses += 1
            assert time.monotonic() < end, f"acknowledged, and {found} of {len(ids)} tokens hit after {UNSEEN_S} s"


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    work = Work(getattr(peer_clients, sys.argv[1]))
    for line in sys.stdin:
        order = json.loads(line)
        answers.write(json.dumps(getattr(work, order.pop("do"))(**order)) + "\n")
        answers.flush()
    work.close()


if __name__ == "__main__":
    main()
