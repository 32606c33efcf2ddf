# SPDX-License-Identifier: Apache-2.0
"""Engines of other block sizes, down to one token, read each other's KV: their tensors say so, and the bytes."""

from __future__ import annotations

import json
import random
import secrets
import subprocess
import sys

import pytest

from kvgrpc.client import (
    OWN_HASH_ALGORITHM,
    KvForm,
    RegisterRequest,
    SchedulerClient,
    SpaceIdentity,
    TokenRange,
    Tokens,
    WorkerClient,
    kv_layout,
    register_kv_caches,
    stored_form,
)
from tests.cards.fake import CardMemory, driver, environment
from tests.cards.test_client import Tensor
from tests.cards.test_processes import FLAGS
from tests.served import serving

POOL, LAYERS, HEADS, HEAD_DIM = 1024, 4, 2, 8  # tokens in a layer's pool; K and V are layers of their own
TOKEN_BYTES = HEADS * HEAD_DIM * 2
PROMPT = Tokens.from_ids(range(128))


class Engine:
    """Its pool of tokens is ``[blocks, block_size, heads, head_dim]`` a layer; other bytes in each engine."""

    def __init__(self, address: str, block_size: int, seed: int) -> None:
        driver()
        self.memory = CardMemory(LAYERS * POOL * TOKEN_BYTES)
        self.memory.buffer[:] = random.Random(seed).randbytes(LAYERS * POOL * TOKEN_BYTES)
        shape = (POOL // block_size, block_size, HEADS, HEAD_DIM)
        tensors = [Tensor(self.memory.pointer + layer * POOL * TOKEN_BYTES, shape) for layer in range(LAYERS)]
        form = KvForm(block_size, POOL // block_size, token_axis=1, heads=HEADS, head_dim=HEAD_DIM)
        layout = kv_layout(tensors, form)
        identity = SpaceIdentity("m", "1", "bfloat16", 1, OWN_HASH_ALGORITHM, stored_form(layout.groups))
        engine_id = secrets.token_hex(16)
        request = RegisterRequest(engine_id, identity, 0, 0, 1, 1, layout)
        self.worker: WorkerClient = register_kv_caches(address, tensors, form, request)
        self.scheduler = SchedulerClient(address, engine_id, identity)
        assert self.worker.start() and self.scheduler.start(), self.worker.problem
        chance = random.Random(seed)
        self.blocks = chance.sample(range(POOL // block_size), PROMPT.num_tokens // block_size)
        self._block_size = block_size

    def tokens(self) -> list[str]:
        """The bytes of the prompt's tokens, in all layers."""
        size = self._block_size
        places = [self.blocks[at // size] * size + at % size for at in range(PROMPT.num_tokens)]
        starts = [(layer * POOL + place) * TOKEN_BYTES for layer in range(LAYERS) for place in places]
        return [bytes(self.memory.buffer[start : start + TOKEN_BYTES]).hex() for start in starts]

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()


def main(address: str, mine: str, theirs: str) -> None:
    first, second = Engine(address, int(mine), 1), Engine(address, int(theirs), 2)
    stored = [one.outcome.name for one in first.worker.store(PROMPT, [first.blocks]).result()]
    hit = second.scheduler.lookup("request", PROMPT, timeout_s=10)
    asked = TokenRange(0, hit.hit_tokens)
    loaded = [one.outcome.name for one in second.worker.retrieve(hit.job_id, asked, [second.blocks]).result()]
    equal = first.tokens() == second.tokens()
    first.close()
    second.close()
    print(json.dumps([stored, hit.hit_tokens, loaded, equal]))


@pytest.mark.parametrize(("mine", "theirs"), [(1, 16), (16, 1), (1, 1), (32, 8)])
def test_what_one_stores_the_other_loads(mine: int, theirs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    with serving(*FLAGS, module="tests.cards.serve") as server:
        command = [sys.executable, "-m", "tests.cards.test_block_sizes", server.address, str(mine), str(theirs)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr + server.log
    assert json.loads(done.stdout) == [["STORED"], 128, ["LOADED"], True]


if __name__ == "__main__":
    main(*sys.argv[1:])
