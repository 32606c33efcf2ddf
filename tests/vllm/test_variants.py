# SPDX-License-Identifier: Apache-2.0
"""Engines of other kinds and in other processes: restarted, beside each other, tight, in parallel, with other KV."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvgrpc.client import ClearTarget, Client
from tests.served import Served, serving, wait_until
from tests.vllm.bench import NO_CACHE, prompt
from tests.vllm.processes import EngineProcess, engine_process

A = prompt(3, 500)
B = A[:256] + prompt(11, 244)
TURN = prompt(17, 512)


CARDS = torch.cuda.device_count()


def fp8_runs() -> bool:
    if CARDS:
        return True
    flags = Path("/proc/cpuinfo").read_text().split()
    return "avx512f" in flags or "amx_tile" in flags


@pytest.fixture
def empty(served: Served) -> Iterator[Served]:
    with Client(served.address) as client:
        client.clear(ClearTarget(all=True))
    yield served
    with Client(served.address) as client:
        wait_until(lambda: (client.get_status().pins, client.get_status().calls_in_flight) == (0, 0), 10)


def cached(said: list[Any]) -> list[int]:
    return [each.cached for each in said]


def check(engine: EngineProcess, hit: int = 448, shared: int = 256) -> list[tuple[int, ...]]:
    """Cold without the cache, cold with it, and again: the same words, and exactly the hits there must be."""
    cold = [engine.say(each, params=NO_CACHE)[0] for each in (A, B)]
    first = engine.say(A)
    again = engine.say(A)
    other = engine.say(B)
    assert (cached(first), cached(again), cached(other)) == ([0], [hit], [shared])
    words = [each.tokens for each in cold]
    assert [first[0].tokens, again[0].tokens, other[0].tokens] == [words[0], words[0], words[1]]
    return words


def test_an_engine_that_was_killed_finds_its_prompts_again(llama: str, empty: Served, tmp_path: Path):
    """The second process has other blocks, another hash seed of Python, and a core and a worker of their own."""
    with engine_process(llama, empty.address, tmp_path / "1", num_gpu_blocks_override=200) as engine:
        words = check(engine)
        engine.end(signal.SIGKILL)
    changes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    options = {"num_gpu_blocks_override": 120, "variables": changes}
    with engine_process(llama, empty.address, tmp_path / "2", **options) as engine:
        engine.say(prompt(47, 300), params=NO_CACHE)
        said = [engine.say(each)[0] for each in (A, B)]
        assert [each.tokens for each in said] == words
        assert min(cached(said)) >= 448


def test_two_engines_share_while_both_run(llama: str, empty: Served, tmp_path: Path):
    with engine_process(llama, empty.address, tmp_path / "1") as one:
        changes = {"extra": {"lookup_async": False}, "by_name": True}
        with engine_process(llama, empty.address, tmp_path / "2", **changes) as two:
            words = check(one)
            said = two.say(A)
            assert (said[0].tokens, cached(said)) == (words[0], [448])
            for engine in (one, two):
                engine.ask(*[TURN + prompt(at, 40) for at in range(8)], tokens=8)
            first, second = one.answered(), two.answered()
            assert [each.tokens for each in first] == [each.tokens for each in second]


def test_few_blocks_and_short_steps(llama: str, empty: Served, tmp_path: Path):
    """Prefill in pieces, and requests that are preempted for want of blocks."""
    prompts = [prompt(51 + at, 200) for at in range(6)]
    tight = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 96, "max_model_len": 512}
    with engine_process(llama, empty.address, tmp_path / "1", **tight) as engine:
        words = [engine.say(each, tokens=100, params=NO_CACHE)[0].tokens for each in prompts]
        for _ in range(3):
            said = engine.say(*prompts, tokens=100)
            assert [each.tokens for each in said] == words
        assert engine.preemptions > 0
        assert min(cached(said)) >= 192


def test_own_hashes_and_drafts_of_n_grams(llama: str, empty: Served, tmp_path: Path):
    """xxhash begins with random bytes in each process: the server hashes token ids instead. Drafts are not stored."""
    options: dict[str, Any] = {"prefix_caching_hash_algo": "xxhash"}
    if not has_xxhash():
        options = {"extra": {"hashes": "tokens"}}
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    with engine_process(llama, empty.address, tmp_path / "1", speculative_config=drafts, **options) as engine:
        words = check(engine)
        check_next_turn(engine, words, 512)
        assert cached(engine.say(A, salt="tenant")) == [0]
    with engine_process(llama, empty.address, tmp_path / "2", **options) as engine:
        assert cached(engine.say(A)) == [448]


def has_xxhash() -> bool:
    import importlib.util

    return importlib.util.find_spec("xxhash") is not None


@pytest.mark.skipif(not fp8_runs(), reason="vLLM's fp8 KV on a CPU needs AVX-512 or AMX")
def test_fp8(llama: str, empty: Served, tmp_path: Path):
    with engine_process(llama, empty.address, tmp_path / "1", kv_cache_dtype="fp8") as engine:
        check(engine)


def test_mla(empty: Served, tmp_path: Path):
    """Its words behind a hit are no measure: the few tokens that are left are multiplied in other shapes, which rounds
    otherwise. The loaded bytes are: all layers, in other blocks."""
    from tests.vllm.models import make_mla

    model = str(make_mla(tmp_path / "model"))
    command = [sys.executable, "-m", "tests.vllm.loaded", model, empty.address, '{"block_size": 16}']
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("@")]
    assert lines, done.stderr[-4000:]
    assert json.loads(lines[-1][1:]) == {"cached": 448, "ours": True, "wrong": [], "moved": True}


@pytest.mark.skipif(CARDS == 1, reason="each rank has a card of its own")
def test_two_tensor_parallel_ranks(llama: str, empty: Served, tmp_path: Path):
    options = {"tensor_parallel_size": 2, "variables": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}}
    with engine_process(llama, empty.address, tmp_path / "1", **options) as engine:
        check(engine)


def test_adapters_keep_apart(llama: str, empty: Served, tmp_path: Path):
    """Two adapters and the model without one: nobody gets what another has computed."""
    from tests.vllm.models import make_lora

    adapters = ["", *(str(make_lora(tmp_path / name, seed)) for name, seed in (("one", 1), ("two", 2)))]
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with engine_process(llama, empty.address, tmp_path / "1", **options) as engine:
        cold = [engine.say(A, lora=lora, params=NO_CACHE)[0].tokens for lora in adapters]
        assert len(set(cold)) == 3
        first = [engine.say(A, lora=lora)[0] for lora in adapters]
        again = [engine.say(A, lora=lora)[0] for lora in adapters]
        assert [each.tokens for each in first] == [each.tokens for each in again] == cold
        assert (cached(first), cached(again)) == ([0, 0, 0], [448, 448, 448])


def check_next_turn(engine: EngineProcess, words: list[tuple[int, ...]], hit: int) -> None:
    turn = [*A, *words[0], *prompt(5, 8)]
    cold = engine.say(turn, params=NO_CACHE)[0].tokens
    (said,) = engine.say(turn)
    assert (said.tokens, said.cached) == (cold, hit)


def test_a_drafter(llama: str, empty: Served, tmp_path: Path):
    """Drafts are not stored, nor the last chunk while the drafter may still change it; what is said stays the same.
    The last block of a hit is computed anew: the drafter's layers have read the token behind it."""
    from tests.vllm.models import make_eagle

    drafter = {"method": "eagle", "num_speculative_tokens": 3, "model": str(make_eagle(tmp_path / "drafter"))}
    with engine_process(llama, empty.address, tmp_path / "1", speculative_config=drafter) as engine:
        check_next_turn(engine, check(engine, hit=416, shared=224), 480)


