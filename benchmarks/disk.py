# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.disk [--folder DIR] [--json FILE]``: the disk tier, prefetch from it, and what a tier that is
dead, slow or busy costs a lookup.

Objects of 32 MiB, four at a time, beside the same direct reads and writes of files without a header, a checksum or a
bound. A prefetch is one lookup of 64 chunks of 8 MiB on a server that has just started, from the call until all are
there; beside it a tier of this process reads the same objects from the same folder. Lookups are of prompts in L1. All
take turns, and ratios are taken within a turn. Needs 4 GiB of memory, and 3 GiB in the folder.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import mmap
import os
import random
import secrets
import signal
import tempfile
import threading
import time
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.remote import AT_ONCE, SIZE, Ours, compare
from kvgrpc import api
from kvgrpc.bench.engine import CHUNK, Paging, store_prompts, working
from kvgrpc.bench.processes import BenchError, Serving, answer, ask, running, serving, unwind_at_sigterm
from kvgrpc.bench.results import Figure, Report, figure
from kvgrpc.bench.start import arena_bytes, resident_bytes
from kvgrpc.cli.bench import as_table
from kvgrpc.client.aio import AioClient
from kvgrpc.core.types import ObjectName, Role, SpaceRef
from kvgrpc.tiers.disk import DiskTier
from tests.tiers.stores import keys, valkey_program

