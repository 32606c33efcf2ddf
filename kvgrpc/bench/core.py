# SPDX-License-Identifier: Apache-2.0
"""Figures of the core alone: microseconds for each key of calls that name 1,024, with nothing around it."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

from kvgrpc.bench.engine import BLOCK, CHUNK
from kvgrpc.bench.results import Figure, figure
from kvgrpc.bench.suite import Effort
from kvgrpc.core.cache import Bookkeeper
from kvgrpc.core.keys import chunk_keys, space_digest
from kvgrpc.core.slots import Slot
from kvgrpc.core.types import (
    ChunkKeys,
    CoreLimits,
    Geometry,
    GroupGeometry,
    LookupCommand,
    Registration,
    Role,
    RunSlice,
    SliceReport,
    SpaceIdentity,
    SpaceRef,
    StoreCommand,
    TokenRange,
)

KEYS = 1024
PAGE_BYTES = 4096
GOALS = {"lookup and release": "<= 0.7", "lookup": None, "reserve and commit": "<= 2", "evict": "<= 1"}


class Core:
    """A bookkeeper with one engine, whose copies end at once and whose arena has room for one prompt of ``KEYS``."""

    def __init__(self) -> None:
        limits = CoreLimits(chunk_tokens=CHUNK, page_bytes=PAGE_BYTES, pin_share=1.0)
        self.book = Bookkeeper(limits, KEYS * PAGE_BYTES)
        self.book.attach(0, "worker", "engine", Role.WORKER, b"s" * 16)
        identity = SpaceIdentity("bench", "", "uint8", 1, "sha256-u32le", "token-major:1:4:1")
        self._blocks = array("I", range(KEYS * CHUNK // BLOCK))  # as the wire decodes them
        group = GroupGeometry(BLOCK, len(self._blocks), PAGE_BYTES // (CHUNK // BLOCK))
        size_bytes = KEYS * PAGE_BYTES
        registration = Registration("engine", identity, 0, 0, 1, 1, Geometry((group,)), size_bytes, 1)
        self.space = SpaceRef(self.book.register(0, "worker", registration).space_base)
        data = bytes(4) * (KEYS * CHUNK)
        self.keys = ChunkKeys(chunk_keys(space_digest(self.space), data, CHUNK), KEYS * CHUNK)
        self._calls = 0

    def store(self) -> None:
        """Reserves and commits; the slices between are reported as they come."""
        self._calls += 1
        tokens = TokenRange(0, self.keys.num_tokens)
        command = StoreCommand("engine", self._calls, self.space, self.keys, tokens, (self._blocks,))
        self.book.store(0, "worker", command)
        while slices := [action for action in self.book.drain() if isinstance(action, RunSlice)]:
            for work in slices:
                self.book.slice_done(0, work.slice_id, SliceReport(len(work.pieces)))

    def lookup(self) -> None:
        self._calls += 1
        job_id = self._calls.to_bytes(16, "little")
        command = LookupCommand("engine", "request", 0, self.space, self.keys, 1, job_id)
        answer = self.book.lookup(0, "worker", command)
        assert answer.status.hit_tokens == self.keys.num_tokens and answer.status.pinned

    def release(self) -> None:
        self.book.end_request(0, "worker", "engine", "request")

    def evict(self) -> None:
        """One object as large as the arena: everything that was stored has to go."""
        index = self.book.index
        (slot,) = index.reserve(index.space(self.space), KEYS * PAGE_BYTES)
        assert isinstance(slot, Slot)
        index.slots.abort(slot)


def core(effort: Effort) -> list[Figure]:
    core = Core()
    acts: dict[str, Callable[[], None]] = {
        "reserve and commit": core.store,
        "lookup": core.lookup,
        "release": core.release,
        "evict": core.evict,
    }
    took: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(2 * effort.repetitions + 1):
        for name, act in acts.items():
            began = time.perf_counter()
            act()
            took[name].append((time.perf_counter() - began) * 1e6 / KEYS)
    took["lookup and release"] = [sum(pair) for pair in zip(took["lookup"], took["release"], strict=True)]
    return [figure(f"core/{name}", took[name][1:], "us/key", goal=goal) for name, goal in GOALS.items()]
