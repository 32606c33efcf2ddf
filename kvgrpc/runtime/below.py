# SPDX-License-Identifier: Apache-2.0
"""What the bookkeeper wants of lower tiers: probes, reads and writes as tasks on the driver's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from kvgrpc.core.types import CancelRead, Extent, ProbeTiers, ReadTier, TierAction, WriteObject
from kvgrpc.tiers.base import FaultReason, TierFault
from kvgrpc.transfer.runs import trim

if TYPE_CHECKING:
    from kvgrpc.runtime.driver import Driver

T = TypeVar("T")
log = structlog.get_logger(__name__)

LET_GO_S = 5.0
"""What reads and writes that were cancelled get to let go of their buffers."""


class Below:
    """The tiers of a driver. Lives on its loop."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._reads: dict[int, tuple[str, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def act(self, action: TierAction) -> None:
        match action:
            case ProbeTiers():
                found = [""] * len(action.objects)
                probing = self._spawn(self._probe(action, found))
                probing.add_done_callback(lambda done: self._probe_ended(action, found, done))
            case ReadTier():
                reading = self._spawn(self._read(action))
                reading.add_done_callback(lambda done: self._read_ended(action, done))
                self._reads[action.read_id] = (action.tier, reading)
            case CancelRead(read_id):
                if read_id in self._reads:
                    self._reads[read_id][1].cancel()
            case WriteObject():
                writing = self._spawn(self._write(action))
                writing.add_done_callback(lambda done: self._write_ended(action, done))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _probe(self, action: ProbeTiers, found: list[str]) -> bool:
        """Whether a tier did not say what it has."""
        silent = False
        for name, tier in self._driver.hands.tiers.items():
            open_at = [at for at, where in enumerate(found) if not where]
            if not open_at:
                break
            try:
                present = await tier.exists([action.objects[at].name for at in open_at])
            except TierFault as fault:
                _tell("tier probe failed", name, fault)
                silent = True
                continue
            for at, is_there in zip(open_at, present, strict=True):
                if is_there:
                    found[at] = name
        return silent

    def _probe_ended(self, action: ProbeTiers, found: list[str], done: asyncio.Task[bool]) -> None:
        """Called for every probe. Only the end of the server cancels one, and then nobody waits for it."""
        if done.cancelled():
            return
        driver = self._driver
        silent = not _went_well("probe", ", ".join(driver.hands.tiers), done) or done.result()
        driver.book.probe_done(driver.now(), action.probe_id, found, silent)
        driver.pump()

    def _views(self, extents: tuple[Extent, ...], size_bytes: int) -> list[memoryview]:
        return [self._driver.hands.arena.view(*extent) for extent in trim(extents, size_bytes)]

    async def _read(self, action: ReadTier) -> None:
        views = self._views(action.extents, action.object.size_bytes)
        await self._driver.hands.tiers[action.tier].read(action.object, views)

    def _read_ended(self, action: ReadTier, done: asyncio.Task[None]) -> None:
        """Called for every read, also for one that was cancelled before its first step."""
        del self._reads[action.read_id]
        driver, ok = self._driver, _went_well("read", action.tier, done)
        driver.book.read_done(driver.now(), action.read_id, ok)
        driver.pump()

    async def _write(self, action: WriteObject) -> None:
        tier = self._driver.hands.tiers[action.tier]
        (is_there,) = await tier.exists([action.object.name])
        if not is_there:
            await tier.write(action.object, self._views(action.extents, action.object.size_bytes))

    def _write_ended(self, action: WriteObject, done: asyncio.Task[None]) -> None:
        driver, ok = self._driver, _went_well("write", action.tier, done)
        error = None if done.cancelled() else done.exception()
        no_room = isinstance(error, TierFault) and error.reason is FaultReason.FULL
        driver.book.write_done(driver.now(), action.write_id, ok, no_room)
        driver.pump()

    def reads_in_flight(self, tier: str) -> int:
        """Reads of this tier that have not ended."""
        return sum(1 for name, _ in self._reads.values() if name == tier)

    def writes(self, tier: str) -> tuple[int, int]:
        """(writes to this tier that have not ended, objects that wait for their turn)."""
        lanes = [lane for lane in self._driver.book.writes.lanes if lane.tier == tier]
        return sum(lane.flights for lane in lanes), sum(len(lane.queue) for lane in lanes)

    async def flush(self, most_s: float) -> None:
        """Waits until everything that waits to be written is written or was skipped, but not longer."""
        driver, lanes = self._driver, self._driver.book.writes.lanes
        end_ns = driver.now() + int(most_s * 1e9)
        while any(lane.flights or lane.queue for lane in lanes):
            left_s = (end_ns - driver.now()) / 1e9
            if left_s <= 0:
                log.warning("not everything was written to lower tiers in time", seconds=most_s)
                break
            writing = [task for task in self._tasks if not task.done()]
            if writing:
                await asyncio.wait(writing, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)  # a write that has ended is reported behind whoever waits for it

    async def close(self) -> None:
        """Ends what runs, also what the end of that begins, then the tiers."""
        driver, loop = self._driver, asyncio.get_running_loop()
        for job in list(driver.book.prefetcher.pending.values()):
            driver.book.lookups.end(job)  # else its turn would come with the end of others' reads
        driver.pump()
        end_s, told = loop.time() + LET_GO_S, set[asyncio.Task[Any]]()
        while self._tasks and (left_s := end_s - loop.time()) > 0:
            for task in self._tasks - told:
                task.cancel()
            told |= self._tasks
            await asyncio.wait(tuple(self._tasks), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if self._tasks:
            log.error("lower tiers do not let go of their buffers", calls=len(self._tasks))
        for tier in driver.hands.tiers.values():
            await tier.close()


def _went_well(what: str, tier: str, done: asyncio.Task[Any]) -> bool:
    error = None if done.cancelled() else done.exception()
    if isinstance(error, TierFault):
        _tell(f"tier {what} failed", tier, error)
    elif error is not None:
        log.error("tier failed", tier=tier, exc_info=error)
    return not done.cancelled() and error is None


def _tell(event: str, tier: str, fault: TierFault) -> None:
    if fault.reason not in (FaultReason.SKIPPED, FaultReason.MISSING):
        log.warning(event, tier=tier, reason=fault.reason.value, what=fault.message)
