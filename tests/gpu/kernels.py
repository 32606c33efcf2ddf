# SPDX-License-Identifier: Apache-2.0
"""What needs torch or CuPy on the engine's side: each in a process of its own.

``python -m tests.gpu.kernels rounds ADDRESS COUNT WHO`` (``client`` or ``server`` waits for events),
``handles ADDRESS``, ``contexts ADDRESS`` or ``refused KIND``.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import secrets
import subprocess
import sys
from importlib import import_module
from typing import Any

from kvgrpc.api import CudaIpcMemory, RegisterRequest
from kvgrpc.client import (
    OWN_HASH_ALGORITHM,
    KvForm,
    NotShareableError,
    SchedulerClient,
    SpaceIdentity,
    WorkerClient,
    kv_layout,
    register_kv_caches,
    stored_form,
)
from kvgrpc.core.types import ChunkOutcome, TokenRange
from tests.cards.engines import prompt

BLOCKS, LAYERS, CHUNK, BLOCK = 64, 4, 64, 16
FORM = KvForm(BLOCK, BLOCKS, block_axis=1, token_axis=2, heads=2, head_dim=64)


def rounds(address: str, count: int, who: str) -> list[int]:
    """Rounds that went wrong; ``who`` waits for the event of a store: the client, or the server by its handle."""
    command = [sys.executable, "-m", "tests.gpu.kernels", "rounds", address, str(count), who]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=50).stdout)


def handles(address: str) -> list[str]:
    """What became of stores that named events nobody can open; then of one without an event."""
    command = [sys.executable, "-m", "tests.gpu.kernels", "handles", address]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=50).stdout)


def contexts(address: str) -> list[bool]:
    """On which cards an engine of the second one has a context, when a store has waited for its event."""
    command = [sys.executable, "-m", "tests.gpu.kernels", "contexts", address]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=50).stdout)


def refused(kind: str) -> str:
    """Why memory of this kind cannot be shared."""
    command = [sys.executable, "-m", "tests.gpu.kernels", "refused", kind]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=60, text=True).stdout


def _engine(address: str) -> tuple[list[Any], WorkerClient, SchedulerClient]:
    import torch

    tensors = [torch.zeros((2, BLOCKS, BLOCK, 2, 64), dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
    form = stored_form(kv_layout(tensors, FORM).groups)
    engine_id = secrets.token_hex(16)
    identity = SpaceIdentity(engine_id, "1", "bfloat16", 1, OWN_HASH_ALGORITHM, form)
    request = RegisterRequest(engine_id, identity, 0, 0, 1, 1, kv_layout(tensors, FORM))
    worker = register_kv_caches(address, tensors, FORM, request)
    scheduler = SchedulerClient(address, engine_id, identity)
    assert worker.start(60) and scheduler.start(60), worker.problem
    return [tensor.view(torch.int16) for tensor in tensors], worker, scheduler


def _rounds(address: str, count: int, who: str) -> list[int]:
    import torch

    words, worker, scheduler = _engine(address)
    again = torch.cuda.Event(interprocess=True)
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
                for _ in range(8):
                    heavy = (heavy @ heavy).clamp(-1, 1)  # the writes come late
            for layer in range(LAYERS):
                words[layer][:, index] = fresh[layer]
            event = again if who == "server" else torch.cuda.Event()
            event.record(stream)
            content = prompt(number * 1000, tokens)
            ready = event.ipc_handle() if who == "server" else event
            results = worker.store(content, [mine], ready=ready).result(30)
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


def _handles(address: str) -> list[str]:
    import torch

    words, worker, scheduler = _engine(address)
    for tensor in words:
        tensor.fill_(7)
    torch.cuda.synchronize()
    content, ids = prompt(1 << 24, CHUNK), list(range(CHUNK // BLOCK))
    memory = kv_layout([tensor.view(torch.bfloat16) for tensor in words], FORM).memory[0]
    assert isinstance(memory, CudaIpcMemory)
    said: list[str] = []
    for handle in (memory.handle, bytes(64), b"x" * 64, None):
        results = worker.store(content, [ids], ready=handle).result(30)
        said += [one.reason or one.outcome.value for one in results]
        said.append(str(scheduler.lookup(f"{len(said)}", content, timeout_s=5).hit_tokens))
    worker.close()
    scheduler.close()
    return said


def _contexts(address: str) -> list[bool]:
    import torch

    torch.cuda.set_device(1)
    _, worker, scheduler = _engine(address)
    event = torch.cuda.Event()
    event.record()
    results = worker.store(prompt(1 << 25, CHUNK), [list(range(CHUNK // BLOCK))], ready=event).result(30)
    assert {one.outcome for one in results} == {ChunkOutcome.STORED}, results
    driver, found = ctypes.CDLL("libcuda.so.1"), list[bool]()
    for ordinal in range(2):
        flags, active = ctypes.c_uint(), ctypes.c_int()
        assert driver.cuDevicePrimaryCtxGetState(ordinal, ctypes.byref(flags), ctypes.byref(active)) == 0
        found.append(bool(active.value))
    worker.close()
    scheduler.close()
    return found


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
        print(json.dumps(_rounds(arguments[0], int(arguments[1]), arguments[2])))
    elif act == "contexts":
        print(json.dumps(_contexts(arguments[0])))
    elif act == "handles":
        print(json.dumps(_handles(arguments[0])))
    else:
        print(_refused(arguments[0]))
