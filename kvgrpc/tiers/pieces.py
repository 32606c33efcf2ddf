# SPDX-License-Identifier: Apache-2.0
"""Objects that travel in pieces: what tiers on a network have in common."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from threading import Lock
from typing import Any, TypeVar

import structlog

from kvgrpc.core.types import ObjectName
from kvgrpc.tiers.base import DAMAGED, FaultReason, OtherLength, TierFault, TierMiss
from kvgrpc.tiers.envelope import HEADER_BYTES, Opening, Sealing

T = TypeVar("T")
Count = Callable[[], AsyncIterator[int]]
"""Bytes of what a tier holds, page by page."""
log = structlog.get_logger(__name__)

STEP_BYTES = 256 << 10
"""Copied while the interpreter lock is held, then hashed without it, while it is in the cache."""
COUNT_S = 600.0
"""How long a count of what a tier holds is good."""
READERS = 8
WRITERS = 4
PROBES = 1000
"""Names in one question."""
BAD_MOST = 10_000


class Filling:
    """Takes an object's bytes in order, header included, and puts the payload into buffers.

    Raises TierFault: SHORT, FOREIGN, CORRUPT.

    Threads: ``take`` and ``end`` on one at a time; ``stop`` on any.
    """

    def __init__(self, object: ObjectName, into: Sequence[memoryview]) -> None:
        self._object = object
        self._room = _steps(into)
        self._space: memoryview = memoryview(b"")
        self._header = bytearray()
        self._opening: Opening | None = None
        self._left = object.size_bytes
        self._stopped = False
        self._touching = Lock()

    def stop(self) -> None:
        """Nobody wants the rest: once it has returned, the buffers are not touched any more."""
        with self._touching:
            self._stopped = True

    @property
    def stopped(self) -> bool:
        """Whether nobody wants more."""
        return self._stopped

    def take(self, piece: bytes | memoryview) -> None:
        """The next bytes; more than the object has are SHORT of a fault: they are FOREIGN."""
        view = memoryview(piece)
        if self._opening is None:
            missing = HEADER_BYTES - len(self._header)
            self._header += view[:missing]
            if len(self._header) < HEADER_BYTES:
                return
            self._opening, view = Opening(self._object, self._header), view[missing:]
        if len(view) > self._left:
            raise TierFault(FaultReason.FOREIGN, f"{self._object.name}: more bytes than the object has")
        self._left -= len(view)
        while len(view) and not self._stopped:
            if not len(self._space):
                self._space = next(self._room)
            size = min(len(view), len(self._space))
            with self._touching:
                if not self._stopped:
                    self._space[:size] = view[:size]
                    self._opening.update(self._space[:size])  # what has come: the piece may be another's memory
            self._space, view = self._space[size:], view[size:]

    def end(self) -> None:
        """After all bytes: whether they are the object."""
        if self._opening is None or self._left:
            raise TierFault(FaultReason.SHORT, f"{self._object.name}: {self._left} bytes of the object are missing")
        self._opening.check()


class Draining:
    """An object's bytes, taken out of their buffers in order, on whatever thread; not after ``stop``: then
    BufferError."""

    def __init__(self, data: Sequence[memoryview]) -> None:
        self._data = data
        self._steps = _steps(data)
        self._step: memoryview = memoryview(b"")
        self._stopped = False
        self._touching = Lock()

    def stop(self) -> None:
        """The buffers are given back: once it has returned, they are not touched any more."""
        with self._touching:
            self._stopped = True

    def seal(self, object: ObjectName) -> bytes:
        """The header, of all bytes."""
        sealing = Sealing(object)
        for step in _steps(self._data):
            with self._touching:
                self._check()
                sealing.update(step)
        return sealing.header()

    def take(self, into: memoryview) -> int:
        """Copies the next bytes; how many, less than there is room for at the end only."""
        done = 0
        while done < len(into):
            if not len(self._step):
                step = next(self._steps, None)
                if step is None:
                    break
                self._step = step
            size = min(len(into) - done, len(self._step))
            with self._touching:
                self._check()
                into[done : done + size] = self._step[:size]
            self._step = self._step[size:]
            done += size
        return done

    def _check(self) -> None:
        if self._stopped:
            raise BufferError("the object's buffers were given back")


def _steps(parts: Sequence[memoryview]) -> Iterator[memoryview]:
    for part in parts:
        for at in range(0, len(part), STEP_BYTES):
            yield part[at : at + STEP_BYTES]


class Usage:
    """Bytes of a tier that takes its time to count them: counted now and then in the background, and meanwhile what
    this server does is added. About what is there: others write and remove, too. Without ``count`` what this server
    does is all."""

    def __init__(self, count: Count | None = None) -> None:
        self._count = count
        self._counting: asyncio.Task[None] | None = None
        self._told = asyncio.Event()
        """The count goes on, or has ended."""
        self._counted_at_s = float("-inf")
        self._found = 0
        self._added = 0
        """Since the last count began."""

    def add(self, size_bytes: int) -> None:
        """Written, or removed when it is less than nothing."""
        self._added += size_bytes

    async def get(self) -> int:
        """While it is counted for the first time, what was found so far, as soon as more is found: the tier is well,
        however long that takes. Raises TierFault: it was never counted, and cannot be now."""
        if self._count is not None and time.monotonic() - self._counted_at_s > COUNT_S and self._counting is None:
            self._counting = asyncio.create_task(self._run(self._count))
            self._counting.add_done_callback(self._ended)
        counting = self._counting
        if counting is not None and self._counted_at_s < 0:
            self._told.clear()
            await self._told.wait()
            if counting.done():
                counting.result()
        return max(self._found + self._added, 0)

    async def _run(self, count: Count) -> None:
        found, before = 0, self._added
        async for page_bytes in count():
            found += page_bytes
            if self._counted_at_s < 0:
                self._found = found
                self._told.set()
        self._found, self._counted_at_s = found, time.monotonic()
        self._added -= before

    def _ended(self, counting: asyncio.Task[None]) -> None:
        self._counting = None
        self._told.set()
        if not counting.cancelled():
            counting.exception()

    async def close(self) -> None:
        """Ends what runs."""
        if self._counting is not None:
            self._counting.cancel()
            await asyncio.wait((self._counting,))


async def run_whole(pool: Executor, stop: Callable[[], None], work: Callable[..., T], *args: object) -> T:
    """Of work on a thread that touches buffers: however it ends, it has ended; ``stop`` asks it to be quick."""
    running = asyncio.wrap_future(pool.submit(work, *args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop()
        while not running.done():
            try:
                await asyncio.wait((running,))
            except asyncio.CancelledError:
                continue
        if not running.cancelled():
            running.exception()
        raise


class TornObject(TierMiss):
    """Pieces of it went away, or another write has replaced them."""


class RemoteTier(ABC):
    """What tiers on a network have in common: a name, counts, usage, and what becomes of objects that are of no use:
    they are removed, and passed over where they cannot be."""

    def __init__(self, name: str, count: Count | None = None) -> None:
        self._name = name
        self._counts: Counter[str] = Counter()
        self._usage = Usage(count)
        self._bad: OrderedDict[str, None] = OrderedDict()
        """Objects of no use that could not be removed."""

    @property
    def name(self) -> str:
        return self._name

    @property
    def healthy(self) -> bool:
        return True

    @property
    def counters(self) -> Mapping[str, int]:
        return dict(self._counts)

    @abstractmethod
    async def remove(self, name: str) -> None: ...

    async def usage(self) -> int:
        return await self._usage.get()

    @asynccontextmanager
    async def _reading(self, name: str) -> AsyncGenerator[None]:
        """Around a read of the object."""
        if name in self._bad:
            raise TierMiss(f"{name}: of no use, and cannot be removed")
        try:
            yield
        except TierFault as fault:
            if isinstance(fault, TornObject):
                await self._set_aside(name, "torn")
            elif fault.reason in DAMAGED and not isinstance(fault, OtherLength):
                log.warning("a damaged object is removed", tier=self._name, object=name)
                await self._set_aside(name, "damaged")
            raise

    async def _set_aside(self, name: str, why: str) -> None:
        self._counts[f"{why}_objects"] += 1
        try:
            await self.remove(name)
        except TierFault as fault:
            log.warning(f"a {why} object cannot be removed", tier=self._name, object=name, reason=fault.message)
            self._bad[name] = None
            if len(self._bad) > BAD_MOST:
                self._bad.popitem(last=False)

    def _written(self, object: ObjectName, freed: int = 0) -> None:
        self._bad.pop(object.name, None)
        self._usage.add(HEADER_BYTES + object.size_bytes - freed)


class BlockingTier(RemoteTier):
    """A tier whose client blocks: it is called by threads of the tier. ``errors`` are those of the client; it is made
    by the first call that needs it, and by others until that went well.

    Threads: one event loop. A call that was cancelled leaves its thread to the client for a while, but not with its
    buffers.
    """

    def __init__(self, name: str, where: str, errors: tuple[type[Exception], ...], count: Count | None = None) -> None:
        super().__init__(name, count)
        self._where = where
        self._errors = errors
        self._client: Any = None
        self._closing = False
        self._connecting = Lock()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix=f"kvgrpc-{name}-read")
        self._writers = ThreadPoolExecutor(WRITERS, thread_name_prefix=f"kvgrpc-{name}-write")

    @abstractmethod
    def _connect(self) -> Any:
        """A new client."""

    @abstractmethod
    def _exists(self, names: Sequence[str]) -> Sequence[bool]: ...

    @abstractmethod
    def _read(self, object: ObjectName, filling: Filling) -> None: ...

    @abstractmethod
    def _write(self, object: ObjectName, draining: Draining) -> int:
        """Bytes of what was replaced."""

    @abstractmethod
    def _remove(self, name: str) -> int:
        """Bytes of what was there."""

    def _connected(self) -> Any:
        with self._connecting:
            if self._closing:
                raise OSError("the tier is being closed")
            if self._client is None:
                self._client = self._connect()
            return self._client

    def _fault(self, error: Exception) -> TierFault:
        return TierFault(FaultReason.IO, f"{self._where}: {str(error)[:300]}")

    def _call_begins(self) -> None:
        """A call begins on this thread."""

    async def _run(self, pool: Executor, work: Callable[..., T], *args: object) -> T:
        def run() -> T:
            self._call_begins()
            return work(*args)

        try:
            return await asyncio.wrap_future(pool.submit(run))
        except self._errors as error:
            raise self._fault(error) from error

    async def exists(self, names: Sequence[str]) -> list[bool]:
        found: list[bool] = []
        for at in range(0, len(names), PROBES):
            found += await self._run(self._readers, self._exists, names[at : at + PROBES])
        return [there and name not in self._bad for name, there in zip(names, found, strict=True)]

    async def read(self, object: ObjectName, into: Sequence[memoryview]) -> None:
        filling = Filling(object, into)
        async with self._reading(object.name):
            try:
                await self._run(self._readers, self._read, object, filling)
            finally:
                filling.stop()

    async def write(self, object: ObjectName, data: Sequence[memoryview]) -> None:
        draining = Draining(data)
        try:
            freed = await self._run(self._writers, self._write, object, draining)
        finally:
            draining.stop()
        self._written(object, freed)

    async def remove(self, name: str) -> None:
        self._usage.add(-await self._run(self._writers, self._remove, name))

    async def close(self) -> None:
        self._closing = True
        await self._usage.close()
        for pool in (self._readers, self._writers):
            await asyncio.to_thread(pool.shutdown, wait=True, cancel_futures=True)
        if self._client is not None:
            await asyncio.to_thread(self._client.close)
