# SPDX-License-Identifier: Apache-2.0
"""Records of objects, and a book that is made of them: no page is shared, and what was cleared never comes back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvgrpc.core import types as t
from kvgrpc.core.cache import Bookkeeper
from kvgrpc.core.invariants import check
from kvgrpc.core.keys import part_keys
from kvgrpc.core.records import Form, Record, UnsoundRecordsError
from kvgrpc.core.types import NO_VERSIONS, Extent, PartForm, Priority, SpaceIdentity, Versions
from tests.core.parted import PartedDesk, outcomes

PAGE = 4096
PAGES = 64
IDENTITY = SpaceIdentity("m", "", "bf16", 1, "sha256-u32le", "form")
LARGE = Form(IDENTITY, "", "", 0, 0, (PartForm(t.ALL, 2 * PAGE, "order"),))
SMALL = Form(replace(IDENTITY, model="small"), "", "salt", 0, 0, (PartForm(t.ALL, 1000, "order"),))
COST = 1024
LIMITS = t.CoreLimits(chunk_tokens=16, page_bytes=PAGE)


def book(versions: Versions = NO_VERSIONS) -> Bookkeeper:
    one = Bookkeeper(LIMITS, PAGES * PAGE, (), versions, 7)
    one.records.on = True
    return one


def record(form: Form, number: int, *extents: Extent, priority: Priority = Priority.NORMAL) -> Record:
    return Record(form, number.to_bytes(32, "little"), priority, extents, b"c" * 16)


def adopt(one: Bookkeeper, records: Sequence[Record], *, whole: bool = True, kept: Versions = NO_VERSIONS) -> int:
    """Adopts and finds all of them right; how many."""
    one.records.adopt(records, kept, whole=whole)
    check(one)
    sealings = list(one.records.unchecked)
    for sealing in sealings:
        one.records.checked(sealing, True)
        check(one)
    return len(sealings)


RECORDS = [
    record(LARGE, 1, (0, 2 * PAGE)),
    record(LARGE, 2, (5 * PAGE, PAGE), (3 * PAGE, PAGE)),
    record(SMALL, 3, (9 * PAGE, COST), priority=Priority.LOW),
    record(SMALL, 4, (9 * PAGE + 3 * COST, COST)),
]


def test_objects_are_where_they_were() -> None:
    one = book()
    assert adopt(one, RECORDS) == 4
    assert one.counts().chunks == 4
    assert {*one.records.of(one.records.chunks())} == {*RECORDS}
    assert one.arena_status().ready_bytes == 4 * PAGE + 2 * COST
    assert one.index.accounts["salt"].used_bytes == 2 * COST
    free = one.index.slots.reserve(2 * PAGE, 2 * PAGE, PAGES)
    taken = {page for slot in free for offset, length in slot.extents for page in range(offset, offset + length, PAGE)}
    assert len(free) == (PAGES - 5) // 2
    assert not taken & {at * PAGE for at in (0, 1, 3, 5, 9)}
    places = [one.index.slots.reserve(1000, COST)[0].extents[0][0] for _ in range(2)]
    assert sorted(places) == [9 * PAGE + COST, 9 * PAGE + 2 * COST], "a shared page has room for more"


def test_what_is_not_what_it_says_is_free_again() -> None:
    one = book()
    one.records.adopt(RECORDS, NO_VERSIONS, whole=True)
    for sealing in list(one.records.unchecked):
        one.records.checked(sealing, False)
        check(one)
    assert one.arena_status().free_bytes == PAGES * PAGE
    assert (one.counts().chunks, one.counters["dropped_objects"]) == (0, 4)


IMPOSSIBLE: dict[str, Record] = {
    "outside": record(LARGE, 9, ((PAGES - 1) * PAGE, 2 * PAGE)),
    "far outside": record(LARGE, 9, (1 << 60, 2 * PAGE)),
    "between pages": record(LARGE, 9, (20 * PAGE + 64, 2 * PAGE)),
    "too short": record(LARGE, 9, (20 * PAGE, PAGE)),
    "too long": record(LARGE, 9, (20 * PAGE, 3 * PAGE)),
    "an empty part": record(LARGE, 9, (20 * PAGE, 2 * PAGE), (30 * PAGE, 0)),
    "twice the same page": record(LARGE, 9, (20 * PAGE, PAGE), (20 * PAGE, PAGE)),
    "another's page": record(LARGE, 9, (20 * PAGE, PAGE), (PAGE, PAGE)),
    "another's place": record(SMALL, 9, (9 * PAGE, COST)),
    "across places": record(SMALL, 9, (9 * PAGE + COST // 2, COST)),
    "in a page of larger ones": record(SMALL, 9, (0, COST)),
    "two places": record(SMALL, 9, (9 * PAGE + COST, COST // 2), (9 * PAGE + 2 * COST, COST // 2)),
    "a place outside": record(SMALL, 9, (PAGES * PAGE, COST)),
    "the same object": record(LARGE, 1, (20 * PAGE, 2 * PAGE)),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_what_cannot_be(what: str) -> None:
    """From a server that ended in order it spoils all of it; from one that was killed, the later record counts."""
    with pytest.raises(UnsoundRecordsError):
        adopt(book(), [*RECORDS, IMPOSSIBLE[what]])
    with pytest.raises(UnsoundRecordsError):
        adopt(book(), [IMPOSSIBLE[what], *RECORDS])
    assert adopt(book(), [IMPOSSIBLE[what], *RECORDS], whole=False) == 4


def test_refused_records_leave_the_book_as_it_was() -> None:
    one = book()
    with pytest.raises(UnsoundRecordsError):
        adopt(one, [IMPOSSIBLE["outside"], *RECORDS])
    check(one)
    assert one.arena_status().free_bytes == PAGES * PAGE


def test_what_was_cleared_is_no_object() -> None:
    """By the versions beside the arena, by those in force, and by either alone."""
    first = book()
    adopt(first, RECORDS)
    first.clear(0, model="m")
    after = first.versions.snapshot()
    assert adopt(book(after), RECORDS, kept=after) == 2
    assert adopt(book(), RECORDS, kept=after) == 2
    assert adopt(book(after), RECORDS, kept=NO_VERSIONS) == 2
    again = book(after)
    records = first.records.of(first.records.chunks())
    assert [one.form.identity.model for one in records] == ["small", "small"]
    assert adopt(again, records, kept=after) == 2


def test_a_clear_while_objects_are_checked() -> None:
    one = book()
    one.records.adopt(RECORDS, NO_VERSIONS, whole=True)
    sealings = list(one.records.unchecked)
    one.clear(0, everything=True)
    one.tick(0)
    check(one)
    for sealing in sealings:
        one.records.checked(sealing, True)
        check(one)
    assert one.arena_status().free_bytes == PAGES * PAGE
    assert one.counts().chunks == 0


def test_random_arenas() -> None:
    """Of records at random, those are adopted that can be, and never two of one page."""
    for seed in range(200):
        rng = random.Random(seed)
        one, records = book(), list[Record]()
        for number in range(rng.randrange(60)):
            if rng.random() < 0.5:
                pages = rng.sample(range(PAGES), 2)
                records.append(record(LARGE, rng.randrange(40), *((at * PAGE, PAGE) for at in pages)))
            else:
                at = rng.randrange(PAGES) * PAGE + rng.randrange(4) * COST
                records.append(record(SMALL, number, (at, COST)))
        one.records.adopt(records, NO_VERSIONS, whole=False)
        check(one)
        adopted = list(one.records.unchecked)
        for sealing in adopted:
            one.records.checked(sealing, rng.random() < 0.7)
        check(one)
        assert not records or adopted


# ---- chunks in parts ----

NEEDS = (PartForm(t.ALL, 2 * PAGE, "o"), PartForm(t.Need(32), 1000, "p"), PartForm(t.Need(8), 1000, "q"))
PARTED = [Form(IDENTITY, "", "", 0, 0, NEEDS, part) for part in range(3)]


def part(number: int, at: int, *extents: Extent) -> Record:
    """Of the chunk ``at``, whose hit needs two windows of a chunk and one state."""
    (key,) = part_keys([at.to_bytes(32, "little")], number)
    return Record(PARTED[number], key, Priority.NORMAL, extents, b"c" * 16)


PARTS = [
    *(part(0, at, (2 * at * PAGE, 2 * PAGE)) for at in range(4)),
    *(part(1, at, (20 * PAGE + (at - 2) * COST, COST)) for at in (2, 3)),
    part(2, 3, (20 * PAGE + 2 * COST, COST)),
]


def hit(one: Bookkeeper) -> int:
    """What a lookup of 4 chunks finds before any engine has told what its hits need."""
    ref = t.SpaceRef(one.space_base(0, IDENTITY))
    return one.lookups.resident(ref, [at.to_bytes(32, "little") for at in range(4)], 1).size


def test_parts_are_where_they_were_and_make_the_hit_that_they_made() -> None:
    one = book()
    assert adopt(one, PARTS) == 7
    assert {*one.records.of(one.records.chunks())} == {*PARTS}
    assert hit(one) == 4


@pytest.mark.parametrize("gone", range(7))
def test_a_part_that_does_not_hold_makes_no_false_hit(gone: int) -> None:
    """Field report 21, after a restart: a hit only when every part has what it needs."""
    one = book()
    one.records.adopt(PARTS, NO_VERSIONS, whole=False)
    for sealing in list(one.records.unchecked):
        assert hit(one) == 0
        one.records.checked(sealing, sealing.slot.extents != PARTS[gone].extents)
        check(one)
    assert hit(one) == 0


def test_forms_that_contradict_each_other() -> None:
    """Whichever comes later counts, and a part is never taken for another."""
    plain = record(LARGE, 40, (40 * PAGE, 2 * PAGE))
    one = book()
    assert adopt(one, [*PARTS, plain]) == 1
    assert one.index.bases[one.space_base(0, IDENTITY)].needs == (t.ALL,)
    one = book()
    assert adopt(one, [plain, *PARTS]) == 7
    assert hit(one) == 4
    wrong = PARTS[4]._replace(form=PARTED[2], extents=((30 * PAGE, COST),))
    with pytest.raises(UnsoundRecordsError):
        adopt(book(), [*PARTS, wrong])
    assert adopt(book(), [*PARTS, wrong], whole=False) == 7


def test_an_engine_of_the_same_parts_goes_on_with_them() -> None:
    p = PartedDesk([t.ALL, t.Need(32), t.Need(8)])
    p.store("a", 4)
    records = p.desk.book.records
    for sealing in records.unrecorded():
        assert records.sealed(sealing, b"c" * 16) is not None
    left = records.of(records.chunks())
    assert len(left) == 12
    again = PartedDesk([t.ALL, t.Need(32), t.Need(8)], register=False)
    again.desk.book.records.adopt(left, NO_VERSIONS, whole=True)
    for sealing in list(again.desk.book.records.unchecked):
        again.desk.book.records.checked(sealing, True)
    again.share()
    job = again.engine.lookup("a", 4)
    assert job.status.hit_tokens == 4 * 16
    assert {outcome for outcome, _ in outcomes(again.retrieve(job, 4))} == {"LOADED"}


# ---- making them ----


def test_only_what_is_still_there_gets_a_record() -> None:
    one = book()
    adopt(one, [])
    one.space_base(0, IDENTITY)
    one.records.adopt(RECORDS, NO_VERSIONS, whole=True)
    sealings = list(one.records.unchecked)
    for sealing in sealings:
        sealing.slot.checksum = b""
        one.records.checked(sealing, True)
        one.records.ready((sealing.chunk,), 0)
    taken = one.records.take(1)
    assert len(taken) == 1, "the first, however large"
    taken += one.records.take(1 << 30)
    assert len(taken) == 4 and not one.records.waiting
    one.index.free_ready(taken[0].chunk)
    one.clear(0, cache_salt="salt")
    made = [one.records.sealed(sealing, b"d" * 16) for sealing in taken]
    gone = [at == 0 or sealing.slot.size_bytes == 1000 for at, sealing in enumerate(taken)]
    assert [kept is None for kept in made] == gone
    assert one.records.unrecorded() == []
