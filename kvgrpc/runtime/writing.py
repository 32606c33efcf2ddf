# SPDX-License-Identifier: Apache-2.0
"""Whole objects that come as bytes, from clients that share no memory: straight into the arena, a part at a time.

Everything belongs to the event loop, but for checksums, which are made of a part's own bytes in the CPU pool. A slot is
reserved when the first part of its object is there and intact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.fillings import Filling
from kvgrpc.core.types import ChunkResult, Extent
from kvgrpc.runtime.reading import PART_BYTES, checksum_of, cut
from kvgrpc.streams import ChunkPart

if TYPE_CHECKING:
    from kvgrpc.runtime.driver import Driver

CLIENT_MOST = 4
"""Streams of one client at a time."""


class Writes:
    """The streams of a driver, at most ``most``: each holds one part and has one object reserved."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.running: Counter[str] = Counter()
        """By client."""
        self.bytes = 0
        """That were put into the arena, since the start."""

    @contextmanager
    def one_more(self, client_id: str) -> Generator[None, None, None]:
        """Refuses: CALL_LIMIT."""
        own, every = self.running[client_id] >= CLIENT_MOST, self.running.total() >= self._most
        if own or every:
            text = (
                f"{self._most} streams of chunks are written already; try again later, or raise --chunk-streams"
                if every
                else f"this client writes {CLIENT_MOST} streams of chunks already; end one of them first"
            )
            raise Refusal(Reason.CALL_LIMIT, text, retry_after_ms=1000, resource="chunk streams")
        self.running[client_id] += 1
        try:
            yield
        finally:
            self.running[client_id] -= 1
            self.running += Counter()  # drops those at zero


async def fill(driver: Driver, filling: Filling, parts: AsyncIterator[ChunkPart]) -> tuple[ChunkResult, ...]:
    """The results, when all parts have come. Refuses: INVALID_FIELD for parts that are not the next ones, and as
    ``Filling.open_next``."""
    at, offset, size, wanted = (0, 0), 0, 0, False
    cuts: Iterator[list[Extent]] = iter(())
    try:
        async for part in parts:
            if not offset:
                at, size = (part.chunk, part.groups), filling.take(part.chunk, part.groups)
            _check(part, at, offset, size)
            if await checksum_of(driver, part.data) != part.checksum:
                raise _wrong("checksum", f"does not fit the bytes of chunk {part.chunk} from {offset} on")
            if not offset:
                slot = filling.open_next()
                wanted, cuts = slot is not None, cut(slot) if slot is not None else iter(())
            if wanted:
                _put(driver, part.data, next(cuts))
            offset += len(part.data)
            if offset == size:
                if wanted:
                    filling.done(driver.now())
                offset = 0
            driver.pump()
    finally:
        filling.close(driver.now())
        driver.pump()
    return filling.results


def _check(part: ChunkPart, at: tuple[int, int], offset: int, size: int) -> None:
    """Whether it is the part from ``offset`` on of the object of ``at``: (chunk, groups)."""
    if (part.chunk, part.groups) != at or part.offset != offset:
        raise _wrong("offset", f"is {part.offset} of chunk {part.chunk}; the next part is {offset} of chunk {at[0]}")
    if part.object_bytes != size:
        raise _wrong("object_bytes", f"is {part.object_bytes}; the stream began with {size}")
    if len(part.data) != min(PART_BYTES, size - offset):
        raise _wrong("data", f"has {len(part.data)} bytes; it must have {min(PART_BYTES, size - offset)}")


def _wrong(field: str, what: str) -> Refusal:
    return Refusal(Reason.INVALID_FIELD, f"part.{field} {what}", field=f"part.{field}")


def _put(driver: Driver, data: bytes, pieces: list[Extent]) -> None:
    done, view = 0, memoryview(data)
    for offset, length in pieces:
        driver.hands.arena.view(offset, length)[:] = view[done : done + length]
        done += length
    driver.writes.bytes += done
