# SPDX-License-Identifier: Apache-2.0
"""Watchers of what can be found: each has a bounded queue, and who does not keep up is told so and left behind.

Everything belongs to the event loop. Nothing here waits for a watcher.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace

from kvgrpc.core.cache import Bookkeeper
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.feed import resident
from kvgrpc.core.keys import fingerprint, space_digest
from kvgrpc.core.types import KeysChanged, SpaceRef
from kvgrpc.streams import WatchEvent, WatchKind, WatchRequest

KEYS_WAITING = 65536
"""Keys that may wait for one watcher; a change without keys counts as one."""
KEYS_AT_ONCE = 1024
"""In one message."""
TIER = "l1"


class _Watcher:
    """What one watcher is still to be told."""

    def __init__(self, request: WatchRequest, backlog: Iterable[KeysChanged]) -> None:
        self.request = request
        self.backlog = backlog
        self.waiting: deque[KeysChanged] = deque()
        self.size = 0
        self.lost = False
        self.woken = asyncio.Event()

    def wants(self, ref: SpaceRef) -> bool:
        asked = self.request
        right_base = not asked.space_base or ref.space_base == asked.space_base
        return right_base and (asked.cache_salts is None or ref.cache_salt in asked.cache_salts)

    def add(self, changed: KeysChanged) -> None:
        if self.lost:
            return
        self.size += len(changed.keys) or 1
        self.lost = self.size > KEYS_WAITING
        if self.lost:
            self.waiting.clear()
            self.size = 0
        else:
            self.waiting.append(changed)
        self.woken.set()

    def take(self) -> KeysChanged | None:
        if not self.waiting:
            return None
        changed = self.waiting.popleft()
        self.size -= len(changed.keys) or 1
        return changed


class Watching:
    """All watchers of a driver, at most ``most``."""

    def __init__(self, book: Bookkeeper, server_epoch: bytes, most: int) -> None:
        self._book = book
        self._epoch = server_epoch
        self._most = most
        self._watchers: set[_Watcher] = set()

    def tell(self, changed: KeysChanged) -> None:
        """The bookkeeper has said so."""
        for watcher in self._watchers:
            if watcher.wants(changed.ref):
                watcher.add(changed)

    async def watch(self, request: WatchRequest) -> AsyncIterator[WatchEvent]:
        """What the watcher is told, until it is lost. Refuses: CALL_LIMIT."""
        if len(self._watchers) >= self._most:
            text = f"{self._most} watchers are there already; raise --watchers"
            raise Refusal(Reason.CALL_LIMIT, text, retry_after_ms=1000, resource="watchers")
        watcher = _Watcher(request, ())
        if request.snapshot:
            watcher.backlog = list(resident(s for s in self._book.index.spaces.values() if watcher.wants(s.ref)))
        self._watchers.add(watcher)
        self._book.index.feed.on = True
        sequence = 0
        try:
            async for event in self._events(watcher):
                sequence += 1
                yield replace(event, sequence=sequence)
        finally:
            self._watchers.discard(watcher)
            self._book.index.feed.on = bool(self._watchers)

    async def _events(self, watcher: _Watcher) -> AsyncIterator[WatchEvent]:
        chunk_tokens = self._book.limits.chunk_tokens
        yield WatchEvent(0, WatchKind.STARTED, server_epoch=self._epoch, chunk_tokens=chunk_tokens)
        if watcher.request.snapshot:
            for changed in watcher.backlog:
                for event in _told(changed):
                    yield event
            watcher.backlog = ()
            yield WatchEvent(0, WatchKind.SYNCED)
        while not watcher.lost:
            changed = watcher.take()
            if changed is None:
                watcher.woken.clear()
                await watcher.woken.wait()
                continue
            for event in _told(changed):
                yield event
        yield WatchEvent(0, WatchKind.LOST)


def _told(changed: KeysChanged) -> Iterable[WatchEvent]:
    ref = changed.ref
    salt = fingerprint(ref.cache_salt) if ref.cache_salt else ""
    space = WatchEvent(0, WatchKind(changed.change.value), b"", 0, space_digest(ref), ref.space_base, ref.lora, salt)
    if not changed.keys:
        yield space
    for at in range(0, len(changed.keys), KEYS_AT_ONCE):
        yield replace(space, tier=TIER, keys=tuple(changed.keys[at : at + KEYS_AT_ONCE]))
