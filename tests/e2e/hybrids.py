# SPDX-License-Identifier: Apache-2.0
"""An engine whose groups need different things of a prefix and share one pool of pages; every byte is compared.

``python -m tests.e2e.hybrids ADDRESS SEED PROMPT...`` is one in a process of its own: it loads each prompt into blocks
that ``SEED`` chooses and prints the hit chunks as a JSON list; a wrong byte anywhere in its memory is its end.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import random
import sys
from collections.abc import Iterator, Sequence

import numpy as np
from typing_extensions import Buffer

from kvgrpc import api
from kvgrpc.client import SchedulerClient, WorkerClient
from kvgrpc.core.types import SpaceIdentity, TokenRange
from kvgrpc.transfer.layout import stored_form
from tests.e2e.disk_server import wait_known
from tests.e2e.harness import outcomes
from tests.kvdata import shared_memory
from tests.pooled import Bytes, Ids, put, take

CHUNK, LAYERS, BLOCKS = 64, 2, 160
FILL = 0xA5
WINDOW, LOCAL, STATE = 72, 32, 32
OBJECTS = 4
"""Of a chunk: the two windows are one."""


def groups(scale: int = 1) -> tuple[api.KvGroup, ...]:
    """``scale`` times 512 bytes are a page."""

    def group(kind: api.GroupKind, block_size: int, run_bytes: int, window: int = 0) -> api.KvGroup:
        page = 512 * scale
        runs = (api.Runs(0, 0, LAYERS, BLOCKS * page, 1, 0, page, run_bytes * scale),)
        return api.KvGroup(block_size, BLOCKS, runs, api.BlockForm.OPAQUE, kind, window, backend="X", layout="Y")

    return (
        group(api.GroupKind.FULL, 16, 256),
        group(api.GroupKind.SLIDING_WINDOW, 16, 384, WINDOW),
        group(api.GroupKind.RECURRENT, STATE, 512),
        group(api.GroupKind.CHUNKED_LOCAL, 16, 128, LOCAL),
        group(api.GroupKind.SLIDING_WINDOW, 16, 256, WINDOW),
    )


def first_needed(hit_tokens: int) -> list[int]:
    """The first token that each group needs of a hit."""
    window = max(hit_tokens - WINDOW, 0)
    return [0, window, hit_tokens - STATE, hit_tokens - LOCAL, window]


def first_stored(hit_tokens: int) -> list[int]:
    """The first token in the objects that such a hit has, since whole objects are restored."""
    window = max(hit_tokens - WINDOW, 0) // CHUNK * CHUNK
    return [0, window, hit_tokens - STATE, hit_tokens - LOCAL, window]


class Pages:
    """The pool."""

    def __init__(self, buffer: Buffer, seed: int, scale: int = 1) -> None:
        self.size_bytes = LAYERS * BLOCKS * 512 * scale
        self.groups = groups(scale)
        pages = np.frombuffer(memoryview(buffer), np.uint8)[: self.size_bytes]
        self.pages: Bytes = pages.reshape(LAYERS, BLOCKS, 512 * scale)
        self.pages[:] = FILL
        self._rng = random.Random(seed)

    def take(self, tokens: int, lack_below: Sequence[int] = (0,) * 5) -> Ids:
        return take(self._rng, self.groups, tokens, lack_below)

    def put(self, ids: Ids, pages: Bytes, first: Sequence[int] = (0,) * 5, prompt: int = 0) -> None:
        """Position-coded data from these tokens on, in a copy of the pages."""
        put(pages, self.groups, ids, first, prompt)


def tokens(count: int, prompt: int = 0) -> api.Tokens:
    return api.Tokens.from_ids(range(7 + 1_000_000 * prompt, 7 + 1_000_000 * prompt + count))


# ---- with a server in another process -------------------------------------------------------------------------------

CHUNKS = 4
SCALE = 128
"""A page is 64 KiB, a chunk of all groups 1.1 MiB."""
FLAGS = ("--chunk-tokens", str(CHUNK))
ENGINE_ID = "hybrid-engine-of-the-tests"


class HybridEngine(Pages):
    """A worker with its memory, and a scheduler."""

    def __init__(self, address: str, memory: tuple[str, mmap.mmap], seed: int) -> None:
        super().__init__(memory[1], seed, SCALE)
        identity = SpaceIdentity("hybrid", "", "bfloat16", 1, api.OWN_HASH_ALGORITHM, stored_form(self.groups))
        layout = api.Layout((api.SharedMemory(memory[0], 0, self.size_bytes),), self.groups)
        engine_id = f"{ENGINE_ID}-{seed}"
        request = api.RegisterRequest(engine_id, identity, 0, 0, 1, 1, layout)
        self.worker, self.scheduler = WorkerClient(address, request), SchedulerClient(address, engine_id, identity)
        self._lookups = 0

    def store(self, prompt: int, chunks: int = CHUNKS, lack_below: Sequence[int] = (0,) * 5) -> list[str]:
        ids = self.take(chunks * CHUNK, lack_below)
        self.put(ids, self.pages, prompt=prompt)
        return outcomes(self.worker.store(tokens(chunks * CHUNK, prompt), ids).result(60))

    def load(self, prompt: int, chunks: int = CHUNKS, wait_s: float = 20) -> int:
        """Chunks of the hit, all of which came back as it needs them; everything else in memory is as it was."""
        self._lookups += 1
        name = f"{prompt}-{self._lookups}"
        found = self.scheduler.lookup(name, tokens(chunks * CHUNK, prompt), timeout_s=wait_s)
        end, count = found.hit_tokens, found.hit_tokens // CHUNK
        if count:
            self.pages[:] = FILL
            ids = self.take(end, first_needed(end) if self._lookups % 2 else (0,) * 5)
            results = outcomes(self.worker.retrieve(found.job_id, TokenRange(0, end), ids).result(60))
            assert results == ["LOADED"] * count, results
            wanted = np.full_like(self.pages, FILL)
            self.put(ids, wanted, first_stored(end), prompt)
            assert np.array_equal(self.pages, wanted), f"prompt {prompt} came back with wrong bytes"
        self.scheduler.discard(name)
        return count


@contextlib.contextmanager
def hybrid_engine(address: str, seed: int) -> Iterator[HybridEngine]:
    with shared_memory(LAYERS * BLOCKS * 512 * SCALE) as memory:
        one = HybridEngine(address, memory, seed)
        try:
            assert one.worker.start(20)
            assert one.scheduler.start(20)
            wait_known(address, one.worker, one.scheduler)
            yield one
        finally:
            one.scheduler.close()
            one.worker.close(timeout_s=2)
            del one.pages


def main(address: str, seed: str, *prompts: str) -> None:
    with hybrid_engine(address, int(seed)) as one:
        print(json.dumps([one.load(int(prompt)) for prompt in prompts]))


if __name__ == "__main__":
    main(*sys.argv[1:])
