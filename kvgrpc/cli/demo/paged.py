# SPDX-License-Identifier: Apache-2.0
"""Paged KV memory of the demo's engine: a pool of blocks in POSIX shared memory, and one sequence's view of it.

The pool is one tensor ``[layers, 2, num_blocks, block_size, kv_heads, head_dim]`` of float32; plane 0 is
K, plane 1 is V.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvgrpc.cli.demo import shared

PREFILL_BYTE = 0xA5


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Geometry of a pool. ``run_bytes`` is one block in one plane of one layer."""

    layers: int
    num_blocks: int
    block_size: int
    kv_heads: int
    head_dim: int

    @property
    def dimensions(self) -> tuple[int, int, int, int, int, int]:
        return (self.layers, 2, self.num_blocks, self.block_size, self.kv_heads, self.head_dim)

    @property
    def run_bytes(self) -> int:
        return self.block_size * self.kv_heads * self.head_dim * 4

    @property
    def size_bytes(self) -> int:
        return self.layers * 2 * self.num_blocks * self.run_bytes


class BlockPool:
    """All blocks of an engine. Every byte starts as 0xA5, so that a block nobody wrote is recognised."""

    def __init__(self, name: str, shape: PoolShape) -> None:
        self.name = name
        self.shape = shape
        self._memory = shared.create(name, shape.size_bytes)
        flat = torch.frombuffer(self._memory, dtype=torch.uint8)
        flat.fill_(PREFILL_BYTE)
        self.blocks = flat.view(torch.float32).view(shape.dimensions)

    def size_of(self, num_blocks: int) -> int:
        """Bytes that so many blocks hold, over all layers and planes."""
        return self.shape.layers * 2 * self.shape.run_bytes * num_blocks

    def digest(self, block_ids: Sequence[int]) -> str:
        """SHA-256 of these blocks' bytes, layer by layer, plane by plane, in the order given."""
        found = hashlib.sha256()
        for run in self._runs(block_ids):
            found.update(run)
        return found.hexdigest()

    def untouched(self, block_ids: Sequence[int]) -> bool:
        """Whether every byte of these blocks is still the one that the pool was filled with."""
        fresh = bytes([PREFILL_BYTE]) * self.shape.run_bytes
        return all(bytes(run) == fresh for run in self._runs(block_ids))

    def _runs(self, block_ids: Sequence[int]) -> Iterator[memoryview]:
        memory, run_bytes = memoryview(self._memory), self.shape.run_bytes
        for plane in range(self.shape.layers * 2):
            for block in block_ids:
                start = (plane * self.shape.num_blocks + block) * run_bytes
                yield memory[start : start + run_bytes]


class PagedSequence:
    """The KV of one sequence: token ``i`` lies in block ``block_ids[i // block_size]`` at ``i % block_size``."""

    def __init__(self, pool: BlockPool, block_ids: Sequence[int]) -> None:
        self.block_ids = tuple(block_ids)
        self._pool = pool
        self._table = torch.tensor(self.block_ids)

    def write(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes ``[tokens, kv_heads, head_dim]`` of K and V for the tokens from ``start`` on."""
        positions = torch.arange(start, start + keys.shape[0])
        block_size = self._pool.shape.block_size
        blocks, offsets = self._table[positions // block_size], positions % block_size
        self._pool.blocks[layer, 0][blocks, offsets] = keys
        self._pool.blocks[layer, 1][blocks, offsets] = values

    def gather(self, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first ``length`` tokens, each ``[length, kv_heads, head_dim]``, copied out of their blocks."""
        shape = self._pool.shape
        table = self._table[: -(-length // shape.block_size)]
        planes = self._pool.blocks[layer][:, table].flatten(1, 2)
        return planes[0, :length], planes[1, :length]
