# SPDX-License-Identifier: Apache-2.0
"""What watchers are told of the index, into the outbox and in the order in which it happens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kvgrpc.core.ledger import Ledger
from kvgrpc.core.types import Change, KeysChanged, SpaceRef

if TYPE_CHECKING:
    from kvgrpc.core.index import Chunk, Space


class Feed:
    """``on`` while somebody watches; else it says nothing."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.on = False

    def stored(self, chunk: Chunk) -> None:
        """All ranks of a chunk of a live table are there."""
        if self.on:
            self._add(Change.STORED, chunk.table.space.ref, chunk.key)

    def removed(self, chunks: Iterable[Chunk]) -> None:
        """Chunks lose their objects; those of dead tables were cleared before."""
        for chunk in chunks if self.on else ():
            if chunk.complete and chunk.table.live:
                self._add(Change.REMOVED, chunk.table.space.ref, chunk.key)

    def cleared(self, ref: SpaceRef) -> None:
        """All of the space is gone."""
        if self.on:
            self._ledger.outbox.append(KeysChanged(Change.CLEARED, ref, []))

    def _add(self, change: Change, ref: SpaceRef, key: bytes) -> None:
        last = self._ledger.outbox[-1] if self._ledger.outbox else None
        if isinstance(last, KeysChanged) and last.change is change and last.ref == ref:
            last.keys.append(key)
        else:
            self._ledger.outbox.append(KeysChanged(change, ref, [key]))


def resident(spaces: Iterable[Space]) -> Iterator[KeysChanged]:
    """What is there, as if it had been stored just now."""
    for space in spaces:
        keys = [chunk.key for chunk in space.table.chunks.values() if chunk.complete]
        if keys:
            yield KeysChanged(Change.STORED, space.ref, keys)
