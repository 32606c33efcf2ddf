# SPDX-License-Identifier: Apache-2.0
"""Models whose layers do not all need every chunk: windows, recurrent states, chunked attention."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from kvgrpc.core import types as t
from kvgrpc.core.errors import Reason
from kvgrpc.core.keys import part_keys
from tests.core.desk import BLOCK, CHUNK, block_ids, refused
from tests.core.parted import NULL, PartedDesk, first_token, outcomes

WINDOW = t.Need(4 * CHUNK)
STATE = t.Need(BLOCK)


def nulls(p: PartedDesk, chunks: int, group: int, named: range) -> list[list[int]]:
    """Blocks of which the engine has, of one group, only those of these chunks."""
    ids = p.ids(chunks)
    ids[group] = [block if at * BLOCK // CHUNK in named else NULL for at, block in enumerate(ids[group])]
    return ids


def test_a_hit_is_never_longer_than_every_group_can_serve():
    """Field report 21: a full group and a window of 4 chunks."""
    p = PartedDesk([t.ALL, WINDOW])
    assert outcomes(p.store("a", 8, nulls(p, 8, 1, range(0)))) == [("STORED", 0b01)] * 8
    assert p.engine.hits("a", 8) == 0
    assert outcomes(p.store("a", 8, nulls(p, 8, 1, range(4, 8)))) == [("RESIDENT", 0b01)] * 4 + [("STORED", 0b11)] * 4
    job = p.engine.lookup("a", 8)
    assert job.status.hit_tokens == 8 * CHUNK
    assert outcomes(p.retrieve(job, 8)) == [("LOADED", 0b01)] * 4 + [("LOADED", 0b11)] * 4
    ids, blocks = p.ids(8), 4 * CHUNK // BLOCK
    assert p.written() == {(0, block) for block in ids[0]} | {(1, block) for block in ids[1][blocks:]}
    assert p.evict(1, 5)
    assert p.engine.hits("a", 8) == 0
    first = nulls(p, 4, 1, range(4))
    assert outcomes(p.store("a", 4, first)) == [("STORED", 0b11)] * 4
    assert p.engine.hits("a", 8) == 5


@pytest.mark.parametrize("order", list(itertools.permutations(range(5))))
def test_no_order_of_eviction_makes_a_false_hit(order: tuple[int, ...]):
    """Field report 21: a window of two chunks and a state, five chunks, whose parts go one after the other."""
    needs = [t.ALL, t.Need(2 * CHUNK), STATE]
    p = PartedDesk(needs)
    p.store("a", 5)
    there = {(group, at) for group in range(3) for at in range(5)}
    for step, at in enumerate(order):
        for group in (1, 2, 0)[: 1 + step]:
            if p.evict(group, at):
                there.discard((group, at))
            hits = [n for n in range(6) if all((g, c) in there for g in range(3) for c in _chunks(needs[g], n))]
            assert p.engine.hits("a", 5) == max(hits)


def _chunks(need: t.Need, hit: int) -> range:
    return range(first_token(need, hit * CHUNK) // CHUNK, hit)


@pytest.mark.parametrize(
    ("need", "tail"),
    [
        (t.ALL, 4), (t.Need(1), 1), (t.Need(5), 2), (t.Need(15), 4), (t.Need(100), 4), (STATE, 1), (t.Need(8, True), 2),
        (t.Need(64, True), 4),
    ],
)  # fmt: skip
def test_an_object_holds_only_blocks_that_a_hit_can_need(need: t.Need, tail: int):
    p = PartedDesk([need])
    p.store("a", 2)
    pieces = [piece for order in p.desk.history for piece in order.pieces]
    assert [block_ids(piece) for piece in pieces] == [(tuple(range(4 - tail, 4)),), (tuple(range(8 - tail, 8)),)]
    assert all(piece.span == (0, tail * 64) for piece in pieces)


def test_what_a_model_of_one_need_does_is_as_it_was():
    """Names, keys and pieces of a model whose groups all need everything know nothing of parts."""
    p = PartedDesk([t.ALL, t.ALL])
    results = p.store("a", 3)
    assert outcomes(results) == [("STORED", 0)] * 3
    keys = p.engine.content("a", 3).keys
    assert list(p.desk.book.index.space(p.engine.space).table.chunks) == list(keys)
    assert part_keys(keys, 0) is keys
    assert {order.part for order in p.desk.history} == {0}


def test_keys_of_parts_are_nobody_elses():
    keys = [b"k" * 16, b"k" * 16 + b"\0", b"k" * 64]
    parts = [key for part in range(3) for key in part_keys(keys, part)]
    assert len(set(parts)) == 9
    assert all(len(key) > 64 for key in parts[3:])


def test_only_what_the_hit_needs_is_pinned():
    p = PartedDesk([t.ALL, t.Need(CHUNK), STATE])
    p.store("a", 4)
    job = p.engine.lookup("a", 4)
    assert job.status.hit_tokens == 4 * CHUNK
    pinned = [(g, at) for g in range(3) for at in range(4) if (chunk := p.chunk(g, at)) and chunk.pins]
    assert pinned == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 3), (2, 3)]
    assert p.desk.counts.pins == 6
    assert p.engine.free(job, start=3, end=4) == 3
    assert p.engine.free(job) == 3
    assert p.desk.counts.pins == 0


def test_a_retrieve_lets_go_of_every_part():
    p = PartedDesk([t.ALL, t.Need(CHUNK), STATE])
    p.store("a", 4)
    p.retrieve(p.engine.lookup("a", 4), 4)
    assert p.desk.counts.pins == 0


def test_what_only_shorter_hits_need_goes_first_then_tails():
    """A window of one chunk: what lies before the last window goes first, then chunk by chunk from the tail."""
    p = PartedDesk([t.ALL, t.Need(CHUNK)], chunks=2)  # an object has 256 bytes, a page 1024: 8 objects
    p.store("a", 4)
    assert p.desk.arena.free_bytes == 0
    gone: list[tuple[int, int]] = []
    for number in range(5):
        p.store(f"b{number}", 1, nulls(p, 1, 1, range(0)))
        gone += [(g, at) for g in range(2) for at in range(4) if p.chunk(g, at) is None and (g, at) not in gone]
    assert gone == [(1, 2), (1, 1), (1, 0), (1, 3), (0, 3)]


def test_a_use_keeps_the_parts_that_it_needs():
    p = PartedDesk([t.ALL, t.Need(CHUNK)], chunks=3)
    p.store("a", 4)
    p.store("b", 2)
    p.engine.hits("a", 2)
    for number in range(4):
        p.store(f"c{number}", 1, nulls(p, 1, 1, range(0)))
    assert p.engine.hits("a", 2) == 2


def test_a_hit_counts_as_a_whole_or_not_at_all():
    """The engine skips the whole prefix for all layers or computes it: a part of a hit is of no use."""
    p = PartedDesk([t.ALL, WINDOW])
    p.store("a", 8)
    job = p.engine.lookup("a", 8)
    p.desk.pass_time(p.desk.limits.lease_ns)
    assert p.evict(1, 6)
    p.desk.history.clear()
    results = p.retrieve(job, 8)
    assert outcomes(results) == [("FAILED", 0)] * 6 + [("MISSING", 0), ("FAILED", 0)]
    assert p.written() == set()


@pytest.mark.parametrize("part", [0, 1])
def test_a_failure_of_one_part_fails_what_others_have_loaded(part: int):
    p = PartedDesk([t.ALL, t.Need(2 * CHUNK)])
    p.store("a", 4)
    job = p.engine.lookup("a", 4)
    p.desk.auto = False
    e = p.engine
    command = t.RetrieveCommand(e.engine_id, 900, job.job_id, t.TokenRange(0, 4 * CHUNK), tuple(p.ids(4)))
    assert p.desk.book.retrieve(0, e.worker(0), command) is None
    p.desk.step()
    while next(iter(p.desk.slices.values())).part < part:
        p.desk.report()
    p.desk.report(report=t.SliceReport(1, "MEMORY_IO", torn=True))
    found = outcomes(p.desk.ended[e.worker(0), 900])
    if part:
        assert found == [("TORN", 0b01)] * 2 + [("TORN", 0b11)] * 2
    else:
        assert found == [("TORN", 0b01)] * 2 + [("FAILED", 0)] * 2
    assert p.desk.counts.calls_in_flight == 0


def test_null_blocks_are_not_written():
    p = PartedDesk([t.ALL, t.Need(20)])
    p.store("a", 4)
    ids = p.ids(4)
    ids[1][:11] = [NULL] * 11
    assert outcomes(p.retrieve(p.engine.lookup("a", 4), 4, ids)) == [("LOADED", 1)] * 2 + [("LOADED", 3)] * 2
    assert p.written() == {(0, block) for block in ids[0]} | {(1, block) for block in ids[1][11:]}


def test_null_blocks_are_refused_where_everything_is_needed_or_after_others():
    p = PartedDesk([t.ALL, WINDOW, STATE])
    for group, at in ((0, 0), (1, 3)):
        ids = p.ids(2)
        ids[group][at] = NULL
        with refused(Reason.BLOCK_IDS) as refusal:
            p.store("a", 2, ids)
        assert refusal.refusal.field == f"blocks[{group}].ids"
    ids = p.ids(2)
    ids[2][4:] = [NULL] * 4
    assert outcomes(p.store("a", 2, ids)) == [("STORED", 7), ("STORED", 3)]


def test_a_store_in_which_the_engine_has_no_group_is_refused():
    p = PartedDesk([STATE])
    assert outcomes(p.store("a", 2, [[NULL] * 8])) == [("REFUSED", 0)] * 2
    assert p.engine.hits("a", 2) == 0


def test_a_hit_ends_with_a_chunk():
    p = PartedDesk([t.ALL, STATE])
    p.store("a", 2)
    job = p.engine.lookup("a", 2)
    with refused(Reason.RANGE):
        p.engine.groups = 2
        p.engine.retrieve(job, end=CHUNK + BLOCK)


def test_past_the_hit_is_missing():
    p = PartedDesk([STATE])
    p.store("a", 2)
    job = p.engine.lookup("a", 4)
    assert job.status.hit_tokens == 2 * CHUNK
    assert outcomes(p.retrieve(job, 4)) == [("LOADED", 0), ("LOADED", 1), ("MISSING", 0), ("MISSING", 0)]


def test_all_ranks_need_all_parts():
    p = PartedDesk([t.ALL, t.Need(CHUNK)], ranks=2)
    p.store("a", 4, rank=0)
    assert p.engine.hits("a", 4) == 0
    p.store("a", 2, rank=1)
    p.store("a", 4, nulls(p, 4, 1, range(0)), rank=1)
    assert p.engine.hits("a", 4) == 2


def test_a_clear_forgets_every_part():
    p = PartedDesk([t.ALL, STATE])
    p.store("a", 4)
    p.engine.clear()
    p.desk.settle()
    assert p.engine.hits("a", 4) == 0
    assert p.desk.arena.free_bytes == p.desk.arena.total_bytes


def test_retention_and_pins_keep_what_the_hit_needs():
    for keep in ("pin", "retain"):
        p = PartedDesk([t.ALL, t.Need(CHUNK)], chunks=2)
        p.store("a", 3, retention_ns=60 * t.S if keep == "retain" else 0)
        if keep == "pin":
            assert p.engine.pin("a", 3).pinned_tokens == 3 * CHUNK
        for number in range(8):
            p.store(f"b{number}", 1)
        assert p.engine.hits("a", 3) == 3


def test_other_needs_in_the_same_space_are_refused():
    p = PartedDesk([t.ALL, STATE])
    p.store("a", 1)
    groups = tuple(replace(one, need=t.ALL) for one in p.engine.registration(0).geometry.groups * 2)
    other = p.desk.engine("other", register=False, stored_form=p.engine.stored_form)
    with refused(Reason.GEOMETRY_MISMATCH):
        other.share(0, geometry=t.Geometry(groups))
