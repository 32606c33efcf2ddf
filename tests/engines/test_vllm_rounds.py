# SPDX-License-Identifier: Apache-2.0
"""A round of a request meets another server, a reset or its end before vLLM has taken the answer."""

from __future__ import annotations

import gc
import weakref

import pytest

from tests.engines.fakes import CHUNK, desk, keys_of


def test_a_round_asks_the_next_server_by_its_own_chunks():
    d = desk()
    d.client.silent = True
    request = d.arrive("r", 200)
    first = d.scheduler._requests["r"].asked
    assert d.scheduler.matched(request, 0) == (None, False)
    assert d.scheduler._requests["r"].asked is first
    d.client.chunk_tokens, d.client.silent, d.client.hit = 2 * CHUNK, False, 128
    d.client.asked.clear()  # another server: the client knows nothing of the question
    assert d.scheduler.matched(request, 0) == (128, True)
    size = (2 * CHUNK).to_bytes(4, "little")
    assert keys_of(d.client.contents[-1]) == [request.block_hashes[at] + size for at in (3, 7, 11)]


def test_another_round_asks_for_what_the_request_has_become():
    d = desk()
    request = d.arrive("r", 100)
    d.scheduler.matched(request, 0)
    d.scheduler.allocated(request, 0)
    request.all_token_ids += range(60)
    d.client.hit = 160
    assert d.scheduler.matched(request, 0) == (160, True)
    assert [content.num_tokens for content in d.client.contents] == [100, 160]
    assert d.client.asked == [("r", 0), ("r", 1)]


@pytest.mark.parametrize("gone", ["server", "chunks that fit"])
def test_a_round_that_nobody_can_be_asked_about_is_a_miss_and_goes_on_later(gone: str):
    d = desk()
    d.client.silent = True
    request = d.arrive("r", 100)
    assert d.scheduler.matched(request, 0) == (None, False)
    d.client.chunk_tokens = 0 if gone == "server" else CHUNK + 8
    assert d.scheduler.matched(request, 0) == (0, False)
    d.scheduler.allocated(request, 0)
    d.client.chunk_tokens, d.client.silent, d.client.hit = CHUNK, False, 64
    assert d.scheduler.matched(request, 0) == (64, True)
    assert d.client.asked == [("r", 0), ("r", 1)]


@pytest.mark.parametrize("lookup_async", [True, False])
def test_what_an_earlier_server_had_is_stored_at_the_next_one(lookup_async: bool):
    """The server is replaced before the request gets its blocks, and vLLM has all of it itself."""
    d = desk(lookup_async=lookup_async)
    d.client.hit = 96
    request = d.arrive("r", 100)
    assert d.scheduler.matched(request, 0) == (96, True)
    d.client.chunk_tokens = 2 * CHUNK
    d.scheduler.allocated(request, 0)
    (save,) = d.scheduler.step([("r", 100)]).saves
    assert (save.start, save.end) == (0, 64)


@pytest.mark.parametrize("lookup_async", [True, False])
def test_a_round_that_waits_for_blocks_is_asked_again_where_the_server_is_another_one(lookup_async: bool):
    d = desk(lookup_async=lookup_async)
    d.client.hit = 96
    request = d.arrive("r", 200)
    assert d.scheduler.matched(request, 0) == (96, True)
    d.client.chunk_tokens, d.client.hit = 2 * CHUNK, 0
    d.client.asked.clear()
    d.client.answers.clear()
    assert d.scheduler.matched(request, 0) == (0, False)


def test_a_reset_in_mid_lookup_asks_nothing_more():
    d = desk()
    d.client.silent, d.client.hit = True, 96
    request = d.arrive("r", 100)
    d.scheduler.matched(request, 0)
    d.scheduler.reset()
    assert d.client.given_back == ["all of r"]
    d.client.silent = False
    assert d.scheduler.matched(request, 0) == (0, False)
    d.scheduler.allocated(request, 0)
    assert d.client.asked == [("r", 0)]


def test_a_reset_between_offer_and_blocks_loads_nothing_that_it_made_unfindable():
    d = desk()
    d.client.hit = 96
    request = d.arrive("r", 100)
    assert d.scheduler.matched(request, 0) == (96, True)
    d.scheduler.reset()
    assert d.scheduler.matched(request, 0) == (0, False)
    d.scheduler.allocated(request, 0)
    assert d.scheduler.step([("r", 100)]).loads == []


def test_an_end_in_mid_lookup_keeps_nothing_of_the_request():
    d = desk()
    d.client.silent = True
    request = d.arrive("r", 100)
    d.scheduler.matched(request, 0)
    asked = d.scheduler._requests["r"].asked
    assert asked is not None
    gone = weakref.ref(asked.content)
    del asked
    gc.disable()
    try:
        d.scheduler.finished("r")
        assert gone() is None
    finally:
        gc.enable()
    assert (d.scheduler.tracked, d.client.given_back) == (0, ["all of r"])


def test_a_request_whose_every_token_is_computed_pins_nothing():
    """With logprobs of its prompt, say: vLLM asks all the same, and takes nothing. It gets its blocks before an answer
    is there, and what was pinned would stay until it ends."""
    d = desk()
    d.client.silent, d.client.hit = True, 96
    request = d.arrive("r", 100, computes_all=True)
    assert d.scheduler.matched(request, 0) == (0, False)
    d.scheduler.allocated(request, 0)
    assert d.client.asked == []
    assert [save.end for save in d.scheduler.step([("r", 100)]).saves] == [96]
