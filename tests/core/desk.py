# SPDX-License-Identifier: Apache-2.0
"""A desk for one bookkeeper: it plays the hands, step by step, and checks every invariant after each call.

Chunks have 16 tokens, blocks 4, an object of one rank 1 KiB, and a page is one object, so an arena of n chunks holds
exactly n objects. Times are nanoseconds that only ``pass_time`` moves.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvgrpc.core import types as t
from kvgrpc.core.cache import Bookkeeper
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.invariants import check
from tests.core.engine import BLOCK, BLOCK_BYTES, CHUNK, OBJECT, EngineDesk, key_of, show

__all__ = ["BLOCK", "BLOCK_BYTES", "CHUNK", "OBJECT", "Desk", "EngineDesk", "key_of", "refused", "show"]

DONE = t.SliceReport(1 << 30)


@dataclass
class Desk:
    """One bookkeeper with ``chunks`` objects of room, and what came out of its outbox."""

    chunks: int = 64
    tiers: tuple[str, ...] = ()
    limits: t.CoreLimits = field(default_factory=t.CoreLimits)
    now: int = 0
    auto: bool = True
    """Slices are reported at once, as done."""
    auto_writes: bool = True
    """Writes to tiers, too."""

    def __post_init__(self) -> None:
        defaults = t.CoreLimits()
        page = OBJECT if self.limits.page_bytes == defaults.page_bytes else self.limits.page_bytes
        self.limits = replace(self.limits, chunk_tokens=CHUNK, page_bytes=page)
        self.book = Bookkeeper(self.limits, self.chunks * OBJECT, self.tiers)
        self.slices: dict[int, t.RunSlice] = {}
        self.history: list[t.RunSlice] = []
        self.ended: dict[tuple[str, int], tuple[t.ChunkResult, ...]] = {}
        self.probes: dict[int, t.ProbeTiers] = {}
        self.reads: dict[int, t.ReadTier] = {}
        self.cancelled: set[int] = set()
        self.writes: dict[int, t.WriteObject] = {}
        self.written: list[t.WriteObject] = []
        self.unmapped: list[tuple[str, int]] = []
        self.gone: list[str] = []
        self.jobs_done: list[bytes] = []
        self.draining: list[str] = []
        self.engines: list[EngineDesk] = []
        self._numbers = 0

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    # ---- the hands --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Empties the outbox into the desk's trays and checks every invariant."""
        for action in self.book.drain():
            match action:
                case t.RunSlice():
                    self.slices[action.slice_id] = action
                    self.history.append(action)
                case t.CallEnded(client_id, call_id, results):
                    self.ended[client_id, call_id] = results
                case t.ProbeTiers():
                    self.probes[action.probe_id] = action
                case t.ReadTier():
                    self.reads[action.read_id] = action
                case t.CancelRead(read_id):
                    self.cancelled.add(read_id)
                case t.WriteObject():
                    self.writes[action.write_id] = action
                case t.JobDone(job_id):
                    self.jobs_done.append(job_id)
                case t.Unmap(client_id, mapping_id):
                    self.unmapped.append((client_id, mapping_id))
                case t.SessionEnded(client_id):
                    self.gone.append(client_id)
                case t.EngineDraining(client_id):
                    self.draining.append(client_id)
        check(self.book)
        if self.auto_writes:
            self.end_writes()
        if self.auto:
            self.run_copies()

    def report(self, order: t.RunSlice | None = None, report: t.SliceReport = DONE) -> t.RunSlice:
        """Reports one slice in flight, the oldest if none is named."""
        order = order or next(iter(self.slices.values()))
        del self.slices[order.slice_id]
        completed = min(report.completed, len(order.pieces))
        self.book.slice_done(self.now, order.slice_id, replace(report, completed=completed))
        self.step()
        return order

    def run_copies(self) -> None:
        """Reports every slice as done until nothing is in flight."""
        while self.slices:
            self.report()

    def answer_probe(self, *found: str, silent: bool = False) -> None:
        """Answers the oldest probe: a tier's name or "" for each object, the last one for all that follow."""
        probe = self.probes.pop(next(iter(self.probes)))
        answers = [found[min(at, len(found) - 1)] for at in range(len(probe.objects))]
        self.book.probe_done(self.now, probe.probe_id, answers, silent)
        self.step()

    def end_read(self, ok: bool = True, read_id: int | None = None) -> t.ReadTier:
        """Reports one tier read, the oldest if none is named."""
        read = self.reads.pop(next(iter(self.reads)) if read_id is None else read_id)
        self.book.read_done(self.now, read.read_id, ok)
        self.step()
        return read

    def end_reads(self, ok: bool = True) -> None:
        while self.reads:
            self.end_read(ok)

    def end_write(self, ok: bool = True) -> t.WriteObject:
        """Reports the oldest write to a tier."""
        write = self.writes.pop(next(iter(self.writes)))
        self.written += [write] * ok
        self.book.write_done(self.now, write.write_id, ok)
        self.step()
        return write

    def end_writes(self, ok: bool = True) -> None:
        while self.writes:
            self.end_write(ok)

    def pass_time(self, ns: int) -> None:
        """Lets time pass as the driver does: a tick whenever the bookkeeper wants to be woken."""
        end = self.now + ns
        while (wake := self.book.next_wake(self.now)) is not None and wake <= end:
            self.now = max(wake, self.now)
            self.book.tick(self.now)
            self.step()
            later = self.book.next_wake(self.now)
            assert later is None or later > self.now, "a tick at its time leaves nothing due"
        self.now = end

    def settle(self) -> None:
        """Ends every copy and read, and reclaims what a Clear left."""
        self.run_copies()
        self.end_reads()
        self.end_writes()
        self.pass_time(t.S // 10)

    # ---- looking ----------------------------------------------------------------------------------------------------

    @property
    def arena(self) -> t.ArenaStatus:
        return self.book.arena_status()

    @property
    def counts(self) -> t.Counts:
        return self.book.counts()

    def states(self) -> str:
        """Objects by state, as one reads them: ``60 free, 4 pinned``."""
        status = self.arena
        names = ("free", "writing", "ready", "pinned", "doomed", "settling")
        counts = {name: getattr(status, f"{name}_bytes") // OBJECT for name in names}
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count)

    # ---- engines ----------------------------------------------------------------------------------------------------

    def engine(self, name: str = "e", **shape: int | str) -> EngineDesk:
        """An attached engine with a scheduler and one registered worker for each tensor-parallel rank and stage."""
        engine = EngineDesk(self, name, **shape)  # type: ignore[arg-type]
        engine.open()
        self.engines.append(engine)
        return engine


class Refused:
    """``with refused(Reason.X):`` as ``pytest.raises``, and the refusal is there afterwards."""

    def __init__(self, reason: Reason) -> None:
        self._reason = reason

    def __enter__(self) -> Refused:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        assert isinstance(error, Refusal), f"not refused with {self._reason}"
        assert error.reason is self._reason, f"{error.reason} instead of {self._reason}: {error.message}"
        self.refusal = error
        return True


def refused(reason: Reason) -> Refused:
    return Refused(reason)


def block_ids(piece: t.Piece) -> tuple[tuple[int, ...], ...]:
    """The engine blocks of a piece, by group."""
    return tuple(map(tuple, piece.block_ids))
