# SPDX-License-Identifier: Apache-2.0
"""A server that damages one bit of the first Store: ``python -m tests.demo.damaging_server SOCKET``."""

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
    """Flips the lowest bit of the first byte of the first object that is stored: the smallest damage there is."""

    def __init__(self, arena: Arena, chunk_tokens: int, allowed_uids: set[int]) -> None:
        super().__init__(arena, chunk_tokens, allowed_uids)
        self._damaged_arena = arena
        self._damaged = False

    def copy(self, work: RunSlice) -> SliceReport:
        report = super().copy(work)
        if work.direction is Direction.STORE and not self._damaged:
            self._damaged = True
            offset, _ = work.pieces[0].extents[0]
            self._damaged_arena.view(offset, 1)[0] ^= 1
        return report


def main(socket: str) -> None:
    configure("info", "json")
    app.SharedMemoryMover = DamagingMover
    asyncio.run(app.serve(load_settings(socket=socket, l1_size="256MiB"), announce))


if __name__ == "__main__":
    main(sys.argv[1])
