# SPDX-License-Identifier: Apache-2.0
"""``kvgrpc top``: a live screen of one server."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Generator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvgrpc.cli.connection import connection_options, credentials_of
from kvgrpc.cli.frame import compared, frame, waiting
from kvgrpc.cli.reached import problem, target_of, told
from kvgrpc.cli.screen import Snapshot
from kvgrpc.cli.status import snapshot_of
from kvgrpc.client.aio import AioClient
from kvgrpc.client.channel import ChannelOptions
from kvgrpc.client.credentials import Credentials
from kvgrpc.core.errors import Refusal

CALL_S = 2.0
"""A server that takes longer is shown as one that does not answer."""
WIDTH, LINES = 80, 1000
"""Of a frame that is printed where there is no terminal; all engines have a line there."""
KEYS_THAT_END = b"qQ\x03\x04"


@click.command()
@connection_options
@click.option("--interval-ms", type=click.IntRange(min=100), default=1000, show_default=True, help="between two looks")
@click.option("--once", is_flag=True, help="print one frame, of two looks, and end")
def top(address: str | None, interval_ms: int, once: bool, **credentials: str | None) -> None:
    """Watch a server: traffic, hit rates, memory, engines.

    Tiers and leases, too. q ends it. A server that goes away is said so and asked again until it is back.
    """
    target = target_of(address)
    if not once and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("a live screen needs a terminal; --once prints one frame anywhere")
    with told(target):
        watch = _Watch(target, credentials_of(credentials), interval_ms / 1000)
        asyncio.run(watch.once() if once else watch.run())


class _Watch:
    """Looks at a server again and again."""

    def __init__(self, target: str, credentials: Credentials, interval_s: float) -> None:
        self._target = target
        self._options = ChannelOptions(call_s=CALL_S, credentials=credentials)
        self._interval_s = interval_s
        self._console = Console()
        self._now: tuple[float, Snapshot] | None = None
        self._before: tuple[float, Snapshot] | None = None
        self._note = ""

    async def once(self) -> None:
        """Two looks, one frame. Refusal when the server does not answer."""
        async with AioClient(self._target, options=self._options) as client:
            await self._look(client)
            await asyncio.sleep(self._interval_s)
            await self._look(client)
        width = self._console.width if sys.stdout.isatty() else WIDTH
        self._console.print(self._frame(width, LINES, Text()), soft_wrap=True)

    async def run(self) -> None:
        """Until a key or a signal ends it."""
        over = asyncio.Event()
        ending = asyncio.ensure_future(over.wait())
        with _keys(over.set), Live(console=self._console, screen=True, auto_refresh=False) as live:
            async with AioClient(self._target, options=self._options) as client:
                while not over.is_set():
                    looking = asyncio.ensure_future(self._try_look(client))
                    await asyncio.wait({looking, ending}, return_when=asyncio.FIRST_COMPLETED)
                    looking.cancel()
                    if not over.is_set():
                        last = Text(self._note, style="bold red") if self._note else Text("q ends", style="dim")
                        live.update(self._frame(*self._console.size, last), refresh=True)
                        await asyncio.wait({ending}, timeout=self._interval_s)

    async def _look(self, client: AioClient) -> None:
        snapshot = await snapshot_of(client)
        self._before, self._now = self._now, (time.monotonic(), snapshot)

    async def _try_look(self, client: AioClient) -> None:
        try:
            await self._look(client)
            self._note = ""
        except Refusal as refusal:
            first = problem(self._target, refusal).splitlines()[0]
            self._note = f"{time.strftime('%H:%M:%S')} no answer, asking again: {first}"
            self._before = None

    def _frame(self, width: int, height: int, last: Text) -> Text:
        if self._now is None:
            return waiting(self._note or f"asking {self._target}", width)
        at, snapshot = self._now
        then, before = self._before or (at, None)
        return frame(compared(self._target, snapshot, before, at - then), width, height, last)


@contextmanager
def _keys(end: Callable[[], object]) -> Generator[None, None, None]:
    """Calls ``end`` for a key that ends, a signal, or a terminal that is gone; the terminal is then as it was."""
    loop, terminal = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def read() -> None:
        try:
            keys = os.read(terminal, 64)
        except OSError:
            keys = b""
        if not keys or set(keys) & set(KEYS_THAT_END):
            loop.remove_reader(terminal)
            end()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end)
    tty.setcbreak(terminal)
    loop.add_reader(terminal, read)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
