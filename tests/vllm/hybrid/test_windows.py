# SPDX-License-Identifier: Apache-2.0
"""A model as Gemma 3: windows of 96 tokens beside full attention, in six groups that lie in the same memory. Chunks of
64, blocks of 32; steps of at most 256 tokens, so that the blocks behind the window are gone when the next step begins.

Run by itself, since a process has one engine: pytest tests/vllm/hybrid/test_windows.py.
"""

from __future__ import annotations

import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvgrpc.core.types import NULL_BLOCK
from tests.served import wait_until
from tests.vllm.bench import Bench, prompt
from tests.vllm.processes import Server
from tests.vllm.test_outputs import (  # noqa: F401 - the same for this model
    A,
    test_a_batch_with_local_and_external_hits,
    test_a_local_prefix_is_continued_from_inside_a_chunk,
    test_a_prompt_that_ends_with_a_chunk_is_loaded_as_a_whole,
    test_a_salt_keeps_tenants_apart,
    test_cold_then_the_same_prompt,
    test_half_of_the_prefix_is_shared,
    test_lengths_around_blocks_and_chunks,
    test_loads_are_real,
    test_the_next_turn_finds_what_was_generated,
    test_what_is_stored_is_what_is_said,
)
from tests.vllm.test_paths import (  # noqa: F401
    Partly,
    test_a_lookup_that_takes_its_time_keeps_nobody_else_waiting,
    test_a_reset_of_the_engines_cache_empties_the_server_too,
    test_an_abort_at_any_moment_leaves_nothing,
    test_what_is_no_longer_pinned_when_its_load_comes_is_computed,
)

LONG = prompt(53, 1500)


@pytest.fixture(scope="session")
def served() -> Iterator[Server]:
    """Can be killed."""
    with tempfile.TemporaryDirectory(prefix="kvgrpc-") as folder:
        server = Server(Path(folder), "--chunk-tokens", "64", "--l1-size", "256MiB")
        server.start()
        yield server
        server.end()


def counted(bench: Bench, before: dict[str, int]) -> dict[str, int]:
    """What the server has counted since."""
    after = bench.status().counters
    names = ("stored_chunks", "loaded_chunks", "failed_chunks")
    return {name: after.get(name, 0) - before.get(name, 0) for name in names}


def test_the_groups_are_what_this_file_is_about(bench: Bench):
    groups = bench.engine.core.scheduler.kv_cache_config.kv_cache_groups
    kinds = Counter((type(group.kv_cache_spec).__name__, len(group.layer_names)) for group in groups)
    assert kinds == {("SlidingWindowSpec", 1): 5, ("FullAttentionSpec", 1): 1}
    assert len({tensor.data_ptr() for tensor in bench.layers().values()}) == 1


def test_a_prompt_much_longer_than_the_window(bench: Bench):
    (cold,) = bench.cold(LONG)
    before = bench.status().counters
    bench.say(LONG)
    assert counted(bench, before)["stored_chunks"] == 2 * 23  # full attention and windows, each a part of a chunk
    bench.forget()
    before = bench.status().counters
    (said,) = bench.say(LONG, params={"kvgrpc.no_store": True})
    assert (said.tokens, said.cached) == (cold, 1472)
    assert counted(bench, before) == {"stored_chunks": 0, "loaded_chunks": 23 + 2, "failed_chunks": 0}


def test_every_prefix_of_a_long_prompt_has_its_window(bench: Bench):
    shorter = [LONG[:at] + prompt(59, 40) for at in (1280, 640, 300, 64)]
    cold = bench.cold(*shorter)
    bench.say(LONG)
    for asked, answer, hit in zip(shorter, cold, (1280, 640, 256, 64), strict=True):
        bench.forget()
        (said,) = bench.say(asked, params={"kvgrpc.no_store": True})
        assert (said.tokens, said.cached) == (answer, hit)


def test_without_its_window_a_prefix_is_no_hit(bench: Bench):
    """Stored late: when vLLM has dropped the window of the prompt's last chunk."""
    (answer,) = bench.cold(A)
    turn = [*A, *answer, *prompt(5, 8)]
    (cold,) = bench.cold(turn)
    scheduler, real = bench.scheduler(), bench.scheduler()._save

    def late(tracked: Any, computed: int, step: Any) -> None:
        if computed > 504:  # a step or two behind the last one that needs it
            real(tracked, computed, step)

    scheduler._save = late
    try:
        bench.say(A)
    finally:
        scheduler._save = real
    bench.forget()
    (said,) = bench.say(A, params={"kvgrpc.no_store": True})
    assert (said.tokens, said.cached) == (answer, 0)  # the window of 448 begins in the chunk from 320 on
    bench.forget()
    (said,) = bench.say(turn, params={"kvgrpc.no_store": True})
    assert (said.tokens, said.cached) == (cold, 512)  # that of 512 in the one from 384 on, which was there


