# SPDX-License-Identifier: Apache-2.0
"""What the engine tells others of the cache: events for routers, metrics, and where hits came from."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from kvgrpc.client import ClearTarget, Client
from tests.served import wait_until
from tests.vllm.bench import Bench, prompt

A = prompt(3, 500)


@pytest.fixture
def told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every event that the engine publishes."""
    events: list[Any] = []
    publisher = bench.engine.core.scheduler.kv_event_publisher
    monkeypatch.setattr(publisher, "publish", lambda batch: events.extend(batch.events))
    return events


def ours(events: list[Any], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind) and event.ownership == "kvgrpc"]


def blocks(events: list[Any]) -> list[Any]:
    return [block for event in events for block in event.block_hashes]


def test_routers_hear_what_can_be_found_by_the_hashes_that_they_know(bench: Bench, told: list[Any]):
    (said,) = bench.say(A)
    stored = ours(told, BlockStored)
    tokens = [token for event in stored for token in event.token_ids]
    assert tokens == [*A, *said.tokens][:512]
    assert {(event.medium, event.block_size, event.locality) for event in stored} == {("CPU", 32, "LOCAL")}
    by_vllm = [event for event in told if isinstance(event, BlockStored) and event.ownership is None]
    assert blocks(stored) == blocks(by_vllm)[:16]
    assert [event.parent_block_hash for event in stored] == [None, *(event.block_hashes[-1] for event in stored[:-1])]


def test_routers_hear_what_is_gone_when_a_lookup_finds_out(bench: Bench, told: list[Any]):
    bench.say(A)
    bench.forget()
    with Client(bench.served.address) as client:
        client.clear(ClearTarget(all=True))
    stored = blocks(ours(told, BlockStored))
    told.clear()
    bench.say(A)
    assert blocks(ours(told, BlockRemoved))[:15] == stored[:15]  # 15: of the 500 tokens that were looked up
    assert blocks(ours(told, BlockStored)) == stored


def test_routers_hear_what_a_server_evicts(bench: Bench, told: list[Any]):
    """Without a lookup of it: at the next step, whatever that computes."""
    bench.say(A)
    stored = set(blocks(ours(told, BlockStored)))
    told.clear()
    with Client(bench.served.address) as client:
        client.clear(ClearTarget(all=True))

    def gone() -> bool:
        bench.say(prompt(5, 10))
        return set(blocks(ours(told, BlockRemoved))) >= stored

    wait_until(gone, 20)


def test_routers_hear_of_a_reset(bench: Bench, told: list[Any]):
    bench.say(A)
    assert bench.engine.llm.reset_prefix_cache(reset_connector=True)
    bench.say(prompt(5, 10))  # vLLM takes events at steps
    assert set(blocks(ours(told, BlockRemoved))) >= set(blocks(ours(told, BlockStored)))


def test_a_salt_is_told(bench: Bench, told: list[Any]):
    bench.say(A, salt="tenant-x")
    (first, *_) = ours(told, BlockStored)
    assert first.extra_keys[0] == ("tenant-x",)


def test_metrics_of_the_engine_count_what_was_copied(bench: Bench):
    names = ("kvgrpc_stored_tokens", "kvgrpc_loaded_tokens", "kvgrpc_load_failed_tokens", "kvgrpc_store_failed_tokens")

    def counts() -> list[int]:
        return [bench.engine.metric(name) for name in names]

    def times() -> list[int]:
        found = {each.name: each.count for each in bench.engine.llm.get_metrics() if hasattr(each, "buckets")}
        return [found[f"vllm:kvgrpc_{name}_seconds"] for name in ("store", "load")]

    before, moments = counts(), times()
    bench.say(A)
    bench.forget()
    bench.say(A)
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [512, 448, 0, 0]
    stores, loads = (now - then for now, then in zip(times(), moments, strict=True))
    assert loads == 1
    assert stores >= 2


def test_hits_are_labelled_with_where_they_came_from(bench: Bench):
    def by_source() -> dict[str, int]:
        name = "vllm:prompt_tokens_cached_by_source"
        return {each.labels["source"]: each.value for each in bench.engine.llm.get_metrics() if each.name == name}

    bench.say(A)
    bench.forget()
    before = by_source()
    bench.say(A)
    after = by_source()
    grown = {source: after[source] - before[source] for source in after if after[source] != before[source]}
    assert grown == {"host": 448}


def test_the_connector_loads_neither_numba_nor_llvmlite():
    """vLLM looks into all loaded modules at start, and falls over what these two leave there."""
    program = "import sys, kvgrpc.engines.vllm.connector; print(sorted({'numba', 'llvmlite'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
