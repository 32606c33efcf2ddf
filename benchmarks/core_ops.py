# SPDX-License-Identifier: Apache-2.0
"""Microbenchmark: the core alone, then calls and copies against a server of this machine (``make bench``).

Prompts have 128K tokens, 512 chunks. A lookup in the core includes the end of its request.

Client, server and engine memory share the machine, so calls and copies are as slow as its cores and memory make them.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median

import click
from rich.console import Console
from rich.table import Table

from kvgrpc.api import BlockForm, Hello, KvGroup, Layout, LookupRequest, RegisterRequest, Runs, SharedMemory, Tokens
from kvgrpc.cli.demo import shared
from kvgrpc.client.aio import AioClient
from kvgrpc.client.scheduler import SchedulerClient
from kvgrpc.client.worker import WorkerClient
from kvgrpc.core.cache import Bookkeeper
from kvgrpc.core.keys import chunk_keys, space_digest
from kvgrpc.core.types import (
    ChunkKeys,
    CoreLimits,
    Geometry,
    GroupGeometry,
    LookupCommand,
    Registration,
    Role,
    RunSlice,
    SliceReport,
    SpaceIdentity,
    SpaceRef,
    StoreCommand,
    TokenRange,
)
from kvgrpc.transfer.layout import stored_form
from tests.served import serving

CHUNK = 256
CHUNKS = 512
PROMPT = Tokens(b"".join(i.to_bytes(4, "little") for i in range(CHUNK * CHUNKS)))
MIB = 1 << 20
BULK_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True)
class Sample:
    """Durations of one operation in seconds, each covering ``parts`` parts (keys, or bytes)."""

    name: str
    seconds: list[float]
    parts: int = 1
    unit: str = "call"

    def row(self) -> tuple[str, str, str, str]:
        middle, late = median(self.seconds), max(self.seconds)
        if self.unit == "byte":
            rate = f"{self.parts / middle / 1e9:.2f} GB/s"
        else:
            rate = f"{middle / self.parts * 1e6:.2f} us a {self.unit}"
        return self.name, f"{middle * 1e3:.3f} ms", f"{late * 1e3:.3f} ms", rate


def timed(count: int, act: Callable[[int], object]) -> list[float]:
    found: list[float] = []
    for number in range(count):
        began = time.perf_counter()
        act(number)
        found.append(time.perf_counter() - began)
    return found


async def timed_calls(count: int, call: Callable[[int], Awaitable[object]]) -> list[float]:
    found: list[float] = []
    for number in range(count):
        began = time.perf_counter()
        await call(number)
        found.append(time.perf_counter() - began)
    return found


# ---- the core alone -------------------------------------------------------------------------------------------------


class Core:
    """A bookkeeper with one engine; its copies end at once."""

    def __init__(self) -> None:
        self.book = Bookkeeper(CoreLimits(chunk_tokens=CHUNK, page_bytes=4096), 64 * MIB)
        identity = SpaceIdentity("bench", "", "uint8", 1, "sha256-u32le", "token-major:1:4:1")
        self.book.attach(0, "worker", "engine", Role.WORKER, b"s" * 16)
        geometry = Geometry((GroupGeometry(16, 8192, 64),))
        registration = Registration("engine", identity, 0, 0, 1, 1, geometry, 8192 * 64, 1)
        self.space = SpaceRef(self.book.register(0, "worker", registration).space_base)
        self.keys = ChunkKeys(chunk_keys(space_digest(self.space), PROMPT.data, CHUNK), PROMPT.num_tokens)
        self.calls = 0

    def store(self, _: int) -> None:
        self.calls += 1
        blocks = range(PROMPT.num_tokens // 16)
        tokens = TokenRange(0, PROMPT.num_tokens)
        command = StoreCommand("engine", self.calls, self.space, self.keys, tokens, (blocks,))
        self.book.store(0, "worker", command)
        while slices := [action for action in self.book.drain() if isinstance(action, RunSlice)]:
            for work in slices:
                self.book.slice_done(0, work.slice_id, SliceReport(len(work.pieces)))

    def lookup(self, number: int) -> None:
        name = f"request-{number}"
        job_id = number.to_bytes(16, "little")
        answer = self.book.lookup(0, "worker", LookupCommand("engine", name, 0, self.space, self.keys, 1, job_id))
        assert answer.status.hit_tokens == PROMPT.num_tokens
        self.book.end_request(0, "worker", "engine", name)

    def forget(self, _: int) -> None:
        self.book.clear(0, everything=True)


def core_samples() -> list[Sample]:
    core = Core()
    seed = space_digest(core.space)
    stores: list[float] = []
    for number in range(20):
        stores += timed(1, core.store)
        if number < 19:
            core.forget(number)
            core.book.tick(0)
            core.book.drain()
    return [
        Sample("core: hash", timed(50, lambda _: chunk_keys(seed, PROMPT.data, CHUNK)), CHUNKS, "key"),
        Sample("core: store", stores, CHUNKS, "key"),
        Sample("core: lookup, all hits", timed(200, core.lookup), CHUNKS, "key"),
    ]


# ---- against a server -----------------------------------------------------------------------------------------------


def bulk_layout(name: str, run_bytes: int) -> Layout:
    """Blocks of 16 tokens, each one run: 256 MiB to store from and 256 MiB to load into."""
    runs = Runs(0, 0, 1, 0, 1, 0, run_bytes, run_bytes)
    group = KvGroup(16, 2 * BULK_BYTES // run_bytes, (runs,), BlockForm.OPAQUE, backend="bench", layout=str(run_bytes))
    return Layout((SharedMemory(name, 0, 2 * BULK_BYTES),), (group,))


def copy_samples(address: str, run_bytes: int) -> list[Sample]:
    """Store and retrieve of 256 MiB in scattered blocks, other tokens each time."""
    name = f"kvgrpc-bench-{secrets.token_hex(8)}"
    memory = shared.create(name, 2 * BULK_BYTES)
    layout = bulk_layout(name, run_bytes)
    identity = SpaceIdentity("bench", "", "uint8", 1, "sha256-u32le", stored_form(layout.groups))
    engine_id = secrets.token_hex(16)
    worker = WorkerClient(address, RegisterRequest(engine_id, identity, 0, 0, 1, 1, layout))
    scheduler = SchedulerClient(address, engine_id, identity)
    half = BULK_BYTES // run_bytes
    blocks = random.Random(1).sample(range(2 * half), 2 * half)
    stores: list[float] = []
    loads: list[float] = []
    try:
        assert worker.start(30) and scheduler.start(30), worker.problem or scheduler.problem
        for number in range(6):
            prompt = Tokens(secrets.token_bytes(4) * (16 * half))
            stores += timed(1, lambda _: worker.store(prompt, (blocks[:half],)).result(60))  # noqa: B023
            hit = scheduler.lookup(str(number), prompt, timeout_s=30)
            assert hit.hit_tokens == 16 * half, hit
            into = TokenRange(0, hit.hit_tokens)
            loads += timed(1, lambda _: worker.retrieve(hit.job_id, into, (blocks[half:],)).result(60))  # noqa: B023
            scheduler.discard(str(number))
    finally:
        worker.close()
        scheduler.close()
        shared.unlink(name)
        memory.close()
    runs = f"256 MiB, {run_bytes // 1024} KiB runs"
    return [Sample(f"store {runs}", stores, BULK_BYTES, "byte"), Sample(f"retrieve {runs}", loads, BULK_BYTES, "byte")]


async def call_samples(address: str) -> list[Sample]:
    engine_id = secrets.token_hex(16)
    identity = SpaceIdentity("bench", "calls", "uint8", 1, "sha256-u32le", "token-major:1:4:1")
    async with AioClient(address) as client:
        info = await client.handshake(Hello(identity=identity))
        session = client.attach(engine_id, Role.SCHEDULER, secrets.token_bytes(16))
        await anext(session)
        space = SpaceRef(info.space_base)

        async def lookup(number: int) -> None:
            await client.lookup(LookupRequest(engine_id, f"r{number}", space, PROMPT))

        samples = [
            Sample("call: handshake", await timed_calls(1000, lambda _: client.handshake(Hello()))),
            Sample("call: lookup, a miss", await timed_calls(200, lookup), CHUNKS, "key"),
        ]
        await session.aclose()
    return samples


@click.command()
def main() -> None:
    """Measure the core alone, then a server of this machine."""
    samples = core_samples()
    with serving("--l1-size", "2GiB") as server:
        samples += asyncio.run(call_samples(server.address))
        for run_bytes in (2 * MIB, 32 << 10):
            samples += copy_samples(server.address, run_bytes)
    table = Table(box=None, header_style="bold")
    for column in ("operation", "median", "slowest", "that is"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for sample in samples:
        table.add_row(*sample.row())
    Console().print(table)


if __name__ == "__main__":
    main()
