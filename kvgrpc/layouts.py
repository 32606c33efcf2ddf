# SPDX-License-Identifier: Apache-2.0
"""Words of an engine's KV memory: where it is, how blocks lie in it. A part of the cache's interface (``kvgrpc.api``).

Sizes, offsets and strides are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class CudaIpcMemory:
    """Device memory by a 64-byte CUDA IPC handle; ``offset_bytes`` lies inside the allocation that it opens."""

    handle: bytes
    device_uuid: str
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Host memory by the name of a POSIX shared memory object (no slash): bytes ``offset_bytes`` to ``offset_bytes +
    size_bytes`` of ``/dev/shm/NAME``. Its pages must be there: write or posix_fallocate them first."""

    name: str
    offset_bytes: int
    size_bytes: int


Memory = CudaIpcMemory | SharedMemory


@dataclass(frozen=True, slots=True)
class Runs:
    """One strided family of runs, a run being what lies side by side of a block: block b of plane p of layer l is the
    ``run_bytes`` of ``memory[memory_index]`` from ``base_bytes + l * layer_stride_bytes + p * plane_stride_bytes +
    b * block_stride_bytes`` on. ``planes`` is 2 where K and V lie apart, else 1. The stride of what there is one of may
    be anything."""

    memory_index: int
    base_bytes: int
    layers: int
    layer_stride_bytes: int
    planes: int
    plane_stride_bytes: int
    block_stride_bytes: int
    run_bytes: int


class GroupKind(Enum):
    """What of a prefix of n tokens a group's layers need: FULL all of it; SLIDING_WINDOW its last ``window_tokens``;
    CHUNKED_LOCAL what follows the last multiple of ``window_tokens`` before token n; RECURRENT one state, in the last
    block. docs/hybrid.md has more. The values are the protocol's names without their prefix."""

    FULL = "FULL"
    SLIDING_WINDOW = "SLIDING_WINDOW"
    RECURRENT = "RECURRENT"
    CHUNKED_LOCAL = "CHUNKED_LOCAL"


class BlockForm(Enum):
    """Whether the order of bytes inside a block is known. TOKEN_MAJOR: a run holds its tokens one after the other, in
    equal parts, so engines of other block sizes read it. OPAQUE: only engines of equal ``backend``, ``layout`` and
    ``block_size`` share blocks."""

    OPAQUE = "OPAQUE"
    TOKEN_MAJOR = "TOKEN_MAJOR"  # noqa: S105 - not a password


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share one block table.

    ``block_size`` is in tokens and divides the server's ``chunk_tokens``; a block of a RECURRENT group holds one state,
    that after its last token. Block ids are below ``num_blocks``. ``runs`` together make a chunk's bytes, in this
    order. ``window_tokens``: of SLIDING_WINDOW and CHUNKED_LOCAL only.

    What says whether two engines' bytes mean the same: of TOKEN_MAJOR blocks ``heads`` (of this rank) and ``head_dim``;
    of OPAQUE ones ``backend`` and ``layout``, any names for the attention backend and its order of bytes. Engines that
    leave these empty are taken to have the same.
    """

    block_size: int
    num_blocks: int
    runs: tuple[Runs, ...]
    form: BlockForm
    kind: GroupKind = GroupKind.FULL
    window_tokens: int = 0
    backend: str = ""
    layout: str = ""
    heads: int = 0
    head_dim: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """An engine's KV memory: where it is and how blocks lie in it. Several ``groups`` may lie in the same memory."""

    memory: tuple[Memory, ...]
    groups: tuple[KvGroup, ...]
