# SPDX-License-Identifier: Apache-2.0
"""What routers are told: only what can be found, and what is known to be gone."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kvgrpc.api import WatchEvent, WatchKind
from kvgrpc.engines.vllm.events import Announcer, Departures, Removed, Stored
from kvgrpc.engines.vllm.metadata import Report
from kvgrpc.engines.vllm.ports import chunk_keys
from tests.engines.fakes import BLOCK, CHUNK, Desk, FakeRequest, desk


def telling(**terms: object) -> tuple[Desk, Announcer]:
    d = desk(**terms)  # pyright: ignore[reportArgumentType]
    d.scheduler.announcer = Announcer(BLOCK, BLOCK)
    return d, d.scheduler.announcer


def save(d: Desk, request_id: str, computed: int, findable: int | None = None) -> None:
    for each in d.scheduler.step([(request_id, computed)]).saves:
        d.scheduler.update(
            Report({each.save_id: 1}, {each.save_id: each.end if findable is None else findable}), (), ()
        )


def test_stored_blocks_are_told_with_what_comes_before_them():
    d, announcer = telling()
    request = d.arrive("r", 100)
    save(d, "r", 40)
    save(d, "r", 100)
    first, second = announcer.take()
    hashes = request.block_hashes
    assert first == Stored(request, 0, tuple(hashes[:2]), None, tuple(range(32)))
    assert second == Stored(request, 32, tuple(hashes[2:6]), hashes[1], tuple(range(32, 96)))
    assert announcer.take() == []


def test_what_could_not_be_stored_is_not_told():
    d, announcer = telling()
    d.arrive("r", 100)
    save(d, "r", 100, findable=0)
    assert announcer.take() == []
    d.arrive("s", 100)
    save(d, "s", 100, findable=CHUNK)
    (told,) = announcer.take()
    assert isinstance(told, Stored)
    assert len(told.tokens) == CHUNK


def test_all_workers_must_have_stored_it():
    d, announcer = telling(workers=2)
    d.arrive("r", 96)
    (each,) = d.scheduler.step([("r", 96)]).saves
    d.scheduler.update(Report({each.save_id: 1}, {each.save_id: 96}), (), ())
    assert announcer.take() == []
    d.scheduler.update(Report({each.save_id: 1}, {each.save_id: 64}), (), ())
    (told,) = announcer.take()
    assert isinstance(told, Stored)
    assert len(told.tokens) == 64


def test_a_lookup_tells_what_is_gone():
    d, announcer = telling()
    request = d.arrive("r", 100)
    save(d, "r", 100)
    announcer.take()
    d.scheduler.finished("r")
    d.client.hit = 32
    again = d.arrive("again", 100)
    d.scheduler.matched(again, 0)
    d.scheduler.allocated(again, 32)
    assert announcer.take() == [Removed(tuple(request.block_hashes[2:6]))]


def test_a_lookup_that_nobody_answered_tells_nothing():
    d, announcer = telling(lookup_async=False)
    d.arrive("r", 100)
    save(d, "r", 100)
    announcer.take()
    d.client.silent = True
    again = d.arrive("again", 100)
    assert d.scheduler.matched(again, 0) == (0, False)
    d.scheduler.allocated(again, 0)
    assert announcer.take() == []


def test_a_reset_tells_that_all_is_gone():
    d, announcer = telling()
    request = d.arrive("r", 64)
    save(d, "r", 64)
    d.scheduler.reset()
    assert announcer.take()[1:] == [Removed(tuple(request.block_hashes))]


def test_a_hit_tells_what_others_stored():
    d, announcer = telling()
    d.client.hit = 2 * CHUNK
    request = d.arrive("r", 100)
    d.scheduler.matched(request, 0)
    d.scheduler.allocated(request, 2 * CHUNK)
    told = announcer.take()
    assert all(isinstance(each, Stored) for each in told)
    assert [block for each in told for block in each.hashes] == request.block_hashes[: 2 * CHUNK // BLOCK]
    assert len(told) == 1, "what lies side by side is told at once"


@dataclass
class Watched:
    """A server as its watcher tells of it."""

    space_base: bytes = b"base"
    events: list[WatchEvent] = field(default_factory=list[WatchEvent])

    def say(self, kind: WatchKind, *keys: bytes, base: bytes = b"base") -> None:
        self.events.append(WatchEvent(0, kind, space_base=base, keys=keys))

    def take(self) -> list[WatchEvent]:
        taken, self.events = self.events, []
        return taken


def watched() -> tuple[Watched, Announcer, Departures, list[bytes]]:
    """A request of three chunks of two blocks, and the chunks' keys."""
    announcer, request, server = Announcer(BLOCK, BLOCK), FakeRequest("r", 6 * BLOCK), Watched()
    announcer.stored(request, 0, 6 * BLOCK, 2 * BLOCK)
    announcer.take()
    return server, announcer, Departures([(server, server)]), list(chunk_keys(request, 2 * BLOCK, BLOCK, 0, 3))


def test_what_a_server_drops_is_told_once():
    server, announcer, departures, keys = watched()
    server.say(WatchKind.REMOVED, keys[2], keys[1])
    departures.tell(announcer)
    departures.tell(announcer)
    hashes = FakeRequest("r", 6 * BLOCK).block_hashes
    assert announcer.take() == [Removed((*hashes[4:6], *hashes[2:4]))]
    server.say(WatchKind.REMOVED, keys[2])
    departures.tell(announcer)
    assert announcer.take() == []


def test_what_came_back_meanwhile_is_not_told_as_gone():
    server, announcer, departures, keys = watched()
    server.say(WatchKind.REMOVED, *keys)
    server.say(WatchKind.STORED, keys[0])
    departures.tell(announcer)
    (told,) = announcer.take()
    assert told.hashes == tuple(FakeRequest("r", 6 * BLOCK).block_hashes[2:])


def test_other_spaces_are_nothing_of_ours():
    server, announcer, departures, keys = watched()
    server.say(WatchKind.REMOVED, *keys, base=b"other")
    server.say(WatchKind.CLEARED, base=b"other")
    departures.tell(announcer)
    assert announcer.take() == []


@pytest.mark.parametrize("kind", [WatchKind.CLEARED, WatchKind.LOST, WatchKind.STARTED])
def test_all_is_gone_when_the_space_is_cleared_or_something_was_missed(kind: WatchKind):
    server, announcer, departures, _ = watched()
    server.say(kind)
    departures.tell(announcer)
    assert announcer.take() == [Removed(tuple(FakeRequest("r", 6 * BLOCK).block_hashes))]


def test_the_oldest_are_given_up_when_there_are_too_many():
    announcer = Announcer(BLOCK, BLOCK, most=4)
    first, second = FakeRequest("a", 48), FakeRequest("b", 48)
    second.all_token_ids = list(range(1000, 1048))
    announcer.stored(first, 0, 48, BLOCK)
    announcer.stored(second, 0, 48, BLOCK)
    assert announcer.take()[2] == Removed(tuple(first.block_hashes[:2]))


def test_hashes_of_parts_of_a_block():
    announcer = Announcer(2 * BLOCK, BLOCK)
    request = FakeRequest("r", 96)
    announcer.stored(request, 32, 96, 2 * BLOCK)
    (told,) = announcer.take()
    assert isinstance(told, Stored)
    assert told.hashes == (request.block_hashes[3], request.block_hashes[5])
    assert told.parent == request.block_hashes[1]
