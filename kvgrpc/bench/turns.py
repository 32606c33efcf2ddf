# SPDX-License-Identifier: Apache-2.0
"""The server on an event loop that knows its longest turn. ``python -m kvgrpc.bench.turns L1_SIZE SOCKET``.

A turn is what the loop does from one look at its sockets to the next. For each line on standard input the longest turn
since the line before is printed, in milliseconds.
"""

from __future__ import annotations

import asyncio
import selectors
import sys
import time

from kvgrpc.app import serve
from kvgrpc.bench.processes import say
from kvgrpc.config.settings import load_settings
from kvgrpc.telemetry.log import configure


class TurnSelector(selectors.DefaultSelector):
    """Notes how long the loop stays away."""

    def __init__(self) -> None:
        super().__init__()
        self.longest_s = 0.0
        self._left = time.perf_counter()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.longest_s = max(self.longest_s, time.perf_counter() - self._left)
        try:
            return super().select(timeout)
        finally:
            self._left = time.perf_counter()


def main(l1_size: str, socket: str) -> None:
    selector = TurnSelector()
    loop = asyncio.SelectorEventLoop(selector)
    asyncio.set_event_loop(loop)

    def tell() -> None:
        if not sys.stdin.readline():
            loop.remove_reader(sys.stdin)
        say(str(selector.longest_s * 1000))
        selector.longest_s = 0.0

    settings = load_settings(socket=socket, l1_size=l1_size, log_level="warning")
    configure(settings.log_level, settings.log_format)
    loop.run_until_complete(serve(settings, lambda _: loop.add_reader(sys.stdin, tell)))


if __name__ == "__main__":
    main(*sys.argv[1:])
