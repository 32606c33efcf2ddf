# SPDX-License-Identifier: Apache-2.0
"""What happens to a request besides being served: loads that fail, aborts at any moment, waiting, resets, wishes."""

from __future__ import annotations

import signal
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvgrpc.client import Client
from kvgrpc.core.types import ChunkOutcome, ChunkResult, TokenRange
from tests.served import wait_until
from tests.vllm.bench import Bench, prompt
from tests.vllm.engine import SamplingParams

A = prompt(3, 500)


class Partly:
    """A worker client whose retrieves load ``good`` chunks and fail behind them."""

    def __init__(self, client: Any, good: int) -> None:
        self._client, self._good = client, good
        self.failed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def retrieve(self, job_id: bytes, range: TokenRange, blocks: Any, **words: Any) -> Any:
        chunk = self._client.chunk_tokens
        first, wanted = range.start // chunk, -(-range.end // chunk) - range.start // chunk
        self.failed += 1
        rest = ChunkResult(first + self._good, wanted - self._good, ChunkOutcome.FAILED, "for the test")
        answer: Future[Any] = Future()
        if not self._good:
            answer.set_result((rest,))
            return answer
        part = self._client.retrieve(job_id, TokenRange(range.start, (first + self._good) * chunk), blocks, **words)
        part.add_done_callback(lambda done: answer.set_result((*done.result(), rest)))
        return answer


@pytest.mark.parametrize("good", [0, 3, 6], ids=["first", "middle", "last"])
def test_blocks_that_cannot_be_loaded_are_computed(bench: Bench, good: int):
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
    assert partly.failed == 1  # and not again and again
    assert bench.scheduler().report.failed_tokens - before == 448 - good * 64
    bench.forget()
    (again,) = bench.say(A)
    assert (again.tokens, again.cached) == (cold, 448)


def test_a_lookup_that_takes_its_time_keeps_nobody_else_waiting(bench: Bench):
    (cold, other) = bench.cold(A, prompt(29, 100))
    bench.say(A)
    bench.forget()
    client, polls = bench.client(), []

    def slowly(request_id: str, *asked: Any, **words: Any) -> Any:
        found = type(client).try_lookup(client, request_id, *asked, **words)
        if words.get("attempt") == 0 and polls.count(request_id) < 10:
            polls.append(request_id)
            return None
        return found

    client.try_lookup = slowly
    try:
        said = bench.say(A, prompt(29, 100))
    finally:
        del client.try_lookup
    assert [each.tokens for each in said] == [cold, other]
    assert [each.cached for each in said] == [448, 0]
    assert len(polls) == 20


def step_until(bench: Bench, condition: Any) -> None:
    for _ in range(2000):
        if condition():
            return
        bench.engine.llm.llm_engine.step()
    raise AssertionError("it did not come to that")


@pytest.mark.parametrize("moment", ["waiting", "looking up", "loading", "computing", "decoding"])
def test_an_abort_at_any_moment_leaves_nothing(bench: Bench, moment: str, monkeypatch: pytest.MonkeyPatch):
    (cold,) = bench.cold(A)
    bench.say(A)
    bench.forget()
    engine, core = bench.engine.llm.llm_engine, bench.engine.core
    client, worker = bench.client(), bench.worker()
    if moment == "looking up":
        real = client.try_lookup
        monkeypatch.setattr(client, "try_lookup", lambda *a, **k: real(*a, **k) and None)
    late: list[Any] = []
    if moment == "loading":
        real_poll = worker.poll
        monkeypatch.setattr(worker, "poll", lambda: real_poll() if late else set())
    sampling = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    engine.add_request("aborted", {"prompt_token_ids": A}, sampling)
    requests = core.scheduler.requests
    mine = lambda: next(iter(requests.values()))  # noqa: E731
    if moment == "looking up":
        for _ in range(5):
            engine.step()
        assert mine().status.name == "WAITING"
    if moment == "loading":
        step_until(bench, lambda: mine().status.name == "WAITING_FOR_REMOTE_KVS" and worker._loads)
    if moment == "computing":
        step_until(bench, lambda: mine().status.name == "RUNNING")
    if moment == "decoding":
        step_until(bench, lambda: mine().num_output_tokens > 20)
    engine.abort_request(["aborted"])
    assert not requests or mine().is_finished()
    late.append(True)
    bench.engine.settle()
    monkeypatch.undo()
    bench.check_nothing_left()
    bench.forget()
    (said,) = bench.say(A)
    assert (said.tokens, said.cached) == (cold, 448)


