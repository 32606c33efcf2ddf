# SPDX-License-Identifier: Apache-2.0
"""Calls that cannot be sent: the mistake is told to whoever made it, and nothing else suffers."""

from __future__ import annotations

import asyncio
import time
from array import array
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest

from kvgrpc import api
from kvgrpc.client import AioClient, BreakerSettings, Client
from kvgrpc.client.aio import cache as wire
from kvgrpc.client.copies import IN_DOUBT
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import ChunkOutcome, ChunkResult, SpaceRef, TokenRange
from tests.client.conftest import MakeScheduler, MakeWorker
from tests.client.fakes import ENGINE, FakeServer, Knobs, wait_until
from tests.client.memory import tokens

RANGE, BLOCKS = TokenRange(0, 32), ((3, 1, 4, 1, 5, 9, 2, 6),)
WRONG: list[Any] = [None, b"\0" * 128, [1, 2, 3], "a prompt"]
SPACE = SpaceRef(b"\7" * 16)
MS = 1_000_000


@pytest.mark.parametrize("content", WRONG)
async def test_content_of_another_kind_is_a_type_error(server: FakeServer, content: Any) -> None:
    cache = server.start()
    lookup = api.LookupRequest(ENGINE, "r1", SPACE, content)
    store = api.StoreRequest(ENGINE, 1, SPACE, content, BLOCKS, RANGE)
    async with AioClient(server.address) as client:
        for call in (client.lookup(lookup), client.store(store), client.pin(SPACE, content, 1000)):
            with pytest.raises(TypeError, match="send Tokens or Hashes"):
                await call
        assert (await client.handshake(api.Hello())).server_version == "fake"
    assert not cache.asked("lookup") + cache.asked("store") + cache.asked("pin")


def test_the_blocking_client_says_so_too(server: FakeServer) -> None:
    server.start()
    with Client(server.address) as client, pytest.raises(TypeError, match="content is list"):
        client.lookup(api.LookupRequest(ENGINE, "r1", SPACE, [1, 2, 3]))  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [RuntimeError, grpc.aio.UsageError, asyncio.InvalidStateError])
async def test_what_fails_inside_grpc_is_in_doubt(server: FakeServer, error: type[Exception]) -> None:
    """It may have been sent: whoever asked must not take it for a mistake that never was."""

    async def fails() -> None:
        raise error("as the test wants")

    async with AioClient(server.address) as client:
        with pytest.raises(Refusal) as refused:
            await client._call(lambda *_, **__: fails(), None, lambda _: None)  # type: ignore[arg-type]
    assert refused.value.reason in IN_DOUBT


IDS = range(2048)


@pytest.mark.parametrize("memory", [array("I", IDS), memoryview(array("I", IDS)), np.array(IDS, dtype=np.uint32)])
def test_memory_of_ids_is_the_ids(memory: Any) -> None:
    """Its length is told in items: a quarter of the bytes was announced, and no server could read the message."""
    content = api.Tokens(memory)
    assert content == api.Tokens.from_ids(IDS) and content.num_tokens == len(IDS)
    request = api.LookupRequest(ENGINE, "r1", SPACE, content)
    assert wire.read_lookup_request(wire.write_lookup_request(request)) == request


@pytest.mark.parametrize("memory", [array("Q", range(64)), np.arange(64), np.arange(64, dtype=np.int32), [1, 2, 3]])
def test_memory_of_something_else_is_a_type_error(memory: Any) -> None:
    with pytest.raises(TypeError):
        api.Tokens(memory)


# ---- workers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", WRONG)
@pytest.mark.parametrize("tokens_range", [None, RANGE])
@pytest.mark.parametrize("place", ["no server", "a server"])
def test_a_store_of_such_content_ends_in_the_error(
    server: FakeServer, make_worker: MakeWorker, content: Any, tokens_range: TokenRange | None, place: str
) -> None:
    client = make_worker(server.address)
    if place == "a server":
        server.start()
    assert client.start(wait_s=5.0 if place == "a server" else 0.0) == (place == "a server")
    future = client.store(content, BLOCKS, range=tokens_range)
    with pytest.raises(TypeError, match="send Tokens or Hashes"):
        future.result(5)
    assert client.blocks_in_flight() == frozenset()


