# SPDX-License-Identifier: Apache-2.0
"""The engine that fills a server for the examples: one prompt, under token ids and under an engine's own hashes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from kvgrpc.client import ChunkOutcome, Content, Hashes, RegisterRequest, SpaceIdentity, Tokens, WorkerClient
from tests.kvdata import LAYERS_OUTERMOST, Image, Kv, shared_memory

BLOCK_SIZE, NUM_BLOCKS, CHUNK = 16, 64, 256
PROMPT = range(1000, 1600)
HASHES = [bytes([1]) * 32, bytes([2]) * 32]
KV = Kv(layers=2, planes=2, heads=2, head_dim=8, itemsize=1)
IDENTITY = SpaceIdentity("example", "1", "uint8", 1, "sha256-u32le", "token-major:2:8:2")
BLOCKS = list(range(5, 5 + len(PROMPT) // CHUNK * CHUNK // BLOCK_SIZE))


@contextmanager
def stored(address: str) -> Iterator[None]:
    """Two workers that have stored the prompt's chunks, one under tokens and one under hashes; both stay."""
    own = replace(IDENTITY, hash_algorithm="example-hashes")
    contents: list[tuple[SpaceIdentity, Content]] = [
        (IDENTITY, Tokens.from_ids(PROMPT)),
        (own, Hashes(HASHES, len(PROMPT))),
    ]
    with ExitStack() as stack:
        for identity, content in contents:
            worker, image = stack.enter_context(sharing(address, identity))
            image.write(BLOCKS)
            blocks = [*BLOCKS, 60, 61, 62, 63, 0, 1]  # of the tail that is no whole chunk
            results = worker.store(content, [blocks[: len(PROMPT) // BLOCK_SIZE]]).result(30)
            assert [result.outcome for result in results] == [ChunkOutcome.STORED], results
        yield


@contextmanager
def sharing(address: str, identity: SpaceIdentity) -> Iterator[tuple[WorkerClient, Image]]:
    """A worker with memory of its own."""
    size_bytes = Image(KV, LAYERS_OUTERMOST, BLOCK_SIZE, NUM_BLOCKS).size_bytes
    with shared_memory(size_bytes) as (name, memory):
        image = Image(KV, LAYERS_OUTERMOST, BLOCK_SIZE, NUM_BLOCKS, buffer=memory)
        layout = image.layout(name)
        worker = WorkerClient(address, RegisterRequest(secrets.token_hex(16), identity, 0, 0, 1, 1, layout))
        try:
            assert worker.start(wait_s=20), worker.problem
            yield worker, image
        finally:
            worker.close()
