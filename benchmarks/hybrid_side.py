# SPDX-License-Identifier: Apache-2.0
"""A client of hybrid.py, with the kvgrpc of its side: ``hybrid_side.py ADDRESS``. It says where that lies and then
answers orders, which are lines of JSON: ``lookups`` with the median seconds of a hit, ``copies`` with those of a store
and of a retrieve of 64 MiB."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from contextlib import AsyncExitStack
from statistics import median
from typing import Any

import kvgrpc
from kvgrpc import api
from kvgrpc.bench.asker import Asker, attached
from kvgrpc.bench.copies import shuffled
from kvgrpc.bench.engine import LENGTHS, Paging, Worker, prompt, store_prompts, working
from kvgrpc.bench.processes import say

CALL_BYTES = 64 << 20


def paging(layers: int, run_bytes: int) -> Paging:
    """K and V of so many layers: blocks for two calls."""
    return Paging(layers, 2, run_bytes, 2 * CALL_BYTES // (layers * 2 * run_bytes))


CASES = {"32x32K": paging(32, 32 << 10), "2x16K": paging(2, 16 << 10)}


async def lookups(asker: Asker, length: str, seconds: float) -> dict[str, float]:
    content, took = prompt("hashes", LENGTHS[length], True), list[float]()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        took.append(await asker.lookup("hashes", content, True))
    return {"lookup": median(took)}


async def copies(worker: Worker, case: Paging, count: int) -> dict[str, float]:
    """Each of a new prompt, out of half of the blocks and into the others."""
    blocks, took = shuffled(case.num_blocks), {"store": list[float](), "retrieve": list[float]()}
    mine, other = blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]
    for _ in range(count):
        content = api.Tokens(secrets.token_bytes(4) * (len(mine) * case.block_size))
        took["store"].append(await worker.store(content, mine))
        took["retrieve"].append(await worker.retrieve(content, other))
    return {name: median(values) for name, values in took.items()}


async def main(address: str) -> None:
    await store_prompts(address)
    async with AsyncExitStack() as stack:
        asker = await stack.enter_async_context(attached(address))
        workers = {
            name: await stack.enter_async_context(working(address, case, case.identity()))
            for name, case in CASES.items()
        }
        say(json.dumps({"kvgrpc": kvgrpc.__file__}))
        for line in sys.stdin:  # nothing else is to happen meanwhile
            order: dict[str, Any] = json.loads(line)
            if order["do"] == "lookups":
                found = await lookups(asker, order["length"], order["seconds"])
            else:
                found = await copies(workers[order["case"]], CASES[order["case"]], order["count"])
            say(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
