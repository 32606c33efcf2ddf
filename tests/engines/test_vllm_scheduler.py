# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half of the vLLM connector: every path gives back what it took, and repeats are harmless."""

from __future__ import annotations

import pytest

from kvgrpc.api import Hashes, Tokens
from kvgrpc.engines.vllm.metadata import REST_S, Report
from tests.engines.fakes import BLOCK, CHUNK, FakeClient, desk, keys_of


def test_the_lookup_begins_when_the_request_arrives():
    d = desk()
    request = d.arrive("r", 100)
    (content,) = d.client.contents
    assert isinstance(content, Hashes)
    assert content.num_tokens == 100
    size = CHUNK.to_bytes(4, "little")
    assert keys_of(content) == [request.block_hashes[at] + size for at in (1, 3, 5)]


def test_until_the_answer_is_there_vllm_is_told_to_ask_again():
    d = desk()
    d.client.silent, d.client.hit = True, 64
    request = d.arrive("r", 100)
    assert [d.scheduler.matched(request, 0) for _ in range(3)] == [(None, False)] * 3
    d.client.silent = False
    assert [d.scheduler.matched(request, 0) for _ in range(3)] == [(64, True)] * 3
    assert d.client.asked == [("r", 0)]


def test_only_a_step_that_has_nothing_to_do_waits_for_an_answer():
    d = desk()
    d.client.silent, d.client.hit = True, 96
    request = d.arrive("r", 100)
    assert not d.scheduler.step([("r", 100)]).idle
    assert d.client.waited == []
    assert d.scheduler.step([]).idle
    assert d.client.waited == [REST_S]
    d.client.silent = False
    d.scheduler.matched(request, 0)
    d.scheduler.allocated(request, 96)
    assert d.scheduler.step([]).loads
    assert d.client.waited == [REST_S], "the load is not held up"


def test_of_several_servers_one_is_waited_for():
    other = FakeClient(silent=True)
    d = desk(others=[other])
    d.arrive("r", 100)
    d.scheduler.step([])
    assert (d.client.waited, other.waited) == ([REST_S], [REST_S])
    d.client.silent = True
    d.scheduler.step([])
    assert (d.client.waited, other.waited) == ([REST_S] * 2, [REST_S])


@pytest.mark.parametrize(
    ("tokens", "hit", "computed", "offered"),
    [
        (100, 96, 0, 96),
        (96, 96, 0, 96),
        (96, 96, 80, 16),
        (97, 96, 0, 96),
        (100, 96, 48, 48),
        (100, 64, 64, 0),
        (100, 64, 80, 0),
        (20, 0, 0, 0),
    ],
)
def test_what_is_offered(tokens: int, hit: int, computed: int, offered: int):
    """Of whole blocks; vLLM computes the last token itself where all are loaded."""
    d = desk()
    d.client.hit = hit
    assert d.scheduler.matched(d.arrive("r", tokens), computed) == (offered, offered > 0)


def test_a_load_names_the_blocks_behind_the_local_prefix():
    d = desk()
    d.client.hit = 96
    request = d.arrive("r", 100)
    d.scheduler.matched(request, 48)
    d.scheduler.allocated(request, 48)
    (load,) = d.scheduler.step([]).loads
    assert (load.start, load.end, load.job_ids) == (48, 96, (b"job",))
    assert load.blocks == (tuple(d.blocks.tables["r"][3:6]),)
    assert d.scheduler.step([]).loads == []


def test_a_loser_gives_its_pins_back():
    """Inside MultiConnector, or with prompt log-probabilities: an offer that vLLM does not take."""
    d = desk()
    d.client.hit = 96
    request = d.arrive("r", 100)
    d.scheduler.matched(request, 0)
    d.scheduler.allocated(request, 0)
    assert d.client.given_back == ["pins of r"]
    assert d.scheduler.step([]).loads == []


def test_a_preempted_request_is_looked_up_afresh():
    d = desk()
    d.client.hit = 32
    request = d.arrive("r", 100)
    d.scheduler.matched(request, 0)
    d.scheduler.allocated(request, 32)
    d.scheduler.step([])
    d.scheduler.update(None, ["r"], ())
    d.scheduler.allocated(request, 0)
    d.client.hit = 96
    assert d.scheduler.matched(request, 0) == (96, True)
    assert d.client.asked == [("r", 0), ("r", 1)]


