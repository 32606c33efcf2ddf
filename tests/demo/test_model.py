# SPDX-License-Identifier: Apache-2.0
"""The demo's model and paged memory: equal step shapes give equal bits wherever blocks lie, and a wrong byte shows."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvgrpc.cli.demo import shared
from kvgrpc.cli.demo.model import ModelShape, Transformer
from kvgrpc.cli.demo.paged import BlockPool, PagedSequence, PoolShape
from kvgrpc.cli.demo.report import FirstReport, SecondReport, checks, from_line, to_line

SHAPE = ModelShape(vocabulary=512, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, feed_forward=128)
STEP = 32
PROMPT = torch.arange(100, dtype=torch.int32) * 37 % SHAPE.vocabulary


@pytest.fixture
def pool() -> Iterator[BlockPool]:
    torch.set_num_threads(1)
    name = f"kvgrpc-test-{secrets.token_hex(8)}"
    try:
        yield BlockPool(name, PoolShape(SHAPE.layers, 32, 16, SHAPE.kv_heads, SHAPE.head_dim))
    finally:
        shared.unlink(name)


def logits_after(model: Transformer, sequence: PagedSequence, start: int = 0) -> torch.Tensor:
    logits = torch.empty(0)
    for begin in range(start, len(PROMPT), STEP):
        logits = model.step(PROMPT[begin : begin + STEP], begin, sequence)
    return logits


def test_the_place_of_the_blocks_changes_no_bit(pool: BlockPool):
    model = Transformer(SHAPE)
    one, other = PagedSequence(pool, range(7)), PagedSequence(pool, range(30, 16, -2))
    assert torch.equal(logits_after(model, one), logits_after(model, other))
    assert pool.digest(one.block_ids[:6]) == pool.digest(other.block_ids[:6])
    assert pool.digest(one.block_ids[:6]) != pool.digest(one.block_ids[5::-1])
    assert model.computed_tokens == 2 * len(PROMPT)


def test_the_rest_behind_cached_tokens_gives_the_same_bits(pool: BlockPool):
    model = Transformer(SHAPE)
    full, cached = PagedSequence(pool, range(7)), PagedSequence(pool, range(7, 14))
    expected = logits_after(model, full)
    pool.blocks[:, :, 7:11] = pool.blocks[:, :, 0:4]
    assert torch.equal(logits_after(model, cached, start=64), expected)
    assert model.computed_tokens == len(PROMPT) + 36


def test_a_wrong_bit_in_a_cached_block_shows_in_the_logits(pool: BlockPool):
    model = Transformer(SHAPE)
    sequence = PagedSequence(pool, range(7))
    expected, digest = logits_after(model, sequence), pool.digest(range(4))
    pool.blocks.view(torch.int32)[1, 1, 2, 3, 0, 5] ^= 1 << 20
    assert pool.digest(range(4)) != digest
    assert not torch.equal(logits_after(model, sequence, start=64), expected)


def test_fresh_memory_is_recognised(pool: BlockPool):
    assert pool.untouched(range(32))
    pool.blocks[1, 0, 9, 15, 1, 15] = 1.0
    assert not pool.untouched([9]) and pool.untouched([*range(9), *range(10, 32)])


def test_weights_follow_from_the_seed():
    assert Transformer(SHAPE).revision() == Transformer(SHAPE).revision()
    assert Transformer(SHAPE).revision() != Transformer(replace(SHAPE, seed=1)).revision()


FIRST = FirstReport(process=1, prompt_tokens=100, stored_tokens=96, stored_bytes=1, store_s=1.0, digest="d" * 64)
SECOND = SecondReport(
    process=2,
    prompt_tokens=100,
    hit_tokens=96,
    retrieved_bytes=1,
    lookup_s=1.0,
    retrieve_s=1.0,
    cached_first_token_s=1.0,
    full_first_token_s=2.0,
    cached_computed_tokens=4 + 31,
    full_computed_tokens=100 + 31,
    cached_tokens=tuple(range(32)),
    full_tokens=tuple(range(32)),
    equal_logits=True,
    largest_difference=0.0,
    other_blocks_untouched=True,
    digest="d" * 64,
)


def test_a_good_pair_of_reports_holds():
    assert all(check.holds for check in checks(FIRST, SECOND, 32))


@pytest.mark.parametrize(
    "wrong",
    [
        {"process": 1},
        {"hit_tokens": 64},
        {"digest": "e" * 64},
        {"other_blocks_untouched": False},
        {"cached_computed_tokens": 100 + 31},
        {"full_computed_tokens": 4 + 31},
        {"equal_logits": False},
        {"cached_tokens": (1, *range(1, 32))},
        {"cached_tokens": tuple(range(31)), "full_tokens": tuple(range(31))},
        {"cached_tokens": (1, 2) * 16, "full_tokens": (1, 2) * 16},
    ],
)
def test_every_difference_fails(wrong: dict[str, object]):
    assert not all(check.holds for check in checks(FIRST, replace(SECOND, **wrong), 32))  # pyright: ignore[reportArgumentType]


def test_a_store_that_fell_short_fails():
    assert not all(check.holds for check in checks(replace(FIRST, stored_tokens=64), SECOND, 32))


def test_reports_travel_as_lines():
    assert from_line(FirstReport, to_line(FIRST)) == FIRST
    assert from_line(SecondReport, to_line(SECOND)) == SECOND
