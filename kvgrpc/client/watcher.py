# SPDX-License-Identifier: Apache-2.0
"""What changes in a server's cache, kept until it is asked for: for engines that publish KV events, and for routers."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import aclosing

from kvgrpc import api
from kvgrpc.client.aio import AioClient
from kvgrpc.client.channel import ChannelOptions
from kvgrpc.client.loop import LoopThread
from kvgrpc.core.errors import Refusal

KEYS_WAITING = 1 << 18
AGAIN_FIRST_S, AGAIN_LONGEST_S = 0.1, 2.0


class Watcher:
    """Watches in the background and keeps what it is told until ``take``.

    Whenever something may have been missed (the connection broke, the server is another one, either side could not keep
    all) there is a LOST event: forget what was known. Then it watches again, and begins with a snapshot if one was
    asked for.

    Thread rule: every method may be called from any thread and returns at once, except ``close``. None raises for what
    the server or the network does; RuntimeError after ``close``, ForkedProcessError in a forked child.
    """

    def __init__(
        self, address: str, request: api.WatchRequest | None = None, options: ChannelOptions | None = None
    ) -> None:
        self._request = request or api.WatchRequest()
        self._api = AioClient(address, options=options or ChannelOptions(retries=False))
        self._loop = LoopThread("kvgrpc-watcher")
        self._lock = threading.Lock()
        self._events: deque[api.WatchEvent] = deque()
        self._keys = 0
        self._heard = False
        self.problem: Refusal | None = None
        """Why nothing is heard, as far as known."""

    def start(self) -> None:
        """Once."""
        self._watching = self._loop.submit(self._run())

    def take(self) -> list[api.WatchEvent]:
        """What has come since the last time, oldest first."""
        self._loop.check()
        with self._lock:
            events, self._events, self._keys = list(self._events), deque(), 0
        return events

    def close(self) -> None:
        """Ends the stream. Harmless when repeated, and in a forked child."""
        if self._loop.is_inherited:
            return
        try:
            if self._loop.has_started:
                self._loop.run(self._api.close())
        except RuntimeError:  # closed before
            pass
        self._loop.stop()

    # ---- on the loop ------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        again_s = AGAIN_FIRST_S
        while True:
            try:
                async with aclosing(self._api.watch(self._request)) as events:
                    async for event in events:
                        again_s, self.problem, self._heard = AGAIN_FIRST_S, None, True
                        self._keep(event)
            except Refusal as refusal:
                self.problem = refusal
            if self._heard:
                self._heard = False
                self._lose()
            await asyncio.sleep(again_s)
            again_s = min(again_s * 2, AGAIN_LONGEST_S)

    def _keep(self, event: api.WatchEvent) -> None:
        if event.kind is api.WatchKind.LOST:
            return  # the stream's end says the same
        with self._lock:
            self._events.append(event)
            self._keys += len(event.keys) or 1
        if self._keys > KEYS_WAITING:
            self._lose()

    def _lose(self) -> None:
        """Nothing that waits is worth more than to know that it is not all."""
        with self._lock:
            self._events.clear()
            self._events.append(api.WatchEvent(0, api.WatchKind.LOST))
            self._keys = 1
