# SPDX-License-Identifier: Apache-2.0
"""A model as LFM2: layers that keep one state beside full attention, in three groups. Chunks of one block of 32 tokens,
since vLLM ends steps with blocks; steps of at most 256 tokens. A state is stored where a step ended: in a prompt of 500
tokens at 256 and 480.

In float32: in bfloat16 this model says other things behind vLLM's own prefix cache, too, since steps of other lengths
round otherwise. And without batches: there vLLM says other things than alone, with and without a cache.

Run by itself, since a process has one engine: pytest tests/vllm/hybrid/test_states.py.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.served import serving
from tests.vllm.bench import Bench, prompt
from tests.vllm.test_paths import Partly

A = prompt(3, 500)
B = A[:256] + prompt(11, 244)
ALIGNED = prompt(17, 512)


@pytest.fixture(scope="session")
def model(tmp_path_factory: Any) -> str:
    from tests.vllm.models import make_lfm2

    return str(make_lfm2(tmp_path_factory.mktemp("lfm2")))


@pytest.fixture(scope="session")
def options() -> dict[str, Any]:
    return {"max_num_batched_tokens": 256, "dtype": "float32"}


@pytest.fixture(scope="session")
def served() -> Any:
    with serving("--chunk-tokens", "32", "--l1-size", "256MiB") as server:
        yield server


def test_the_groups_are_what_this_file_is_about(bench: Bench):
    groups = bench.engine.core.scheduler.kv_cache_config.kv_cache_groups
    kinds = Counter((type(group.kv_cache_spec).__name__, len(group.layer_names)) for group in groups)
    assert kinds == {("MambaSpec", 2): 2, ("FullAttentionSpec", 2): 1}


def test_cold_then_the_same_prompt(bench: Bench):
    (cold,) = bench.cold(A)
    (first,) = bench.say(A)
    hits = bench.engine.metric("external_prefix_cache_hits")
    before = bench.status().counters
    bench.forget()
    (again,) = bench.say(A)
    assert (first.tokens, first.cached) == (cold, 0)
    assert (again.tokens, again.cached) == (cold, 480)
    assert bench.engine.metric("external_prefix_cache_hits") - hits == 480
    loaded = bench.status().counters["loaded_chunks"] - before.get("loaded_chunks", 0)
    assert loaded == 15 + 1  # 15 chunks of full attention, and one state


@pytest.mark.parametrize(("shared", "hit"), [(500, 480), (490, 480), (480, 256), (300, 256), (256, 0)])
def test_a_hit_ends_with_a_state(bench: Bench, shared: int, hit: int):
    """And lies before the prompt's last token, which cannot be computed again."""
    asked = A[:shared] if shared in (480, 256) else A[:shared] + prompt(5, 30)
    (cold,) = bench.cold(asked)
    bench.say(A)
    bench.forget()
    (said,) = bench.say(asked, params={"kvgrpc.no_store": True})
    assert (said.tokens, said.cached) == (cold, hit)


def test_half_of_the_prefix_is_shared(bench: Bench):
    (cold,) = bench.cold(B)
    bench.say(A)
    bench.forget()
    (said,) = bench.say(B)
    assert (said.tokens, said.cached) == (cold, 256)


def test_a_prompt_that_ends_with_a_chunk(bench: Bench):
    (cold,) = bench.cold(ALIGNED)
    bench.say(ALIGNED)
    bench.forget()
    (said,) = bench.say(ALIGNED)
    assert (said.tokens, said.cached) == (cold, 480)


def test_the_next_turn_finds_what_was_generated(bench: Bench):
    (answer,) = bench.cold(A)
    turn = [*A, *answer, *prompt(5, 8)]
    (cold,) = bench.cold(turn)
    bench.say(A)
    bench.forget()
    (said,) = bench.say(turn)
    assert (said.tokens, said.cached) == (cold, 512)  # the state at 512 was one of the answer


def test_a_salt_keeps_tenants_apart(bench: Bench):
    (cold,) = bench.cold(A)
    bench.say(A)
    bench.forget()
    (other,) = bench.say(A, salt="tenant-x")
    bench.forget()
    (same,) = bench.say(A, salt="tenant-x")
    assert (other.tokens, other.cached) == (cold, 0)
    assert (same.tokens, same.cached) == (cold, 480)


def test_what_is_stored_is_what_is_said(bench: Bench):
    """Damaged bytes in the server's memory change what the engine says."""
    (cold,) = bench.cold(A)
    bench.say(A)
    bench.forget()
    bench.damage()
    (said,) = bench.say(A, params={"kvgrpc.no_store": True})
    assert said.cached == 480
    assert said.tokens != cold
    bench.damage()
    bench.forget()
    (mended,) = bench.say(A)
    assert (mended.tokens, mended.cached) == (cold, 480)


def test_states_count(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """With the states of another prompt, and its own full attention, the engine says other things."""
    (cold,) = bench.cold(A)
    bench.say(A)
    bench.forget()
    client = bench.worker()._client
    real = client.retrieve
    tensors = bench.layers()
    groups = bench.engine.core.scheduler.kv_cache_config.kv_cache_groups

    def retrieve(job_id: bytes, range: Any, blocks: Any, **words: Any) -> Any:
        future = real(job_id, range, blocks, **words)
        future.result()
        for group, ids in zip(groups, blocks, strict=True):
            for layer in group.layer_names if type(group.kv_cache_spec).__name__ == "MambaSpec" else ():
                tensors[layer][ids[-1]] ^= 0x40
        return future

    monkeypatch.setattr(client, "retrieve", retrieve)
    (said,) = bench.say(A, params={"kvgrpc.no_store": True})
    assert said.cached == 480
    assert said.tokens != cold


def test_a_load_that_fails_is_computed_as_a_whole(bench: Bench):
    (cold,) = bench.cold(A)
    bench.say(A)
    bench.forget()
    worker = bench.worker()
    client = worker._client
    worker._client = partly = Partly(client, 3)
    try:
        (said,) = bench.say(A)
    finally:
        worker._client = client
    assert said.tokens == cold
    assert partly.failed == 1
    bench.forget()
    (again,) = bench.say(A)
    assert (again.tokens, again.cached) == (cold, 480)
