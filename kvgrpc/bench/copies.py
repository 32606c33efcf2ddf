# SPDX-License-Identifier: Apache-2.0
"""Figures of copies, each of 128 MiB: through calls to a server, and alone.

The measure of all is the server's own kind of thread team copying one contiguous stretch into another, both touched, in
this process. What is compared alternates; a repetition takes the best of five of each, and the ratio of the bests.
"""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager

from kvgrpc import api
from kvgrpc.bench.engine import CHUNK, Paging, shared_memory, worker
from kvgrpc.bench.processes import BenchError, serving, wait_until
from kvgrpc.bench.results import Figure, figure
from kvgrpc.bench.start import arena_bytes, resident_bytes
from kvgrpc.bench.suite import Effort
from kvgrpc.client.scheduler import SchedulerClient
from kvgrpc.core.types import ChunkOutcome, ChunkResult, Direction, Piece, RunSlice, SliceReport, TokenRange
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.shm import SharedMemoryMover

MIB = 1 << 20
CALL_BYTES = 128 * MIB
SLICE_BYTES = 64 * MIB
L1_BYTES = 1024 * MIB
BEST_OF = 5
WAIT_S = 60.0


def paging(layers: int, run_bytes: int) -> Paging:
    """K and V of so many layers: blocks for two calls."""
    return Paging(layers, 2, run_bytes, 2 * CALL_BYTES // (layers * 2 * run_bytes))


WHOLE = Paging(1, 1, SLICE_BYTES, 2 * CALL_BYTES // SLICE_BYTES, block_size=CHUNK)
CASES = {
    "32 layers of 32 KiB": (paging(32, 32 << 10), ">= 0.85"),
    "2 layers of 16 KiB": (paging(2, 16 << 10), ">= 0.6"),
    "2 layers of 4 KiB": (paging(2, 4 << 10), ">= 0.6"),
}


def shuffled(count: int) -> list[int]:
    """Block ids in an order that is the same in every run."""
    return random.Random(1).sample(range(count), count)  # noqa: S311  (no secret)


Copy = Callable[[], float]
"""Copies once; the seconds that it took."""


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
def alone() -> Generator[Callable[[Paging, Direction], Copy], None, None]:
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

            def copy() -> float:
                began = time.perf_counter()
                for one in work:
                    if mover.copy(one) != SliceReport(len(one.pieces)):
                        raise BenchError("a copy in this process failed")
                return time.perf_counter() - began

            return copy

        yield make


# ---- through a server -----------------------------------------------------------------------------------------------


@contextmanager
def through(address: str, paging: Paging) -> Generator[dict[Direction, Copy], None, None]:
    """Store of a new prompt from the first half of the shuffled blocks, and retrieve of it into the others."""
    engine_id, identity = secrets.token_hex(16), paging.identity()
    blocks = shuffled(paging.num_blocks)
    num_tokens = paging.num_blocks // 2 * paging.block_size
    mine, other = blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]
    scheduler = SchedulerClient(address, engine_id, identity)
    prompt = api.Tokens(b"")
    asked = 0

    with worker(address, engine_id, paging, identity) as engine:

        def store() -> float:
            nonlocal prompt
            prompt = api.Tokens(secrets.token_bytes(4) * num_tokens)
            began = time.perf_counter()
            results = engine.store(prompt, (mine,)).result(WAIT_S)
            took = time.perf_counter() - began
            check(results, ChunkOutcome.STORED)
            return took

        def retrieve() -> float:
            nonlocal asked
            asked += 1
            hit = scheduler.lookup(str(asked), prompt, timeout_s=WAIT_S)
            if hit.hit_tokens != num_tokens:
                raise BenchError(f"what was stored is not found: {hit}")
            began = time.perf_counter()
            results = engine.retrieve(hit.job_id, TokenRange(0, num_tokens), (other,)).result(WAIT_S)
            took = time.perf_counter() - began
            scheduler.discard(str(asked))
            check(results, ChunkOutcome.LOADED)
            return took

        def check(results: Sequence[ChunkResult], outcome: ChunkOutcome) -> None:
            if {result.outcome for result in results} != {outcome}:
                raise BenchError(f"a call did not end as {outcome.value}: {results}")

        try:
            if not scheduler.start(WAIT_S):
                raise BenchError(f"no session with {address}: {scheduler.problem or 'no answer'}")
            yield {Direction.STORE: store, Direction.RETRIEVE: retrieve}
        finally:
            scheduler.close()


# ---- figures --------------------------------------------------------------------------------------------------------


def best(copies: Sequence[Copy]) -> list[float]:
    """GB/s of the best of five of each copy; they take turns."""
    rounds = [[copy() for copy in copies] for _ in range(BEST_OF)]
    return [CALL_BYTES / min(times) / 1e9 for times in zip(*rounds, strict=True)]


def copies(effort: Effort) -> list[Figure]:
    figures: list[Figure] = []
    with alone() as make, serving(f"{L1_BYTES // MIB}MiB") as server:
        pid = server.process.pid
        wait_until(lambda: arena_bytes(resident_bytes(pid)) >= L1_BYTES, "the arena to be warm", WAIT_S)
        for name, (case, goal) in CASES.items():
            with through(server.address, case) as calls:
                floors = [make(WHOLE, direction) for direction in Direction]
                lone = [make(case, direction) for direction in Direction]
                turns = [*floors, *lone, *(calls[direction] for direction in Direction)]
                best(turns)
                rates = list(zip(*(best(turns) for _ in range(max(1, effort.repetitions // 3))), strict=True))
            for at, direction in enumerate(Direction):
                floor, one, call = rates[at], rates[2 + at], rates[4 + at]
                what, of = f"copies/{direction.value} {name}", "contiguous copy"
                figures += [
                    figure(what, call, "GB/s"),
                    figure(f"{what} ratio", divided(call, floor), "ratio", of=of, goal=goal),
                    figure(f"{what} alone ratio", divided(one, floor), "ratio", of=of),
                ]
    return figures


def divided(values: Sequence[float], floor: Sequence[float]) -> list[float]:
    return [value / least for value, least in zip(values, floor, strict=True)]
