# SPDX-License-Identifier: Apache-2.0
"""What may be answered: kept by the world from what it saw itself, never from the core's own state."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from kvgrpc.core.types import PrefetchStatus, Reader
from tests.sim.loop import PromiseError
from tests.sim.memory import Cell, Shape


@dataclass
class Space:
    """A space as its engines see it. ``version`` grows with each Clear or BumpGeneration: older data is stale."""

    index: int
    digest: bytes
    version: int = 0
    whole: dict[tuple[int, bytes, int], set[int]] = field(default_factory=dict)
    """KV ranks whose whole object has arrived in the arena, by (version, key, part)."""

    def content(self, version: int, key: bytes, kv_rank: int, cell: Hashable) -> Cell:
        return (self.index, version, key, kv_rank, cell)

    def arrived(self, version: int, key: bytes, kv_rank: int, part: int = 0) -> None:
        self.whole.setdefault((version, key, part), set()).add(kv_rank)


@dataclass(frozen=True)
class Prompt:
    """Keys of its full chunks, and its length in tokens."""

    keys: tuple[bytes, ...]
    num_tokens: int


@dataclass
class Lease:
    """A lookup's grant as the engine may rely on it."""

    engine_id: str
    request_id: str
    job_id: bytes
    space: Space
    version: int
    keys: Sequence[bytes]
    kv_ranks: tuple[int, ...]
    readers_per_object: int
    until_ns: int
    shape: Shape
    hit_chunks: int = -1
    pinned: bool = False
    over: bool = False
    readers_known: bool = True
    """Some worker shared memory when the lookup was made; else one reader an object was assumed."""
    left: dict[tuple[int, int], set[tuple[int, int]]] = field(default_factory=dict)
    """Who has not read yet, by chunk and part."""
    status: PrefetchStatus | None = None

    def answered(self, status: PrefetchStatus, chunk_tokens: int, kv_tp_size: int) -> None:
        """The lookup is final; checks the answer and, once more, that it never changes."""
        if self.status is not None:
            if self.status != status:
                raise PromiseError(f"the answer of a lookup changed from {self.status} to {status}")
            return
        if status.hit_tokens % chunk_tokens or status.hit_tokens > len(self.keys) * chunk_tokens:
            raise PromiseError(f"hit of {status.hit_tokens} tokens for {len(self.keys)} chunks")
        self.status = status
        self.hit_chunks = status.hit_tokens // chunk_tokens
        self.pinned = status.pinned
        if sum(status.hit_chunks_by_tier.values()) != self.hit_chunks:
            raise PromiseError(f"{self.hit_chunks} hit chunks, but by tier {status.hit_chunks_by_tier}")
        count = self.readers_per_object
        for chunk, key in enumerate(self.keys[: self.hit_chunks]):
            for part in self.shape.parts_of_hit(chunk, self.hit_chunks):
                self._check_hit(key, part)
                self.left[chunk, part] = {
                    (k, (k % kv_tp_size) * count + r) for k in self.kv_ranks for r in range(count)
                }

    def _check_hit(self, key: bytes, part: int) -> None:
        versions = range(self.version, self.space.version + 1)
        if not any(set(self.kv_ranks) <= self.space.whole.get((v, key, part), set()) for v in versions):
            raise PromiseError(
                f"a hit on a chunk whose objects never arrived whole (space {self.space.index}, key {key.hex()[:8]})"
            )

    def holds(self, now: int, chunk: int, reader: tuple[int, int]) -> bool:
        """The reader may rely on the chunk: it is pinned for it, now and since the lookup."""
        parts = [readers for (at, _), readers in self.left.items() if at == chunk]
        live = self.pinned and not self.over and now < self.until_ns
        return live and bool(parts) and all(reader in readers for readers in parts)

    def must_be_known(self, now: int) -> bool:
        return self.pinned and not self.over and now < self.until_ns and any(self.left.values())

    def has_read(self, chunk: int, part: int, reader: tuple[int, int]) -> None:
        self.left.get((chunk, part), set()).discard(reader)

    def freed(self, first: int, last: int, readers: Sequence[Reader]) -> None:
        """Chunks ``first`` .. ``last - 1`` are given back by those readers (none named: all)."""
        named = {(r.kv_rank, r.tp_rank) for r in readers}
        for (chunk, part), left in self.left.items():
            if first <= chunk < last:
                self.left[chunk, part] = left - named if named else set()

    def left_pins(self) -> int:
        return sum(len(readers) for readers in self.left.values())


@dataclass
class Hold:
    """An operator's pin."""

    space: Space
    version: int
    keys: Sequence[bytes]
    until_ns: int
    over: bool = False

    def counts(self, now: int) -> bool:
        return not self.over and now < self.until_ns and self.version == self.space.version
