# SPDX-License-Identifier: Apache-2.0
"""Position-coded KV data, and engine memory that holds it.

Every byte follows from (seed, layer, plane, token, head, offset in the head), so that a byte in the wrong place is
seen wherever it comes from. Where a byte lies is computed by numpy's axes alone, independently of the code under
test.

    image = Image(MHA, LAYERS_OUTERMOST, block_size=16, num_blocks=40)     # plain memory filled with 0xA5
    image.write(block_ids, first_token=0)                                   # as an engine after prefill
    image.layout("name")                                                    # what it registers
    image.wrong_tokens(block_ids, first_token=0)                            # as an engine before decode: [] is good
    image.untouched(block_ids)                                              # every other byte is still 0xA5
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from kvgrpc.api import BlockForm, KvGroup, Layout, Runs, SharedMemory

FILL = 0xA5
Bytes = NDArray[np.uint8]
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0x2545F491)
_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Kv:
    """What KV data a rank has. ``first_head`` tells ranks apart that have different heads of the same data."""

    layers: int
    planes: int
    heads: int
    head_dim: int
    itemsize: int = 2
    first_head: int = 0
    seed: int = 0

    @property
    def head_bytes(self) -> int:
        return self.head_dim * self.itemsize

    @property
    def token_bytes(self) -> int:
        """Of all layers and planes."""
        return self.layers * self.planes * self.heads * self.head_bytes


MHA = Kv(layers=3, planes=2, heads=4, head_dim=8)
GQA = Kv(layers=4, planes=2, heads=1, head_dim=16)
MLA = Kv(layers=3, planes=1, heads=1, head_dim=576)


def byte_at(seed: int, layer: int, plane: int, token: int, head: int, offset: int) -> int:
    """The byte at a position, in plain arithmetic."""
    x = sum(f * v for f, v in zip(_FACTORS, (seed, layer, plane, token, head, offset), strict=True)) & _MASK
    x = (x ^ x >> 15) * 0x2C1B3C6D & _MASK
    x = (x ^ x >> 12) * 0x297A2D39 & _MASK
    return (x ^ x >> 15) & 0xFF


def token_data(kv: Kv, first_token: int, num_tokens: int) -> Bytes:
    """The bytes of some tokens as [layer, plane, token, head, byte]; the same arithmetic, all at once."""
    axes = (
        np.arange(kv.layers),
        np.arange(kv.planes),
        np.arange(first_token, first_token + num_tokens),
        np.arange(kv.first_head, kv.first_head + kv.heads),
        np.arange(kv.head_bytes),
    )
    x = np.full((1,) * 5, kv.seed * _FACTORS[0] & _MASK, np.uint64)
    for axis, (factor, values) in enumerate(zip(_FACTORS[1:], axes, strict=True)):
        shape = [1] * 5
        shape[axis] = -1
        x = x + values.astype(np.uint64).reshape(shape) * np.uint64(factor)
    x = x.astype(np.uint32)
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x2C1B3C6D)
    x = (x ^ x >> np.uint32(12)) * np.uint32(0x297A2D39)
    return (x ^ x >> np.uint32(15)).astype(np.uint8)


@dataclass(frozen=True)
class Arrangement:
    """How engine memory is ordered: a permutation of L(ayer) P(lane) B(lock) T(oken in the block) H(ead) D (bytes of
    a head).

    ``run`` are the last axes, without B: what one run holds. ``tensors``: each layer is a tensor of its own (an entry
    of runs and a piece of memory each), which needs L first; else one entry and one piece.
    """

    order: str
    run: str
    form: BlockForm
    tensors: bool = False

    def __str__(self) -> str:
        return f"{self.order}-{self.form.value.lower()}-{self.run}{'-tensors' if self.tensors else ''}"


LAYERS_OUTERMOST = Arrangement("LPBTHD", "THD", BlockForm.TOKEN_MAJOR, tensors=True)
"""A tensor a layer [2, N, 16, heads, dim]: K and V planes first."""
LAYERS_ONE_TENSOR = Arrangement("LPBTHD", "THD", BlockForm.TOKEN_MAJOR)
"""The same in one tensor with a layer stride."""
BLOCKS_BEFORE_PLANES = Arrangement("LBPTHD", "THD", BlockForm.TOKEN_MAJOR, tensors=True)
"""A tensor a layer [N, 2, 16, heads, dim], planes apart."""
BLOCKS_OUTERMOST = Arrangement("BLPTHD", "THD", BlockForm.TOKEN_MAJOR)
"""One tensor [N, L, 2, 16, heads, dim] whose layers and planes are strided runs inside a block."""
BLOCKS_OUTERMOST_OPAQUE = Arrangement("BLPTHD", "LPTHD", BlockForm.OPAQUE)
"""The same, a block one opaque run."""
HEADS_FIRST_OPAQUE = Arrangement("LBPHTD", "PHTD", BlockForm.OPAQUE, tensors=True)
"""An engine whose blocks order heads before tokens: [N, 2, heads, 16, dim] a layer."""
ARRANGEMENTS = (
    LAYERS_OUTERMOST,
    LAYERS_ONE_TENSOR,
    BLOCKS_BEFORE_PLANES,
    BLOCKS_OUTERMOST,
    BLOCKS_OUTERMOST_OPAQUE,
    HEADS_FIRST_OPAQUE,
)


class Image:
    """An engine's paged KV memory: ``tensors`` pieces of ``tensor_bytes``, ``lead`` bytes before each and ``tail``
    after the last.

    ``buffer`` is the memory to use (at least ``size_bytes``; it is filled with 0xA5), else a bytearray is made.
    """

    def __init__(
        self,
        kv: Kv,
        arrangement: Arrangement,
        block_size: int,
        num_blocks: int,
        *,
        lead: int = 0,
        tail: int = 0,
        buffer: Buffer | None = None,
    ) -> None:
        self.kv, self.arrangement, self.block_size, self.num_blocks = kv, arrangement, block_size, num_blocks
        self.lead = lead
        self.tensors = kv.layers if arrangement.tensors else 1
        self.tensor_bytes = kv.token_bytes // self.tensors * block_size * num_blocks
        self.size_bytes = self.tensors * (lead + self.tensor_bytes) + tail
        self.buffer = bytearray(self.size_bytes) if buffer is None else buffer
        self.memory: Bytes = np.frombuffer(memoryview(self.buffer), np.uint8)[: self.size_bytes]
        self.memory[:] = FILL
        pitched = self.memory[: self.tensors * (lead + self.tensor_bytes)].reshape(self.tensors, -1)[:, lead:]
        sizes = dict(
            zip("LPBTHD", (kv.layers, kv.planes, num_blocks, block_size, kv.heads, kv.head_bytes), strict=True)
        )
        order = arrangement.order
        shape = [sizes[axis] for axis in order]
        as_ordered = np.lib.stride_tricks.as_strided(pitched, shape, self._strides(shape), writeable=True)
        self.blocks: Bytes = as_ordered.transpose([order.index(axis) for axis in "BLPTHD"])
        """A view of all memory as [block, layer, plane, token in the block, head, byte]."""

    def _strides(self, shape: Sequence[int]) -> list[int]:
        strides = [int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))]
        if self.arrangement.tensors:
            strides[0] = self.lead + self.tensor_bytes
        return strides

    def layout(self, name: str = "kv") -> Layout:
        """What the engine registers when ``buffer`` is the shared memory object ``name``."""
        pitch = self.lead + self.tensor_bytes
        memory = tuple(SharedMemory(name, self.lead + i * pitch, self.tensor_bytes) for i in range(self.tensors))
        strides = dict(zip("BLPTHD", self.blocks.strides, strict=True))
        sizes = dict(zip("BLPTHD", self.blocks.shape, strict=True))
        run, a = self.arrangement.run, self.arrangement
        apart = {axis: 1 if axis in run or (axis == "L" and a.tensors) else sizes[axis] for axis in "LP"}
        entry = Runs(
            memory_index=0,
            base_bytes=0,
            layers=apart["L"],
            layer_stride_bytes=strides["L"],
            planes=apart["P"],
            plane_stride_bytes=strides["P"],
            block_stride_bytes=strides["B"],
            run_bytes=int(np.prod([sizes[axis] for axis in run if axis != "L" or not a.tensors])),
        )
        entries = tuple(Runs(**{**_fields(entry), "memory_index": i}) for i in range(self.tensors))
        group = KvGroup(
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            runs=entries,
            form=a.form,
            backend="TEST",
            layout=a.order,
            heads=self.kv.heads,
            head_dim=self.kv.head_dim,
        )
        return Layout(memory, (group,))

    def write(self, block_ids: Sequence[int], first_token: int = 0) -> None:
        """Puts the right bytes of consecutive tokens into these blocks."""
        self.blocks[list(block_ids)] = self._expected(len(block_ids), first_token)

    def wrong_tokens(self, block_ids: Sequence[int], first_token: int = 0) -> list[int]:
        """Tokens of which any byte in these blocks is not the right one."""
        wrong = self.blocks[list(block_ids)] != self._expected(len(block_ids), first_token)
        return [first_token + int(i) for i in np.flatnonzero(wrong.any(axis=(1, 2, 4, 5)).reshape(-1))]

    def untouched(self, block_ids: Sequence[int] = ()) -> bool:
        """Whether every byte outside these blocks is still 0xA5, padding included."""
        rest = self.memory.copy()
        view = np.lib.stride_tricks.as_strided(
            rest[self.lead :], self.blocks.shape, self.blocks.strides, writeable=True
        )
        view[list(block_ids)] = FILL
        return bool((rest == FILL).all())

    def object_bytes(self, block_ids: Sequence[int]) -> bytes:
        """The object that a store of these blocks (one chunk) must make of them."""
        run = self.arrangement.run
        outer = [axis for axis in "LP" if axis not in run]
        order = [*outer, "B", *run]
        chosen = self.blocks[list(block_ids)]
        return chosen.transpose(["BLPTHD".index(axis) for axis in order]).tobytes()

    def _expected(self, count: int, first_token: int) -> Bytes:
        data = token_data(self.kv, first_token, count * self.block_size)
        kv = self.kv
        paged = data.reshape(kv.layers, kv.planes, count, self.block_size, kv.heads, kv.head_bytes)
        return paged.transpose(2, 0, 1, 3, 4, 5)


def _fields(runs: Runs) -> dict[str, int]:
    return {name: getattr(runs, name) for name in Runs.__slots__}


@contextmanager
def shared_memory(size_bytes: int) -> Iterator[tuple[str, mmap.mmap]]:
    """A POSIX shared memory object of this process: its name, and it mapped. It is gone at the end."""
    name = f"kvgrpc-test-{secrets.token_hex(8)}"
    path = f"/dev/shm/{name}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size_bytes)
        yield name, mmap.mmap(fd, size_bytes)
    finally:
        os.close(fd)
        os.unlink(path)
