# SPDX-License-Identifier: Apache-2.0
"""Lower tiers of the world. A tier has an object or not; what it has was written under the version of its time."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from tests.sim.loop import PromiseError
from tests.sim.memory import Cell
from tests.sim.truth import Space

GENERATIONS_MOST = 64
"""More than there are Clears in a world."""


def object_name(space: bytes, generation: int, key: bytes, kv_rank: int, order: str = "") -> str:
    """The documented name of an object, made independently of the core."""
    fields = (b"kvgrpc.object.v1", space, str(generation).encode(), key, str(kv_rank).encode(), order.encode())
    return hashlib.sha256(b"".join(len(f).to_bytes(4, "little") + f for f in fields)).hexdigest()


@dataclass
class Stored:
    """An object that a tier was asked for."""

    space: Space
    version: int
    key: bytes
    kv_rank: int
    tier: str


class Tiers:
    """Answers probes and gives contents. Where generations begin to count is the core's business: a Clear before a
    space was seen moves it."""

    def __init__(self, rng: random.Random, names: tuple[str, ...], share: float) -> None:
        self.names = names
        self._rng = rng
        self._share = share
        self._meanings: dict[str, tuple[Space, bytes, int, int]] = {}
        self._stored: dict[str, Stored] = {}
        self._objects: list[tuple[Space, bytes, int, int]] = []
        self._orders: dict[int, str] = {}
        self.written = 0

    def know(self, space: Space, keys: list[bytes], kv_ranks: int, cells: int, order: str) -> None:
        """The space's objects can be asked for from now on."""
        self._objects += [(space, key, rank, cells) for key in keys for rank in range(kv_ranks)]
        self._orders[space.index] = order

    def find(self, name: str) -> str:
        """The tier that has the object, or ""."""
        if name not in self._stored:
            space, key, rank, _ = self._meaning(name)
            tier = self._rng.choice(self.names) if self._rng.random() < self._share else ""
            self._stored[name] = Stored(space, space.version, key, rank, tier)
        return self._stored[name].tier

    def contents(self, name: str) -> list[Cell]:
        stored = self._stored.get(name)
        if stored is None or not stored.tier:
            raise PromiseError("a tier is asked for an object that it does not have")
        cells = self._meaning(name)[3]
        return [stored.space.content(stored.version, stored.key, stored.kv_rank, cell) for cell in range(cells)]

    def keep(self, name: str, tier: str, cells: list[Cell]) -> None:
        """An object was written: it must be what its name says, whole and of one version."""
        space, key, rank, count = self._meaning(name)
        versions = {cell[1] for cell in cells if isinstance(cell, tuple) and len(cell) == 5}
        version = versions.pop() if len(versions) == 1 else -1
        if cells != [space.content(version, key, rank, cell) for cell in range(count)]:
            raise PromiseError(f"a tier is given {cells[:3]} under the name of key {key.hex()[:8]}, rank {rank}")
        self._stored[name] = Stored(space, version, key, rank, tier)
        self.written += 1

    def arrived(self, name: str) -> None:
        stored = self._stored[name]
        stored.space.arrived(stored.version, stored.key, stored.kv_rank)

    def _meaning(self, name: str) -> tuple[Space, bytes, int, int]:
        generations = iter(range(GENERATIONS_MOST))
        while name not in self._meanings:
            generation = next(generations, None)
            if generation is None:
                raise PromiseError(f"a tier is asked for an unknown object {name[:16]}")
            for space, key, rank, cells in self._objects:
                name_then = object_name(space.digest, generation, key, rank, self._orders[space.index])
                self._meanings[name_then] = (space, key, rank, cells)
        return self._meanings[name]
