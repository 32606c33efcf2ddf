# SPDX-License-Identifier: Apache-2.0
"""SchedulerClient: asynchronous lookups, and the end of what was begun. Field report 42."""

from __future__ import annotations

import time
from array import array

import pytest

from kvgrpc import api
from kvgrpc.client import LookupBounds, LookupResult, SchedulerClient
from kvgrpc.core.types import Reader, TokenRange
from tests.client.conftest import MakeScheduler
from tests.client.fakes import CHUNK, FakeServer, Knobs, wait_until
from tests.client.memory import tokens


def answer(client: SchedulerClient, request_id: str, content: api.Content, attempt: int = 0) -> LookupResult:
    """Asks until there is an answer, as an engine does from step to step."""
    found: list[LookupResult] = []

    def ask() -> bool:
        result = client.try_lookup(request_id, content, attempt=attempt)
        found.extend([result] if result is not None else [])
        return result is not None

    wait_until(ask)
    return found[0]


def test_none_until_the_answer_is_there(server: FakeServer, make_scheduler: MakeScheduler) -> None:
    cache = server.start()
    client = make_scheduler(server.address, tp_size=2, kv_ranks=(0,))
    assert client.start()
    assert client.attached
    assert client.chunk_tokens == CHUNK
    assert client.try_lookup("r1", tokens(40), lora="L", cache_salt="S") is None
    found: list[LookupResult] = []

    def answered() -> bool:
        found.extend(filter(None, [client.try_lookup("r1", tokens(40), lora="L", cache_salt="S")]))
        return bool(found)

    wait_until(answered)
    result = found[0]
    assert (result.hit_tokens, result.pinned, result.reason) == (32, True, "")
    assert result.hit_chunks_by_tier == {"l1": 2}
    (request,) = cache.asked("lookup")
    assert (request.request_id, request.tp_size, request.kv_ranks) == ("r1", 2, (0,))
    assert (request.space.space_base, request.space.lora, request.space.cache_salt) == (b"\x07" * 16, "L", "S")
    assert bytes(request.content.data) == tokens(40).data


def test_an_answer_is_waited_for_no_longer_than_said(server: FakeServer, make_scheduler: MakeScheduler) -> None:
    cache = server.start(Knobs(pending=True))
    client = make_scheduler(server.address)
    client.start()
    assert not client.wait_for_answer(100)
    assert client.try_lookup("r1", tokens(32)) is None
    assert client.wait_for_answer(0.01)
    wait_until(lambda: cache.asked("query"))
    server.run(cache.finish)
    began = time.monotonic()
    client.wait_for_answer(100)
    assert client.try_lookup("r1", tokens(32)) is not None
    assert not client.wait_for_answer(100)
    assert time.monotonic() - began < 50


def test_a_repeat_asks_nobody_and_a_new_attempt_asks_afresh(server: FakeServer, make_scheduler: MakeScheduler) -> None:
    cache = server.start()
    client = make_scheduler(server.address)
    client.start()
    first = answer(client, "r1", tokens(64))
    assert all(client.try_lookup("r1", tokens(64)) is first for _ in range(100))
    assert len(cache.asked("lookup")) == 1
    second = answer(client, "r1", tokens(64), attempt=1)
    assert second.job_id != first.job_id
    assert [request.attempt for request in cache.asked("lookup")] == [0, 1]
    assert [request.job_id for request in cache.asked("free")] == [first.job_id], (
        "the old attempt's pins are given back"
    )


def test_content_is_made_once(server: FakeServer, make_scheduler: MakeScheduler) -> None:
    server.start()
    client = make_scheduler(server.address)
    client.start()
    made: list[int] = []

    def content() -> api.Content:
        made.append(1)
        return tokens(32)

    wait_until(lambda: client.try_lookup("r1", content) is not None)
    client.try_lookup("r1", content)
    assert made == [1]


def test_pending_jobs_are_polled(server: FakeServer, make_scheduler: MakeScheduler) -> None:
    cache = server.start(Knobs(pending=True))
    client = make_scheduler(server.address)
    client.start()
    assert client.try_lookup("r1", tokens(32)) is None
    wait_until(lambda: cache.asked("query"))
    assert client.try_lookup("r1", tokens(32)) is None
    server.run(cache.finish)
    assert answer(client, "r1", tokens(32)).hit_tokens == 2 * CHUNK
    assert len(cache.asked("query")) == 1, "one long poll is enough"


def test_a_prefetch_that_takes_too_long_is_a_miss_and_ends(server: FakeServer, make_scheduler: MakeScheduler) -> None:
    cache = server.start(Knobs(pending=True))
    client = make_scheduler(server.address, bounds=LookupBounds(pending_s=0.2))
    client.start()
    result = answer(client, "r1", tokens(32))
    assert (result.hit_tokens, result.reason) == (0, "PREFETCH_TIMEOUT")
    wait_until(lambda: not cache.jobs)


