# SPDX-License-Identifier: Apache-2.0
"""A server that damages one byte of the first Store: ``python -m tests.demo.damaging_server SOCKET BYTE BITS``."""

from __future__ import annotations

import asyncio
import sys

from kvgrpc import app
from kvgrpc.cli.serve import announce
from kvgrpc.config.settings import load_settings
from kvgrpc.core.types import Direction, RunSlice, SliceReport
from kvgrpc.telemetry.log import configure
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.shm import SharedMemoryMover


class DamagingMover(SharedMemoryMover):
    """Flips bits of one byte in the first object that is stored."""

    byte = 0
    bits = 0

    def __init__(self, arena: Arena, chunk_tokens: int, allowed_uids: set[int], threads: int) -> None:
        super().__init__(arena, chunk_tokens, allowed_uids, threads=threads)
        self._damaged_arena = arena
        self._damaged = False

    def copy(self, work: RunSlice) -> SliceReport:
        report = super().copy(work)
        if work.direction is Direction.STORE and not self._damaged:
            self._damaged = True
            offset, _ = work.pieces[0].extents[0]
            self._damaged_arena.view(offset + self.byte, 1)[0] ^= self.bits
        return report


def main(socket: str, byte: str, bits: str) -> None:
    configure("info", "json")
    DamagingMover.byte, DamagingMover.bits = int(byte), int(bits)
    app.SharedMemoryMover = DamagingMover
    asyncio.run(app.serve(load_settings(socket=socket, l1_size="256MiB"), announce))


if __name__ == "__main__":
    main(*sys.argv[1:])
