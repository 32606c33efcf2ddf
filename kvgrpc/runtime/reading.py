# SPDX-License-Identifier: Apache-2.0
"""Whole objects as bytes, for clients that share no memory: straight from the arena, a part at a time.

Everything belongs to the event loop, but for checksums, which are made of a part's own bytes in the CPU pool.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from kvgrpc.core import readings
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.slots import Slot
from kvgrpc.core.types import MIB, Extent
from kvgrpc.streams import ChunkPart, ReadChunksAnswer, ReadChunksRequest

if TYPE_CHECKING:
    from kvgrpc.runtime.driver import Driver

PART_BYTES = MIB
INLINE_BYTES = 64 << 10
"""Checksums of shorter parts cost less than two hops between threads."""


class Reads:
    """The streams of a driver, at most ``most``: each holds one part and pins one object."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.running = 0
        self.bytes = 0
        """That were handed out, since the start."""

    async def read(self, driver: Driver, client_id: str, asked: ReadChunksRequest) -> AsyncIterator[ReadChunksAnswer]:
        """Refuses: CALL_LIMIT, and as ``readings.begin``."""
        if self.running >= self._most:
            text = f"{self._most} streams of chunks are open already; try again later, or raise --chunk-streams"
            raise Refusal(Reason.CALL_LIMIT, text, retry_after_ms=1000, resource="chunk streams")
        where = (asked.engine_id, asked.job_id, asked.reader, asked.range)
        reading = readings.begin(driver.book, client_id, *where, by_groups=asked.by_groups)
        self.running += 1
        try:
            while (slot := reading.open_next()) is not None:
                offset = 0
                for pieces in cut(slot):
                    data = b"".join([driver.hands.arena.view(*piece) for piece in pieces])
                    checksum, order = await checksum_of(driver, data), "" if offset else reading.order
                    self.bytes += len(data)
                    yield ChunkPart(reading.at, offset, slot.size_bytes, checksum, data, order, reading.groups)
                    offset += len(data)
                reading.done(driver.now())
                driver.pump()
            yield reading.results()
        finally:
            self.running -= 1
            reading.close()
            driver.pump()


async def checksum_of(driver: Driver, data: bytes) -> int:
    """CRC-32."""
    if len(data) <= INLINE_BYTES:
        return zlib.crc32(data)
    return await asyncio.get_running_loop().run_in_executor(driver.hands.cpu_pool, zlib.crc32, data)


def cut(slot: Slot) -> Iterator[list[Extent]]:
    """The object's bytes in order, as lists of pieces of the arena that make a part each."""
    left, room, pieces = slot.size_bytes, PART_BYTES, list[Extent]()
    for offset, length in slot.extents:
        length = min(length, left)
        left -= length
        while length:
            taken = min(length, room)
            pieces.append((offset, taken))
            offset, length, room = offset + taken, length - taken, room - taken
            if not room:
                yield pieces
                room, pieces = PART_BYTES, []
    if pieces:
        yield pieces
