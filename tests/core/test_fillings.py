# SPDX-License-Identifier: Apache-2.0
"""Streams of WriteChunks among everything else, at the core's desk: every invariant holds after every turn."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from kvgrpc.core import types as t
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.fillings import Filling, begin
from kvgrpc.core.slots import Slot
from tests.core.desk import OBJECT, Desk, EngineDesk, refused, show

SEEDS, TURNS, CHUNKS = 60, 120, 6


def opened(engine: EngineDesk, prompt: str = "a", chunks: int = CHUNKS, **changes: object) -> Filling:
    command = t.StoreCommand(
        engine_id=engine.engine_id,
        call_id=0,
        space=engine.space,
        content=engine.content(prompt, chunks),
        range=t.TokenRange(0, chunks * 16),
        blocks=(),
        policy=t.Policy(**changes),  # type: ignore[arg-type]
    )
    (part,) = engine.registration().geometry.parts(16)
    written = t.ObjectForm(0, part.object_bytes, part.order)
    filling = begin(engine.desk.book, engine.scheduler, command, [written], 0)
    engine.desk.step()
    return filling


class Peer:
    """Who fills: one slot at a time, as its bytes come."""

    def __init__(self, desk: Desk, filling: Filling) -> None:
        self._desk, self.filling, self._at = desk, filling, filling.first
        self._slot: Slot | None = None

    def turn(self) -> None:
        """A chunk begins, or its last byte has come."""
        if self._slot is not None:
            self.filling.done(self._desk.now)
            self._slot = None
        elif self._at < self.filling.end:
            self.filling.take(self._at, 0)
            self._at += 1
            self._slot = self.filling.open_next()
        self._desk.step()

    def close(self) -> None:
        self.filling.close(self._desk.now)
        self.filling.close(self._desk.now)
        self._desk.step()
        results = self.filling.results
        assert sum(result.count for result in results) == self.filling.end - self.filling.first
        assert self._at == self.filling.end or results[-1].reason == "NOT_SENT"


class World:
    """Two engines and some peers in an arena that is too small for them."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = Random(seed)
        self.desk = Desk(chance.choice((5, 12, 40)), tiers=("disk",) * (seed % 2), auto=False, auto_writes=False)
        self.engines = [self.desk.engine("e"), self.desk.engine("f", salt="other")]
        self.desk.book.set_write_policy("", chance.choice([*t.WritePolicy]))
        self.peers: list[Peer] = []

    def _engine(self) -> EngineDesk:
        return self.chance.choice(self.engines)

    def open(self) -> None:
        if len(self.peers) < 4:
            policy = {"priority": self.chance.choice([*t.Priority]), "retention_ns": self.chance.choice((0, t.S))}
            filling = opened(self._engine(), self.chance.choice("abc"), self.chance.randrange(CHUNKS), **policy)
            self.peers.append(Peer(self.desk, filling))

    def fill(self) -> None:
        if self.peers:
            self.chance.choice(self.peers).turn()

    def close(self) -> None:
        if self.peers:
            self.peers.pop(self.chance.randrange(len(self.peers))).close()

    def store(self) -> None:
        engine = self._engine()
        engine.store(self.chance.choice("abc"), CHUNKS)

    def lookup(self) -> None:
        self._engine().lookup(self.chance.choice("abc"), CHUNKS)

    def clear(self) -> None:
        self.desk.book.clear(self.desk.now, space=self._engine().space)
        self.desk.step()

    def quota(self) -> None:
        self.desk.book.set_quota("other", self.chance.choice((None, 2 * OBJECT, 20 * OBJECT)))
        self.desk.step()

    def time(self) -> None:
        self.desk.pass_time(self.chance.choice((t.MS, t.S, 61 * t.S)))

    def hands(self) -> None:
        if self.desk.slices:
            self.desk.report()
        if self.desk.writes:
            self.desk.end_write(self.chance.random() < 0.8)
        while self.desk.probes:
            self.desk.answer_probe("")

    def run(self) -> None:
        turns: list[Callable[[], None]] = [self.open, self.close, self.store, self.lookup, self.clear, self.quota]
        for _ in range(TURNS):
            self.chance.choice([*turns, self.time, self.hands, *[self.fill] * 6])()
        while self.peers:
            self.close()
        while self.desk.slices or self.desk.writes or self.desk.probes:
            self.hands()
        self.desk.pass_time(700 * t.S)  # leases and holds
        self.desk.settle()
        arena = self.desk.arena
        assert arena.writing_bytes == arena.doomed_bytes == arena.settling_bytes == 0
        assert self.desk.book.calls.streams == []


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_order_of_things(seed: int) -> None:
    World(seed).run()


def test_only_the_chunk_at_hand_is_in_use() -> None:
    desk = Desk(chunks=4)
    engine = desk.engine()
    peer = Peer(desk, opened(engine, "a", 3))
    for _ in range(5):
        peer.turn()
    assert desk.states() == "1 free, 1 writing, 2 ready"
    assert engine.store("b", 3) == "3 STORED", "the first two were not in use"
    peer.turn()
    peer.close()
    assert show(peer.filling.results) == "3 STORED"
    assert desk.states() == "4 ready"


def test_another_form_between_two_chunks() -> None:
    """The space was cleared and its engine has gone: another one's objects mean other bytes."""
    desk = Desk()
    engine, other = desk.engine(), desk.engine("f", register=False)
    peer = Peer(desk, opened(engine))
    peer.turn()
    peer.turn()
    desk.book.clear(desk.now, everything=True)
    desk.pass_time(t.S)
    late = Peer(desk, opened(engine))
    desk.book.unregister(desk.now, engine.worker(0), engine.engine_id)
    desk.step()
    other.block_bytes *= 2
    other.share()
    peer.turn()
    peer.close()
    assert show(peer.filling.results) == "1 STORED, 1 REFUSED CLEARED, 4 FAILED NOT_SENT"
    with refused(Reason.GEOMETRY_MISMATCH):
        late.turn()
    late.close()
    assert show(late.filling.results) == "6 FAILED NOT_SENT"
    desk.settle()
    assert desk.states() == "64 free"


def test_what_goes_in_the_middle() -> None:
    desk = Desk()
    engine = desk.engine()
    drained, gone = Peer(desk, opened(engine, "a")), Peer(desk, opened(desk.engine("g"), "b"))
    for peer in (drained, gone):
        peer.turn()
    desk.book.drain_engine(desk.now, engine.engine_id)
    desk.step()
    desk.engines[1].die(desk.engines[1].scheduler)
    desk.pass_time(t.S)
    for peer, reason in ((drained, Reason.ENGINE_DRAINING), (gone, Reason.NOT_ATTACHED)):
        peer.turn()
        with pytest.raises(Refusal) as refusal:
            peer.turn()
        assert refusal.value.reason is reason
        peer.close()
        assert show(peer.filling.results) == "1 STORED, 5 FAILED NOT_SENT"
    assert desk.states() == "62 free, 2 ready"
