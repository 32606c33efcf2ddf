# SPDX-License-Identifier: Apache-2.0
"""Who goes first when room is needed: least recently used, by priority class, and inside a tenant that has a quota.

Only chunks that may be evicted are queued; whoever uses a chunk takes it out and puts it back as the most recent. Uses of
a prefix end tail first, so a head is always younger than its tail and never goes before it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvgrpc.core.types import Priority

if TYPE_CHECKING:
    from kvgrpc.core.index import Chunk


class Account:
    """What one tenant (salt) has. ``quota_bytes`` None = no quota, and then no queue of its own."""

    __slots__ = ("queue", "quota_bytes", "used_bytes")

    def __init__(self) -> None:
        self.used_bytes = 0
        self.quota_bytes: int | None = None
        self.queue: OrderedDict[Chunk, None] | None = None


class Eviction:
    """The queue of evictable chunks, oldest first, one for each priority."""

    def __init__(self) -> None:
        self.queues: tuple[OrderedDict[Chunk, None], ...] = tuple(OrderedDict() for _ in Priority)

    def add(self, chunk: Chunk) -> None:
        """The chunk may be evicted and was used just now."""
        self.queues[chunk.priority][chunk] = None
        queue = chunk.account.queue
        if queue is not None:
            queue[chunk] = None

    def remove(self, chunk: Chunk) -> None:
        """The chunk is in use or gone."""
        self.queues[chunk.priority].pop(chunk, None)
        queue = chunk.account.queue
        if queue is not None:
            queue.pop(chunk, None)

    def victim(self, account: Account | None = None) -> Chunk | None:
        """The chunk to go first, of one tenant or of all; None when nothing may go. Stays queued until removed."""
        if account is not None:
            return next(iter(account.queue), None) if account.queue else None
        for queue in self.queues:
            if queue:
                return next(iter(queue))
        return None

    def set_quota(self, account: Account, quota_bytes: int | None) -> None:
        """Gives a tenant a quota or takes it away."""
        account.quota_bytes = quota_bytes
        if quota_bytes is None:
            account.queue = None
        elif account.queue is None:
            account.queue = OrderedDict()
            for queue in self.queues:
                account.queue.update((chunk, None) for chunk in queue if chunk.account is account)


def touch_order(chunks: list[Chunk]) -> list[Chunk]:
    """The order in which uses of a prefix end: tails first."""
    return chunks[::-1]
