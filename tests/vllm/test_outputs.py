# SPDX-License-Identifier: Apache-2.0
"""What an engine says does not depend on the cache, and hits are exactly what was there. Chunks of 64, blocks of 32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvgrpc.client import Client
from tests.vllm.bench import NO_CACHE, Bench, prompt

A = prompt(3, 500)
B = A[:256] + prompt(11, 244)
ALIGNED = prompt(17, 512)


def test_cold_then_the_same_prompt(bench: Bench):
    (cold,) = bench.cold(A)
    (first,) = bench.say(A)
    hits = bench.engine.metric("external_prefix_cache_hits")
    bench.forget()
    (again,) = bench.say(A)
    assert (first.tokens, first.cached) == (cold, 0)
    assert (again.tokens, again.cached) == (cold, 448)  # 7 whole chunks of 500 tokens
    assert bench.engine.metric("external_prefix_cache_hits") - hits == 448


def test_half_of_the_prefix_is_shared(bench: Bench):
    cold = bench.cold(B)
    bench.say(A)
    bench.forget()
    (said,) = bench.say(B)
    assert (said.tokens, said.cached) == (cold[0], 256)


def test_a_prompt_that_ends_with_a_chunk_is_loaded_as_a_whole(bench: Bench):
    """vLLM computes its last token only."""
    (cold,) = bench.cold(ALIGNED)
    bench.say(ALIGNED)
    bench.forget()
    (said,) = bench.say(ALIGNED)
    assert (said.tokens, said.cached) == (cold, 512)


@pytest.mark.parametrize("length", [63, 64, 65, 95, 96, 97, 127, 128, 129])
def test_lengths_around_blocks_and_chunks(bench: Bench, length: int):
    (cold,) = bench.cold(prompt(23, length), tokens=8)
    bench.say(prompt(23, length), tokens=8)
    bench.forget()
    (said,) = bench.say(prompt(23, length), tokens=8)
    assert (said.tokens, said.cached) == (cold, length // 64 * 64)


def test_the_next_turn_finds_what_was_generated(bench: Bench):
    (answer,) = bench.cold(A)
    turn = [*A, *answer, *prompt(5, 8)]
    (cold,) = bench.cold(turn)
    bench.say(A)
    bench.forget()
    (said,) = bench.say(turn)
    assert (said.tokens, said.cached) == (cold, 512)  # the chunk from 448 on ends in the answer


def test_a_batch_with_local_and_external_hits(bench: Bench):
    batch = [A, B, ALIGNED, prompt(29, 100), A[:320] + prompt(31, 64), prompt(37, 31), B[:400], prompt(41, 700)]
    cold = bench.cold(*batch)
    bench.say(A)
    bench.say(ALIGNED)
    bench.forget()
    bench.say(B[:256])  # a local prefix of B, and an external one
    said = bench.say(*batch)
    assert [each.tokens for each in said] == cold
    assert [each.cached for each in said][2:4] == [512, 0]
    assert all(each.cached >= 256 for each in said[:2])


def test_a_batch_of_hits_is_what_was_computed(bench: Bench):
    """Every block byte for byte, in other blocks, and the words that vLLM says behind hits of its own: on a card they
    may differ from those of a cold run."""
    batch = [A[:128] + prompt(51 + at, 70 + at % 27) for at in range(50)]  # whole blocks end where whole chunks do
    kept = bench.blocks_at_the_end()
    try:
        bench.say(*batch, tokens=4)
        local = bench.say(*batch, tokens=4, params=NO_CACHE)
        bench.forget()
        said = bench.say(*batch, tokens=4, params={"kvgrpc.no_store": True})
    finally:
        del bench.scheduler().finished
    assert [each.tokens for each in said] == [each.tokens for each in local]
    assert {each.cached for each in said} == {each.cached for each in local} == {192}
    numbers = sorted(kept)
    computed, loaded = ([kept[number] for number in part] for part in (numbers[:50], numbers[100:]))
    for ((first,), was), ((second,), found) in zip(computed, loaded, strict=True):
        assert first[:6] != second[:6]
        for layer, blocks in found.items():
            assert torch.equal(blocks[4:6].view(torch.uint8), was[layer][4:6].view(torch.uint8))
            shared = (other[layer][:4].view(torch.uint8) for _, other in computed)  # one of those who computed it
            assert any(torch.equal(blocks[:4].view(torch.uint8), one) for one in shared)


def test_a_local_prefix_is_continued_from_inside_a_chunk(bench: Bench):
    (cold,) = bench.cold(A)
    bench.say(A)
    bench.forget()
    bench.say(A[:100], tokens=1)  # three local blocks: one and a half chunks
    hits = bench.engine.metric("external_prefix_cache_hits")
    (said,) = bench.say(A)
    assert (said.tokens, said.cached) == (cold, 448)
    assert bench.engine.metric("external_prefix_cache_hits") - hits == 448 - 96


def test_a_salt_keeps_tenants_apart(bench: Bench):
    (cold,) = bench.cold(A)
    bench.say(A)
    bench.forget()
    (other,) = bench.say(A, salt="tenant-x")
    bench.forget()
    (same,) = bench.say(A, salt="tenant-x")
    assert (other.tokens, other.cached) == (cold, 0)
    assert (same.tokens, same.cached) == (cold, 448)


@contextmanager
def served_as(bench: Bench, other: list[int]) -> Iterator[None]:
    """Lookups find the stored chunks of another prompt."""
    scheduler, made = bench.scheduler(), []
    real = scheduler._keys

    def note(*asked: Any) -> tuple[bytes, ...]:
        made.append(real(*asked))
        return made[-1]

    scheduler._keys = note
    bench.say(other, tokens=1)
    bench.forget()
    scheduler._keys = lambda *_: made[0]
    try:
        yield
    finally:
        scheduler._keys = real


def test_loads_are_real(bench: Bench):
    """What the server gives decides what the engine says: with a prefix of another prompt it says other things."""
    (cold,) = bench.cold(A)
    bench.say(A)
    bench.forget()
    with served_as(bench, prompt(43, 500)):
        (said,) = bench.say(A, params={"kvgrpc.no_store": True})
    assert said.cached == 448
    assert said.tokens != cold


def test_what_is_stored_is_what_is_said(bench: Bench):
    """Damaged bytes in the server's memory change what the engine says."""
    (cold,) = bench.cold(A)
    bench.say(A)
    bench.forget()
    bench.damage()
    (said,) = bench.say(A, params={"kvgrpc.no_store": True})
    assert said.cached == 448
    assert said.tokens != cold
    bench.damage()
    bench.forget()
    (mended,) = bench.say(A)
    assert (mended.tokens, mended.cached) == (cold, 448)


def test_the_servers_counts_agree(bench: Bench):
    bench.cold(A)
    before, failed = bench.status().counters, bench.scheduler().report.failed_tokens
    bench.say(A)
    bench.forget()
    bench.say(A)
    with Client(bench.served.address) as client:
        after = client.get_status().counters
    names = ("stored_chunks", "loaded_chunks", "failed_chunks")  # those that are not 0
    grown = {name: after.get(name, 0) - before.get(name, 0) for name in names}
    assert grown == {"stored_chunks": 8, "loaded_chunks": 7, "failed_chunks": 0}
    assert bench.scheduler().report.failed_tokens == failed
