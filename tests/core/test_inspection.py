# SPDX-License-Identifier: Apache-2.0
"""Looks of operators: what they count, where they stop, and that they change nothing."""

from __future__ import annotations

from kvgrpc.core import types as t
from kvgrpc.core.inspection import KEEPERS_MOST, Inspected, inspect
from kvgrpc.core.types import Policy, S
from tests.core.desk import OBJECT, Desk, EngineDesk, key_of


def look(desk: Desk, e: EngineDesk, prompt: str = "a", chunks: int = 4) -> Inspected:
    before = desk.book.counters.copy(), list(desk.book.ledger.outbox)
    found = inspect(desk.book, desk.now, e.space, e.content(prompt, chunks).keys)
    desk.step()
    assert (desk.book.counters, list(desk.book.ledger.outbox)) == before
    return found


def test_ranks_are_counted_as_they_come() -> None:
    desk = Desk()
    e = desk.engine(tp_size=2, kv_tp_size=2)
    e.store("a", 2, worker=0)
    desk.auto = False
    e.store("a", 1, worker=1)
    found = look(desk, e)
    assert [(one.ready_ranks, one.writing_ranks, one.bytes) for one in found.chunks] == [
        (1, 1, OBJECT),
        (1, 0, OBJECT),
        (0, 0, 0),
        (0, 0, 0),
    ]
    assert [at for at, _ in found.objects] == [0, 0, 1, 1, 2, 2, 3, 3], "one for each rank"
    assert found.chunks[0].key == key_of("a", 0)


def test_everyone_who_keeps_something_is_named() -> None:
    desk = Desk()
    e = desk.engine()
    e.store("a", 4, policy=Policy(retention_ns=30 * S))
    e.pin("a", 2, ttl_ns=60 * S)
    e.lookup("a", 3)
    retained, pinned, looked = look(desk, e).keepers
    assert (retained.chunks, retained.left_ms, retained.pin_id, retained.engine) == (4, 30_000, b"", "")
    assert (pinned.chunks, pinned.left_ms, pinned.pin_id) == (2, 60_000, b"pin")
    assert looked.chunks == 3 and 0 < looked.left_ms <= desk.limits.lease_ns // t.MS
    assert e.engine_id not in repr(looked)
    assert look(desk, e, "b").keepers == (), "of what was asked for only"


def test_a_look_stops_at_its_most_and_says_so() -> None:
    desk = Desk()
    e = desk.engine()
    e.store("a", 1)
    for number in range(KEEPERS_MOST + 3):
        e.lookup("a", 1, request=f"r{number}")
    found = look(desk, e)
    assert (len(found.keepers), found.more_keepers) == (KEEPERS_MOST, True)
    assert found.chunks[0].pins == KEEPERS_MOST + 3


def test_what_goes_first_stays_what_goes_first() -> None:
    desk = Desk(chunks=8)
    e = desk.engine()
    e.store("a", 4)
    e.store("b", 4)
    for _ in range(3):
        look(desk, e, "a")
    e.store("c", 4)
    assert [one.ready_ranks for one in look(desk, e, "a").chunks] == [0, 0, 0, 0]
    assert [one.ready_ranks for one in look(desk, e, "b").chunks] == [1, 1, 1, 1]


def test_a_space_without_data_is_no_new_space() -> None:
    desk = Desk()
    e = desk.engine()
    assert [one.ready_ranks for one in look(desk, e).chunks] == [0] * 4
    assert not desk.book.index.spaces
