# SPDX-License-Identifier: Apache-2.0
"""Slow copies: gates that take their time at every run, and a server that has them:
``python -m tests.e2e.slow SOCKET RUN_S`` (chunks of 16 tokens, 64 MiB of L1, a slice a chunk of the tests' MHA).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

from kvgrpc import app
from kvgrpc.cli.serve import announce
from kvgrpc.config.settings import load_settings
from kvgrpc.core.types import RunSlice
from kvgrpc.telemetry.log import configure
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.gates import Gates
from kvgrpc.transfer.shm import SharedMemoryMover


class SlowGates(Gates):
    """Every run takes ``run_s`` longer.

    Threads: as Gates; ``run_s`` may be set at any time.
    """

    def __init__(self, run_s: float = 0.0) -> None:
        super().__init__()
        self.run_s = run_s

    def pacer(self, work: RunSlice) -> Callable[[], None]:
        held = super().pacer(work)

        def pace() -> None:
            if held is not None:
                held()
            time.sleep(self.run_s)

        return pace


class SlowMover(SharedMemoryMover):
    """The mover of the server below."""

    run_s = 0.0

    def __init__(self, arena: Arena, chunk_tokens: int, allowed_uids: set[int], threads: int) -> None:
        super().__init__(arena, chunk_tokens, allowed_uids, threads=threads, gates=SlowGates(self.run_s))


def main(socket: str, run_s: str) -> None:
    configure("info", "json")
    SlowMover.run_s = float(run_s)
    app.SharedMemoryMover = SlowMover
    settings = load_settings(socket=socket, l1_size="64MiB", chunk_tokens="16", page_size="4096", slice_size="6144")
    asyncio.run(app.serve(settings, announce))


if __name__ == "__main__":
    main(*sys.argv[1:])