def test_a_failed_load_is_not_tried_again():
    d = desk()
    d.client.hit = 96
    request = d.arrive("r", 100)
    d.scheduler.matched(request, 0)
    d.scheduler.allocated(request, 96)
    (load,) = d.scheduler.step([]).loads
    d.scheduler.update(None, ["r"], load.blocks[0][3:])
    assert d.scheduler.matched(request, 0) == (0, False)
    d.scheduler.allocated(request, 0)
    assert "pins of r" in d.client.given_back
    (save,) = d.scheduler.step([("r", 100)]).saves
    assert (save.start, save.end) == (0, 96)  # computed anew, so stored anew


def test_a_load_that_fails_in_one_worker_while_another_goes_on_is_not_tried_again():
    """vLLM hands on bad blocks as they come, the request when all workers have it; a prompt of which nothing is left is
    then asked about anew: it would fail again and again."""
    d = desk(workers=2)
    d.client.hit = 96
    request, other = d.arrive("r", 100), d.arrive("other", 100)
    for each in (request, other):
        d.scheduler.matched(each, 0)
        d.scheduler.allocated(each, 96)
    load, _ = d.scheduler.step([]).loads
    d.scheduler.update(None, (), load.blocks[0])
    assert d.client.given_back == []  # the other worker still reads under the same pins
    d.scheduler.update(None, ["r", "other"], ())
    assert d.client.given_back == ["pins of r"]
    assert d.scheduler.matched(request, 0) == (0, False)
    d.scheduler.allocated(request, 0)
    (save,) = d.scheduler.step([("r", 100)]).saves
    assert (save.start, save.end) == (0, 96)
    assert d.scheduler.matched(other, 0) == (96, True)


def test_an_abort_before_the_load_is_sent_still_ends_in_a_report():
    """vLLM waits for the request to be received, and frees its blocks then."""
    d = desk()
    d.client.hit = 96
    request = d.arrive("r", 100)
    d.scheduler.matched(request, 0)
    d.scheduler.allocated(request, 96)
    d.scheduler.finished("r")
    (load,) = d.scheduler.step([]).loads
    assert (load.request_id, load.blocks) == ("r", ())
    d.scheduler.update(None, ["r"], ())
    assert d.scheduler.tracked == 0
    assert d.client.given_back == ["all of r"]


@pytest.mark.parametrize("moment", ["arrived", "matched", "allocated", "loading", "running"])
def test_an_abort_gives_everything_back(moment: str):
    d = desk()
    d.client.hit = 64
    request = d.arrive("r", 100)
    moments = ["arrived", "matched", "allocated", "loading", "running"]
    done = moments.index(moment)
    if done >= 1:
        d.scheduler.matched(request, 0)
    if done >= 2:
        d.scheduler.allocated(request, 64)
    if done >= 3:
        d.scheduler.step([])
    if done >= 4:
        d.scheduler.update(None, ["r"], ())
        d.scheduler.allocated(request, 0)
    saves = d.scheduler.step([("r", 100)]).saves if done >= 4 else []
    d.scheduler.finished("r")
    d.scheduler.finished("r")
    assert d.client.given_back.count("all of r") == 1
    assert len(saves) == (done >= 4)
    for save in saves:
        assert sorted(d.blocks.held) == sorted(save.blocks[0])
        d.scheduler.update(Report({save.save_id: 1}), (), ())
    assert (d.scheduler.tracked, d.scheduler.held_blocks, d.scheduler.busy) == (0, 0, False)
    assert not d.blocks.held


# ---- saves ----------------------------------------------------------------------------------------------------------


def test_whole_chunks_are_saved_as_they_are_computed():
    d = desk()
    request = d.arrive("r", 100)
    d.scheduler.matched(request, 0)
    d.scheduler.allocated(request, 0)
    spans = []
    for computed in (20, 40, 100):
        spans += [(save.start, save.end, len(save.blocks[0])) for save in d.scheduler.step([("r", computed)]).saves]
    assert spans == [(0, 32, 2), (32, 96, 4)]
    request.all_token_ids += range(28)
    (save,) = d.scheduler.step([("r", 128)]).saves
    assert (save.start, save.end, save.first_chunk) == (96, 128, 3)
    assert save.hashes == (request.block_hashes[7] + CHUNK.to_bytes(4, "little"),)


