# SPDX-License-Identifier: Apache-2.0
"""The smallest engine: one process stores the KV of a prompt, another one finds it and reads it back.

    kvgrpc serve                        # in one terminal
    python examples/python_client.py    # in another; with the server's address behind it if that is not the default

An engine has one SchedulerClient (it looks up) and a WorkerClient for each process with KV memory (it stores and
retrieves). Here both live in one process, and the "KV cache" is made-up bytes: 2 layers x (K, V) x 64 blocks.
docs/python.md explains each step.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import secrets
import subprocess
import sys
from pathlib import Path

from kvgrpc.client import (
    OWN_HASH_ALGORITHM,
    BlockForm,
    ChunkOutcome,
    KvGroup,
    Layout,
    RegisterRequest,
    Runs,
    SchedulerClient,
    SharedMemory,
    SpaceIdentity,
    TokenRange,
    Tokens,
    WorkerClient,
    default_address,
)

BLOCK_SIZE, NUM_BLOCKS, LAYERS, PLANES, HEADS, HEAD_DIM = 16, 64, 2, 2, 2, 8
RUN_BYTES = BLOCK_SIZE * HEADS * HEAD_DIM  # one block of one plane of one layer; elements of one byte
PLANE_BYTES = NUM_BLOCKS * RUN_BYTES
POOL_BYTES = LAYERS * PLANES * PLANE_BYTES
PROMPT = range(1000, 1600)  # 600 tokens: two chunks of 256 can be cached, the rest cannot

# Equal identities share data, unequal ones never: name everything that changes the bytes.
IDENTITY = SpaceIdentity(
    model="example",
    revision="1",
    kv_dtype="uint8",
    kv_world_size=1,
    hash_algorithm=OWN_HASH_ALGORITHM,  # the server hashes the tokens
    stored_form=f"token-major:{HEADS}:{HEAD_DIM}:{PLANES}",
)


class Engine:
    """KV memory as [layer][plane][block][token], shared once with the server, and the two clients."""

    def __init__(self, address: str) -> None:
        self._file = Path("/dev/shm") / f"kvgrpc-example-{secrets.token_hex(8)}"
        runs = Runs(
            memory_index=0,
            base_bytes=0,
            layers=LAYERS,
            layer_stride_bytes=PLANES * PLANE_BYTES,
            planes=PLANES,
            plane_stride_bytes=PLANE_BYTES,
            block_stride_bytes=RUN_BYTES,
            run_bytes=RUN_BYTES,
        )
        group = KvGroup(BLOCK_SIZE, NUM_BLOCKS, (runs,), BlockForm.TOKEN_MAJOR, heads=HEADS, head_dim=HEAD_DIM)
        layout = Layout((SharedMemory(self._file.name, 0, POOL_BYTES),), (group,))
        engine_id = secrets.token_hex(16)  # a secret that all processes of this engine share, and no other engine
        request = RegisterRequest(engine_id, IDENTITY, kv_rank=0, tp_rank=0, tp_size=1, kv_tp_size=1, layout=layout)
        self.scheduler = SchedulerClient(address, engine_id, IDENTITY)
        self.worker = WorkerClient(address, request)

        descriptor = os.open(self._file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        os.posix_fallocate(descriptor, 0, POOL_BYTES)
        self.memory = mmap.mmap(descriptor, POOL_BYTES)
        os.close(descriptor)
        for client in (self.scheduler, self.worker):
            if not client.start(wait_s=10):  # never raises: later calls would be misses until the server is there
                problem = client.problem
                self.close()
                sys.exit(f"gave up on {address}: {problem}")

    def digest(self, blocks: list[int]) -> str:
        starts = (plane * PLANE_BYTES + b * RUN_BYTES for plane in range(LAYERS * PLANES) for b in blocks)
        return hashlib.sha256(b"".join(self.memory[at : at + RUN_BYTES] for at in starts)).hexdigest()

    def close(self) -> None:
        self.worker.close()  # before the memory goes
        self.scheduler.close()
        self._file.unlink()


def main(address: str, part: str = "store", expected: str = "") -> None:
    engine = Engine(address)
    try:
        tokens = Tokens.from_ids(PROMPT)
        if part == "store":
            blocks = list(range(len(PROMPT) // BLOCK_SIZE))  # in token order; any ids will do
            engine.memory[:] = random.Random(1).randbytes(POOL_BYTES)  # "computes" the prompt: the same in every run
            results = engine.worker.store(tokens, [blocks]).result()
            print("stored", results)
            whole = len(PROMPT) // engine.worker.chunk_tokens * engine.worker.chunk_tokens // BLOCK_SIZE
            good = {ChunkOutcome.STORED, ChunkOutcome.RESIDENT}  # RESIDENT: an earlier run stored it
            assert results and all(result.outcome in good for result in results), results
            child = [sys.executable, __file__, address, "retrieve", engine.digest(blocks[:whole])]
            sys.exit(subprocess.run(child, check=False).returncode)

        hit = engine.scheduler.lookup("request-1", tokens, timeout_s=5)
        print("found", hit)
        if not hit.hit_tokens:
            sys.exit(f"a miss: {hit.reason or 'nothing is stored under this identity'}")
        blocks = list(reversed(range(NUM_BLOCKS)))[: hit.hit_tokens // BLOCK_SIZE]  # others than the first engine's
        results = engine.worker.retrieve(hit.job_id, TokenRange(0, hit.hit_tokens), [blocks]).result()
        print("retrieved", results)
        engine.scheduler.discard("request-1")  # the request is over
        loaded = all(result.outcome is ChunkOutcome.LOADED for result in results)
        if not loaded or engine.digest(blocks) != expected:
            sys.exit("the bytes are not the stored ones")
        print("the bytes are the stored ones")
    finally:
        engine.close()


if __name__ == "__main__":
    main(*(sys.argv[1:] or [default_address()]))
