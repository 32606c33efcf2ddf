# SPDX-License-Identifier: Apache-2.0
"""Names and shapes for the model test: engines, prompts, and commands about them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from kvgrpc.core.types import MS, CoreLimits, Geometry, GroupGeometry, Piece, Registration, S, SpaceIdentity
from tests.model.oracle import Kind

CHUNK_TOKENS = 4
TOKEN_BYTES = 64
OBJECT_BYTES = CHUNK_TOKENS * TOKEN_BYTES
NUM_BLOCKS = 1000
ARENA_BYTES = 4096 * OBJECT_BYTES
KINDS = [Kind(1, 1, 1), Kind(3, 1, 1), Kind(2, 2, 2), Kind(4, 2, 2), Kind(1, 1, 2)]
"""Alone; MLA with three readers; plain tensor parallelism; replicated heads; a pipeline of two stages."""


def limits(slice_tokens: int) -> CoreLimits:
    return CoreLimits(
        chunk_tokens=CHUNK_TOKENS,
        page_bytes=2 * TOKEN_BYTES,
        slice_bytes=slice_tokens * TOKEN_BYTES,
        lease_ns=60 * S,
        record_ns=600 * S,
        read_record_ns=5 * S,
        pin_share=1.0,
        hold_share=1.0,
        prefetch_share=1.0,
        settling_share=1.0,
        prefetch_wait_ns=2 * S,
        reattach_grace_ns=500 * MS,
    )


def identity(kv_world_size: int) -> SpaceIdentity:
    return SpaceIdentity(f"model-{kv_world_size}", "r1", "bfloat16", kv_world_size, "engine-hash", "opaque:SIM:flat:1")


def keys_of(path: list[int]) -> list[bytes]:
    """Chained keys: prompts that begin alike share keys."""
    return [hashlib.sha256(bytes(path[: depth + 1])).digest()[:16] for depth in range(len(path))]


@dataclass
class Member:
    """One client of an engine."""

    client_id: str
    session_id: bytes
    kv_rank: int = 0
    tp_rank: int = 0
    is_worker: bool = True
    attached: bool = True
    ended: bool = False
    """Its session is over: SessionEnded has come out."""
    taken_over: bool = False
    """Another process wants its id: its session is over, grace or not."""
    broken_ns: int = 0
    mapping_id: int = 0
    """0: nothing registered."""
    calls: int = 0


@dataclass
class EngineModel:
    """One engine."""

    name: str
    kind: Kind
    block_size: int
    scheduler: Member
    workers: list[Member] = field(default_factory=list)
    drained: bool = False

    def readers(self, ranks: tuple[int, ...]) -> set[tuple[int, int]]:
        """Who reads objects of these ranks; as long as nobody shares memory, one reader an object is assumed."""
        shared = any(worker.mapping_id for worker in self.workers)
        tp_size = self.kind.tp_size
        kind = self.kind if shared else Kind(tp_size, tp_size, self.kind.kv_world_size)
        return {reader for rank in ranks for reader in kind.readers_of(rank)}

    def members(self) -> list[Member]:
        return [self.scheduler, *self.workers]

    @property
    def engine_id(self) -> str:
        return f"engine-{self.name}-0123456789"

    def registration(self, worker: Member, mapping_id: int) -> Registration:
        block_bytes = self.block_size * TOKEN_BYTES
        return Registration(
            engine_id=self.engine_id,
            identity=identity(self.kind.kv_world_size),
            kv_rank=worker.kv_rank,
            tp_rank=worker.tp_rank,
            tp_size=self.kind.tp_size,
            kv_tp_size=self.kind.kv_tp_size,
            geometry=Geometry((GroupGeometry(self.block_size, NUM_BLOCKS, block_bytes),)),
            memory_bytes=NUM_BLOCKS * block_bytes,
            mapping_id=mapping_id,
            layout_digest=bytes([mapping_id % 256]),
        )


def piece_bytes(piece: Piece, block_bytes: int) -> int:
    """Bytes that a piece moves: its blocks, as far as they lie in its span."""
    first = piece.first_block[0] * block_bytes
    last = first + len(piece.block_ids[0]) * block_bytes
    return max(0, min(last, piece.span[1]) - max(first, piece.span[0]))