def test_what_was_hit_is_not_saved_again():
    d = desk()
    d.client.hit = 64
    request = d.arrive("r", 100)
    d.scheduler.matched(request, 0)
    d.scheduler.allocated(request, 64)
    d.scheduler.step([])
    d.scheduler.update(None, ["r"], ())
    (save,) = d.scheduler.step([("r", 100)]).saves
    assert (save.start, save.end) == (64, 96)


def test_drafts_are_not_saved():
    """Computed tokens that vLLM does not know yet may be rejected."""
    d = desk()
    d.arrive("r", 60)
    (save,) = d.scheduler.step([("r", 68)]).saves
    assert save.end == 32


@pytest.mark.parametrize("ahead", [1, 3])
def test_the_last_chunk_of_a_drafter_waits(ahead: int):
    """Until all tokens are known that its layers read."""
    d = desk(ahead=ahead)
    request = d.arrive("r", 64)
    for at in range(ahead):
        saved = [save.end for save in d.scheduler.step([("r", 64 + at)]).saves]
        assert saved == ([] if at else [32])
        request.all_token_ids.append(7)
    (save,) = d.scheduler.step([("r", 64 + ahead)]).saves
    assert (save.start, save.end) == (32, 64)


@pytest.mark.parametrize(
    ("ahead", "hit", "loaded"), [(1, 64, 48), (1, 160, 128), (16, 64, 48), (17, 64, 32), (1, 0, 0)]
)
def test_the_end_of_a_hit_is_computed_anew_for_a_drafter(ahead: int, hit: int, loaded: int):
    """Its layers have read tokens behind the hit when they made it: those of whoever stored it. Of a whole prompt (160)
    the last block is computed anyway."""
    d = desk(ahead=ahead)
    d.client.hit = hit
    request = d.arrive("r", 160)
    assert d.scheduler.matched(request, 0) == (loaded, loaded > 0)
    assert d.scheduler.matched(request, 32) == ((loaded - 32, True) if loaded > 32 else (0, False))


def test_blocks_are_held_until_every_worker_has_let_go():
    d = desk(workers=2)
    d.arrive("r", 64)
    (save,) = d.scheduler.step([("r", 64)]).saves
    d.scheduler.finished("r")
    for _ in range(2):
        assert sorted(d.blocks.held) == sorted(save.blocks[0])
        assert d.scheduler.busy
        d.scheduler.update(Report({save.save_id: 1}), (), ())
    assert not d.blocks.held
    assert not d.scheduler.busy


def test_saves_hold_a_share_of_the_pool_and_go_on_later():
    d = desk()
    d.blocks.total = 20  # a quarter: 5
    d.arrive("a", 64)
    d.arrive("b", 64)
    (first,) = d.scheduler.step([("a", 64), ("b", 64)]).saves
    assert d.scheduler.step([("b", 64)]).saves == []
    d.scheduler.update(Report({first.save_id: 1}), (), ())
    (second,) = d.scheduler.step([("b", 64)]).saves
    assert second.blocks == (tuple(d.blocks.tables["b"][:4]),)


# ---- who, and what is wanted ----------------------------------------------------------------------------------------


def test_own_hashes_send_tokens_and_the_salt():
    d = desk(lora="adapter@path", own_hashes=True)
    d.arrive("r", 64, salt="tenant")
    (content,) = d.client.contents
    assert isinstance(content, Tokens)
    assert content.num_tokens == 64
    (save,) = d.scheduler.step([("r", 64)]).saves
    assert (save.tokens, save.hashes) == (bytes(content.data), ())
    assert (save.lora, save.cache_salt) == ("adapter@path", "tenant")


def test_what_tokens_do_not_identify_is_not_cached():
    d = desk(lora=None, own_hashes=True)
    request = d.arrive("r", 64)
    assert d.scheduler.matched(request, 0) == (0, False)
    assert d.scheduler.step([("r", 64)]).saves == []
    assert d.client.asked == []