def test_loaded_blocks_hold_what_was_computed(bench: Bench):
    """In all layers, byte for byte, in other blocks."""
    kept = bench.blocks_at_the_end()
    try:
        bench.say(A, tokens=1)
        bench.forget()
        for tensor in bench.layers().values():
            tensor.view(torch.uint8).fill_(0xA5)
        (said,) = bench.say(A, tokens=1)
    finally:
        del bench.scheduler().finished
    (first, computed), (second, loaded) = kept.values()
    assert said.cached == 448
    named = [[at for at in range(14) if ids[at]] for ids in first]
    assert sorted(map(len, named)) == [2] * 5 + [14]  # the window of the 500th token begins in block 12
    groups = bench.engine.core.scheduler.kv_cache_config.kv_cache_groups
    for group, places, one, other in zip(groups, named, first, second, strict=True):
        assert not {one[at] for at in places} & {other[at] for at in places}
        for layer in group.layer_names:
            assert torch.equal(computed[layer][places].view(torch.uint8), loaded[layer][places].view(torch.uint8))


@pytest.mark.parametrize("good", [0, 3, 6], ids=["first", "middle", "last"])
def test_a_load_that_fails_is_computed_as_a_whole(bench: Bench, good: int):
    (cold,) = bench.cold(A)
    bench.say(A)
    bench.forget()
    worker, before = bench.worker(), bench.scheduler().report.failed_tokens
    client = worker._client
    worker._client = partly = Partly(client, good)
    try:
        (said,) = bench.say(A)
    finally:
        worker._client = client
    assert said.tokens == cold
    assert partly.failed == 1
    assert bench.scheduler().report.failed_tokens - before == 448
    bench.forget()
    (again,) = bench.say(A)
    assert (again.tokens, again.cached) == (cold, 448)


def test_null_blocks_are_neither_named_nor_held(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """vLLM has one null block, in the tables of all requests."""
    copies: list[Any] = []
    held: list[int] = []
    client, blocks = bench.worker()._client, bench.scheduler().blocks
    hold = blocks.hold
    monkeypatch.setattr(blocks, "hold", lambda ids: held.extend(ids) or hold(ids))
    for name in ("store", "retrieve"):
        real = getattr(client, name)
        take = 1 if name == "store" else 2
        monkeypatch.setattr(
            client, name, lambda *a, real=real, take=take, **k: copies.append((take, a[take])) or real(*a, **k)
        )
    bench.say(LONG)
    bench.forget()
    bench.say(LONG)
    named = [block for _, blocks in copies for ids in blocks for block in ids]
    assert NULL_BLOCK in named
    assert NULL_BLOCK not in held
    assert bench.engine.pool.null_block.block_id not in [*named, *held]


def test_a_limit_asks_for_a_shorter_hit(bench: Bench):
    """A hit cannot be cut: what is not wanted is not looked up."""
    behind_64, behind_256 = bench.local(A, 64), bench.local(A, 256)
    bench.say(A, params={"kvgrpc.max_store_tokens": 300})
    bench.forget()
    (less,) = bench.say(A, params={"kvgrpc.max_load_tokens": 100, "kvgrpc.no_store": True})
    bench.forget()
    (some,) = bench.say(A, params={"kvgrpc.no_store": True})
    assert [each.cached for each in (less, some)] == [64, 256]
    assert [each.tokens for each in (less, some)] == [behind_64, behind_256]


def test_a_server_that_is_killed_in_the_middle_of_copies(bench: Bench, served: Server):
    batch = [A[: 128 * at] + prompt(67 + at, 300) for at in range(4)]
    cold = bench.cold(*batch)
    bench.say(*batch)
    bench.forget()
    worker, killed = bench.worker(), []
    real = worker.load

    def load(loads: Any) -> None:
        real(loads)
        if loads and not killed:
            killed.append(len(loads))
            served.signal(signal.SIGKILL)

    worker.load = load
    try:
        said = bench.say(*batch)
    finally:
        del worker.load
    assert killed
    assert [each.tokens for each in said] == cold
    served.start()
    wait_until(lambda: bench.status().clients == 2, 30)
    wait_until(lambda: bench.scheduler()._servers.attached and worker._client.attached, 30)
    bench.forget()
    bench.say(*batch)
    bench.forget()
    again = bench.say(*batch)
    assert [each.tokens for each in again] == cold
    assert [each.cached for each in again] == [256, 384, 512, 640]
