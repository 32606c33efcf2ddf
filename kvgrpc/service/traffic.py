# SPDX-License-Identifier: Apache-2.0
"""Which calls run, and whether new ones are let in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from kvgrpc.service.calls import Rule

T = TypeVar("T")


class Traffic:
    """Counts running calls and carries the two turns of a drain: ``draining`` (no new calls), ``closed`` (streams end).

    Used on one event loop; nothing here may be called from another thread.
    """

    def __init__(self) -> None:
        self.draining = asyncio.Event()
        self.closed = asyncio.Event()
        self.reason = ""
        self.limited_calls = 0
        self.limited_bytes = 0
        self._running = 0
        self._holding = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self, rule: Rule, size_bytes: int) -> None:
        self.limited_calls += rule.limited
        self.limited_bytes += rule.limited * size_bytes
        self._running += 1
        self._empty.clear()
        if rule.holds_drain:
            self._holding += 1
            self._idle.clear()

    def leave(self, rule: Rule, size_bytes: int) -> None:
        self.limited_calls -= rule.limited
        self.limited_bytes -= rule.limited * size_bytes
        self._running -= 1
        if not self._running:
            self._empty.set()
        if rule.holds_drain:
            self._holding -= 1
            if not self._holding:
                self._idle.set()

    @property
    def holding_calls(self) -> int:
        """Running calls that a drain waits for."""
        return self._holding

    def begin_drain(self, reason: str) -> None:
        self.reason = reason
        self.draining.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether the last call that a drain waits for ended in time."""
        return await _in_time(self._idle, timeout_s)

    async def wait_empty(self, timeout_s: float) -> bool:
        """Whether the last call of any kind, streams included, ended in time."""
        return await _in_time(self._empty, timeout_s)

    def close(self) -> None:
        self.closed.set()


async def until_closed(events: AsyncIterator[T], traffic: Traffic) -> AsyncGenerator[T, None]:
    """The events, until the server closes its streams. However it ends, ``events`` is closed before this returns."""
    source = cast("AsyncGenerator[T, None]", events)

    async def next_event() -> T | None:
        return await anext(source, None)

    closed = asyncio.create_task(traffic.closed.wait())
    upcoming: asyncio.Task[T | None] | None = None
    try:
        while True:
            upcoming = asyncio.create_task(next_event())
            await asyncio.wait({upcoming, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not upcoming.done() or (event := upcoming.result()) is None:
                return
            yield event
    finally:
        closed.cancel()
        if upcoming is not None:
            upcoming.cancel()
            await asyncio.wait({upcoming})
        await source.aclose()


async def _in_time(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except asyncio.TimeoutError:
        return False
    return True