def test_wishes():
    d = desk()
    d.client.hit = 96
    silent = d.arrive("a", 100, params={"kvgrpc.no_lookup": True})
    assert d.scheduler.matched(silent, 0) == (0, False)
    unsaved = d.arrive("b", 100, params={"kvgrpc.no_store": True, "kvgrpc.max_load_tokens": 40})
    assert d.scheduler.matched(unsaved, 0) == (32, True)
    assert d.scheduler.step([("b", 100)]).saves == []
    d.arrive("c", 100, params={"kvgrpc.max_store_tokens": 70, "kvgrpc.retention_s": 9, "other": 1})
    (save,) = d.scheduler.step([("c", 100)]).saves
    assert (save.end, save.policy.retention_ns) == (64, 9_000_000_000)
    assert d.client.asked == [("b", 0), ("c", 0)]


@pytest.mark.parametrize(
    "bad", [{"kvgrpc.no_store": 1}, {"kvgrpc.retention_s": -1}, {"kvgrpc.priority": []}, {"kvgrpc.x": 1}, "text", 7]
)
def test_a_wish_that_is_not_understood_stops_nothing(bad: object):
    d = desk()
    d.client.hit = 96
    assert d.scheduler.matched(d.arrive("r", 100, params=bad), 0) == (96, True)


def test_a_salt_that_cannot_be_sent_stops_nothing():
    d = desk(own_hashes=True)
    d.client.hit = 96
    assert d.scheduler.matched(d.arrive("r", 100, salt="a\ud800"), 0) == (0, False)
    assert d.client.asked == [] and d.scheduler.step([("r", 100)]).saves == []
    assert d.scheduler.matched(d.arrive("s", 100, salt="größer 日本"), 0) == (96, True)


# ---- the server -----------------------------------------------------------------------------------------------------


def test_without_a_server_nothing_is_saved_or_found():
    d = desk()
    d.client.chunk_tokens, d.client.attached = 0, False
    request = d.arrive("r", 100)
    assert d.scheduler.matched(request, 0) == (0, False)
    assert d.scheduler.step([("r", 100)]).saves == []


def test_a_chunk_that_is_no_multiple_of_a_block_caches_nothing():
    d = desk()
    d.client.chunk_tokens = BLOCK + 8
    assert d.scheduler.matched(d.arrive("r", 100), 0) == (0, False)
    assert d.scheduler.step([("r", 100)]).saves == []


def test_keys_of_another_chunk_size_never_match():
    """A server may be replaced by one with other chunks between making keys and sending them."""
    d = desk()
    d.arrive("small", 128)
    small = set(keys_of(d.client.contents[0]))
    d.client.chunk_tokens = 2 * CHUNK
    d.arrive("large", 128)
    assert small.isdisjoint(keys_of(d.client.contents[1]))


def test_a_worker_without_shareable_memory_ends_the_lookups():
    d = desk()
    d.client.hit = 96
    d.scheduler.update(Report(unusable=True), (), ())
    assert d.scheduler.matched(d.arrive("r", 100), 0) == (0, False)
    assert d.client.asked == []


def test_a_reset_stores_and_finds_nothing_of_what_was_running():
    d = desk()
    d.client.hit = 32
    request = d.arrive("r", 100)
    d.scheduler.reset()
    assert d.scheduler.matched(request, 0) == (0, False)
    step = d.scheduler.step([("r", 100)])
    assert (step.saves, step.resets) == ([], 1)
    later = d.arrive("later", 100)
    assert d.scheduler.matched(later, 0) == (32, True)


def test_the_blocking_mode_asks_once():
    d = desk(lookup_async=False)
    d.client.silent = True
    request = d.arrive("r", 100)
    assert [d.scheduler.matched(request, 0) for _ in range(3)] == [(0, False)] * 3
    assert d.client.asked == [("r", 0)]


def test_sums_do_not_grow_with_the_saves():
    d = desk()
    for number in range(3):
        d.arrive(f"r{number}", 64)
        (save,) = d.scheduler.step([(f"r{number}", 64)]).saves
        d.scheduler.update(Report({save.save_id: 1}, {save.save_id: 64}, saved_tokens=64), (), ())
    assert d.scheduler.report == Report(saved_tokens=192)
