# SPDX-License-Identifier: Apache-2.0
"""Objects that travel in pieces: what tiers on a network have in common."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor
from threading import Lock
from typing import Any, TypeVar

from kvgrpc.core.types import ObjectName
from kvgrpc.tiers.base import FaultReason, TierFault
from kvgrpc.tiers.envelope import HEADER_BYTES, Opening, Sealing

T = TypeVar("T")

STEP_BYTES = 256 << 10
"""Copied while the interpreter lock is held, then hashed without it, while it is in the cache."""
COUNT_S = 600.0
"""How long a count of what a tier holds is good."""


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
    this server does is added. About what is there: others write and remove, too."""

    def __init__(self, count: Callable[[], Coroutine[Any, Any, int]]) -> None:
        self._count = count
        self._counting: asyncio.Task[None] | None = None
        self._counted_at_s = float("-inf")
        self._used = 0

    def add(self, size_bytes: int) -> None:
        """Written, or removed when it is less than nothing."""
        self._used += size_bytes

    async def get(self) -> int:
        """Raises TierFault: it was never counted, and cannot be now."""
        if time.monotonic() - self._counted_at_s > COUNT_S and self._counting is None:
            self._counting = asyncio.create_task(self._run())
            self._counting.add_done_callback(self._ended)
        if self._counting is not None and self._counted_at_s < 0:
            await asyncio.shield(self._counting)
        return max(self._used, 0)

    async def _run(self) -> None:
        self._used = await self._count()
        self._counted_at_s = time.monotonic()

    def _ended(self, counting: asyncio.Task[None]) -> None:
        self._counting = None
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
