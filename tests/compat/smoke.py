# SPDX-License-Identifier: Apache-2.0
"""The smoke test that goes into a recorded client: `python client.zip ADDRESS` against any later server.

Stores one prompt from shared memory, finds it, reads it back into other blocks and compares every byte.
"""

from __future__ import annotations

import array
import asyncio
import mmap
import os
import secrets
import sys

from kvgrpc import api
from kvgrpc.client import AioClient
from kvgrpc.core.types import ChunkOutcome, Role, SpaceIdentity, SpaceRef, TokenRange

BLOCK_SIZE, NUM_BLOCKS, RUN_BYTES = 16, 64, 512


def layout(name: str) -> api.Layout:
    runs = api.Runs(0, 0, 1, 0, 1, 0, RUN_BYTES, RUN_BYTES)
    group = api.KvGroup(BLOCK_SIZE, NUM_BLOCKS, (runs,), api.BlockForm.OPAQUE, backend="SMOKE", layout="B")
    return api.Layout((api.SharedMemory(name, 0, NUM_BLOCKS * RUN_BYTES),), (group,))


async def smoke(address: str, name: str, memory: mmap.mmap) -> None:
    engine_id = secrets.token_hex(16)
    client = AioClient(address, f"smoke-{secrets.token_hex(8)}")
    info = await client.handshake(api.Hello(client_version="smoke"))
    chunk = info.chunk_tokens
    count = chunk // BLOCK_SIZE
    assert 2 * count <= NUM_BLOCKS, f"chunks of {chunk} tokens are too large for this test"
    session = client.attach(engine_id, Role.WORKER, secrets.token_bytes(16))
    assert not (await anext(session)).draining
    identity = SpaceIdentity(f"smoke-{secrets.token_hex(4)}", "", "uint8", 1, info.hash_algorithm, "")
    register = api.RegisterRequest(engine_id, identity, 0, 0, 1, 1, layout(name), info.host_id)
    space = SpaceRef((await client.register(register)).space_base)
    content = api.Tokens(array.array("I", range(chunk + 3)).tobytes())
    source, target = list(range(count)), list(range(2 * count - 1, count - 1, -1))
    for block in source:
        memory[block * RUN_BYTES : (block + 1) * RUN_BYTES] = bytes((block * 7 + at) % 251 for at in range(RUN_BYTES))
    stored = await client.store(api.StoreRequest(engine_id, 1, space, content, (source,), TokenRange(0, chunk)))
    assert [result.outcome for result in stored] == [ChunkOutcome.STORED], stored
    answer = await client.lookup(api.LookupRequest(engine_id, "r", space, content))
    assert answer.status.hit_tokens == chunk, answer
    retrieve = api.RetrieveRequest(engine_id, 2, answer.job_id, TokenRange(0, chunk), (target,))
    loaded = await client.retrieve(retrieve)
    assert [result.outcome for result in loaded] == [ChunkOutcome.LOADED], loaded
    for block, other in zip(source, target, strict=True):
        there = memory[block * RUN_BYTES : (block + 1) * RUN_BYTES]
        assert there == memory[other * RUN_BYTES : (other + 1) * RUN_BYTES], f"block {block} came back different"
    await client.fence(engine_id, [1, 2])
    assert (await client.get_status()).chunks >= 1
    await client.close()


def main() -> None:
    name = f"kvgrpc-smoke-{secrets.token_hex(8)}"
    path = f"/dev/shm/{name}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(fd, NUM_BLOCKS * RUN_BYTES)
        asyncio.run(smoke(sys.argv[1], name, mmap.mmap(fd, NUM_BLOCKS * RUN_BYTES)))
    finally:
        os.close(fd)
        os.unlink(path)
    print("smoke ok")


if __name__ == "__main__":
    main()
