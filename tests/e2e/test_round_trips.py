# SPDX-License-Identifier: Apache-2.0
"""Position-coded KV goes in by one set of block ids and comes out by another, byte for byte, through a real server."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvgrpc.core.types import CoreLimits, TokenRange
from tests.e2e.harness import local_server, outcomes, tokens_of
from tests.kvdata import ARRANGEMENTS, BLOCKS_OUTERMOST, GQA, LAYERS_OUTERMOST, MHA, MLA, Arrangement, Kv

BYTE_KV = Kv(layers=2, planes=2, heads=2, head_dim=16, itemsize=1, seed=3)
FLOAT_KV = Kv(layers=2, planes=2, heads=2, head_dim=16, itemsize=4, seed=4)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=str)
@pytest.mark.parametrize("kv", [MHA, GQA, MLA, BYTE_KV, FLOAT_KV], ids=["mha", "gqa", "mla", "1-byte", "4-byte"])
@pytest.mark.parametrize(("block_size", "chunk"), [(1, 16), (8, 64), (16, 16), (32, 512)])
async def test_other_process_memory_other_block_ids(
    tmp_path: Path, kv: Kv, arrangement: Arrangement, block_size: int, chunk: int
) -> None:
    limits = CoreLimits(chunk_tokens=chunk, page_bytes=4096)
    num_tokens = 3 * chunk
    count = num_tokens // block_size
    order = list(range(1, 2 * count + 1))
    random.Random(5).shuffle(order)
    async with local_server(tmp_path, limits=limits, l1_bytes=64 << 20) as server:
        facts = {"kv": kv, "arrangement": arrangement, "block_size": block_size, "num_blocks": 2 * count + 2}
        writer, reader = await server.engine(**facts), await server.engine(**facts)
        tokens = tokens_of(1, num_tokens + chunk - 1)
        assert outcomes(await writer.store(tokens, order[:count], range=TokenRange(0, num_tokens))) == ["STORED"] * 3
        target = order[:count][::-1]
        answer = await reader.lookup(tokens)
        assert answer.status.hit_tokens == num_tokens
        assert outcomes(await reader.retrieve(answer, target)) == ["LOADED"] * 3
        assert reader.image.wrong_tokens(target) == []
        assert reader.image.untouched(target)
        assert server.counts() == (0, 0, 0)


@pytest.mark.parametrize("bounds", [(0, 4), (4, 8), (12, 20), (4, 60), (20, 44), (60, 64), (0, 64)])
async def test_ranges_that_start_and_end_inside_a_chunk(tmp_path: Path, bounds: tuple[int, int]) -> None:
    start, end = bounds
    async with local_server(tmp_path) as server:
        writer, reader = await server.engine(), await server.engine()
        tokens = tokens_of(1, 64)
        await writer.store(tokens, list(range(16)))
        answer = await reader.lookup(tokens)
        target = [200 - at for at in range((end - start) // 4)]
        results = await reader.retrieve(answer, target, range=TokenRange(start, end))
        assert set(outcomes(results)) == {"LOADED"}
        assert results[0].first_chunk == start // 16
        assert reader.image.wrong_tokens(target, start) == []
        assert reader.image.untouched(target)


async def test_repeated_block_ids(tmp_path: Path) -> None:
    """An engine may map one block twice (a store reads it twice); a retrieve into it leaves the last of the two."""
    async with local_server(tmp_path) as server:
        engine = await server.engine()
        tokens = tokens_of(1, 32)
        engine.image.write([3], 0)
        results = await engine.worker.store(engine.store_request(tokens, [3] * 8))
        assert outcomes(results) == ["STORED", "STORED"]
        answer = await engine.lookup(tokens)
        target = [10, 11, 12, 13, 14, 15, 16, 17]
        assert outcomes(await engine.retrieve(answer, target)) == ["LOADED", "LOADED"]
        for block in target:
            assert engine.image.wrong_tokens([block], 0) == []
        assert engine.image.untouched(target)


async def test_token_major_engines_of_different_block_sizes_share(tmp_path: Path) -> None:
    async with local_server(tmp_path, limits=CoreLimits(chunk_tokens=64, page_bytes=4096)) as server:
        writer = await server.engine(block_size=16, arrangement=LAYERS_OUTERMOST)
        reader = await server.engine(block_size=32, arrangement=BLOCKS_OUTERMOST)
        tokens = tokens_of(1, 128)
        await writer.store(tokens, [7, 3, 5, 1, 9, 2, 8, 4])
        answer = await reader.lookup(tokens)
        assert answer.status.hit_tokens == 128
        await reader.retrieve(answer, [6, 2, 4, 0])
        assert reader.image.wrong_tokens([6, 2, 4, 0]) == []
        assert reader.image.untouched([6, 2, 4, 0])


@pytest.mark.parametrize("slice_bytes", [1000, 7000, 1 << 20])
async def test_slices_smaller_than_a_chunk_and_scattered_pages(tmp_path: Path, slice_bytes: int) -> None:
    """Objects lie in pages wherever there is room, and copies stop between slices; the bytes do not care."""
    limits = CoreLimits(chunk_tokens=16, page_bytes=512, slice_bytes=slice_bytes)
    async with local_server(tmp_path, limits=limits, l1_bytes=96 << 10) as server:
        engine = await server.engine()
        chance = random.Random(slice_bytes)
        for seed in range(40):
            count = chance.randint(1, 5)
            tokens = tokens_of(seed, count * 16)
            blocks = chance.sample(range(256), count * 4)
            await engine.store(tokens, blocks)
            answer = await engine.lookup(tokens)
            assert answer.status.hit_tokens == count * 16
            target = chance.sample(range(256), count * 4)
            assert outcomes(await engine.retrieve(answer, target)) == ["LOADED"] * count
            assert engine.image.wrong_tokens(target) == []
            assert engine.image.untouched(target)
            server.check()