@pytest.mark.parametrize("moment", ["before the answer", "while pending", "after the answer"])
def test_discard_ends_the_job_however_late_its_answer(
    server: FakeServer, make_scheduler: MakeScheduler, moment: str
) -> None:
    cache = server.start(Knobs(pending=moment == "while pending", hang=["lookup"] if "before" in moment else []))
    client = make_scheduler(server.address)
    client.start()
    client.try_lookup("r1", tokens(32))
    wait_until(lambda: cache.asked("lookup"))
    if moment == "while pending":
        wait_until(lambda: cache.asked("query"))
    if moment == "after the answer":
        answer(client, "r1", tokens(32))
    client.discard("r1")
    if moment == "before the answer":
        assert not cache.asked("end_request")
        cache.knobs.hang.clear()
    wait_until(lambda: cache.asked("end_request") == ["r1"])
    wait_until(lambda: not cache.jobs)
    client.discard("r1")
    client.discard("never asked")
    # the same id again is a new request, and is not ended by what is left of the old one
    cache.knobs.pending = False
    assert answer(client, "r1", tokens(32)).hit_tokens == 32
    assert list(cache.jobs.values()) == ["r1"]
    assert cache.asked("end_request") == ["r1"]


def test_an_id_used_again_at_once_waits_for_the_end_of_the_old(
    server: FakeServer, make_scheduler: MakeScheduler
) -> None:
    cache = server.start()
    client = make_scheduler(server.address)
    client.start()
    for _ in range(20):
        client.try_lookup("r1", tokens(32))
        client.discard("r1")
    assert answer(client, "r1", tokens(32)).hit_tokens == 32
    assert len(cache.jobs) == 1
    # an end before its lookup, or after the next one, would show here
    order = [name for name, _ in cache.seen if name in ("lookup", "end_request")]
    assert order.count("end_request") <= 20
    assert order[-1] == "lookup"


def test_free_gives_back_what_is_named(server: FakeServer, make_scheduler: MakeScheduler) -> None:
    cache = server.start()
    client = make_scheduler(server.address, tp_size=4)
    client.start()
    client.try_lookup("r1", tokens(64))
    client.free("r1", TokenRange(32, 64), (Reader(0, 3),))
    result = answer(client, "r1", tokens(64))
    client.free("r1")
    client.free("never asked")
    wait_until(lambda: len(cache.asked("free")) == 2)
    first, second = cache.asked("free")
    assert (first.job_id, first.tp_size, first.range, first.readers) == (
        result.job_id,
        4,
        TokenRange(32, 64),
        (Reader(0, 3),),
    )
    assert (second.range, second.readers) == (None, ())


def test_lookups_in_flight_are_bounded(server: FakeServer, make_scheduler: MakeScheduler) -> None:
    cache = server.start(Knobs(hang=["lookup"]))
    client = make_scheduler(server.address, in_flight=8)
    client.start()
    for i in range(50):
        assert client.try_lookup(f"r{i}", tokens(32)) is None
    assert client.lookup("more", tokens(32)).reason == "IN_FLIGHT_LIMIT"
    wait_until(lambda: len(cache.asked("lookup")) == 8)
    cache.knobs.hang.clear()
    for i in range(50):
        assert answer(client, f"r{i}", tokens(32)).hit_tokens == 32


def test_remembered_requests_are_bounded_and_the_oldest_is_ended(
    server: FakeServer, make_scheduler: MakeScheduler
) -> None:
    cache = server.start()
    client = make_scheduler(server.address, remembered=4)
    client.start()
    for i in range(6):
        answer(client, f"r{i}", tokens(32))
    wait_until(lambda: sorted(cache.asked("end_request")) == ["r0", "r1"])


def test_content_that_cannot_be_sent_is_the_callers_error(server: FakeServer, make_scheduler: MakeScheduler) -> None:
    server.start()
    client = make_scheduler(server.address)
    client.start()
    with pytest.raises(ValueError):
        answer(client, "r1", api.Tokens(b"\0\0\0"))
    client.discard("r1")
    assert answer(client, "r2", tokens(32)).hit_tokens == 32


def test_close_answers_what_waits_and_is_final(server: FakeServer, make_scheduler: MakeScheduler) -> None:
    server.start(Knobs(hang=["lookup"]))
    client = make_scheduler(server.address)
    client.start()
    assert client.try_lookup("r1", tokens(32)) is None
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.try_lookup("r1", tokens(32))


@pytest.mark.parametrize("count", [2_000, 32_000, 128_000, 1_000_000])
def test_a_repeat_costs_a_fifth_of_the_first_at_most(
    server: FakeServer, make_scheduler: MakeScheduler, count: int
) -> None:
    """Field report 42: from the engine's side, first call and repeats with 64 waiting requests."""
    server.start(Knobs(hang=["lookup"]))
    client = make_scheduler(server.address, bounds=LookupBounds(answer_s=30))
    client.start()
    ids = list(range(count))
    first: list[float] = []
    for i in range(64 if count < 1_000_000 else 4):
        start = time.perf_counter()
        client.try_lookup(f"r{i}", lambda: api.Tokens(memoryview(array("I", ids)).cast("B")))
        first.append(time.perf_counter() - start)
    waiting = [f"r{i}" for i in range(len(first))]
    repeats: list[float] = []
    for _ in range(100):
        for request_id in waiting:
            start = time.perf_counter()
            assert client.try_lookup(request_id, lambda: api.Tokens(memoryview(array("I", ids)).cast("B"))) is None
            repeats.append(time.perf_counter() - start)
    assert sorted(repeats)[len(repeats) // 2] <= 0.2 * sorted(first)[len(first) // 2]
