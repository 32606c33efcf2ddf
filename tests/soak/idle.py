# SPDX-License-Identifier: Apache-2.0
"""Two hundred engines that do nothing, and eight that do: ``python -m tests.soak.idle --seconds 1800``

The idle ones are attached over TCP, where a server could take their pings amiss. Health is asked from a process that
does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import secrets
import time
from array import array
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvgrpc import api
from kvgrpc.bench.engine import BLOCK, CHUNK, Paging, working
from kvgrpc.client import AioClient, Client
from kvgrpc.core.types import Role
from tests.fuzz.run import resident_bytes
from tests.ports import free_port
from tests.served import serving

IDLE, BUSY = 200, 8
HEALTH_S = 0.05
PROMPTS, PROMPT_CHUNKS = 64, 8
PAGING = Paging(4, 2, 2048, 4 * PROMPT_CHUNKS * CHUNK // BLOCK)
CONTEXT = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Idled:
    """What was seen. ``lost`` are streams of idle engines that ended, ``calls`` those of the busy engines."""

    health_s: list[float]
    lost: int
    sessions_ended: int
    calls: int
    memory_first: int
    memory_last: int

    def late(self, most_s: float) -> int:
        return sum(one > most_s for one in self.health_s)


async def _idle(address: str, ready: Connection) -> None:
    lost = 0

    async def attached(stack: AsyncExitStack, number: int) -> asyncio.Task[None]:
        client = await stack.enter_async_context(AioClient(address, f"idle-{number}"))
        stream = client.attach(secrets.token_hex(16), Role.WORKER, secrets.token_bytes(16))
        await anext(stream)

        async def follow() -> None:
            nonlocal lost
            try:
                async for _ in stream:
                    pass
            finally:
                lost += not over

        return asyncio.create_task(follow())

    over = False
    async with AsyncExitStack() as stack:
        tasks = [await attached(stack, number) for number in range(IDLE)]
        ready.send(len(tasks))
        await asyncio.to_thread(ready.recv)
        ready.send(lost)
        over = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _busy(address: str, ready: Connection) -> None:
    calls, over = 0, False

    async def work(number: int) -> None:
        nonlocal calls
        async with working(address, PAGING, PAGING.identity()) as worker:
            blocks = range(PROMPT_CHUNKS * CHUNK // BLOCK)
            at = 0
            while not over:
                at += 1
                first = (number * PROMPTS + at % PROMPTS) << 16
                prompt = api.Tokens(array("I", range(first, first + PROMPT_CHUNKS * CHUNK)).tobytes())
                await worker.store_again(prompt, blocks)
                await worker.lookup(prompt, str(at))
                await worker.end(str(at))
                calls += 3

    tasks = [asyncio.create_task(work(number)) for number in range(BUSY)]
    ready.send(len(tasks))
    await asyncio.to_thread(ready.recv)
    over = True
    await asyncio.gather(*tasks)
    ready.send(calls)


def _run_idle(address: str, ready: Connection) -> None:
    asyncio.run(_idle(address, ready))


def _run_busy(address: str, ready: Connection) -> None:
    asyncio.run(_busy(address, ready))


def idle(seconds: float) -> Idled:
    """Raises AssertionError when health says anything but SERVING."""
    port = free_port()
    flags = ("--listen", f"127.0.0.1:{port}", "--l1-size", "64MiB", "--clients", "256")
    with serving(*flags) as server:
        others = [(_run_idle, f"127.0.0.1:{port}"), (_run_busy, server.address)]
        pipes: list[Connection] = []
        processes = []
        for run, address in others:
            ours, theirs = CONTEXT.Pipe()
            processes.append(CONTEXT.Process(target=run, args=(address, theirs), daemon=True))
            processes[-1].start()
            pipes.append(ours)
        assert [pipe.recv() for pipe in pipes] == [IDLE, BUSY]
        with grpc.insecure_channel(server.address) as channel, Client(server.address) as admin:
            health: Any = health_pb2_grpc.HealthStub(channel)
            asked: list[float] = []
            memory_first, end = 0, time.monotonic() + seconds
            while (now := time.monotonic()) < end:
                if not memory_first and end - now < seconds * 0.8:
                    memory_first = resident_bytes(server.process.pid)
                answer = health.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=30)
                asked.append(time.monotonic() - now)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
                time.sleep(HEALTH_S)
            memory_last = resident_bytes(server.process.pid)
            status = admin.get_status()
            assert status.clients >= IDLE
        for pipe in pipes:
            pipe.send("over")
        lost, calls = (pipe.recv() for pipe in pipes)
        for process in processes:
            process.join(60)
        ended = status.counters.get("ended_sessions", 0)
    return Idled(asked, lost, ended, calls, memory_first, memory_last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800)
    found = idle(parser.parse_args().seconds)
    worst, grown = max(found.health_s), found.memory_last - found.memory_first
    print(f"{IDLE} idle engines: {found.lost} lost; {found.calls} calls of {BUSY} others")
    print(f"health: {len(found.health_s)} answers, the slowest after {worst * 1000:.1f} ms (goal 100)")
    print(f"memory beside L1: {found.memory_first >> 20} MiB, grown by {grown / (1 << 20):.1f} MiB")
    assert (found.lost, found.sessions_ended) == (0, 0)
    assert worst <= 0.1, f"{found.late(0.1)} answers were late"
    assert grown <= found.memory_first * 0.1


if __name__ == "__main__":
    main()
