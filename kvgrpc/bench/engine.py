# SPDX-License-Identifier: Apache-2.0
"""Engines of the benchmark: shared memory with a paging, and prompts that are stored or not."""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory

from kvgrpc import api
from kvgrpc.bench.processes import START_S, BenchError
from kvgrpc.client.worker import WorkerClient
from kvgrpc.core.types import ChunkOutcome, SpaceIdentity
from kvgrpc.transfer.layout import stored_form

BLOCK, CHUNK = 16, 256
LENGTHS = {"1K": 1 << 10, "8K": 8 << 10, "32K": 32 << 10, "128K": 128 << 10}
KINDS = {"tokens": api.OWN_HASH_ALGORITHM, "hashes": "bench-sha256"}
"""How a prompt is named, and the hash algorithm of the space that is asked."""


@dataclass(frozen=True, slots=True)
class Paging:
    """Engine memory of ``num_blocks`` blocks, layer by layer, plane by plane (K and V)."""

    layers: int
    planes: int
    run_bytes: int
    num_blocks: int
    block_size: int = BLOCK

    @property
    def object_bytes(self) -> int:
        return self.layers * self.planes * self.run_bytes * (CHUNK // self.block_size)

    @property
    def size_bytes(self) -> int:
        return self.layers * self.planes * self.run_bytes * self.num_blocks

    def layout(self, name: str) -> api.Layout:
        plane, run = self.run_bytes * self.num_blocks, self.run_bytes
        runs = api.Runs(0, 0, self.layers, plane * self.planes, self.planes, plane, run, run)
        form = f"{self.layers}x{self.planes}x{run}"
        group = api.KvGroup(
            self.block_size, self.num_blocks, (runs,), api.BlockForm.OPAQUE, backend="bench", layout=form
        )
        return api.Layout((api.SharedMemory(name, 0, self.size_bytes),), (group,))

    def identity(self, hash_algorithm: str = api.OWN_HASH_ALGORITHM) -> SpaceIdentity:
        return SpaceIdentity("bench", "", "uint8", 1, hash_algorithm, stored_form(self.layout("").groups))


@contextmanager
def shared_memory(size_bytes: int) -> Generator[SharedMemory, None, None]:
    """Memory of this size, every page of it touched."""
    memory = SharedMemory(create=True, size=size_bytes)
    try:
        assert memory.buf is not None, "it is open"
        memory.buf[:] = bytes(range(256)) * (size_bytes // 256)
        yield memory
    finally:
        memory.close()
        memory.unlink()


@contextmanager
def worker(
    address: str, engine_id: str, paging: Paging, identity: SpaceIdentity
) -> Generator[WorkerClient, None, None]:
    """An attached worker with memory of this paging."""
    with shared_memory(paging.size_bytes) as memory:
        client = WorkerClient(address, api.RegisterRequest(engine_id, identity, 0, 0, 1, 1, paging.layout(memory.name)))
        try:
            if not client.start(START_S):
                raise BenchError(f"no session with {address}: {client.problem or 'no answer'}")
            yield client
        finally:
            client.close()


# ---- prompts --------------------------------------------------------------------------------------------------------

_SMALL = Paging(1, 1, 512, LENGTHS["128K"] // BLOCK)
"""8 KiB a chunk: what a lookup costs does not depend on the size of objects."""


def identities() -> dict[str, SpaceIdentity]:
    """The identity of the space of each kind of prompt."""
    return {kind: _SMALL.identity(algorithm) for kind, algorithm in KINDS.items()}


def prompt(kind: str, num_tokens: int, stored: bool) -> api.Content:
    """A prompt that ``store_prompts`` has stored, or one that differs in its first token (and so in every hash)."""
    if kind == "tokens":
        return api.Tokens(array("I", [0 if stored else 1 << 31, *range(1, num_tokens)]).tobytes())
    hashes = [hashlib.sha256(f"{stored} {at}".encode()).digest() for at in range(num_tokens // CHUNK)]
    return api.Hashes(tuple(hashes), num_tokens)


def store_prompts(address: str) -> None:
    """Stores the longest prompt of each kind, of which the others are prefixes."""
    for kind, identity in identities().items():
        with worker(address, secrets.token_hex(16), _SMALL, identity) as client:
            results = client.store(prompt(kind, LENGTHS["128K"], True), (range(_SMALL.num_blocks),)).result(START_S)
        if {result.outcome for result in results} != {ChunkOutcome.STORED}:
            raise BenchError(f"the prompts could not be stored: {results}")
