# SPDX-License-Identifier: Apache-2.0
"""Figures of copies between a card and the server, whole calls over gRPC as their client times them.

The measure of all is the card's own copy of 1 GiB between its memory and pinned memory, in pieces of 64 MiB, in the
same run: what is compared alternates. The model has 32 layers and 8 KV heads of 128, bf16; blocks of 16 tokens, chunks
of 256.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

from kvgrpc import api
from kvgrpc.bench.bare import EMPTY_CALL
from kvgrpc.bench.card import CEILING_BYTES, CardEngine
from kvgrpc.bench.copies import shuffled
from kvgrpc.bench.engine import KINDS, Paging, Worker, prompt, sharing
from kvgrpc.bench.processes import BenchError, Serving, answer, ask, running, serving
from kvgrpc.bench.results import Figure, figure
from kvgrpc.bench.start import until_serving
from kvgrpc.bench.suite import Effort
from kvgrpc.client.address import parse_address
from kvgrpc.client.aio import AioClient
from kvgrpc.client.channel import ChannelOptions, open_channel
from kvgrpc.core.types import Direction

MIB, GIB = 1 << 20, 1 << 30
L1 = 8 * GIB
START_L1 = 16 * GIB
READY_S = 60.0
BESIDE_S = 1.5
MODES = ("dma", "staged", "direct")
STORE, RETRIEVE = Direction.STORE, Direction.RETRIEVE


@dataclass(frozen=True, slots=True)
class Case:
    """So many bytes a call, in runs of the paging; random blocks unless ``consecutive``."""

    name: str
    paging: Paging
    size_bytes: int
    goals: tuple[str, str] | None
    consecutive: bool = False

    @property
    def blocks(self) -> int:
        return self.size_bytes // (self.paging.size_bytes // self.paging.num_blocks)


def pool(layers: int, planes: int, run_bytes: int, size_bytes: int = 4 * GIB) -> Paging:
    return Paging(layers, planes, run_bytes, size_bytes // (layers * planes * run_bytes))


BLOCKS_FIRST = pool(1, 1, 2 * MIB)
RANK = pool(32, 2, 8 << 10, 2 * GIB)
CASES = (
    Case("2M runs 2GiB", BLOCKS_FIRST, 2 * GIB, (">= 0.96", ">= 0.96")),
    Case("2M runs 256MiB", BLOCKS_FIRST, 256 * MIB, (">= 0.9", ">= 0.9")),
    Case("2M runs 32MiB", BLOCKS_FIRST, 32 * MIB, None),
    Case("64K runs 2GiB", pool(32, 1, 64 << 10), 2 * GIB, (">= 0.92", ">= 0.92")),
    Case("64K runs 2GiB consecutive", pool(32, 1, 64 << 10), 2 * GIB, (">= 0.95", ">= 0.95"), consecutive=True),
    Case("32K runs 2GiB", pool(32, 2, 32 << 10), 2 * GIB, (">= 0.85", ">= 0.85")),
    Case("8K runs 1GiB", RANK, GIB, (">= 0.85", ">= 0.85")),
)
SIZES = tuple(Case(f"2M runs {size}MiB", BLOCKS_FIRST, size * MIB, None) for size in (64, 128, 512, 1024))


@contextmanager
def server(*flags: str) -> Generator[Serving, None, None]:
    """A server whose arena is all there, and pinned."""
    with serving(f"{L1}", *flags) as found:
        asyncio.run(_until_grown(found.address))
        yield found


async def _until_grown(address: str, size_bytes: int = L1) -> None:
    end = time.monotonic() + READY_S
    async with AioClient(address) as client:
        while (await client.get_status()).arena.total_bytes < size_bytes:
            if time.monotonic() > end:
                raise BenchError(f"the arena has not grown within {READY_S:.0f} s")
            await asyncio.sleep(0.05)


class Bench:
    """A card in this process, and a server."""

    def __init__(self, card: CardEngine, address: str) -> None:
        self.card, self.address = card, address

    @asynccontextmanager
    async def worker(self, paging: Paging, pointer: int) -> AsyncGenerator[Worker, None]:
        layout = paging.layout("")
        shared = replace(layout, memory=(self.card.share(pointer, paging.size_bytes),))
        async with sharing(self.address, shared, paging.identity()) as worker:
            yield worker

    @asynccontextmanager
    async def empty_call(self) -> AsyncGenerator[Callable[[], Awaitable[float]], None]:
        """Seconds of a call that does nothing, at each call of this."""
        channel = open_channel(parse_address(self.address), ChannelOptions())
        call = cast("Any", channel).unary_unary(EMPTY_CALL)

        async def timed() -> float:
            began = time.perf_counter()
            await call(b"")
            return time.perf_counter() - began

        await timed()
        try:
            yield timed
        finally:
            await channel.close()

    async def rates(self, case: Case, repetitions: int) -> dict[str, list[float]]:
        """GB/s of store and retrieve by name, and of the ceiling each way; seconds of empty calls, each after a copy as
        the others are. The first round is not counted."""
        ids = list(range(case.paging.num_blocks)) if case.consecutive else shuffled(case.paging.num_blocks)
        mine, other = ids[: case.blocks], ids[-case.blocks :]
        found: dict[str, list[float]] = {name: [] for name in ("store", "retrieve", "store top", "retrieve top")}
        empty: list[float] = []
        with self.card.memory(max(case.paging.size_bytes, CEILING_BYTES)) as pointer:
            async with self.worker(case.paging, pointer) as worker, self.empty_call() as empty_call:
                for _ in range(repetitions + 1):
                    tokens = fresh(case.blocks * case.paging.block_size)
                    for name, took, size in (
                        ("store top", self.card.copy(pointer, (STORE,)), CEILING_BYTES),
                        ("store", await worker.store(tokens, mine), case.size_bytes),
                        ("retrieve top", self.card.copy(pointer, (RETRIEVE,)), CEILING_BYTES),
                        ("retrieve", await worker.retrieve(tokens, other), case.size_bytes),
                    ):
                        found[name].append(size / took / 1e9)
                    self.card.copy(pointer, (STORE,))
                    empty.append(await empty_call())
        return {name: values[1:] for name, values in (*found.items(), ("empty", empty))}


def fresh(count: int) -> api.Tokens:
    """A prompt that nobody has stored."""
    return api.Tokens(secrets.token_bytes(4) * count)


# ---- copies ---------------------------------------------------------------------------------------------------------


def gpu_copies(effort: Effort) -> list[Figure]:
    """With the mover that ``auto`` chooses."""
    card = CardEngine()
    with server() as found:
        return asyncio.run(_copies(Bench(card, found.address), effort))


async def _copies(bench: Bench, effort: Effort) -> list[Figure]:
    figures: list[Figure] = []
    tops: dict[str, list[float]] = {"store": [], "retrieve": []}
    empty: list[float] = []
    for case in (*CASES, *SIZES):
        found = await bench.rates(case, effort.repetitions)
        empty += found["empty"]
        for at, way in enumerate(("store", "retrieve")):
            rates, top = found[way], found[f"{way} top"]
            tops[way] += top
            figures.append(figure(f"gpu/{way} {case.name}", rates, "GB/s"))
            if case.name == "2M runs 32MiB":
                size = case.size_bytes
                turns = zip(top, rates, found["empty"], strict=True)
                floor = [(size / most / 1e9 + idle_s) / (size / rate / 1e9) for most, rate, idle_s in turns]
                name = f"gpu/{way} {case.name} ratio"
                figures.append(figure(name, floor, "ratio", of="ceiling and an empty call", goal=">= 0.85"))
            elif case.goals is not None:
                goal = case.goals[at]
                figures.append(
                    figure(f"gpu/{way} {case.name} ratio", per(rates, top), "ratio", of="ceiling", goal=goal)
                )
    figures += [figure(f"gpu/ceiling {way}", rates, "GB/s") for way, rates in tops.items()]
    figures.append(figure("gpu/empty call", [took * 1e6 for took in empty], "us"))
    return figures + await _both_ways(bench, effort)


async def _both_ways(bench: Bench, effort: Effort) -> list[Figure]:
    """One client stores 1 GiB while another retrieves as much; the sum of both."""
    case = Case("", BLOCKS_FIRST, GIB, None)
    ids = shuffled(case.paging.num_blocks)[: case.blocks]
    rates: list[float] = []
    tops: list[float] = []
    with bench.card.memory(case.paging.size_bytes) as a, bench.card.memory(case.paging.size_bytes) as b:
        async with bench.worker(case.paging, a) as one, bench.worker(case.paging, b) as two:
            known = fresh(case.blocks * case.paging.block_size)
            await two.store(known, ids)
            for _ in range(effort.repetitions):
                took = bench.card.copy(a, (STORE, RETRIEVE))
                tops.append(2 * CEILING_BYTES / took / 1e9)
                began = time.perf_counter()
                await asyncio.gather(one.store(fresh(case.blocks * 16), ids), two.retrieve(known, ids))
                rates.append(2 * case.size_bytes / (time.perf_counter() - began) / 1e9)
    ratio = figure("gpu/both ways 1GiB ratio", per(rates, tops), "ratio", of="ceiling both ways", goal=">= 0.9")
    return [figure("gpu/both ways 1GiB", rates, "GB/s"), ratio, figure("gpu/ceiling both ways", tops, "GB/s")]


def gpu_movers(effort: Effort) -> list[Figure]:
    """Each mover, with long runs and with short ones."""
    card = CardEngine()
    figures: list[Figure] = []
    for mode in MODES:
        with server("--copy-mode", mode) as found:
            bench = Bench(card, found.address)
            for case in (CASES[0], CASES[3], CASES[5], CASES[6]):
                rates = asyncio.run(bench.rates(case, max(2, effort.repetitions // 3)))
                for way in ("store", "retrieve"):
                    values = per(rates[way], rates[f"{way} top"])
                    figures.append(figure(f"gpu/{mode} {way} {case.name} ratio", values, "ratio", of="ceiling"))
    return figures


# ---- calls ----------------------------------------------------------------------------------------------------------


def gpu_calls(effort: Effort) -> list[Figure]:
    card = CardEngine()
    with server() as found:
        return asyncio.run(_calls(Bench(card, found.address), effort))


def gpu_start(effort: Effort) -> list[Figure]:
    """Seconds from the start of the process to the first answer SERVING, and until all of L1 is pinned."""
    CardEngine()
    ready: list[float] = []
    pinned: list[float] = []
    for _ in range(max(1, effort.repetitions // 3)):
        began = time.perf_counter()
        with serving(f"{START_L1}") as found:
            asyncio.run(until_serving(found))
            ready.append(time.perf_counter() - began)
            asyncio.run(_until_grown(found.address, START_L1))
            pinned.append(time.perf_counter() - began)
    return [
        figure("gpu/until SERVING with 16GiB to pin", ready, "s", goal="<= 2"),
        figure("gpu/until 16GiB are pinned", pinned, "s"),
    ]


async def _calls(bench: Bench, effort: Effort) -> list[Figure]:
    figures: list[Figure] = []
    case = CASES[0]
    with bench.card.memory(case.paging.size_bytes) as pointer:
        began = time.perf_counter()
        async with bench.worker(case.paging, pointer) as worker:
            first = time.perf_counter() - began
            figures.append(figure("gpu/first registration", [first], "s", goal="<= 0.5"))
            blocks = shuffled(case.paging.num_blocks)[:1024]
            tokens = fresh(1024 * 16)
            await worker.store(tokens, blocks)
            resident: list[float] = []
            for _ in range(effort.calls):
                began = time.perf_counter()
                await worker.store_again(tokens, blocks)
                resident.append((time.perf_counter() - began) * 1e3)
            figures.append(figure("gpu/store of 16K tokens that are there", resident, "ms"))
            launched = await _first_bytes(bench, worker, pointer, tokens, blocks, effort.repetitions)
            figures.append(figure("gpu/call to first bytes 16K tokens", launched, "ms", goal="<= 1"))
            times = await worker_lookups(worker, tokens, effort.calls)
            figures.append(figure("gpu/lookup 16K tokens", times, "ms", goal="<= 2"))
    paging = Paging(1, 1, 64 << 10, 1024)
    with bench.card.memory(paging.size_bytes) as pointer:
        layout = replace(paging.layout(""), memory=(bench.card.share(pointer, paging.size_bytes),))
        async with sharing(bench.address, layout, paging.identity(KINDS["hashes"])) as worker:
            content = prompt("hashes", 16 << 10, True)
            await worker.store(content, range(1024))
            times = await worker_lookups(worker, content, effort.calls)
            figures.append(figure("gpu/lookup 16K tokens by hashes", times, "ms", goal="<= 1"))
    return figures


async def _first_bytes(
    bench: Bench, worker: Worker, pointer: int, tokens: api.Tokens, blocks: Sequence[int], times: int
) -> list[float]:
    """Milliseconds from a Retrieve's call until the first word of its first block has come: the launch of the first
    copy, and what the card needs to begin it."""
    block_bytes = CASES[0].paging.size_bytes // CASES[0].paging.num_blocks
    took: list[float] = []
    for _ in range(times + 1):
        hit = await worker.find(tokens)
        with bench.card.awaiting_word(pointer + blocks[0] * block_bytes) as seconds:
            await worker.load(hit, blocks)
            took.append(seconds() * 1e3)
    return took[1:]


async def worker_lookups(worker: Worker, content: api.Content, times: int) -> list[float]:
    """Milliseconds of lookups of a prompt that is there."""
    took: list[float] = []
    for number in range(times):
        began = time.perf_counter()
        hit = await worker.lookup(content, f"look-{number}")
        took.append((time.perf_counter() - began) * 1e3)
        if hit.status.hit_tokens != content.num_tokens:
            raise BenchError("a prompt that was stored was not found")
        await worker.end(f"look-{number}")
    return took


# ---- an engine that computes ----------------------------------------------------------------------------------------

GOALS = {"large": ">= 0.97", "small": ">= 0.9"}


def gpu_beside(effort: Effort) -> list[Figure]:
    """What a computing engine loses while another process's blocks are copied, and what the copies reach then."""
    card = CardEngine()
    figures: list[Figure] = []
    long, short = Case("", BLOCKS_FIRST, 2 * GIB, None), Case(" 8K runs", RANK, GIB, None)
    with running("kvgrpc.bench.compute") as computing:
        answer(computing)
        for mode in MODES:
            with server("--copy-mode", mode) as found:
                bench = Bench(card, found.address)
                for case in (long, short) if mode != "direct" else (long,):
                    for kind in GOALS:
                        times = 2 if effort.repetitions > 2 else 1
                        figures += asyncio.run(_beside(bench, computing, mode, kind, case, times))
    return figures


