# SPDX-License-Identifier: Apache-2.0
"""The world's driver: asks the bookkeeper, carries out its orders (late, partly, never) and checks it at each step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar, cast

from kvgrpc.core import invariants
from kvgrpc.core.cache import Bookkeeper
from kvgrpc.core.calls import SLICES_LAUNCHED
from kvgrpc.core.errors import Refusal
from kvgrpc.core.slicing import SKIPPED
from kvgrpc.core.types import (
    MS,
    Action,
    CallEnded,
    CancelRead,
    ChunkResult,
    CoreLimits,
    EngineDraining,
    JobDone,
    ProbeTiers,
    ReadTier,
    RunSlice,
    S,
    SessionEnded,
    Unmap,
    WriteObject,
)
from tests.sim.calls import Call, check_retrieve, check_store
from tests.sim.flights import Copy, Flight, TierRead, TierWrite
from tests.sim.loop import Loop, PromiseError, Signal
from tests.sim.memory import CELL_BYTES, Cell, EngineMemory
from tests.sim.parted import check_parted
from tests.sim.tiers import Tiers
from tests.sim.trace import Traced
from tests.sim.watch import Watch

T = TypeVar("T")
PACES = (0.0, 0.05, 0.5)


class Hands:
    """Owns the bookkeeper. All contact with it goes through ``ask``."""

    def __init__(
        self, loop: Loop, rng: random.Random, limits: CoreLimits, arena_cells: int, tiers: Tiers, verbose: bool
    ) -> None:
        self.loop = loop
        self.rng = rng
        self.limits = limits
        self.tiers = tiers
        self._bare = Bookkeeper(limits, arena_cells * CELL_BYTES, tiers.names)
        self.book = cast(Bookkeeper, Traced(self._bare, loop)) if verbose else self._bare
        self.watch = Watch(self._bare, loop)
        self.arena: list[Cell] = ["never written"] * arena_cells
        self.copies: dict[int, Copy] = {}
        self.reads: dict[int, TierRead] = {}
        self.writes: dict[int, TierWrite] = {}
        self.probes = 0
        self.mappings: dict[int, EngineMemory] = {}
        self.calls: dict[tuple[str, int], Call] = {}
        self.orphans: list[Call] = []
        """Calls whose id a later process uses again under the same client id."""
        self.present: set[str] = set()
        """Clients whose stream is open."""
        self.jobs: dict[bytes, Signal] = {}
        self.sessions: dict[str, Signal] = {}
        self.draining: set[str] = set()
        self.closing = False
        self.check_every = 8
        """The core's invariants cost more than the whole world, and what breaks them rarely heals; 0: not at all."""
        self.asks = 0
        self.evicted_at = 0
        """The last contact that made room by evicting something."""
        self._evicted = 0
        self._wake_at = 0
        self._ticks_at = (0, 0)
        self._mappings = 0

    def ask(self, act: Callable[[int], T]) -> T:
        """One call of the bookkeeper, and what follows from it at once."""
        self.asks += 1
        try:
            answer = act(self.loop.now)
        except Refusal:
            self.settle()
            raise
        self.settle()
        return answer

    def settle(self) -> None:
        if self.check_every and self.asks % self.check_every == 0:
            invariants.check(self._bare)
        self.watch.step()
        self._note_evicted()
        while actions := self.book.drain():
            for action in actions:
                self._carry_out(action)
            if self.rng.random() < 0.7:  # not always: nothing may depend on it
                for client_id in sorted({copy.order.client_id for copy in self.copies.values()}):
                    self.book.plan_ahead(self.loop.now, client_id, self.rng.choice((2, SLICES_LAUNCHED)))
                self._note_evicted()
        self._plan_wake()

    def _note_evicted(self) -> None:
        evicted = self.book.counters["evicted_chunks"]
        if evicted != self._evicted:
            self._evicted, self.evicted_at = evicted, self.asks

    def map(self, memory: EngineMemory) -> int:
        self._mappings += 1
        self.mappings[self._mappings] = memory
        return self._mappings

    def move_bytes(self) -> None:
        """Called after every event: whatever is on its way gets on by some cells."""
        waiting = {copy for line in self._lines() for copy in line[1:]}
        for flight in (*self.copies.values(), *self.reads.values(), *self.writes.values()):
            if flight not in waiting and self.rng.random() < flight.pace:
                flight.advance(self.rng.randint(1, 6))

    def under_way(self) -> int:
        return len(self.copies) + len(self.reads) + len(self.writes) + self.probes

    # ---- time -------------------------------------------------------------------------------------------------------

    def _plan_wake(self) -> None:
        wake = self.book.next_wake(self.loop.now)
        if wake is None or (self._wake_at and self._wake_at <= wake):
            return
        late = 0 if self.rng.random() < 0.7 else self.rng.randint(0, 3 * MS)
        self._wake_at = max(self.loop.now, wake) + late
        self.loop.at(self._wake_at, self._tick, self._wake_at)

    def _tick(self, planned: int) -> None:
        if planned != self._wake_at:
            return
        self._wake_at = 0
        now, count = self._ticks_at
        self._ticks_at = (self.loop.now, count + 1 if now == self.loop.now else 0)
        if self._ticks_at[1] > 2000:
            raise PromiseError("tick is wanted again and again without an end")
        self.ask(self.book.tick)

    # ---- orders -----------------------------------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, RunSlice):
            self._start_copy(action)
        elif isinstance(action, CallEnded):
            self._end_call(action)
        elif isinstance(action, ProbeTiers):
            self._probe(action)
        elif isinstance(action, ReadTier):
            self._start_read(action)
        elif isinstance(action, WriteObject):
            self._start_write(action)
        elif isinstance(action, CancelRead):
            if action.read_id not in self.reads:
                raise PromiseError("a read is cancelled that is not under way")
        elif isinstance(action, JobDone):
            self.loop.fire(self.jobs.setdefault(action.job_id, Signal()))
        elif isinstance(action, Unmap):
            self._unmap(action)
        elif isinstance(action, SessionEnded):
            self._end_session(action)
        else:
            assert isinstance(action, EngineDraining)
            self.draining.add(action.client_id)

    def _start_copy(self, order: RunSlice) -> None:
        memory = self.mappings.get(order.mapping_id)
        if memory is None:
            raise PromiseError(f"a copy is ordered for mapping {order.mapping_id}, which is unmapped")
        call = self.calls.get((order.client_id, order.call_id))
        if call is None or call.results is not None or call.memory is not memory:
            raise PromiseError(f"a copy is ordered for call {order.call_id}, which is over or never was")
        line = [c for c in self.copies.values() if c.order.client_id == order.client_id]
        if len(line) >= SLICES_LAUNCHED:
            raise PromiseError(f"too many slices of client {order.client_id} at a time")
        if order.after != next((c.order.slice_id for c in reversed(line) if c.call is call), 0):
            raise PromiseError(f"a slice of call {order.call_id} does not know what is in front of it")
        if not order.pieces:
            raise PromiseError("an empty slice is ordered")
        copy = Copy(order, call, self.arena, self.rng)
        self._check_clash(copy)
        copy.pace = self.rng.choice(PACES)
        self.copies[order.slice_id] = copy
        if not line:
            self._begin_copy(copy)

    def _begin_copy(self, copy: Copy) -> None:
        self.loop.at(self.loop.now + self._fate(copy), self._report, copy.order.slice_id)

    def _lines(self) -> list[list[Copy]]:
        """Copies in flight, client by client: the first is made, the others wait."""
        clients = {copy.order.client_id for copy in self.copies.values()}
        return [[c for c in self.copies.values() if c.order.client_id == client] for client in sorted(clients)]

    def _fate(self, copy: Copy) -> int:
        """Decides how a copy ends, and when."""
        chance = self.rng.random()
        if chance < 0.06:
            copy.doom(self.rng.randrange(len(copy.order.pieces)), 0.0)
        elif chance < 0.12:
            copy.doom(self.rng.randrange(len(copy.order.pieces)), self.rng.random())
        elif chance < 0.125 and not self.closing:
            copy.doom(self.rng.randrange(len(copy.order.pieces)), self.rng.random())
            return self.rng.randint(1, 3) * S  # lost: only its mapping's end tells
        return self.rng.choice((2 * MS, 2 * MS, 10 * MS, 40 * MS, 300 * MS)) * self.rng.randint(1, 100) // 100

    def _check_clash(self, flight: Flight) -> None:
        for other in (*self.copies.values(), *self.reads.values(), *self.writes.values()):
            if flight.clashes_with(other):
                raise PromiseError("two copies touch the same arena bytes, and one of them writes")

    def _report(self, slice_id: int) -> None:
        copy = self.copies.pop(slice_id)
        report = copy.end()
        call = copy.call
        for number, piece in enumerate(copy.order.pieces):
            if number < report.completed:
                unit = (piece.chunk, copy.order.part)
                call.moved[unit] = call.moved.get(unit, 0) + copy.moves_of_piece(number)
                if piece.span[1] == len(call.memory.places[unit[1]]) * CELL_BYTES:
                    self._note_whole(call, *unit)
            elif number == report.completed and report.reason != SKIPPED:
                call.broken[piece.chunk] = bool(report.torn)
        behind = next((c for c in self.copies.values() if c.order.client_id == copy.order.client_id), None)
        if behind is not None:
            if behind.order.after == slice_id and report.completed < len(copy.order.pieces):
                behind.skip()
                self.loop.at(self.loop.now, self._report, behind.order.slice_id)
            else:
                self._begin_copy(behind)
        self.ask(lambda now: self.book.slice_done(now, slice_id, report))

    @staticmethod
    def _note_whole(call: Call, chunk: int, part: int) -> None:
        """The end of an object has been copied."""
        if call.lease is not None:
            call.lease.has_read(chunk, part, (call.kv_rank, call.tp_rank))
        elif call.moved[chunk, part] == len(call.memory.places[part]):
            call.space.arrived(call.version, call.keys[chunk], call.kv_rank, part)

    def _end_call(self, action: CallEnded) -> None:
        call = self.calls.get((action.client_id, action.call_id))
        if call is None:
            raise PromiseError(f"the end of call {action.call_id} is told, which never was")
        orphans = [c for c in self.orphans if (c.client_id, c.call_id) == (action.client_id, action.call_id)]
        self.orphans = [c for c in self.orphans if c not in orphans]
        if not (orphans and call.results is not None):
            self._finish(call, action.results)

    def begin(self, call: Call) -> None:
        """A call is about to be made."""
        earlier = self.calls.get((call.client_id, call.call_id))
        if earlier is not None and earlier.results is None:
            self.orphans.append(earlier)
        self.calls[(call.client_id, call.call_id)] = call

    def _finish(self, call: Call, results: tuple[ChunkResult, ...]) -> None:
        """The call has its answer: it comes once and is worth what it says."""
        if call.results is not None:
            raise PromiseError(f"call {call.call_id} ends twice")
        if any(c.call is call for c in self.copies.values()):
            raise PromiseError(f"call {call.call_id} is answered while its copy runs")
        call.results = results
        call.answered_at = self.asks
        if call.returned:
            pass  # fenced: its blocks hold something else by now
        elif call.memory.shape.parted:
            check_parted(call, self.loop.now)
        elif call.lease is None:
            check_store(call)
        else:
            check_retrieve(call, self.loop.now)
        self.loop.fire(call.ended, results)

    def _unmap(self, action: Unmap) -> None:
        memory = self.mappings.pop(action.mapping_id, None)
        if memory is None:
            raise PromiseError(f"mapping {action.mapping_id} is unmapped twice, or never was")
        if any(c.order.mapping_id == action.mapping_id for c in self.copies.values()):
            raise PromiseError(f"mapping {action.mapping_id} is unmapped while a copy touches it")
        if memory not in self.mappings.values():
            self.loop.fire(memory.unmapped)

    def _end_session(self, action: SessionEnded) -> None:
        if action.client_id in self.present:
            raise PromiseError(f"the session of {action.client_id} ends, but its stream is open")
        self.loop.fire(self.sessions.setdefault(action.client_id, Signal()))

    # ---- tiers ------------------------------------------------------------------------------------------------------

    def _probe(self, action: ProbeTiers) -> None:
        found = [self.tiers.find(name.name) for name in action.objects]
        self.probes += 1

        def answer(_: object) -> None:
            self.probes -= 1
            self.ask(lambda now: self.book.probe_done(now, action.probe_id, found))

        self.loop.at(self.loop.now + self.rng.choice((0, 1, 5, 50)) * MS, answer)

    def _start_read(self, order: ReadTier) -> None:
        read = TierRead(order, self.tiers.contents(order.object.name), self.arena)
        self._check_clash(read)
        read.pace = self.rng.choice(PACES)
        self.reads[order.read_id] = read
        if self.rng.random() < 0.12:
            read.doom(self.rng.random())
        delay = self.rng.choice((1, 5, 20, 120, 400)) * MS
        self.loop.at(self.loop.now + delay, self._end_read, order.read_id)

    def _end_read(self, read_id: int) -> None:
        read = self.reads.pop(read_id)
        ok = read.end()
        if ok:
            self.tiers.arrived(read.order.object.name)
        self.ask(lambda now: self.book.read_done(now, read_id, ok))

    def _start_write(self, order: WriteObject) -> None:
        write = TierWrite(order, self.arena)
        self._check_clash(write)
        write.pace = self.rng.choice(PACES)
        self.writes[order.write_id] = write
        chance = self.rng.random()
        if chance < 0.15:
            write.doom(self.rng.random())
        delay = self.rng.choice((0, 1, 5, 20, 120, 400)) * MS
        if chance < 0.02 and not self.closing:
            delay = self.rng.randint(1, 3) * S  # hangs
        self.loop.at(self.loop.now + delay, self._end_write, order.write_id)

    def _end_write(self, write_id: int) -> None:
        write = self.writes.pop(write_id)
        ok = write.end()
        if ok:
            self.tiers.keep(write.order.object.name, write.order.tier, write.taken)
        no_room = not ok and self.rng.random() < 0.3
        self.ask(lambda now: self.book.write_done(now, write_id, ok, no_room))
