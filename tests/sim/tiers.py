# SPDX-License-Identifier: Apache-2.0
"""Lower tiers of the world. A tier has an object or not; what it has was written under the version of its time."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.sim.loop import PromiseError
from tests.sim.memory import Cell
from tests.sim.truth import Space

GENERATIONS_MOST = 64
"""More than there are Clears in a world."""


def object_name(space: bytes, generation: int, key: bytes, kv_rank: int, order: str = "") -> str:
    """The documented name of an object, made independently of the core."""
    fields = (b"kvgrpc.object.v1", space, str(generation).encode(), key, str(kv_rank).encode(), order.encode())
    return hashlib.sha256(b"".join(len(f).to_bytes(4, "little") + f for f in fields)).hexdigest()


def part_key(key: bytes, part: int) -> bytes:
    """The documented key of a part of a chunk."""
    return key + bytes(64 - len(key)) + bytes((len(key), part)) if part else key


class Meaning(NamedTuple):
    """What an object's name stands for; ``cells`` is its length."""

    space: Space
    key: bytes
    part: int
    kv_rank: int
    cells: int

    def contents(self, version: int) -> list[Cell]:
        numbers = [(self.part, cell) if self.part else cell for cell in range(self.cells)]
        return [self.space.content(version, self.key, self.kv_rank, number) for number in numbers]


@dataclass
class Stored:
    """An object that a tier was asked for."""

    meaning: Meaning
    version: int
    tier: str


class Tiers:
    """Answers probes and gives contents. Where generations begin to count is the core's business: a Clear before a
    space was seen moves it."""

    def __init__(self, rng: random.Random, names: tuple[str, ...], share: float) -> None:
        self.names = names
        self._rng = rng
        self._share = share
        self._meanings: dict[str, Meaning] = {}
        self._stored: dict[str, Stored] = {}
        self._objects: list[Meaning] = []
        self.written = 0
        self.read_parts = 0

    def know(self, space: Space, keys: list[bytes], kv_ranks: int, cells: Sequence[int]) -> None:
        """The space's objects can be asked for from now on; ``cells`` of each part."""
        self._objects += [
            Meaning(space, key, part, rank, count)
            for key in keys
            for part, count in enumerate(cells)
            for rank in range(kv_ranks)
        ]

    def find(self, name: str) -> str:
        """The tier that has the object, or ""."""
        if name not in self._stored:
            meaning = self._meaning(name)
            tier = self._rng.choice(self.names) if self._rng.random() < self._share else ""
            self._stored[name] = Stored(meaning, meaning.space.version, tier)
        return self._stored[name].tier

    def contents(self, name: str) -> list[Cell]:
        stored = self._stored.get(name)
        if stored is None or not stored.tier:
            raise PromiseError("a tier is asked for an object that it does not have")
        return stored.meaning.contents(stored.version)

    def keep(self, name: str, tier: str, cells: list[Cell]) -> None:
        """An object was written: it must be what its name says, whole and of one version."""
        meaning = self._meaning(name)
        versions = {cell[1] for cell in cells if isinstance(cell, tuple) and len(cell) == 5}
        version = versions.pop() if len(versions) == 1 else -1
        if cells != meaning.contents(version):
            raise PromiseError(f"a tier is given {cells[:3]} under the name of {meaning}")
        self._stored[name] = Stored(meaning, version, tier)
        self.written += 1

    def arrived(self, name: str) -> None:
        stored = self._stored[name]
        meaning = stored.meaning
        meaning.space.arrived(stored.version, meaning.key, meaning.kv_rank, meaning.part)
        self.read_parts += meaning.part > 0

    def _meaning(self, name: str) -> Meaning:
        generations = iter(range(GENERATIONS_MOST))
        while name not in self._meanings:
            generation = next(generations, None)
            if generation is None:
                raise PromiseError(f"a tier is asked for an unknown object {name[:16]}")
            for one in self._objects:
                name_then = object_name(one.space.digest, generation, part_key(one.key, one.part), one.kv_rank)
                self._meanings[name_then] = one
        return self._meanings[name]
