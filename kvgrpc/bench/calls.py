# SPDX-License-Identifier: Apache-2.0
"""Figures of calls: what a call costs beside one that does nothing, and how many lookups there are in a second.

Ratios are of medians of calls that alternate: each repetition goes through what it compares forwards and then
backwards, so that a machine that becomes slower meanwhile is the same for all.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from statistics import median
from typing import Any, cast

from kvgrpc.bench.asker import attached
from kvgrpc.bench.bare import EMPTY_CALL
from kvgrpc.bench.engine import KINDS, LENGTHS, prompt, store_prompts
from kvgrpc.bench.processes import answer, ask, listening, running, serving
from kvgrpc.bench.results import Figure, figure
from kvgrpc.bench.suite import Effort
from kvgrpc.client.address import parse_address
from kvgrpc.client.channel import ChannelOptions, open_channel

L1 = "512MiB"
CLIENTS = (1, 4)
IN_FLIGHT = 8
RATIOS = {"hashes": {"32K": "<= 1.4", "128K": "<= 2.0"}, "tokens": {"32K": "<= 2.5", "128K": "<= 6"}}

Act = Callable[[], Awaitable[float]]
"""Does something once; the seconds that count."""


def empty_call(address: str) -> tuple[Act, Act, Callable[[], Awaitable[None]]]:
    """The empty call alone, a call of several at a time, and how to close the channel."""
    channel = open_channel(parse_address(address), ChannelOptions())
    method = cast("Any", channel).unary_unary(EMPTY_CALL)

    async def call() -> float:
        began = time.perf_counter()
        await method(b"", wait_for_ready=True)
        return time.perf_counter() - began

    async def crowd() -> float:
        began = time.perf_counter()
        await asyncio.gather(*(method(b"", wait_for_ready=True) for _ in range(IN_FLIGHT)))
        return (time.perf_counter() - began) / IN_FLIGHT

    async def close() -> None:
        await channel.close()

    return call, crowd, close


async def there_and_back(acts: dict[str, Act], calls: int) -> dict[str, float]:
    """Median seconds of each act, done ``calls`` times forwards and as often backwards."""
    took: dict[str, list[float]] = {name: [] for name in acts}
    for name in (*acts, *reversed(acts)):
        took[name] += [await acts[name]() for _ in range(calls)]
    return {name: median(times) for name, times in took.items()}


async def repeated(acts: dict[str, Act], effort: Effort) -> dict[str, list[float]]:
    """Medians of each act, one for each repetition, after one that does not count."""
    await there_and_back(acts, max(1, effort.calls // 4))
    rounds = [await there_and_back(acts, effort.calls) for _ in range(effort.repetitions)]
    return {name: [one[name] for one in rounds] for name in acts}


def ratios(name: str, values: list[float], floor: list[float], of: str, goal: str | None) -> Figure:
    return figure(name, [one / least for one, least in zip(values, floor, strict=True)], "ratio", of=of, goal=goal)


def microseconds(name: str, values: list[float]) -> Figure:
    return figure(name, [value * 1e6 for value in values], "us")


# ---- figures --------------------------------------------------------------------------------------------------------


def health(effort: Effort) -> list[Figure]:
    with listening("kvgrpc.bench.bare") as bare, serving(L1) as server:
        took = asyncio.run(_health(bare.address, server.address, effort))
    of, goal = "bare grpc.aio server", "<= 1.15"
    return [
        microseconds("health/p50", took["call"]),
        ratios("health/p50 ratio", took["call"], took["bare call"], of, goal),
        ratios(f"health/{IN_FLIGHT} in flight ratio", took["crowd"], took["bare crowd"], of, goal),
    ]


async def _health(bare: str, server: str, effort: Effort) -> dict[str, list[float]]:
    bare_call, bare_crowd, close_bare = empty_call(bare)
    call, crowd, close = empty_call(server)
    try:
        return await repeated({"bare call": bare_call, "call": call}, effort) | await repeated(
            {"bare crowd": bare_crowd, "crowd": crowd}, effort
        )
    finally:
        await close_bare()
        await close()


def lookup(effort: Effort) -> list[Figure]:
    with serving(L1) as server:
        took = asyncio.run(_lookup(server.address, effort))
    figures = [microseconds("lookup/empty call", took["empty"])]
    for kind in KINDS:
        for length in LENGTHS:
            values = took[f"{kind} {length}"]
            figures.append(microseconds(f"lookup/{kind} {length}", values))
            goal = RATIOS[kind].get(length)
            if goal is not None:
                figures.append(ratios(f"lookup/{kind} {length} ratio", values, took["empty"], "empty call", goal))
    return figures


async def _lookup(address: str, effort: Effort) -> dict[str, list[float]]:
    await store_prompts(address)
    call, _, close = empty_call(address)
    async with attached(address) as asker:
        acts: dict[str, Act] = {"empty": call}
        for kind in KINDS:
            for length, num_tokens in LENGTHS.items():
                content = prompt(kind, num_tokens, True)
                acts[f"{kind} {length}"] = lambda kind=kind, content=content: asker.lookup(kind, content, True)
        try:
            return await repeated(acts, effort)
        finally:
            await close()


def lookups(effort: Effort) -> list[Figure]:
    figures: list[Figure] = []
    with ExitStack() as stack:
        server = stack.enter_context(serving(L1))
        asyncio.run(store_prompts(server.address))
        askers = [stack.enter_context(running("kvgrpc.bench.asker", server.address)) for _ in range(max(CLIENTS))]
        for asker in askers:
            answer(asker)
        for length in LENGTHS:
            for hit in (True, False):
                for clients in CLIENTS:
                    order = {"kind": "tokens", "length": length, "hit": hit, "seconds": effort.seconds}
                    rates: list[float] = []
                    for _ in range(min(5, effort.repetitions) + 1):
                        for asker in askers[:clients]:
                            ask(asker, json.dumps(order))
                        answers = [json.loads(answer(asker)) for asker in askers[:clients]]
                        rates.append(sum(one["lookups"] / one["seconds"] for one in answers))
                    name = f"lookups/{length} {'hit' if hit else 'miss'} {clients} client{'s' * (clients > 1)}"
                    figures.append(figure(name, rates[1:], "1/s"))
    return figures


def turn(effort: Effort) -> list[Figure]:
    with listening("kvgrpc.bench.turns", L1) as server:
        longest = asyncio.run(
            _turn(server.address, effort, lambda: ask(server.process, ""), lambda: answer(server.process))
        )
    return [figure(f"turn/{kind} 128K", values, "ms", goal="<= 5") for kind, values in longest.items()]


async def _turn(
    address: str, effort: Effort, ask: Callable[[], None], answer: Callable[[], str]
) -> dict[str, list[float]]:
    await store_prompts(address)
    longest: dict[str, list[float]] = {kind: [] for kind in KINDS}
    async with attached(address) as asker:
        for _ in range(effort.repetitions):
            for kind, values in longest.items():
                content = prompt(kind, LENGTHS["128K"], True)
                ask()
                answer()
                for _ in range(effort.calls):
                    await asker.lookup(kind, content, True)
                ask()
                values.append(float(answer()))
    return longest
