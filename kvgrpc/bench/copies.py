# SPDX-License-Identifier: Apache-2.0
"""Figures of copies, each of 128 MiB: through calls to a server, and alone.

The measure of all is the server's own kind of thread team copying one contiguous stretch into another, both touched, in
this process. What is compared alternates; a repetition takes the best of five of each, and the ratio of the bests.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager

from kvgrpc import api
from kvgrpc.bench.engine import CHUNK, Paging, Worker, shared_memory, working
from kvgrpc.bench.processes import BenchError, serving, wait_until
from kvgrpc.bench.results import Figure, figure
from kvgrpc.bench.start import arena_bytes, resident_bytes
from kvgrpc.bench.suite import Effort
from kvgrpc.core.types import Direction, Piece, RunSlice, SliceReport
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.shm import SharedMemoryMover

MIB = 1 << 20
CALL_BYTES = 128 * MIB
SLICE_BYTES = 64 * MIB
L1_BYTES = 1024 * MIB
BEST_OF = 5


def paging(layers: int, run_bytes: int) -> Paging:
    """K and V of so many layers: blocks for two calls."""
    return Paging(layers, 2, run_bytes, 2 * CALL_BYTES // (layers * 2 * run_bytes))


WHOLE = Paging(1, 1, SLICE_BYTES, 2 * CALL_BYTES // SLICE_BYTES, block_size=CHUNK)
# layers x the bytes of a block's K, or of its V, in one of them
CASES = {
    "32x32K": (paging(32, 32 << 10), ">= 0.85"),
    "2x16K": (paging(2, 16 << 10), ">= 0.6"),
    "2x4K": (paging(2, 4 << 10), ">= 0.6"),
}


def shuffled(count: int) -> list[int]:
    """Block ids in an order that is the same in every run."""
    return random.Random(1).sample(range(count), count)  # noqa: S311  (no secret)


Copy = Callable[[], Awaitable[float]]
"""Copies once; the seconds that it took."""

Maker = Callable[[Paging, Direction], Copy]


# ---- alone ----------------------------------------------------------------------------------------------------------


def slices(paging: Paging, mapping_id: int, direction: Direction) -> list[RunSlice]:
    """A call of shuffled blocks, objects one after the other, as the core would cut it."""
    blocks, size = CHUNK // paging.block_size, paging.object_bytes
    ids = shuffled(paging.num_blocks) if paging is not WHOLE else range(paging.num_blocks)
    pieces: list[Piece] = []
    for chunk in range(CALL_BYTES // size):
        named = (tuple(ids[chunk * blocks : (chunk + 1) * blocks]),)
        pieces.append(Piece(chunk, ((chunk * size, size),), (0, size), (0,), named))
    step = max(SLICE_BYTES // size, 1)
    parts = [tuple(pieces[at : at + step]) for at in range(0, len(pieces), step)]
    return [RunSlice(1, "bench", mapping_id, 1, direction, part) for part in parts]


@contextmanager
def alone() -> Generator[Maker, None, None]:
    """Makes copies of a paging in this process, between touched memory and a touched arena."""
    with ExitStack() as stack:
        arena = Arena(CALL_BYTES)
        stack.callback(arena.close)
        arena.view(0, CALL_BYTES)[:] = bytes([1]) * CALL_BYTES
        memory = stack.enter_context(shared_memory(2 * CALL_BYTES))
        mover = SharedMemoryMover(arena, CHUNK, {os.getuid()})
        stack.callback(mover.close)
        mapped: dict[Paging, int] = {}

        def make(paging: Paging, direction: Direction) -> Copy:
            if paging not in mapped:
                mapped[paging] = len(mapped)
                mover.map(mapped[paging], paging.layout(memory.name))
            work = slices(paging, mapped[paging], direction)

            async def copy() -> float:
                began = time.perf_counter()
                for one in work:
                    if mover.copy(one) != SliceReport(len(one.pieces)):
                        raise BenchError("a copy in this process failed")
                return time.perf_counter() - began

            return copy

        yield make


# ---- figures --------------------------------------------------------------------------------------------------------


async def best(turns: dict[str, Copy], of: int) -> dict[str, float]:
    """GB/s of the best ``of`` so many of each copy; they take turns."""
    rounds = [{name: await copy() for name, copy in turns.items()} for _ in range(of)]
    return {name: CALL_BYTES / min(one[name] for one in rounds) / 1e9 for name in turns}


async def rates(worker: Worker, make: Maker, case: Paging, effort: Effort) -> dict[str, list[float]]:
    """GB/s of store and retrieve, of the same copies alone, and of the contiguous ones. A store has a new prompt, from
    the first half of the shuffled blocks; retrieve loads it into the others."""
    blocks = shuffled(case.num_blocks)
    mine, other = blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]
    prompt = api.Tokens(b"")

    def store() -> Awaitable[float]:
        nonlocal prompt
        prompt = api.Tokens(secrets.token_bytes(4) * (len(mine) * case.block_size))
        return worker.store(prompt, mine)

    turns: dict[str, Copy] = {"store": store, "retrieve": lambda: worker.retrieve(prompt, other)}
    for direction in Direction:
        turns[f"{direction.value} alone"] = make(case, direction)
        turns[f"{direction.value} floor"] = make(WHOLE, direction)
    await best(turns, 1)
    rounds = [await best(turns, min(BEST_OF, effort.repetitions)) for _ in range(max(1, effort.repetitions // 3))]
    return {name: [one[name] for one in rounds] for name in turns}


def copies(effort: Effort) -> list[Figure]:
    with serving(f"{L1_BYTES // MIB}MiB") as server:
        pid = server.process.pid
        wait_until(lambda: arena_bytes(resident_bytes(pid)) >= L1_BYTES, "the arena to be warm")
        return asyncio.run(_copies(server.address, effort))


async def _copies(address: str, effort: Effort) -> list[Figure]:
    figures: list[Figure] = []
    with alone() as make:
        for name, (case, goal) in CASES.items():
            async with working(address, case, case.identity()) as worker:
                found = await rates(worker, make, case, effort)
            for direction in ("store", "retrieve"):
                call, lone, floor = found[direction], found[f"{direction} alone"], found[f"{direction} floor"]
                what, of = f"copies/{direction} {name}", "contiguous copy"
                figures += [
                    figure(what, call, "GB/s"),
                    figure(f"{what} ratio", divided(call, floor), "ratio", of=of, goal=goal),
                    figure(f"{what} alone ratio", divided(lone, floor), "ratio", of=of),
                ]
    return figures


def divided(values: Sequence[float], floor: Sequence[float]) -> list[float]:
    return [value / least for value, least in zip(values, floor, strict=True)]
