# SPDX-License-Identifier: Apache-2.0
"""The tier on disk: files in a folder of this server's own, never more bytes than its limit, least recently used first
to go. What other servers keep under the same directory is read, too.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import structlog

from kvgrpc.core.types import ObjectName
from kvgrpc.tiers.base import DAMAGED, FaultReason, OtherLength, TierFault, TierMiss
from kvgrpc.tiers.disk_files import (
    CallCancelledError,
    Cancelled,
    can_direct,
    file_bytes,
    mark_used,
    read_object,
    write_object,
)
from kvgrpc.tiers.disk_slot import Slot, claim, object_path, other_folders
from kvgrpc.tiers.envelope import HEADER_BYTES

T = TypeVar("T")
log = structlog.get_logger(__name__)

OTHERS_S = 1.0
"""How long the list of other servers' folders is good."""
READ_THREADS = 8
WRITE_THREADS = 4


class DiskTier:
    """Keeps at most ``limit_bytes`` in files under ``directory``; ``direct`` False: always through the page cache.

    ``start`` begins to open the directory, which must be there; as long as that fails, every call tries again.
    ``admit`` blocks, and raises OSError while the directory must not be used. Reads work while the folder is still
    being scanned, writes wait for it.

    Threads: one event loop; files are read and written by threads of its own.
    """

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        *,
        direct: bool = True,
        name: str = "disk",
        admit: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._admit = admit
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._direct = direct
        self._slot: Slot | None = None
        self._index: OrderedDict[str, int] = OrderedDict()
        """Payload bytes by name, least recently used first."""
        self._used = 0
        self._coming: dict[str, tuple[int, asyncio.Future[None]]] = {}
        self._bad: set[str] = set()
        """Damaged objects of others, which are theirs to remove, and what could not be read: a bad block, a right that
        was taken away. They are found no more until they are written anew, so that other tiers are asked."""
        self._others: list[Path] = []
        self._others_until_s = 0.0
        self._opening: asyncio.Task[Slot] | None = None
        self._claiming = asyncio.Lock()
        self._scanned = asyncio.Event()
        self._tasks: set[asyncio.Task[object]] = set()
        self._numbers = itertools.count(1)
        self._last_use_ns = 0
        """Of any file, as it is marked: the order of uses outlives the server, whatever is done to the wall clock."""
        self._counts: Counter[str] = Counter()
        self._readers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="kvgrpc-disk-read")
        self._writers = ThreadPoolExecutor(WRITE_THREADS, thread_name_prefix="kvgrpc-disk-write")

    @property
    def name(self) -> str:
        return self._name

    @property
    def healthy(self) -> bool:
        return self._slot is not None

    @property
    def counters(self) -> Mapping[str, int]:
        now = {"limit_bytes": self._limit_bytes, "objects": len(self._index), "direct_io": int(self._direct)}
        return {**self._counts, **now, "scanning": int(not self._scanned.is_set())}

    # ---- opening ----

    def start(self) -> None:
        """Opens the directory in the background."""
        self._spawn(self._first_open())

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _first_open(self) -> None:
        try:
            await self._open()
        except TierFault as fault:
            sentence = "the disk tier cannot be opened yet, and is tried again; the server never makes its folder"
            log.warning(sentence, directory=str(self._directory), reason=fault.message)

    async def _open(self) -> Slot:
        """The slot, claimed now if need be; whoever asks may be cancelled, that goes on. Raises TierFault (IO)."""
        if self._slot is not None:
            return self._slot
        if self._opening is None or self._opening.done():
            self._opening = self._spawn(self._claim_slot())
            self._opening.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(self._opening)

    async def _claim_slot(self) -> Slot:
        claiming = self._writers.submit(self._claim)
        try:
            slot, why_not = await asyncio.wrap_future(claiming)
        except OSError as error:
            raise _fault(error) from error
        except asyncio.CancelledError:
            claiming.add_done_callback(_give_back)
            raise
        if why_not:
            self._direct = False
            sentence = "no direct I/O here, files go through the page cache"
            log.warning(sentence, directory=str(self._directory), reason=why_not)
        self._slot = slot
        self._spawn(self._scan(slot))
        return slot

    def _claim(self) -> tuple[Slot, str]:
        self._admit()
        slot = claim(self._directory)
        try:
            return slot, can_direct(slot.aside) if self._direct else ""
        except BaseException:
            slot.close()
            raise

    async def _scan(self, slot: Slot) -> None:
        began = time.monotonic()
        try:
            found = await self._run(self._writers, slot.scan)
        except TierFault as fault:
            log.warning("the disk tier cannot be read yet", directory=str(self._directory), reason=fault.message)
            self._lose(slot)
            return
        if self._slot is not slot:
            return  # it was lost meanwhile
        self._index = OrderedDict((name, size - HEADER_BYTES) for _, name, size in found)
        self._used = sum(map(file_bytes, self._index.values()))
        self._last_use_ns = max(self._last_use_ns, found[-1][0] if found else 0)
        self._scanned.set()
        took_ms = round((time.monotonic() - began) * 1000)
        log.info("disk tier is open", folder=str(slot.folder), objects=len(found), bytes=self._used, took_ms=took_ms)

    async def _is_gone(self, slot: Slot) -> bool:
        """Whether the folder went away, or another is in its place."""
        try:
            await self._run(self._readers, slot.check)
        except TierFault as fault:
            if self._slot is slot:
                log.warning("the disk tier's folder is gone", folder=str(slot.folder), reason=fault.message)
            self._lose(slot)
            return True
        return False

    def _lose(self, slot: Slot) -> None:
        """The folder is not what it was: the next call opens it anew."""
        if self._slot is slot:
            slot.close()
            self._slot = None
            self._scanned.clear()
            self._index.clear()
            self._bad.clear()
            self._used = 0

    # ---- Tier ----

    async def exists(self, names: Sequence[str]) -> list[bool]:
        slot = await self._open()
        found = [name in self._index and name not in self._bad for name in names]
        fresh = self._scanned.is_set() and time.monotonic() < self._others_until_s
        if not all(found) and (self._others or not fresh):
            asked = [at for at, known in enumerate(found) if not known]
            there = await self._run(self._readers, self._look, slot, [names[at] for at in asked])
            for at, is_there in zip(asked, there, strict=True):
                found[at] = is_there and names[at] not in self._bad
        return found

    def _look(self, slot: Slot, names: list[str]) -> list[bool]:
        folders = self._other_folders(slot)
        if not self._scanned.is_set():
            folders = [slot.folder, *folders]
        return [any(os.path.exists(object_path(folder, name)) for folder in folders) for name in names]

    def _other_folders(self, slot: Slot) -> list[Path]:
        if time.monotonic() >= self._others_until_s:
            self._others = list(other_folders(self._directory, slot.folder))
            self._others_until_s = time.monotonic() + OTHERS_S
        return self._others

    async def read(self, object: ObjectName, into: Sequence[memoryview]) -> None:
        slot = await self._open()
        try:
            own = await self._run_whole(self._readers, self._read, slot, object, into)
        except TierFault as fault:
            if fault.reason in DAMAGED and not isinstance(fault, OtherLength):
                await self._set_aside(slot, object.name)
            elif await self._is_gone(slot):
                pass  # nothing is known of the object
            elif isinstance(fault, TierMiss):
                self._forget(object.name)
            elif fault.reason is FaultReason.IO:
                self._bad.add(object.name)
            raise
        if own and object.name in self._index:
            self._index.move_to_end(object.name)

    def _read(self, cancelled: Cancelled, slot: Slot, object: ObjectName, into: Sequence[memoryview]) -> bool:
        """Whether it was this server's own."""
        try:
            read_object(slot.path(object.name), object, into, self._direct, cancelled, self._mark)
        except TierMiss:
            for folder in self._other_folders(slot):
                path = object_path(folder, object.name)
                if os.path.exists(path):
                    read_object(path, object, into, self._direct, cancelled, self._mark)
                    return False
            raise
        return True

    def _mark(self, fd: int) -> None:
        self._last_use_ns = mark_used(fd, self._last_use_ns)

    async def _set_aside(self, slot: Slot, name: str) -> None:
        """A damaged object is found no more."""
        self._counts["damaged_objects"] += 1
        log.warning("a damaged object is removed", tier=self._name, object=name)
        if name in self._index or not self._scanned.is_set():
            self._forget(name)
            await self._run(self._writers, slot.path(name).unlink, missing_ok=True)
        else:
            self._bad.add(name)

    def _forget(self, name: str) -> None:
        self._bad.discard(name)
        size_bytes = self._index.pop(name, None)
        if size_bytes is not None:
            self._used -= file_bytes(size_bytes)

    async def write(self, object: ObjectName, data: Sequence[memoryview]) -> None:
        name, size = object.name, file_bytes(object.size_bytes)
        slot, ended = await self._open(), asyncio.get_running_loop().create_future()
        while not self._scanned.is_set() or name in self._coming:  # meanwhile the folder may go, and another come
            await (asyncio.wait((self._coming[name][1],)) if self._scanned.is_set() else self._scanned.wait())
            slot = await self._open()
        if self._index.get(name) == object.size_bytes and name not in self._bad:
            self._index.move_to_end(name)
            return
        self._coming[name], written = (0, ended), list[bool]()
        try:
            await self._make_room(slot, size, name)
            for last in (False, False, False, True):
                try:
                    await self._run_whole(self._writers, self._write, slot, object, data, written)
                    break
                except TierFault as fault:
                    if fault.reason is not FaultReason.FULL or last or not self._index:
                        raise
                async with self._claiming:  # the device is full, whatever the limit; others may be quicker
                    await self._evict(slot, size)
        except TierFault as fault:
            if fault.reason is FaultReason.IO:
                await self._is_gone(slot)
            raise
        finally:
            if written and self._slot is slot:  # also where nobody waits for it any more
                self._forget(name)
                self._index[name] = object.size_bytes
                self._used += size
            del self._coming[name]
            ended.set_result(None)

    def _write(
        self, cancelled: Cancelled, slot: Slot, object: ObjectName, data: Sequence[memoryview], written: list[bool]
    ) -> None:
        slot.check()  # or it goes where another server is, and nobody counts it
        aside = slot.aside / f"{object.name}.{next(self._numbers)}"
        write_object(slot.path(object.name), aside, object, data, self._direct, cancelled, self._mark)
        written.append(True)

    async def _make_room(self, slot: Slot, size: int, name: str) -> None:
        """Evicts until the object fits and claims its bytes, one call after the other: what others were promised is not
        promised twice. Raises TierFault (FULL, IO)."""
        async with self._claiming:
            coming = sum(claimed for claimed, _ in self._coming.values())
            over = self._used + coming + size - self._limit_bytes
            if over > self._used:
                raise TierFault(FaultReason.FULL, f"{name}: no room for {size} bytes under the limit")
            await self._evict(slot, over)
            self._coming[name] = (size, self._coming[name][1])

    async def _evict(self, slot: Slot, size: int) -> None:
        """Removes the least recently used until so many bytes are free; by one caller at a time."""
        victims: list[str] = []
        freed = 0
        for name, size_bytes in self._index.items():
            if freed >= size:
                break
            victims.append(name)
            freed += file_bytes(size_bytes)
        if victims:
            await self._run(self._writers, _unlink_all, slot, victims)
            for name in victims:
                self._forget(name)
            self._counts["evicted_objects"] += len(victims)

    async def remove(self, name: str) -> None:
        slot = await self._open()
        if name in self._index or not self._scanned.is_set():
            await self._run(self._writers, slot.path(name).unlink, missing_ok=True)
        self._forget(name)

    async def usage(self) -> int:
        if await self._is_gone(await self._open()):
            await self._open()
        await self._scanned.wait()
        return self._used

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        for pool in (self._readers, self._writers):
            await asyncio.to_thread(pool.shutdown)
        if self._slot is not None:
            self._slot.close()

    # ---- threads ----

    async def _run(self, pool: ThreadPoolExecutor, work: Callable[..., T], *args: object, **named: object) -> T:
        """Of work that touches no buffers: cancelled, it is not waited for. Raises TierFault (IO, FULL)."""
        try:
            return await asyncio.wrap_future(pool.submit(work, *args, **named))
        except OSError as error:
            raise _fault(error) from error

    async def _run_whole(self, pool: ThreadPoolExecutor, work: Callable[..., T], *args: object) -> T:
        """Of work that touches buffers: however it ends, it has ended. Raises TierFault."""
        stop = threading.Event()
        running = asyncio.wrap_future(pool.submit(work, stop.is_set, *args))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            stop.set()
            while not running.done():
                try:
                    await asyncio.wait((running,))
                except asyncio.CancelledError:
                    continue
            running.exception()
            raise
        except CallCancelledError:
            raise asyncio.CancelledError from None
        except OSError as error:
            raise _fault(error) from error


def _fault(error: OSError) -> TierFault:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return TierFault(FaultReason.FULL if full else FaultReason.IO, error.strerror or str(error))


def _give_back(done: Future[tuple[Slot, str]]) -> None:
    if not done.cancelled() and done.exception() is None:
        done.result()[0].close()


def _unlink_all(slot: Slot, names: Sequence[str]) -> None:
    slot.check()
    for name in names:
        slot.path(name).unlink(missing_ok=True)
