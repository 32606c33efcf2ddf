# SPDX-License-Identifier: Apache-2.0
"""Engines with memory on a card, each a process of its own that does what its parent says.

with engine_process("fake") as engine:            # or "cuda": a real card
    layout = engine.make(kv, arrangement, 16, 40)
    engine.write(ids, first_token)                # position-coded, from inside the process
    engine.wrong_tokens(ids, first_token)         # [] is good
    engine.untouched(ids)
    engine.start(address, ...); engine.store(...); engine.retrieve(...)    # as a client of a server
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgrpc.api import BlockForm, CudaIpcMemory, KvGroup, Layout, RegisterRequest, Runs, SharedMemory, Tokens
from kvgrpc.client import (
    OWN_HASH_ALGORITHM,
    CopyFuture,
    SchedulerClient,
    SchedulerOptions,
    SpaceIdentity,
    WorkerClient,
    WorkerOptions,
    stored_form,
)
from kvgrpc.core.types import TokenRange
from kvgrpc.transfer import _native
from tests.kvdata import FILL, Arrangement, Image, Kv

if TYPE_CHECKING:
    from tests.cards.fake import LateWrites
    from tests.cards.pool import Pool

WAIT_S = 60.0
START_S = 10.0


class FakeMemory:
    """On the fake driver's card."""

    def __init__(self, size_bytes: int) -> None:
        from tests.cards.fake import CardMemory

        self.memory = CardMemory(size_bytes)
        self.pointer = self.memory.pointer

    def upload(self, data: bytearray) -> None:
        self.memory.buffer[:] = data

    def download(self) -> bytes:
        return bytes(self.memory.buffer)

    def free(self) -> None:
        self.memory.free()


class CudaMemory:
    """On a real card, by the CUDA driver alone, so that nothing but the test allocates."""

    def __init__(self, size_bytes: int, ordinal: int = 0) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._size = size_bytes
        self._check(self._cuda.cuInit(0))
        context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
        self._check(self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal))
        self._check(self._cuda.cuCtxSetCurrent(context))
        self._check(self._cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size_bytes)))
        self.pointer = pointer.value

    def upload(self, data: bytearray) -> None:
        source = (ctypes.c_ubyte * len(data)).from_buffer(data)
        self._check(self._cuda.cuMemcpyHtoD_v2(ctypes.c_uint64(self.pointer), source, ctypes.c_size_t(len(data))))

    def download(self) -> bytes:
        data = (ctypes.c_ubyte * self._size)()
        self._check(self._cuda.cuMemcpyDtoH_v2(data, ctypes.c_uint64(self.pointer), ctypes.c_size_t(self._size)))
        return bytes(data)

    def free(self) -> None:
        self._check(self._cuda.cuMemFree_v2(ctypes.c_uint64(self.pointer)))

    @staticmethod
    def _check(result: int) -> None:
        assert result == 0, f"CUDA error {result}"


MEMORY: dict[str, Callable[[int], FakeMemory | CudaMemory]] = {
    "fake": FakeMemory,
    "cuda": CudaMemory,
    **{f"cuda:{ordinal}": partial(CudaMemory, ordinal=ordinal) for ordinal in range(8)},
}


