# SPDX-License-Identifier: Apache-2.0
"""docs/gpu.md is true: its blocks store what comes back, on a card that is none."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cards.fake import environment
from tests.cards.test_processes import FLAGS
from tests.served import serving

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/gpu.md").read_text(), re.MULTILINE | re.DOTALL)

BEFORE = """
import random, secrets, sys
from types import SimpleNamespace
from kvgrpc.client import SchedulerClient, TokenRange, Tokens
from tests.cards.fake import CardMemory
from tests.cards.test_client import Tensor

address, engine_id = sys.argv[1], secrets.token_hex(16)
model, revision, kv_world_size, kv_rank, tp_rank, tp_size, kv_tp_size = "my-model", "1", 1, 0, 0, 1, 1
blocks, heads, head_dim = 64, 2, 8
SHAPE, RUN_BYTES = (2, blocks, 16, heads, head_dim), 16 * heads * head_dim * 2
layer_bytes = 2 * blocks * RUN_BYTES


class Event:
    def record(self): ...
    def synchronize(self): ...


torch = SimpleNamespace(cuda=SimpleNamespace(Event=Event))
memory = CardMemory(5 * layer_bytes)
memory.buffer[:] = random.Random(1).randbytes(5 * layer_bytes)
tensors = [Tensor(memory.pointer + layer * layer_bytes, SHAPE) for layer in range(3)]
window_tensors = [Tensor(memory.pointer + layer * layer_bytes, SHAPE) for layer in range(3, 5)]
tokens = Tokens.from_ids(range(128))
block_ids, window_block_ids = [5, 3, 17, 0, 9, 12, 8, 1], [2, 4, 6, 7, 10, 11, 13, 14]


def content(layers, ids):
    planes = [(2 * layer + plane) * blocks * RUN_BYTES for layer in layers for plane in (0, 1)]
    starts = [plane + block * RUN_BYTES for plane in planes for block in ids]
    return [bytes(memory.buffer[start : start + RUN_BYTES]) for start in starts]


def check(*groups):
    # each group's layers and blocks; what was stored comes back in blocks that held something else
    assert [one.outcome.name for one in stored.result()] == ["STORED"], stored.result()
    scheduler = SchedulerClient(address, engine_id, identity)
    assert scheduler.start()
    hit = scheduler.lookup(f"request-{len(groups)}", tokens, timeout_s=10)
    assert hit.hit_tokens == 128, hit
    targets = [[16 * len(groups) + 8 * group + at + 16 for at in range(8)] for group in range(len(groups))]
    assert all(content(layers, ids) != content(layers, to) for (layers, ids), to in zip(groups, targets))
    loaded = worker.retrieve(hit.job_id, TokenRange(0, 128), targets, ready=event).result()
    assert {one.outcome.name for one in loaded} == {"LOADED"}, loaded
    assert all(content(layers, ids) == content(layers, to) for (layers, ids), to in zip(groups, targets))
    assert worker.close()
    scheduler.close()
"""
AFTER = ["check((range(3), block_ids))", "check((range(3), block_ids), (range(3, 5), window_block_ids))"]


def test_the_blocks_are_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(BLOCKS) == len(AFTER)
    program = [BEFORE, *(line for block, check in zip(BLOCKS, AFTER, strict=True) for line in (block, check))]
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    with serving(*FLAGS, module="tests.cards.serve") as server:
        done = subprocess.run(
            [sys.executable, "-c", "\n".join(program), server.address],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr + server.log