MIB = 1 << 20
PAGING = Paging(layers=32, planes=2, run_bytes=8192, num_blocks=1024)
SMALL = replace(PAGING, num_blocks=CHUNK // PAGING.block_size)
"""The same model in an engine with room for one chunk."""
CHUNKS = PAGING.num_blocks * PAGING.block_size // CHUNK
L1 = "2GiB"
TURNS = 4
"""Of lookups, for each repetition: they are short, since other guests of a machine come and go."""
WAIT_S = 60.0


async def until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not await holds():
        if time.monotonic() > end:
            raise BenchError(f"waited {WAIT_S:.0f} s for {what}")
        await asyncio.sleep(0.02)


# ---- files ----------------------------------------------------------------------------------------------------------


class BareFiles:
    """The same sizes and depth, and the same steps of the file system: a new file under another name, then its own."""

    def __init__(self, folder: Path, source: bytes) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._memory = memoryview(mmap.mmap(-1, 2 * AT_ONCE * SIZE))
        self._memory[: AT_ONCE * SIZE] = source * AT_ONCE

    def _open(self, name: str, flags: int) -> int:
        return os.open(self._folder / name, flags | os.O_DIRECT, 0o600)

    async def write(self, number: int) -> None:
        await asyncio.wrap_future(self._pool.submit(self._write, number))

    async def read(self, number: int) -> None:
        await asyncio.wrap_future(self._pool.submit(self._read, number))

    def _write(self, number: int) -> None:
        fd = self._open(f"{number}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        at = number % AT_ONCE * SIZE
        done = os.pwritev(fd, [self._memory[at : at + SIZE]], 0)
        os.close(fd)
        os.replace(self._folder / f"{number}.new", self._folder / str(number))
        if done != SIZE:
            raise BenchError(f"{done} bytes were written")

    def _read(self, number: int) -> None:
        fd = self._open(str(number), os.O_RDONLY)
        at = (AT_ONCE + number % AT_ONCE) * SIZE
        done = os.preadv(fd, [self._memory[at : at + SIZE]], 0)
        os.close(fd)
        if done != SIZE:
            raise BenchError(f"{done} bytes were read")


class Anew(Ours):
    """Writes each object under a new name: one that is there is not written again."""

    def __init__(self, tier: DiskTier, source: bytes) -> None:
        super().__init__(tier, source)
        self._numbers = itertools.count(1)
        self._last: dict[int, int] = {}

    def _object(self, number: int) -> ObjectName:
        return ObjectName(f"{self._last[number]:060x}{number:04x}", SIZE)

    async def write(self, number: int) -> None:
        self._last[number] = next(self._numbers)
        await super().write(number)


@asynccontextmanager
async def opened(folder: Path, limit_bytes: int) -> AsyncGenerator[DiskTier, None]:
    tier = DiskTier(folder, limit_bytes)
    tier.start()

    async def scanned() -> bool:
        return tier.healthy and not tier.counters["scanning"]

    await until(scanned, "the disk tier")
    if not tier.counters["direct_io"]:
        raise BenchError(f"{folder} has no direct reads and writes: name another one with --folder")
    yield tier
    await tier.close()


async def files(folder: Path, repetitions: int) -> list[Figure]:
    source, goals = random.Random(1).randbytes(SIZE), {"read": ">= 0.9", "write": ">= 0.85"}
    for name in ("bare", "ours"):
        (folder / name).mkdir()
    async with opened(folder / "ours", 1 << 30) as tier:
        return await compare("disk", Anew(tier, source), BareFiles(folder / "bare", source), 8, repetitions, goals)


# ---- prefetch -------------------------------------------------------------------------------------------------------


def long_prompt() -> api.Tokens:
    return api.Tokens(array("I", range(CHUNKS * CHUNK)).tobytes())


class Peak:
    """The most memory beside the arena that a process has had, in MiB, while it was watched."""

    def __init__(self, pid: int) -> None:
        self.mib = 0.0
        self._pid, self._over = pid, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            found = resident_bytes(self._pid)
            self.mib = max(self.mib, (sum(found.values()) - arena_bytes(found)) / MIB)


def server(folder: Path) -> AbstractContextManager[Serving]:
    return serving(L1, "--disk-path", str(folder), "--disk-size", "3GiB", "--prefetch-share", "0.5")


async def fill(address: str) -> None:
    """Stores the prompt, and waits until the disk has it."""
    async with working(address, PAGING, PAGING.identity()) as worker, AioClient(address) as client:
        await worker.store(long_prompt(), range(PAGING.num_blocks))

        async def written() -> bool:
            return (await client.get_status()).tiers[0].counters.get("writes", 0) >= CHUNKS

        await until(written, "the writes to the disk")


async def fetch(found: Serving) -> tuple[float, float]:
    """(GB/s of a lookup that finds the prompt on the disk alone, the peak of the server's memory beside the arena)."""
    engine_id = secrets.token_hex(16)
    shared = working(found.address, SMALL, SMALL.identity())  # so that the server knows what a chunk is
    async with AioClient(found.address) as client, shared:

        async def ready() -> bool:
            status = await client.get_status()
            return status.arena.total_bytes >= 2 << 30 and not status.tiers[0].counters["scanning"]

        await until(ready, "the arena and the disk's scan")
        base = (await client.handshake(api.Hello(identity=PAGING.identity()))).space_base
        session = client.attach(engine_id, Role.SCHEDULER, secrets.token_bytes(16))
        await anext(session)
        request = api.LookupRequest(engine_id, "1", SpaceRef(base), long_prompt(), prefetch_wait_ms=30_000)
        with Peak(found.process.pid) as peak:
            began = time.perf_counter()
            job = await client.lookup(request)
            status = job.status
            while not status.done:
                status = await client.query(engine_id, job.job_id, 30_000)
            took = time.perf_counter() - began
        await client.end_request(engine_id, "1")
        await session.aclose()
    if status.hit_tokens != CHUNKS * CHUNK:
        raise BenchError(f"a lookup found {status.hit_tokens} tokens on the disk")
    return PAGING.size_bytes / took / 1e9, peak.mib


class Reader:
    """The tier alone, over the same objects, into memory that is there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._memory = memoryview(mmap.mmap(-1, PAGING.size_bytes))
        self._memory[:] = bytes(PAGING.size_bytes)

    async def rate(self) -> float:
        size = PAGING.object_bytes
        async with opened(self._folder, 1 << 30) as tier:
            names = [path.name for path in self._folder.rglob("*") if path.is_file() and path.stat().st_size > size]
            if len(names) != CHUNKS:
                raise BenchError(f"{len(names)} objects lie on the disk")
            began = time.perf_counter()
            await asyncio.gather(
                *(
                    tier.read(ObjectName(name, size), [self._memory[at * size : (at + 1) * size]])
                    for at, name in enumerate(names)
                )
            )
            return PAGING.size_bytes / (time.perf_counter() - began) / 1e9


def prefetch(folder: Path, repetitions: int) -> list[Figure]:
    folder.mkdir()
    with server(folder) as found:
        asyncio.run(fill(found.address))
    reader = Reader(folder)
    rates: dict[str, list[float]] = {"prefetch": [], "tier": []}
    peaks: list[float] = []
    for repetition in range(-1, repetitions):
        for side in sorted(rates, reverse=repetition % 2 == 0):
            if side == "tier":
                rates[side].append(asyncio.run(reader.rate()))
                continue
            with server(folder) as found:
                rate, peak = asyncio.run(fetch(found))
            rates[side].append(rate)
            peaks.append(peak)
    pairs = list(zip(rates["prefetch"], rates["tier"], strict=True))[1:]
    return [
        figure(f"prefetch/{CHUNKS} chunks", [ours for ours, _ in pairs], "GB/s"),
        figure("prefetch/tier alone", [alone for _, alone in pairs], "GB/s"),
        figure("prefetch/ratio", [ours / alone for ours, alone in pairs], "ratio", of="tier alone", goal=">= 0.85"),
        figure("prefetch/peak memory beside the arena", peaks, "MiB", goal="<= 300"),
    ]


# ---- lookups beside a tier in trouble -------------------------------------------------------------------------------


def lookups(folder: Path, repetitions: int) -> list[Figure]:
    """Of a server with Valkey below it, while that is stopped and then dead, and of one with a disk that is written to
    all the time; beside one without a tier, to which as much is stored."""
    figures: list[Figure] = []
    with ExitStack() as stack:
        store = stack.enter_context(keys(folder, valkey_program()))
        (folder / "busy").mkdir()
        disk = ("--disk-path", str(folder / "busy"), "--disk-size", "1GiB")
        found = {
            "none": stack.enter_context(serving(L1)),
            "valkey": stack.enter_context(serving(L1, "--valkey-url", store.url)),
            "disk": stack.enter_context(serving(L1, *disk)),
        }
        askers = {name: stack.enter_context(running("kvgrpc.bench.asker", one.address)) for name, one in found.items()}
        for name, one in found.items():
            asyncio.run(store_prompts(one.address))
            answer(askers[name])

        def rate(name: str, busy: bool) -> float:
            with ExitStack() as beside:
                if busy:
                    beside.enter_context(storing(found[name].address))
                ask(askers[name], json.dumps({"kind": "tokens", "length": "8K", "hit": True, "seconds": 0.5}))
                said = json.loads(answer(askers[name]))
            return said["lookups"] / said["seconds"]

        def case(what: str, name: str, busy: bool = False) -> None:
            rates: dict[str, list[float]] = {name: [], "none": []}
            for _ in range(TURNS * repetitions + 1):
                for side in ("none", name, name, "none"):
                    rates[side].append(rate(side, busy))
            pairs = {
                side: [sum(two) / 2 for two in zip(all[2::2], all[3::2], strict=True)] for side, all in rates.items()
            }
            kept = [ours / bare for ours, bare in zip(pairs[name], pairs["none"], strict=True)]
            figures.append(figure(f"lookups/tier {what}", pairs[name], "1/s"))
            figures.append(figure(f"lookups/tier {what}, ratio", kept, "ratio", of="no tier", goal=">= 0.95"))

        case("busy", "disk", busy=True)
        store.signal(signal.SIGSTOP)
        case("stopped", "valkey")
        store.kill()
        case("dead", "valkey")
    return figures


@contextmanager
def storing(address: str) -> Iterator[None]:
    """Meanwhile an engine stores 8 MiB ten times a second."""
    over = threading.Event()

    async def store() -> None:
        async with working(address, SMALL, SMALL.identity()) as worker:
            while not over.is_set():
                tokens = api.Tokens(secrets.token_bytes(4) * CHUNK)
                await worker.store(tokens, range(SMALL.num_blocks))
                await asyncio.sleep(0.1)

    thread = threading.Thread(target=lambda: asyncio.run(store()))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk that is meant; default: where temporary files are")
    parser.add_argument("--json", type=Path, help="write the result: a file, or a folder")
    options = parser.parse_args()
    unwind_at_sigterm()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        figures = asyncio.run(files(folder, options.repetitions))
        figures += prefetch(folder / "prefetch", options.repetitions)
        figures += lookups(folder, options.repetitions)
    report = Report("disk", tuple(figures))
    Console().print(as_table(report.figures))
    if options.json is not None:
        report.write(options.json)


if __name__ == "__main__":
    main()