def test_a_copy_of_the_model_elsewhere_under_one_namespace(llama: str, empty: Served, tmp_path: Path):
    copy = shutil.copytree(llama, tmp_path / "copy")
    shared = {"extra": {"namespace": "ours"}}
    with engine_process(llama, empty.address, tmp_path / "1", **shared) as engine:
        words = check(engine)
    with engine_process(str(copy), empty.address, tmp_path / "2", **shared) as engine:
        (said,) = engine.say(A)
        assert (said.tokens, said.cached) == (words[0], 448)


def test_a_model_that_changes_its_configuration_while_it_is_loaded(llama: str, empty: Served, tmp_path: Path):
    """As transformers' own implementation does; the scheduler's half is in another process, and does not see it."""
    changes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    options = {"model_impl": "transformers", "dtype": "float32", "variables": changes}
    with engine_process(llama, empty.address, tmp_path / "1", **options) as engine:
        check(engine)


def test_two_connectors(llama: str, empty: Served, tmp_path: Path):
    """One wins, the other gives its pins back."""
    with serving("--chunk-tokens", "32", "--l1-size", "64MiB") as second:
        with engine_process(llama, empty.address, tmp_path / "1", second=second.address) as engine:
            check(engine)
            with Client(empty.address) as client:
                client.clear(ClearTarget(all=True))
            assert cached(engine.say(A)) == [480]  # the other's chunks are of one block
        with Client(second.address) as client:
            wait_until(lambda: (client.get_status().pins, client.get_status().calls_in_flight) == (0, 0), 10)