def test_what_is_no_longer_pinned_when_its_load_comes_is_computed(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """As when a request has waited in the queue for longer than its lease, and all was evicted meanwhile."""
    (cold,) = bench.cold(A)
    bench.say(A)
    bench.forget()
    worker = bench.worker()
    real, ended = worker.load, []

    def load(loads: Any) -> None:
        if loads:
            bench.client().discard(loads[0].request_id)
            wait_until(lambda: bench.status().pins == 0, 10)
            ended.append(loads[0].request_id)
        real(loads)

    monkeypatch.setattr(worker, "load", load)
    (said,) = bench.say(A)
    assert said.tokens == cold
    assert len(ended) == 1


def test_a_reset_of_the_engines_cache_empties_the_server_too(bench: Bench):
    (cold,) = bench.cold(A)
    bench.say(A)
    assert bench.engine.llm.reset_prefix_cache(reset_connector=True)
    (said,) = bench.say(A)
    assert (said.tokens, said.cached) == (cold, 0)
    bench.forget()
    (again,) = bench.say(A)
    assert again.cached == 448


def test_a_reset_waits_two_seconds_for_a_server_that_stops_meanwhile(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    real, process = Client.handshake, bench.served.process

    def then_stop(client: Client, *asked: Any, **words: Any) -> Any:
        info = real(client, *asked, **words)
        process.send_signal(signal.SIGSTOP)
        return info

    monkeypatch.setattr(Client, "handshake", then_stop)
    start = time.monotonic()
    try:
        assert not bench.engine.llm.reset_prefix_cache(reset_connector=True)
        seconds = time.monotonic() - start
    finally:
        process.send_signal(signal.SIGCONT)
    assert seconds < 4


def test_wishes_of_a_request(bench: Bench):
    (cold,) = bench.cold(A)
    behind_96 = bench.local(A, 96)
    bench.say(A, params={"kvgrpc.no_store": True})
    bench.forget()
    (nothing,) = bench.say(A, params={"kvgrpc.max_store_tokens": 300})
    bench.forget()
    (some,) = bench.say(A, params={"kvgrpc.no_store": True})
    bench.forget()
    (less,) = bench.say(A, params={"kvgrpc.max_load_tokens": 100, "kvgrpc.no_store": True})
    bench.forget()
    (none,) = bench.say(A, params={"kvgrpc.no_lookup": True, "kvgrpc.retention_s": "x"})
    assert [each.cached for each in (nothing, some, less, none)] == [0, 256, 96, 0]
    assert [each.tokens for each in (nothing, some, less, none)] == [cold, cold, behind_96, cold]


def test_nothing_is_looked_up_for_a_request_whose_every_token_is_computed(bench: Bench):
    """With log-probabilities of the prompt vLLM computes all of it."""
    bench.cold(A)
    bench.say(A)
    bench.forget()
    before = bench.status().counters["lookups"]
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False, prompt_logprobs=0)
    (output,) = bench.engine.llm.generate([{"prompt_token_ids": A}], sampling, use_tqdm=False)
    assert (output.num_cached_tokens, len(output.prompt_logprobs)) == (0, 500)
    assert bench.status().counters["lookups"] == before


def test_what_other_connectors_of_a_pipeline_tell_each_other_does_not_concern_this_one(bench: Bench):
    """A MultiConnector tells all; vLLM's own answer is an exception, for a stage behind the first."""
    bench.engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): object(), (1, 0): object()})


def test_an_image_that_vllm_only_counts_keeps_its_request_out(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    connector, picture = bench.engine.connector, SimpleNamespace(mm_features=[object()])
    assert connector._lora_of(picture) == ""  # named by its content in the block hashes
    monkeypatch.setattr(connector, "_facts", replace(connector._facts, media_named=False))
    assert connector._lora_of(picture) is None
    assert connector._lora_of(SimpleNamespace(mm_features=[])) == ""
