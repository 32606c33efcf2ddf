# SPDX-License-Identifier: Apache-2.0
"""What needs torch or CuPy on the engine's side: each in a process of its own.

``python -m tests.gpu.kernels rounds ADDRESS COUNT`` or ``refused KIND``.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
from importlib import import_module
from typing import Any

from kvgrpc.api import RegisterRequest
from kvgrpc.client import (
    OWN_HASH_ALGORITHM,
    KvForm,
    NotShareableError,
    SchedulerClient,
    SpaceIdentity,
    kv_layout,
    register_kv_caches,
    stored_form,
)
from kvgrpc.core.types import ChunkOutcome, TokenRange
from tests.cards.engines import prompt

BLOCKS, LAYERS, CHUNK, BLOCK = 64, 4, 64, 16
FORM = KvForm(BLOCK, BLOCKS, block_axis=1, token_axis=2, heads=2, head_dim=64)


def rounds(address: str, count: int) -> list[int]:
    """Rounds that went wrong."""
    command = [sys.executable, "-m", "tests.gpu.kernels", "rounds", address, str(count)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=50).stdout)


def refused(kind: str) -> str:
    """Why memory of this kind cannot be shared."""
    command = [sys.executable, "-m", "tests.gpu.kernels", "refused", kind]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=60, text=True).stdout


def _rounds(address: str, count: int) -> list[int]:
    import torch

    tensors = [torch.zeros((2, BLOCKS, BLOCK, 2, 64), dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
    words = [tensor.view(torch.int16) for tensor in tensors]
    form = stored_form(kv_layout(tensors, FORM).groups)
    identity = SpaceIdentity("rounds", "1", "bfloat16", 1, OWN_HASH_ALGORITHM, form)
    engine_id = secrets.token_hex(16)
    request = RegisterRequest(engine_id, identity, 0, 0, 1, 1, kv_layout(tensors, FORM))
    worker = register_kv_caches(address, tensors, FORM, request)
    scheduler = SchedulerClient(address, engine_id, identity)
    assert worker.start(60) and scheduler.start(60), worker.problem
    chance = random.Random(1)
    stream = torch.cuda.Stream()
    heavy: Any = torch.randn((4096, 4096), device="cuda", dtype=torch.bfloat16)
    bad: list[int] = []
    tokens = 2 * CHUNK
    with torch.cuda.stream(stream):
        for number in range(count):
            ids = chance.sample(range(BLOCKS), 2 * tokens // BLOCK)
            mine, other = ids[: tokens // BLOCK], ids[tokens // BLOCK :]
            index, place = torch.tensor(mine, device="cuda"), torch.tensor(other, device="cuda")
            fresh = torch.randint(-32768, 32767, (LAYERS, 2, len(mine), BLOCK, 2, 64), dtype=torch.int16, device="cuda")
            stream.synchronize()
            if number % 2:
                heavy = (heavy @ heavy).clamp(-1, 1)  # the writes come late
            for layer in range(LAYERS):
                words[layer][:, index] = fresh[layer]
            event = torch.cuda.Event()
            event.record(stream)
            content = prompt(number * 1000, tokens)
            results = worker.store(content, [mine], ready=event).result(30)
            assert {one.outcome for one in results} == {ChunkOutcome.STORED}, results
            for layer in range(LAYERS):
                words[layer][:, index] = 0
            hit = scheduler.lookup(str(number), content, timeout_s=5)
            assert hit.hit_tokens == tokens
            results = worker.retrieve(hit.job_id, TokenRange(0, tokens), [other]).result(30)
            same = [torch.equal(words[layer][:, place], fresh[layer]) for layer in range(LAYERS)]
            if {one.outcome for one in results} != {ChunkOutcome.LOADED} or not all(same):
                bad.append(number)
            scheduler.discard(str(number))
    worker.close()
    scheduler.close()
    return bad


def _refused(kind: str) -> str:
    if kind == "expandable":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        import torch

        tensors: list[Any] = [torch.zeros((BLOCKS, 1024), device="cuda")]
    else:
        cupy: Any = import_module("cupy")
        take = cupy.cuda.malloc_managed if kind == "managed" else cupy.cuda.malloc_async
        tensors = [cupy.ndarray((BLOCKS, 1024), cupy.float32, take(BLOCKS * 4096))]
    try:
        kv_layout(tensors, KvForm(BLOCK, BLOCKS))
    except NotShareableError as error:
        return str(error)
    return "it was shared"


if __name__ == "__main__":
    act, *arguments = sys.argv[1:]
    if act == "rounds":
        print(json.dumps(_rounds(arguments[0], int(arguments[1]))))
    else:
        print(_refused(arguments[0]))
