# SPDX-License-Identifier: Apache-2.0
"""Engines that span nodes: each node's server is asked for its node's ranks, and the least counts."""

from __future__ import annotations

import pytest

from kvgrpc.client import ParallelStrategy
from kvgrpc.engines.vllm.groups import UnsupportedError
from kvgrpc.engines.vllm.servers import Servers, check_nodes, node_of, nodes_of
from tests.engines.fakes import CHUNK, FakeClient, desk


def test_the_least_of_all_answers_counts_and_all_must_have_answered():
    other = FakeClient(hit=64)
    d = desk(others=[other])
    d.client.hit, other.silent = 96, True
    request = d.arrive("r", 100)
    assert d.scheduler.matched(request, 0) == (None, False)
    other.silent = False
    assert d.scheduler.matched(request, 0) == (64, True)
    assert d.client.contents == other.contents
    d.scheduler.allocated(request, 64)
    (load,) = d.scheduler.step([]).loads
    assert (load.end, load.job_ids) == (64, (b"job", b"job"))


def test_what_one_server_has_alone_is_given_back():
    other = FakeClient(hit=0)
    d = desk(others=[other])
    d.client.hit = 96
    request = d.arrive("r", 100)
    assert d.scheduler.matched(request, 0) == (0, False)
    d.scheduler.allocated(request, 0)
    assert d.client.given_back == ["pins of r"]
    d.scheduler.finished("r")
    assert other.given_back[-1] == d.client.given_back[-1] == "all of r"


def test_servers_with_other_chunks_cache_nothing():
    other = FakeClient(hit=96, chunk_tokens=2 * CHUNK)
    d = desk(others=[other])
    d.client.hit = 96
    request = d.arrive("r", 100)
    assert d.scheduler.matched(request, 0) == (0, False)
    assert d.scheduler.step([("r", 100)]).saves == []
    assert d.client.asked == other.asked == []


def test_nothing_is_stored_while_one_server_is_away():
    other = FakeClient(attached=False)
    d = desk(others=[other])
    d.arrive("r", 100)
    assert d.scheduler.step([("r", 100)]).saves == []


def test_the_blocking_mode_begins_all_before_it_waits():
    other = FakeClient(hit=64)
    d = desk(others=[other], lookup_async=False)
    d.client.hit = 96
    assert d.scheduler.matched(d.arrive("r", 100), 0) == (64, True)


def test_without_a_server_all_is_a_miss():
    """As where the default socket belongs to somebody else."""
    d = desk(servers=Servers([]))
    request = d.arrive("r", 100)
    assert d.scheduler.matched(request, 0) == (0, False)
    assert d.scheduler.step([("r", 100)]).saves == []
    d.scheduler.finished("r")
    assert d.client.given_back == []


def strategy(rank: int, tp: int, pp: int = 1, heads: int = 8, is_mla: bool = False) -> ParallelStrategy:
    return ParallelStrategy(is_mla, tp * pp, rank, tp, pp, heads)


def test_ranks_lie_on_nodes_in_their_order():
    two_stages = [node_of(strategy(rank, tp=2, pp=2), 2) for rank in range(4)]
    assert [(node.index, node.kv_ranks, node.writes) for node in two_stages] == [
        (0, (0, 1), True),
        (0, (0, 1), True),
        (1, (2, 3), True),
        (1, (2, 3), True),
    ]
    assert [node.kv_ranks for node in nodes_of(strategy(0, tp=2, pp=2), 2)] == [(0, 1), (2, 3)]


def test_one_worker_of_each_node_stores_what_all_have():
    nodes = [node_of(strategy(rank, tp=4, is_mla=True), 2) for rank in range(4)]
    assert [(node.index, node.kv_ranks, node.writes) for node in nodes] == [
        (0, (0,), True),
        (0, (0,), False),
        (1, (0,), True),
        (1, (0,), False),
    ]
    split = [node_of(strategy(rank, tp=4, heads=2), 2) for rank in range(4)]
    assert [(node.index, node.kv_ranks, node.writes) for node in split] == [
        (0, (0,), True),
        (0, (0,), False),
        (1, (1,), True),
        (1, (1,), False),
    ]


def test_one_server_is_asked_for_all_ranks():
    assert nodes_of(strategy(0, tp=4), 1) == (node_of(strategy(0, tp=4), 1),)
    assert node_of(strategy(3, tp=4), 1).kv_ranks == ()


@pytest.mark.parametrize(("nodes", "servers", "said"), [(2, 1, "spans 2 nodes and has 1"), (1, 3, "4 ranks cannot")])
def test_addresses_that_do_not_fit_are_refused_by_name(nodes: int, servers: int, said: str):
    with pytest.raises(UnsupportedError, match=said):
        check_nodes(strategy(0, tp=4), nodes, servers)


def test_addresses_that_fit():
    for nodes, servers in ((1, 1), (1, 2), (2, 2), (2, 0)):
        check_nodes(strategy(0, tp=4), nodes, servers)