class Engine:
    """What runs in the process."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._memory: FakeMemory | CudaMemory | None = None
        self._image: Image | None = None
        self._pool: Pool | None = None
        self._apart: list[FakeMemory | CudaMemory] = []
        self._late: LateWrites | None = None
        self._stores: list[CopyFuture] = []
        self._layout: Layout | None = None
        self._clients: tuple[WorkerClient, SchedulerClient] | None = None
        self._lookups = 0

    @property
    def _worker(self) -> WorkerClient:
        assert self._clients is not None
        return self._clients[0]

    @property
    def _scheduler(self) -> SchedulerClient:
        assert self._clients is not None
        return self._clients[1]

    def make(
        self, kv: Kv, arrangement: Arrangement, block_size: int, num_blocks: int, lead: int = 0, tail: int = 0
    ) -> Layout:
        """Memory in an allocation of its own, filled with 0xA5; what it is as a layout."""
        if self._memory is not None:
            self._memory.free()
        self._image = image = Image(kv, arrangement, block_size, num_blocks, lead=lead, tail=tail)
        self._memory = memory = MEMORY[self._kind](image.size_bytes)
        self._upload(image)
        self._layout = exported(image.layout(), memory.pointer)
        return self._layout

    def make_apart(self, layers: int, blocks: int, run: int) -> Layout:
        """Layers in allocations of their own, each block filled with its layer times 16 and its number."""
        one = KvGroup(1, blocks, tuple(Runs(at, 0, 1, 0, 1, 0, run, run) for at in range(layers)), BlockForm.OPAQUE)
        memory: list[CudaIpcMemory] = []
        for layer in range(layers):
            self._apart.append(MEMORY[self._kind](blocks * run))
            self._apart[-1].upload(bytearray(b"".join(bytes([16 * layer + at]) * run for at in range(blocks))))
            handle, uuid, offset, _ = _native.export_memory(self._apart[-1].pointer)
            memory.append(CudaIpcMemory(handle, uuid, offset, blocks * run))
        return Layout(tuple(memory), (one,))

    def free_apart(self, run: int) -> list[list[int]]:
        """What each block begins with, layer by layer."""
        found = [list(memory.download()[::run]) for memory in self._apart]
        while self._apart:
            self._apart.pop().free()
        return found

    def write(self, ids: Sequence[int], first_token: int = 0) -> None:
        image = self._load()
        image.write(ids, first_token)
        self._upload(image)

    def wrong_tokens(self, ids: Sequence[int], first_token: int = 0) -> list[int]:
        return self._load().wrong_tokens(ids, first_token)

    def untouched(self, ids: Sequence[int]) -> bool:
        return self._load().untouched(ids)

    def object_bytes(self, ids: Sequence[int]) -> bytes:
        return self._load().object_bytes(ids)

    # ---- events -----------------------------------------------------------------------------------------------------

    def write_late(self, ids: Sequence[int], first_token: int, gate: str) -> bytes:
        """As ``write``, on a stream of a fake card, once there is a file ``gate``. The handle of an event behind it,
        the same each time."""
        from tests.cards.fake import LateWrites

        image = self._load()
        image.write(ids, first_token)
        self._late = self._late or LateWrites()
        assert isinstance(self._memory, FakeMemory)
        self._late.write(self._memory.memory, bytes(image.memory), gate)
        return self._late.handle

    def begin_store_behind(self, first: int, count: int, ids: Sequence[int], handle: bytes) -> None:
        self._stores.append(self._worker.store(prompt(first, count), [ids], ready=handle))

    def stored(self, wait_s: float = WAIT_S) -> list[str] | None:
        """Outcomes or reasons of the first store that was begun and not asked for; None: it has not ended."""
        if not wait(self._stores[:1], wait_s).done:
            return None
        results = self._stores.pop(0).result()
        return [one.reason or one.outcome.name.lower() for one in results for _ in range(one.count)]

    def take_back(self) -> None:
        """The first of those."""
        self._stores[0].cancel()

    # ---- several groups in one pool of pages ------------------------------------------------------------------------

    def make_pool(self, page: int) -> Layout:
        """Memory of a Pool, filled with 0xA5."""
        from tests.cards.pool import Pool

        self._pool = pool = Pool(page)
        self._memory = memory = MEMORY[self._kind](pool.size_bytes)
        self.clear()
        self._layout = exported(pool.layout(), memory.pointer)
        return self._layout

    def clear(self) -> None:
        assert self._memory is not None and self._pool is not None
        self._memory.upload(bytearray([FILL]) * self._pool.size_bytes)

    def put(self, ids: list[list[int]], seed: int) -> None:
        assert self._memory is not None and self._pool is not None
        data = bytearray(self._memory.download())
        self._pool.put(np.frombuffer(data, np.uint8), ids, seed)
        self._memory.upload(data)

    def holds(self, ids: list[list[int]], seed: int, first: Sequence[int]) -> bool:
        """Whether the memory is what ``put`` makes of one that was cleared, byte by byte."""
        assert self._memory is not None and self._pool is not None
        wanted = bytearray([FILL]) * self._pool.size_bytes
        self._pool.put(np.frombuffer(wanted, np.uint8), ids, seed, first)
        return wanted == self._memory.download()

    def store_groups(self, first: int, count: int, ids: list[list[int]]) -> list[int]:
        """Which groups of each chunk are there now."""
        results = self._worker.store(prompt(first, count), ids).result(WAIT_S)
        return [one.groups for one in results for _ in range(one.count)]

    def retrieve_groups(self, job_id: bytes, count: int, ids: list[list[int]]) -> list[str]:
        results = self._worker.retrieve(job_id, TokenRange(0, count), ids).result(WAIT_S)
        return [one.outcome.name.lower() for one in results for _ in range(one.count)]

    def _load(self) -> Image:
        assert self._image is not None and self._memory is not None
        self._image.memory[:] = memoryview(self._memory.download())
        return self._image

    def _upload(self, image: Image) -> None:
        assert self._memory is not None
        self._memory.upload(bytearray(image.memory))

    # ---- as a client ------------------------------------------------------------------------------------------------

    def start(
        self, address: str, engine_id: str, ranks: tuple[int, int, int, int] = (0, 0, 1, 1), name: str = ""
    ) -> str:
        """Registers; "" or why not. ``ranks``: kv_rank, tp_rank, tp_size, kv_tp_size."""
        assert self._layout is not None
        kv_rank, tp_rank, tp_size, kv_tp_size = ranks
        form = stored_form(self._layout.groups)
        model = f"pool {self._pool.page}" if self._pool is not None else ""
        if self._image is not None:
            kv = self._image.kv
            model = f"{kv.layers}x{kv.planes}x{kv.heads}x{kv.head_dim}"
        identity = SpaceIdentity(model, "1", "bfloat16", kv_tp_size, OWN_HASH_ALGORITHM, form)
        request = RegisterRequest(engine_id, identity, kv_rank, tp_rank, tp_size, kv_tp_size, self._layout)
        worker = WorkerClient(address, request, WorkerOptions(client_id=name))
        scheduler = SchedulerClient(address, engine_id, identity, SchedulerOptions(tp_size=tp_size))
        self._clients = worker, scheduler
        ready = worker.start(START_S)
        return "" if ready and scheduler.start(START_S) else str(worker.problem)

    def store(self, first: int, count: int, ids: Sequence[int]) -> list[str]:
        """Outcomes of the chunks of a prompt (``count`` token ids from ``first`` on) that lies in ``ids``."""
        results = self._worker.store(prompt(first, count), [ids]).result(WAIT_S)
        return [one.outcome.name.lower() for one in results for _ in range(one.count)]

    def begin_store(self, first: int, count: int, ids: Sequence[int]) -> None:
        self._worker.store(prompt(first, count), [ids])

    def lookup(self, first: int, count: int) -> tuple[bytes, int]:
        self._lookups += 1
        hit = self._scheduler.lookup(f"{os.getpid()}-{self._lookups}", prompt(first, count), timeout_s=10)
        return hit.job_id, hit.hit_tokens

    def retrieve(self, job_id: bytes, count: int, ids: Sequence[int]) -> list[str]:
        results = self._worker.retrieve(job_id, TokenRange(0, count), [ids]).result(WAIT_S)
        return [one.outcome.name.lower() for one in results for _ in range(one.count)]

    def begin_retrieve(self, job_id: bytes, count: int, ids: Sequence[int]) -> None:
        self._worker.retrieve(job_id, TokenRange(0, count), [ids])

    def stop(self) -> bool:
        self._scheduler.close()
        return self._worker.close()


def exported(layout: Layout, pointer: int) -> Layout:
    """The layout in an allocation of this process, shared by handle."""
    handle, uuid, offset, _ = _native.export_memory(pointer)
    assert offset == 0
    pieces = [piece for piece in layout.memory if isinstance(piece, SharedMemory)]
    shared = tuple(CudaIpcMemory(handle, uuid, piece.offset_bytes, piece.size_bytes) for piece in pieces)
    return replace(layout, memory=shared)


def prompt(first: int, count: int) -> Tokens:
    return Tokens(array("I", range(first, first + count)).tobytes())


class EngineProcess:
    """An Engine as its parent sees it: every method of it, by name; ``begin`` and ``end`` apart for several at once."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self.process = process
        self._pipe = pipe

    def begin(self, act: str, *arguments: Any, **more: Any) -> None:
        self._pipe.send((act, arguments, more))

    def end(self) -> Any:
        assert self._pipe.poll(2 * WAIT_S), "the engine does not answer"
        good, answer = self._pipe.recv()
        assert good, answer
        return answer

    def __getattr__(self, act: str) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            self.begin(act, *arguments, **more)
            return self.end()

        return call

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def run(kind: str, pipe: Connection) -> None:
    engine = Engine(kind)
    while True:
        try:
            act, arguments, more = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(engine, act)(*arguments, **more)))
        except Exception as error:  # noqa: BLE001 - outermost: its parent is told
            pipe.send((False, repr(error)))


@contextmanager
def engine_process(kind: str) -> Iterator[EngineProcess]:
    """Started afresh: a process that has used CUDA cannot be forked."""
    context = multiprocessing.get_context("spawn")
    mine, other = context.Pipe()
    process = context.Process(target=run, args=(kind, other), daemon=True)
    process.start()
    other.close()
    try:
        yield EngineProcess(process, mine)
    finally:
        mine.close()
        process.join(5)
        process.kill()
        process.join()
        for left in Path("/dev/shm").glob(f"kvgrpc-fake-{process.pid}-*"):  # of one that was killed
            left.unlink()