def test_flat_block_ids_are_told(server: FakeServer, make_worker: MakeWorker) -> None:
    client = make_worker(server.address)
    flat: Any = [3, 1, 4]
    for future in (client.store(tokens(32), flat), client.retrieve(b"j" * 16, RANGE, flat)):
        with pytest.raises(TypeError, match="one list of block ids for each KV group"):
            future.result(0)
    assert client.blocks_in_flight() == frozenset()


def test_a_reversed_range_is_told(server: FakeServer, make_worker: MakeWorker) -> None:
    client, reversed_ = make_worker(server.address), TokenRange(32, 0)
    for future in (client.store(tokens(32), BLOCKS, range=reversed_), client.retrieve(b"j" * 16, reversed_, BLOCKS)):
        with pytest.raises(ValueError, match="reversed"):
            future.result(0)


@pytest.mark.parametrize("error", [TypeError, ValueError, AttributeError, OverflowError, KeyError, AssertionError])
def test_no_future_stays_open_whatever_encoding_raises(
    server: FakeServer, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    cache = server.start()
    client = make_worker(server.address)
    client.start()

    def fail(_: object) -> None:
        raise error("as the test wants")

    with monkeypatch.context() as patch:
        patch.setattr(wire, "encode_store_request", fail)
        patch.setattr(wire, "encode_retrieve_request", fail)
        futures = [client.store(tokens(32), BLOCKS, range=RANGE), client.retrieve(b"j" * 16, RANGE, BLOCKS)]
        for future in futures:
            with pytest.raises(error):
                future.result(5)
    wait_until(lambda: not client.blocks_in_flight())
    assert not cache.asked("store") + cache.asked("retrieve") + cache.asked("fence"), "nothing was sent"
    assert client.store(tokens(32), BLOCKS, range=RANGE).result(5)[0].outcome is ChunkOutcome.STORED


def test_a_wrong_range_or_policy_ends_in_the_error(server: FakeServer, make_worker: MakeWorker) -> None:
    server.start()
    client = make_worker(server.address)
    client.start()
    wrong: Any = (0, 32)
    for future in (
        client.store(tokens(32), BLOCKS, range=wrong),
        client.store(tokens(32), BLOCKS, policy=wrong),
        client.retrieve(b"j" * 16, wrong, BLOCKS),
    ):
        with pytest.raises((AttributeError, TypeError)):
            future.result(5)
    assert client.blocks_in_flight() == frozenset()


def test_copies_before_the_start_fail_and_are_not_remembered(server: FakeServer, make_worker: MakeWorker) -> None:
    server.start()
    client = make_worker(server.address, calls=2)
    for _ in range(4):
        refused = client.store(tokens(32), BLOCKS, range=RANGE).result(10)
        assert refused == (ChunkResult(0, 1, ChunkOutcome.FAILED, "SERVER_UNREACHABLE"),)
    assert client.blocks_in_flight() == frozenset()
    assert client.start()
    assert client.store(tokens(32), BLOCKS, range=RANGE).result(5)[0].outcome is ChunkOutcome.STORED


# ---- schedulers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", WRONG)
def test_a_lookup_of_such_content_raises_at_the_call(
    server: FakeServer, make_scheduler: MakeScheduler, content: Any
) -> None:
    cache = server.start()
    client = make_scheduler(server.address, in_flight=1)
    client.start()
    for source in (content, lambda: content):
        with pytest.raises(TypeError, match="send Tokens or Hashes"):
            client.try_lookup("r1", source)
        with pytest.raises(TypeError, match="send Tokens or Hashes"):
            client.lookup("r1", source)
    assert not cache.asked("lookup")
    assert client.lookup("r1", tokens(32), timeout_s=2).hit_tokens == 32, "nothing is left of the wrong ones"


@pytest.mark.parametrize("error", [TypeError, ValueError, AttributeError, OverflowError, KeyError, AssertionError])
def test_what_cannot_be_encoded_is_no_unreachable_server(
    server: FakeServer, make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    server.start()
    client = make_scheduler(server.address, in_flight=1)
    client.start()

    def fail(_: object) -> None:
        raise error("as the test wants")

    with monkeypatch.context() as patch:
        patch.setattr(wire, "encode_lookup_request", fail)
        for i in range(5):
            with pytest.raises(error):
                client.lookup(f"r{i}", tokens(32), timeout_s=2)
    assert client.lookup("good", tokens(32), timeout_s=2).hit_tokens == 32, "the breaker is closed"


@pytest.mark.parametrize("wrong", ["content", "policy"])
def test_a_wrong_call_gives_the_trial_of_an_open_breaker_back(
    server: FakeServer, make_scheduler: MakeScheduler, wrong: str
) -> None:
    cache = server.start(Knobs(refuse={"lookup": "INTERNAL"}))
    client = make_scheduler(server.address, breaker=BreakerSettings(failures=1, first_delay_ns=50 * MS))
    client.start()
    assert client.lookup("r1", tokens(32), timeout_s=2).reason == "INTERNAL"
    # a machine with other work may let the delay pass before the next call, which opens it for twice as long
    wait_until(lambda: client.lookup(f"r2 {time.monotonic()}", tokens(32), timeout_s=2).reason == "BREAKER_OPEN")
    cache.knobs.refuse.clear()
    nothing: Any = None
    tried: list[BaseException] = []

    def mistaken() -> bool:
        """Whether the breaker let the wrong call try."""
        try:
            if wrong == "content":
                client.lookup("r3", nothing, timeout_s=2)
            else:
                client.lookup("r3", tokens(32), policy=nothing, timeout_s=2)
        except (TypeError, AttributeError) as error:
            tried.append(error)
        return bool(tried)

    wait_until(mistaken)
    assert client.lookup("r4", tokens(32), timeout_s=2).hit_tokens == 32, "the next caller may try at once"


def test_another_question_under_a_request_id_is_the_callers_error(
    server: FakeServer, make_scheduler: MakeScheduler
) -> None:
    """Its answer would be another prompt's, adapter's or tenant's KV."""
    server.start()
    client = make_scheduler(server.address)
    assert client.start(5)
    assert client.lookup("r1", tokens(64), timeout_s=5).reason == ""
    others: list[tuple[api.Content, dict[str, Any]]] = [
        (tokens(64, first=1), {}),
        (tokens(63), {}),
        (api.Hashes((b"h" * 32,), 64), {}),
        (tokens(64), {"lora": "other"}),
        (tokens(64), {"cache_salt": "other"}),
    ]
    for content, more in others:
        with pytest.raises(ValueError, match="discard it first, or count attempt up"):
            client.lookup("r1", content, **more)
        with pytest.raises(ValueError, match="'r1' has been looked up with another"):
            client.try_lookup("r1", content, **more)
    client.lookup("r1", tokens(64, first=1), attempt=1, timeout_s=5)
    client.discard("r1")
    client.lookup("r1", tokens(63), timeout_s=5)


def test_a_number_is_no_request_id(server: FakeServer, make_scheduler: MakeScheduler) -> None:
    server.start()
    client, number = make_scheduler(server.address, in_flight=1), cast(str, 7)
    client.start()
    for look in (client.try_lookup, client.lookup):
        with pytest.raises(TypeError, match="request_id is int; send a str"):
            look(number, tokens(32))
    assert client.lookup("7", tokens(32), timeout_s=5.0).reason == ""  # the one place of a lookup is free again


def test_a_start_without_a_server_says_why(folder: Path, make_scheduler: MakeScheduler) -> None:
    client = make_scheduler(f"unix:{folder}/nobody")
    assert not client.start(0.1)
    assert client.problem is not None
    assert client.problem.reason is Reason.SERVER_UNREACHABLE
