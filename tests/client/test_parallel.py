# SPDX-License-Identifier: Apache-2.0
"""Which rank holds what, in tables; and field report 44: topologies that do not fit are refused."""

from __future__ import annotations

import pytest

from kvgrpc.client import ParallelStrategy

# is_mla, tp, pp, heads -> kv_world_size, kv_tp_size, readers, kv rank of each rank, ranks that store
TABLE = [
    (False, 1, 1, None, 1, 1, 1, [0], [0]),
    (False, 2, 1, None, 2, 2, 1, [0, 1], [0, 1]),
    (False, 2, 1, 8, 2, 2, 1, [0, 1], [0, 1]),
    (False, 2, 2, 8, 4, 2, 1, [0, 1, 2, 3], [0, 1, 2, 3]),
    (False, 1, 3, 8, 3, 1, 1, [0, 1, 2], [0, 1, 2]),
    # more ranks than KV heads: heads are replicated
    (False, 4, 1, 2, 2, 2, 2, [0, 0, 1, 1], [0, 2]),
    (False, 4, 2, 2, 4, 2, 2, [0, 0, 1, 1, 2, 2, 3, 3], [0, 2, 4, 6]),
    (False, 8, 1, 1, 1, 1, 8, [0] * 8, [0]),
    (False, 4, 1, 4, 4, 4, 1, [0, 1, 2, 3], [0, 1, 2, 3]),
    # MLA: tensor parallelism does not split the data
    (True, 1, 1, None, 1, 1, 1, [0], [0]),
    (True, 4, 1, None, 1, 1, 4, [0] * 4, [0]),
    (True, 4, 2, None, 2, 1, 4, [0] * 4 + [1] * 4, [0, 4]),
    (True, 4, 2, 128, 2, 1, 4, [0] * 4 + [1] * 4, [0, 4]),
    (True, 3, 1, 2, 1, 1, 3, [0] * 3, [0]),
]


@pytest.mark.parametrize(("mla", "tp", "pp", "heads", "world", "kv_tp", "readers", "kv_ranks", "writers"), TABLE)
def test_table(
    mla: bool,
    tp: int,
    pp: int,
    heads: int | None,
    world: int,
    kv_tp: int,
    readers: int,
    kv_ranks: list[int],
    writers: list[int],
) -> None:
    ranks = [ParallelStrategy(mla, tp * pp, rank, tp, pp, heads) for rank in range(tp * pp)]
    assert [rank.kv_rank for rank in ranks] == kv_ranks
    assert [at for at, rank in enumerate(ranks) if rank.is_kv_writer] == writers
    for at, rank in enumerate(ranks):
        assert (rank.kv_world_size, rank.kv_tp_size, rank.readers_per_object) == (world, kv_tp, readers)
        assert (rank.tp_rank, rank.pp_rank) == (at % tp, at // tp)
        # the rule in RegisterKvCacheRequest
        assert rank.kv_rank == rank.pp_rank * kv_tp + rank.tp_rank // (tp // kv_tp)
        assert tp % kv_tp == 0
        assert world % kv_tp == 0
    assert sorted(set(kv_ranks)) == list(range(world)), "every KV rank is held by somebody"
    assert sorted(ranks[writer].kv_rank for writer in writers) == list(range(world)), "and stored by exactly one"


def test_replicas_of_data_parallelism_are_each_rank_0() -> None:
    replicas = [ParallelStrategy(False, 1, 0, 1) for _ in range(2)]
    assert [(r.kv_world_size, r.kv_rank, r.is_kv_writer) for r in replicas] == [(1, 0, True)] * 2


@pytest.mark.parametrize(
    ("world", "rank", "tp", "pp", "heads", "says"),
    [
        (2, 2, 2, 1, None, "rank 2"),
        (2, -1, 2, 1, None, "rank -1"),
        (4, 0, 2, 1, None, "data-parallel replica"),
        (2, 0, 2, 2, None, "world_size 2"),
        (0, 0, 0, 1, None, "at least 1"),
        (0, 0, 1, 0, None, "at least 1"),
        (4, 0, 4, 1, 0, "num_kv_heads 0"),
        (4, 0, 4, 1, 3, "must divide"),
        (3, 0, 3, 1, 4, "must divide"),
    ],
)
def test_sizes_that_do_not_fit(world: int, rank: int, tp: int, pp: int, heads: int | None, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        ParallelStrategy(False, world, rank, tp, pp, heads)
    assert says in str(caught.value)
