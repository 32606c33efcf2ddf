# SPDX-License-Identifier: Apache-2.0
"""A real server's evictions reach routers by the hashes that they know."""

from __future__ import annotations

from kvgrpc import api
from kvgrpc.client import SchedulerClient, Watcher, WorkerClient
from kvgrpc.core.types import SpaceIdentity
from kvgrpc.engines.vllm.events import Announcer, Departures, Removed, Stored
from kvgrpc.engines.vllm.ports import chunk_keys
from tests.e2e.harness import outcomes
from tests.engines.fakes import BLOCK, CHUNK, FakeRequest
from tests.kvdata import BLOCKS_OUTERMOST, Image, Kv, shared_memory
from tests.served import serving, wait_until

KV = Kv(layers=1, planes=1, heads=1, head_dim=2048, itemsize=1)
"""64 KiB a chunk: an arena of 16 MiB holds at most 256."""
IDENTITY = SpaceIdentity("model", "", "uint8", 1, "vllm:sha256", "token-major:1:2048:1")
CHUNKS = 64
ENGINE = "engine-that-is-watched"


def request_of(seed: int) -> FakeRequest:
    request = FakeRequest(f"r{seed}", CHUNKS * CHUNK)
    request.all_token_ids = [seed * 100_000 + at for at in range(CHUNKS * CHUNK)]
    return request


def test_evicted_blocks_are_told_and_what_is_left_is_not():
    image_bytes = Image(KV, BLOCKS_OUTERMOST, BLOCK, 2 * CHUNKS).size_bytes
    flags = ("--l1-size", "16MiB", "--page-size", "4KiB", "--chunk-tokens", str(CHUNK))
    with serving(*flags) as server, shared_memory(image_bytes) as (name, buffer):
        image = Image(KV, BLOCKS_OUTERMOST, BLOCK, 2 * CHUNKS, buffer=buffer)
        worker = WorkerClient(server.address, api.RegisterRequest(ENGINE, IDENTITY, 0, 0, 1, 1, image.layout(name)))
        scheduler, watcher = SchedulerClient(server.address, ENGINE, IDENTITY), Watcher(server.address)
        announcer, departures = Announcer(BLOCK, BLOCK), Departures([(scheduler, watcher)])
        there: set[bytes] = set()

        def tell() -> None:
            departures.tell(announcer)
            for event in announcer.take():
                if isinstance(event, Stored):
                    there.update(event.hashes)
                else:
                    assert isinstance(event, Removed) and there.issuperset(event.hashes)
                    there.difference_update(event.hashes)

        try:
            watcher.start()
            assert worker.start(20) and scheduler.start(20)
            requests = [request_of(seed) for seed in range(8)]
            for request in requests:
                content = api.Hashes(chunk_keys(request, CHUNK, BLOCK, 0, CHUNKS), CHUNKS * CHUNK)
                stored = worker.store(content, [range(2 * CHUNKS)]).result(20)
                assert outcomes(stored) == ["STORED"] * CHUNKS
                tell()
                announcer.stored(request, 0, CHUNKS * CHUNK, CHUNK)
            wait_until(lambda: (tell(), len(there) <= 2 * 256)[1], 10)
            told, found = 0, 0
            for request in requests:
                content = api.Hashes(chunk_keys(request, CHUNK, BLOCK, 0, CHUNKS), CHUNKS * CHUNK)
                told += next((at for at, block in enumerate(request.block_hashes) if block not in there), 2 * CHUNKS)
                found += scheduler.lookup(request.request_id, content, timeout_s=20).hit_tokens // BLOCK
            assert found == told > 0
        finally:
            watcher.close()
            scheduler.close()
            worker.close(timeout_s=5)
