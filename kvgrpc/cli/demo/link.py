# SPDX-License-Identifier: Apache-2.0
"""What an engine does with the cache: its scheduler looks up, its worker shares the pool, stores and retrieves."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import click
import torch

from kvgrpc.cli.demo.paged import BlockPool, PoolShape
from kvgrpc.client import (
    OWN_HASH_ALGORITHM,
    BlockForm,
    ChunkOutcome,
    ChunkResult,
    KvGroup,
    Layout,
    LookupResult,
    RegisterRequest,
    Runs,
    SchedulerClient,
    SharedMemory,
    SpaceIdentity,
    TokenRange,
    Tokens,
    WorkerClient,
    stored_form,
)

WAIT_S = 30.0
REQUEST_ID = "demo"


class CacheError(click.ClickException):
    """The server could not be used; the message says why."""


def pool_layout(name: str, shape: PoolShape) -> Layout:
    """The pool as the server has to see it: one family of runs over all layers and planes, tokens in order."""
    plane_bytes = shape.num_blocks * shape.run_bytes
    runs = Runs(
        memory_index=0,
        base_bytes=0,
        layers=shape.layers,
        layer_stride_bytes=2 * plane_bytes,
        planes=2,
        plane_stride_bytes=plane_bytes,
        block_stride_bytes=shape.run_bytes,
        run_bytes=shape.run_bytes,
    )
    group = KvGroup(
        block_size=shape.block_size,
        num_blocks=shape.num_blocks,
        runs=(runs,),
        form=BlockForm.TOKEN_MAJOR,
        heads=shape.kv_heads,
        head_dim=shape.head_dim,
    )
    return Layout((SharedMemory(name, 0, shape.size_bytes),), (group,))


class CacheLink:
    """One engine of one process: its own engine id, one scheduler and one worker."""

    def __init__(self, address: str, pool: BlockPool, revision: str) -> None:
        layout = pool_layout(pool.name, pool.shape)
        identity = SpaceIdentity("kvgrpc-demo", revision, "float32", 1, OWN_HASH_ALGORITHM, stored_form(layout.groups))
        engine_id = secrets.token_hex(16)
        register = RegisterRequest(engine_id, identity, kv_rank=0, tp_rank=0, tp_size=1, kv_tp_size=1, layout=layout)
        self._scheduler = SchedulerClient(address, engine_id, identity)
        self._worker = WorkerClient(address, register)
        for client in (self._scheduler, self._worker):
            if not client.start(WAIT_S):
                raise CacheError(f"no session with {address}: {client.problem or 'no answer'}")
        self.chunk_tokens = self._scheduler.chunk_tokens

    def store(self, prompt: torch.Tensor, block_ids: Sequence[int]) -> int:
        """Stores the prompt's whole chunks; answers how many tokens can be found from now on."""
        results = self._worker.store(_tokens(prompt), (block_ids,)).result(WAIT_S)
        return self._prefix_tokens(results, {ChunkOutcome.STORED, ChunkOutcome.RESIDENT})

    def lookup(self, prompt: torch.Tensor) -> LookupResult:
        return self._scheduler.lookup(REQUEST_ID, _tokens(prompt), timeout_s=WAIT_S)

    def retrieve(self, hit: LookupResult, block_ids: Sequence[int]) -> int:
        """Loads the hit into the blocks; answers how many tokens from the start on are there."""
        if not hit.hit_tokens:
            return 0
        results = self._worker.retrieve(hit.job_id, TokenRange(0, hit.hit_tokens), (block_ids,)).result(WAIT_S)
        return self._prefix_tokens(results, {ChunkOutcome.LOADED})

    def close(self) -> None:
        self._worker.close()
        self._scheduler.close()

    def _prefix_tokens(self, results: Sequence[ChunkResult], good: set[ChunkOutcome]) -> int:
        chunks = 0
        for result in results:
            if result.outcome not in good:
                break
            chunks += result.count
        return chunks * self.chunk_tokens


def _tokens(prompt: torch.Tensor) -> Tokens:
    return Tokens.from_ids(int(token) for token in prompt)
