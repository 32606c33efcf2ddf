# SPDX-License-Identifier: Apache-2.0
"""Who goes first when room is needed: least recently used, by priority class, and inside a tenant that has a quota.

Every use of a prefix touches all of it, tails first; so a head is always younger than its tail and never goes before
it. Only uses set the order: the end of a pin, a write or a hold makes a chunk evictable where its last use put it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from kvgrpc.core.types import Priority

if TYPE_CHECKING:
    from kvgrpc.core.index import Chunk


class Queue:
    """Chunks of one priority, least recently used first.

    Chunks in use stay in their places, so pinning and releasing cost nothing here. Whoever looks for a victim parks
    those in use that it meets; a parked chunk that comes to rest, unused since, goes before all others, in old order.
    """

    __slots__ = ("_back", "_parkings", "order", "parked")

    def __init__(self, chunks: Sequence[Chunk] = ()) -> None:
        self.order: OrderedDict[Chunk, None] = OrderedDict.fromkeys(chunks)
        self.parked: dict[Chunk, int] = {}
        self._parkings = 0
        self._back: list[tuple[int, Chunk]] = []

    def use(self, chunk: Chunk) -> None:
        """The chunk was used just now."""
        if self.parked:
            self.parked.pop(chunk, None)
        self.order[chunk] = None
        self.order.move_to_end(chunk)

    def drop(self, chunk: Chunk) -> None:
        """The chunk is gone, or goes to another queue."""
        self.order.pop(chunk, None)
        self.parked.pop(chunk, None)

    def rest(self, chunk: Chunk) -> None:
        """Nobody uses the chunk any more."""
        parking = self.parked.get(chunk)
        if parking is not None:
            heapq.heappush(self._back, (parking, chunk))

    def take(self) -> Iterator[Chunk]:
        """Takes chunks out, those to go first first, until all that are left are in use."""
        while self._back:
            parking, chunk = heapq.heappop(self._back)
            if self.parked.get(chunk) == parking and not chunk.in_use:
                del self.parked[chunk]
                yield chunk
        order = self.order
        while order:
            chunk, _ = order.popitem(last=False)
            if chunk.pins or chunk.writes or chunk.holds:
                self._parkings += 1
                self.parked[chunk] = self._parkings
            else:
                yield chunk


class Account:
    """What one tenant (salt) has. ``quota_bytes`` None = no quota, and then no queues of its own."""

    __slots__ = ("queues", "quota_bytes", "used_bytes")

    def __init__(self) -> None:
        self.used_bytes = 0
        self.quota_bytes: int | None = None
        self.queues: tuple[Queue, ...] = ()


class Eviction:
    """The chunks of all tenants, a queue for each priority."""

    def __init__(self) -> None:
        self.queues: tuple[Queue, ...] = tuple(Queue() for _ in Priority)
        self.quotas = 0
        """Tenants that have one."""

    def use(self, chunks: Sequence[Chunk], priority: Priority) -> None:
        """A prefix was used just now, by a request of this priority."""
        queues = self.queues
        for chunk in touch_order(chunks):
            if chunk.priority < priority:
                self.drop((chunk,))
                chunk.priority = priority
            queue = queues[chunk.priority]
            if queue.parked:
                queue.parked.pop(chunk, None)
            order = queue.order
            order[chunk] = None
            order.move_to_end(chunk)
            if chunk.account.queues:
                chunk.account.queues[chunk.priority].use(chunk)

    def drop(self, chunks: Sequence[Chunk]) -> None:
        """The chunks are gone."""
        for chunk in chunks:
            self.queues[chunk.priority].order.pop(chunk, None)
            self.queues[chunk.priority].parked.pop(chunk, None)
            if chunk.account.queues:
                chunk.account.queues[chunk.priority].drop(chunk)

    def rest(self, chunk: Chunk) -> None:
        """Nobody uses the chunk any more."""
        queue = self.queues[chunk.priority]
        if queue.parked:
            queue.rest(chunk)
        if chunk.account.queues:
            chunk.account.queues[chunk.priority].rest(chunk)

    def take_victims(self, account: Account | None = None) -> Iterator[Chunk]:
        """Takes out the chunks to go first, of one tenant with a quota or of all. Its caller frees those that it got
        before anything else is decided."""
        return chain.from_iterable(queue.take() for queue in (self.queues if account is None else account.queues))

    def set_quota(self, account: Account, quota_bytes: int | None) -> None:
        """Gives a tenant a quota or takes it away."""
        self.quotas += (quota_bytes is not None) - (account.quota_bytes is not None)
        account.quota_bytes = quota_bytes
        if quota_bytes is None:
            account.queues = ()
        elif not account.queues:
            account.queues = tuple(
                Queue([chunk for chunk in (*queue.parked, *queue.order) if chunk.account is account])
                for queue in self.queues
            )


def touch_order(chunks: Sequence[Chunk]) -> Sequence[Chunk]:
    """The order in which a prefix is touched: tails first."""
    return chunks[::-1]
