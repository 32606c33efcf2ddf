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


Queues = tuple[OrderedDict["Chunk", None], ...]
"""Evictable chunks, oldest first, one queue for each priority."""


class Account:
    """What one tenant (salt) has. ``quota_bytes`` None = no quota, and then no queues of its own."""

    __slots__ = ("queues", "quota_bytes", "used_bytes")

    def __init__(self) -> None:
        self.used_bytes = 0
        self.quota_bytes: int | None = None
        self.queues: Queues = ()


class Eviction:
    """The evictable chunks of all tenants."""

    def __init__(self) -> None:
        self.queues: Queues = tuple(OrderedDict() for _ in Priority)

    def add(self, chunk: Chunk) -> None:
        """The chunk may be evicted and was used just now."""
        self.queues[chunk.priority][chunk] = None
        if chunk.account.queues:
            chunk.account.queues[chunk.priority][chunk] = None

    def remove(self, chunk: Chunk) -> None:
        """The chunk is in use or gone."""
        self.queues[chunk.priority].pop(chunk, None)
        if chunk.account.queues:
            chunk.account.queues[chunk.priority].pop(chunk, None)

    def victim(self, account: Account | None = None) -> Chunk | None:
        """The chunk to go first, of one tenant with a quota or of all; None when nothing may go. Stays queued until removed."""
        for queue in self.queues if account is None else account.queues:
            if queue:
                return next(iter(queue))
        return None

    def set_quota(self, account: Account, quota_bytes: int | None) -> None:
        """Gives a tenant a quota or takes it away."""
        account.quota_bytes = quota_bytes
        if quota_bytes is None:
            account.queues = ()
        elif not account.queues:
            account.queues = tuple(
                OrderedDict((chunk, None) for chunk in queue if chunk.account is account) for queue in self.queues
            )


def touch_order(chunks: list[Chunk]) -> list[Chunk]:
    """The order in which uses of a prefix end: tails first."""
    return chunks[::-1]
