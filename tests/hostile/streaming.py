# SPDX-License-Identifier: Apache-2.0
"""A client without shared memory, in a process of its own, that stops in the middle of a stream of chunks.

    with Streaming(address, "write", prompt=1, chunks=3, parts=6) as peer:   # or "read"
        peer.wait_in_the_middle()                                            # so many parts were sent or taken
        peer.go_on(); peer.ended()                                           # outcomes, or ["INTERNAL"] and the like

Data is position-coded, as that of tests/hostile/engine.py: an engine loads what is written here, and the other way.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any

from kvgrpc import api
from kvgrpc.client import AioClient, object_order, stored_form
from kvgrpc.client.objects import alone, collected, parts_of
from kvgrpc.core.errors import Refusal
from kvgrpc.core.types import Reader, Role, SpaceIdentity, SpaceRef, TokenRange
from tests.e2e.harness import BLOCK, CHUNK, outcomes, tokens_of
from tests.kvdata import LAYERS_OUTERMOST, Image, Kv

BIG = Kv(layers=2, planes=2, heads=8, head_dim=1536)
"""1.5 MiB a chunk, so two parts."""
OBJECT_BYTES, PARTS_A_CHUNK = 3 << 19, 2
PER_CHUNK = CHUNK // BLOCK


def objects_of(prompt: int, chunks: int) -> dict[int, bytes]:
    """What the chunks of a prompt are."""
    image, blocks = (
        Image(replace(BIG, seed=prompt), LAYERS_OUTERMOST, BLOCK, chunks * PER_CHUNK),
        range(chunks * PER_CHUNK),
    )
    image.write(blocks)
    return {at: image.object_bytes(blocks[at * PER_CHUNK : (at + 1) * PER_CHUNK]) for at in range(chunks)}


async def middle() -> None:
    print("middle", flush=True)
    await asyncio.to_thread(sys.stdin.readline)


async def live(address: str, act: str, prompt: int, chunks: int, parts: int) -> list[str]:
    groups, engine_id = Image(BIG, LAYERS_OUTERMOST, BLOCK, 1).layout("none").groups, secrets.token_hex(16)
    identity = SpaceIdentity("test-model", "", "bfloat16", 1, api.OWN_HASH_ALGORITHM, stored_form(groups))
    tokens = tokens_of(prompt, chunks * CHUNK)
    async with AioClient(address, f"streaming-{engine_id}") as client:
        session = client.attach(engine_id, Role.SCHEDULER, secrets.token_bytes(16))
        await anext(session)
        space = SpaceRef((await client.handshake(api.Hello(identity=identity))).space_base)

        async def stopping(stream: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
            count = 0
            async for one in stream:
                if count == parts:
                    await middle()
                count += 1
                yield one

        if act == "write":
            asked = api.WriteChunksRequest(engine_id, space, tokens, OBJECT_BYTES, object_order(groups))
            return outcomes(await client.write_chunks(asked, stopping(parts_of(alone(objects_of(prompt, chunks))))))
        job_id = (await client.lookup(api.LookupRequest(engine_id, "r", space, tokens))).job_id
        reading = api.ReadChunksRequest(engine_id, job_id, Reader(0, 0), TokenRange(0, chunks * CHUNK))
        taken, results = await collected(stopping(client.read_chunks(reading)), by_groups=False)
        found = objects_of(prompt, chunks)
        assert all(taken[at] == {0: found[at]} for at in taken), "wrong bytes"
        return outcomes(results)


class Streaming:
    """The test's end of it."""

    def __init__(self, address: str, act: str, prompt: int, chunks: int, parts: int) -> None:
        words = (sys.executable, "-m", __name__, address, act, f"{prompt}", f"{chunks}", f"{parts}")
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Streaming:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def wait_in_the_middle(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "middle\n"

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def ended(self) -> list[str]:
        """Outcomes, or the reason of the refusal."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        self._process.kill()
        self._process.wait()


def main() -> None:
    address, act, *numbers = sys.argv[1:]
    try:
        print(json.dumps(asyncio.run(live(address, act, *map(int, numbers)))), flush=True)
    except Refusal as refusal:
        print(json.dumps([refusal.reason.value]), flush=True)


if __name__ == "__main__":
    main()
