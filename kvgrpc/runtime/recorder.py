# SPDX-License-Identifier: Apache-2.0
"""The arena's life beyond the server's: takes over what an earlier one left, and keeps records for the next.

At the start the index beside the arena is read and its objects get their places back; then each is compared with its
checksum, most recently used first, and found by lookups from then on, while the server already serves. Meanwhile and
later, new objects get their checksums, a slice at a time, in a thread of low priority, and at most a quarter of one
core's time; while copies run, a slice a second. At the end the rest gets them, as far as time reaches, and the index is
written anew. See docs/adr/0021.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import structlog
from xxhash import xxh3_128

from kvgrpc import api
from kvgrpc.core.cache import Bookkeeper
from kvgrpc.core.records import Record, Sealing, UnsoundRecordsError
from kvgrpc.core.types import MIB, Versions
from kvgrpc.runtime.driver import Driver
from kvgrpc.transfer.arena import Arena, ArenaError
from kvgrpc.transfer.arena_file import new_mark
from kvgrpc.transfer.arena_index import Head, IndexDamagedError, IndexFile, index_path, read_index
from kvgrpc.transfer.runs import trim

log = structlog.get_logger(__name__)

SLICE_BYTES = 64 * MIB
CHECK_BYTES = 16 * MIB
PART_BYTES = 4 * MIB
PATIENCE_S = 1.0
"""How long a slice waits for copies to end."""
LEAST_REST_S = 0.1
RESTS = 3
"""So many times as long as a slice took is the rest after it."""
RETRY_S = 10.0
END_S = 3.0
"""What objects without a checksum get at the end."""
TURN_CHUNKS = 4096
SPARE_OBJECTS = 65536
"""Records of objects that have gone, and are not worth a new file."""
_NICENESS = 15


class Recorder:
    """Lives on the driver's loop, but for what is said to block."""

    def __init__(self, book: Bookkeeper, arena: Arena, path: Path) -> None:
        self._book = book
        self._arena = arena
        self._path = path
        self._head = Head(b"", 0, arena.size_bytes, book.limits.page_bytes, book.limits.chunk_tokens)
        self._file: IndexFile | None = None
        self._found = 0
        self._refused = ""
        self._making = 0
        """Objects whose records are being made."""
        self._running: asyncio.Task[None] | None = None
        self._ending: asyncio.Future[None] | None = None
        self._pool = ThreadPoolExecutor(1, "kvgrpc-records", _be_nice)
        self._checkers = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "kvgrpc-check")

    def status(self) -> api.RestartStatus:
        counters = self._book.counters
        return api.RestartStatus(
            checking=bool(self._book.records.unchecked),
            refused=self._refused,
            found_objects=self._found,
            restored_objects=counters.get("restored_objects", 0),
            dropped_objects=self._found - len(self._book.records.unchecked) - counters.get("restored_objects", 0),
            recorded_objects=counters.get("recorded_objects", 0),
            waiting_objects=len(self._book.records.waiting) + self._making,
        )

    # ---- taking over ------------------------------------------------------------------------------------------------

    def take_over(self, kept: Versions | None) -> None:
        """Before anything is stored. ``kept``: versions of spaces that lie beside the arena. Blocks. Raises ArenaError
        when the arena cannot be used at all."""
        arena, mark = self._arena, self._arena.mark
        self._refused = arena.refused
        if arena.left:
            try:
                self._refused = self._adopt(kept)
            except (IndexDamagedError, UnsoundRecordsError) as error:
                self._refused = str(error)
            except OSError as error:
                self._refused = f"its index cannot be read ({error.strerror})"
        if self._refused:
            log.error("the arena begins empty", path=str(self._path), reason=self._refused)
            mark = new_mark()
        elif arena.left:
            objects = len(self._book.records.unchecked)
            log.info("arena taken over", path=str(self._path), objects=objects, records=self._found)
        try:
            arena.put_mark(replace(mark, clean=False))
        except OSError as error:
            raise ArenaError(f"the arena {self._path} cannot be written: {error.strerror}") from error
        self._head = replace(self._head, arena=mark.arena, serial=mark.serial)
        self._book.records.on = True

    def _adopt(self, kept: Versions | None) -> str:
        """Why not; empty when it is done."""
        arena, mark = self._arena, self._arena.mark
        if kept is None:
            return "the versions of its spaces are lost, so nobody knows what was cleared"
        found = read_index(index_path(self._path), mark.arena)
        serials = (mark.serial,) if mark.clean else (mark.serial, mark.serial + 1)
        if found.head.serial not in serials:
            return "its index is of another run"
        if mark.clean and not found.whole:
            return "its index is cut short"
        if found.head != replace(self._head, arena=mark.arena, serial=found.head.serial):
            return "its objects have another chunk size, page size or arena size"
        end = max((offset + length for record in found.records for offset, length in record.extents), default=0)
        while arena.ready_bytes < min(end, arena.size_bytes):
            arena.grow()
        self._book.grow(arena.ready_bytes)
        self._book.records.adopt(found.records, kept, whole=mark.clean)
        self._found = len(found.records)
        return ""

    # ---- while the server runs --------------------------------------------------------------------------------------

    def start(self, driver: Driver) -> None:
        """Begins to check and to record, until ``end``."""
        self._running = asyncio.get_running_loop().create_task(self._run(driver))
        self._running.add_done_callback(_tell)

    async def _run(self, driver: Driver) -> None:
        await self._check(driver)
        while True:
            try:
                await self._begin_file()
                await self._record(driver)
            except OSError as error:
                log.error("the arena's index cannot be written", path=str(self._path), reason=error.strerror)
                await asyncio.sleep(RETRY_S)

    async def _check(self, driver: Driver) -> None:
        """Makes adopted objects findable, or drops them."""
        loop, began_s = asyncio.get_running_loop(), time.monotonic()
        groups = self._groups()
        running: deque[tuple[Sequence[Sealing], asyncio.Future[list[bool]]]] = deque()
        while True:
            while len(running) < 8 and (group := next(groups, None)) is not None:
                running.append((group, loop.run_in_executor(self._checkers, self._hold, group)))
            if not running:
                break
            group, checking = running.popleft()
            for sealing, holds in zip(group, await checking, strict=True):
                self._book.records.checked(sealing, holds)
            driver.pump()
        if self._found:
            status, seconds = self.status(), round(time.monotonic() - began_s, 3)
            restored, dropped = status.restored_objects, status.dropped_objects
            log.info("arena checked", restored_objects=restored, dropped_objects=dropped, seconds=seconds)

    def _groups(self) -> Iterator[list[Sealing]]:
        group: list[Sealing] = []
        size_bytes = 0
        for sealing in tuple(self._book.records.unchecked):
            group.append(sealing)
            size_bytes += sealing.slot.size_bytes
            if size_bytes >= CHECK_BYTES:
                yield group
                group, size_bytes = [], 0
        if group:
            yield group

    def _hold(self, group: Sequence[Sealing]) -> list[bool]:
        return [self._checksum(sealing) == sealing.slot.checksum for sealing in group]

    def _checksum(self, sealing: Sealing) -> bytes:
        """In any thread. What it reads may change meanwhile: then nobody uses the result."""
        state = xxh3_128(sealing.name.encode())
        for offset, length in trim(sealing.slot.extents, sealing.slot.size_bytes):
            for at in range(offset, offset + length, PART_BYTES):
                with self._arena.view(at, min(PART_BYTES, offset + length - at)) as part:
                    state.update(part)
        return state.digest()

    async def _begin_file(self) -> None:
        """A new index, of everything that has a checksum now; in turns, so that the loop never stands still."""
        loop, chunks = asyncio.get_running_loop(), self._book.records.chunks()
        head = replace(self._head, serial=self._head.serial + 1)
        if self._file is not None:
            self._file.close()
        file = await loop.run_in_executor(self._pool, IndexFile, index_path(self._path), head)
        self._file = file
        for at in range(0, len(chunks), TURN_CHUNKS):
            await loop.run_in_executor(self._pool, file.append, self._book.records.of(chunks[at : at + TURN_CHUNKS]))
        await loop.run_in_executor(self._pool, self._publish, file, head, False)

    def _publish(self, file: IndexFile, head: Head, clean: bool) -> None:
        """The file becomes the index, then the arena says that it is. Blocks."""
        file.publish()
        self._arena.put_mark(replace(self._arena.mark, serial=head.serial, clean=clean))
        self._head = head

    async def _record(self, driver: Driver) -> None:
        """Until there is more in the file that has gone than what is there."""
        loop, records, file = asyncio.get_running_loop(), self._book.records, self._file
        assert file is not None
        began_with = file.objects
        while file.objects <= 2 * max(began_with, driver.book.counts().chunks) + SPARE_OBJECTS:
            if not records.waiting:
                await driver.wait_pulse(PATIENCE_S)
                await asyncio.sleep(LEAST_REST_S)
                continue
            until_s = time.monotonic() + PATIENCE_S
            while driver.book.calls.in_flight and time.monotonic() < until_s:
                await driver.wait_pulse(until_s - time.monotonic())
            batch, began_s = records.take(SLICE_BYTES), time.monotonic()
            self._making = len(batch)
            sums = await loop.run_in_executor(self._pool, lambda batch=batch: [*map(self._checksum, batch)])
            sealed = [records.sealed(*one) for one in zip(batch, sums, strict=True)]
            made: list[Record] = [record for record in sealed if record is not None]
            if made:
                await loop.run_in_executor(self._pool, file.append, made)
                records.kept(len(made))
            self._making = 0
            await asyncio.sleep(max(LEAST_REST_S, RESTS * (time.monotonic() - began_s)))

    # ---- the end ----------------------------------------------------------------------------------------------------

    async def end(self) -> None:
        """The driver has closed, and nothing changes the arena any more: leaves it to the next server. Harmless when
        repeated, as ``Driver.close`` is."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait((self._running,))
        await asyncio.to_thread(self._finish)

    def _finish(self) -> None:
        self._pool.shutdown(wait=True)
        if self._file is not None:
            self._file.close()
        records, end_s = self._book.records, time.monotonic() + END_S
        rest = records.unrecorded()
        late = 0

        def in_time(sealing: Sealing) -> bytes:
            return self._checksum(sealing) if time.monotonic() < end_s else b""

        sums = self._checkers.map(in_time, rest)
        for sealing, checksum in zip(rest, sums, strict=True):
            late += not checksum
            if checksum:
                records.sealed(sealing, checksum)
        self._checkers.shutdown(wait=True, cancel_futures=True)
        if late:
            log.warning("not all objects got a checksum in time; the rest will be lost", objects=late)
        head = replace(self._head, serial=self._head.serial + 1)
        try:
            file = IndexFile(index_path(self._path), head)
            file.append(records.of(records.chunks()))
            file.end()
            self._publish(file, head, True)
            file.close()
        except OSError as error:
            log.error("the arena's index cannot be written", path=str(self._path), reason=error.strerror)
            return
        log.info("arena left to the next server", path=str(self._path), objects=file.objects)


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _tell(done: asyncio.Task[None]) -> None:
    if not done.cancelled() and done.exception() is not None:
        log.error("no more records are made of the arena's objects", exc_info=done.exception())