async def _beside(bench: Bench, computing: Any, mode: str, kind: str, case: Case, times: int) -> list[Figure]:
    ids = shuffled(case.paging.num_blocks)
    tokens = fresh(case.blocks * 16)
    shares: dict[str, list[float]] = {"store": [], "retrieve": []}
    rates: dict[str, list[float]] = {"store": [], "retrieve": []}
    with bench.card.memory(case.paging.size_bytes) as pointer:
        tops = {way: CEILING_BYTES / bench.card.copy(pointer, (way,)) / 1e9 for way in Direction}
        async with bench.worker(case.paging, pointer) as worker:
            for _ in range(times):
                ask(computing, f"{kind} {BESIDE_S}")
                alone = float(await asyncio.to_thread(answer, computing))
                for way in shares:
                    await worker.store_again(tokens, ids[: case.blocks])  # the stores may have evicted it
                    ask(computing, f"{kind} {BESIDE_S}")
                    rounds = asyncio.ensure_future(asyncio.to_thread(answer, computing))
                    while not rounds.done():
                        if way == "store":
                            took = await worker.store(fresh(case.blocks * 16), ids[: case.blocks])
                        else:
                            took = await worker.retrieve(tokens, ids[-case.blocks :])
                        rates[way].append(case.size_bytes / took / 1e9)
                    shares[way].append(float(rounds.result()) / alone)
    figures: list[Figure] = []
    for way, direction in (("store", STORE), ("retrieve", RETRIEVE)):
        named = f"{mode} {way}{case.name}"
        goal = GOALS[kind] if mode == "dma" else None
        figures.append(figure(f"gpu/{kind} kernels beside {named}", shares[way], "ratio", of="alone", goal=goal))
        goal = ">= 0.9" if mode == "dma" and kind == "large" and not case.name else None
        beside = [rate / tops[direction] for rate in rates[way]]
        figures.append(figure(f"gpu/{named} beside {kind} kernels", beside, "ratio", of="ceiling", goal=goal))
    return figures


def per(values: Sequence[float], tops: Sequence[float]) -> list[float]:
    return [value / top for value, top in zip(values, tops, strict=True)]
