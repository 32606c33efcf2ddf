# SPDX-License-Identifier: Apache-2.0
"""Movers and tiers that count what they do. What they wrap notices nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from threading import Lock

from kvgrpc.api import Layout
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import Direction, ObjectName, RunSlice, SliceReport
from kvgrpc.runtime.figures import Spread
from kvgrpc.tiers.base import Tier, TierMiss
from kvgrpc.transfer.base import EVENTS_OF_CARDS, Flight, LaunchingMover, Mover, WaitingMover

READ_RESULTS = ("read", "missing", "failed", "cancelled")


class CopyFigures:
    """Slices of one direction: seconds each, bytes and failures of all. Written by any thread that holds the lock."""

    def __init__(self) -> None:
        self.seconds = Spread()
        self.bytes = 0
        self.failed = 0


class CountedMover:
    """A mover whose slices are timed."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._lock = Lock()
        self.copies = {direction: CopyFigures() for direction in Direction}

    def map(self, mapping_id: int, layout: Layout) -> bytes:
        return self._mover.map(mapping_id, layout)

    def copy(self, work: RunSlice) -> SliceReport:
        begin = time.perf_counter()
        return self.count(work, self._mover.copy(work), begin)

    def launches(self, mapping_id: int) -> bool:
        return isinstance(self._mover, LaunchingMover) and self._mover.launches(mapping_id)

    def launch(self, work: RunSlice) -> Flight | SliceReport:
        """A flight is timed from its launch, so with what it waits for behind others."""
        if not isinstance(self._mover, LaunchingMover):
            return self.copy(work)
        begin = time.perf_counter()
        begun = self._mover.launch(work)
        return self.count(work, begun, begin) if isinstance(begun, SliceReport) else _Counted(self, begun, work, begin)

    def count(self, work: RunSlice, report: SliceReport, begin: float) -> SliceReport:
        seconds = time.perf_counter() - begin
        copied = sum(piece.span[1] - piece.span[0] for piece in work.pieces[: report.completed])
        with self._lock:
            figures = self.copies[work.direction]
            figures.seconds.add(seconds)
            figures.bytes += copied
            figures.failed += report.completed < len(work.pieces)
        return report

    def when_ready(self, mapping_id: int, event: bytes, done: Callable[[Refusal | None], None]) -> Callable[[], None]:
        if isinstance(self._mover, WaitingMover):
            return self._mover.when_ready(mapping_id, event, done)
        raise Refusal(Reason.READY_EVENT_UNSUPPORTED, EVENTS_OF_CARDS, field="ready_event")

    def unmap(self, mapping_id: int) -> None:
        self._mover.unmap(mapping_id)

    def close(self) -> None:
        self._mover.close()


class _Counted:
    """A flight that is counted when it has landed."""

    def __init__(self, mover: CountedMover, flight: Flight, work: RunSlice, begin: float) -> None:
        self._mover, self._flight, self._work, self._begin = mover, flight, work, begin

    def wait(self) -> SliceReport:
        return self._mover.count(self._work, self._flight.wait(), self._begin)


class CountedTier:
    """A tier whose reads and writes are timed and counted. Used on one event loop."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.read_seconds = Spread()
        self.read_bytes = self.written_bytes = self.failed_writes = 0
        self.reads = dict.fromkeys(READ_RESULTS, 0)

    @property
    def name(self) -> str:
        return self._tier.name

    @property
    def healthy(self) -> bool:
        return self._tier.healthy

    @property
    def counters(self) -> Mapping[str, int]:
        return self._tier.counters

    async def exists(self, names: Sequence[str]) -> list[bool]:
        return await self._tier.exists(names)

    async def read(self, object: ObjectName, into: Sequence[memoryview]) -> None:
        begin, result = time.perf_counter(), "failed"
        try:
            await self._tier.read(object, into)
            result = "read"
            self.read_bytes += object.size_bytes
        except TierMiss:
            result = "missing"
            raise
        except asyncio.CancelledError:
            result = "cancelled"
            raise
        finally:
            self.reads[result] += 1
            self.read_seconds.add(time.perf_counter() - begin)

    async def write(self, object: ObjectName, data: Sequence[memoryview]) -> None:
        done = False
        try:
            await self._tier.write(object, data)
            done = True
        finally:
            self.written_bytes += object.size_bytes * done
            self.failed_writes += not done

    async def remove(self, name: str) -> None:
        await self._tier.remove(name)

    async def usage(self) -> int:
        return await self._tier.usage()

    async def close(self) -> None:
        await self._tier.close()
