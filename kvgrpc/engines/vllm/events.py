# SPDX-License-Identifier: Apache-2.0
"""What routers are told of the cache: which blocks of this engine lie in its memory, by vLLM's block hashes.

That blocks are gone is told when a server says so (Departures), when a lookup finds out, when the cache is reset, and
of the oldest when more than ``most`` are told of. Blocks come and go by chunks of the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Protocol

from kvgrpc.api import WatchEvent, WatchKind
from kvgrpc.engines.vllm.ports import Request, chunk_keys

MOST = 1 << 17


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks of ``request`` from the token ``start`` on, with the hash of the block before them, if there is one."""

    request: Request
    start: int
    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that can no longer be loaded."""

    hashes: tuple[bytes, ...]


class Announcer:
    """Collects what is to be told until ``take``. Thread rule: as for Scheduler."""

    def __init__(self, block_size: int, hash_block_size: int, most: int = MOST) -> None:
        self._block_size = block_size
        self._hash_block_size = hash_block_size
        self._most = most
        self._told: dict[bytes, tuple[bytes, ...]] = {}
        """The blocks of each chunk that is there, by the chunk's key, the oldest first."""
        self._blocks = 0
        self._events: list[Stored | Removed] = []

    def stored(self, request: Request, start: int, end: int, chunk: int) -> None:
        """The tokens ``start`` to ``end`` can be found from now on, in chunks of ``chunk`` tokens."""
        first, last = start // self._block_size, end // self._block_size
        if last <= first:
            return
        hashes = self._hashes(request, first, last)
        parent = self._hashes(request, first - 1, first)[0] if first else None
        tokens = tuple(islice(request.all_token_ids, first * self._block_size, last * self._block_size))
        self._events.append(Stored(request, first * self._block_size, hashes, parent, tokens))
        each = chunk // self._block_size
        for at, key in enumerate(self._keys(request, chunk, start, end)):
            self._drop(key)
            self._told[key] = hashes[at * each : (at + 1) * each]
            self._blocks += each
        left, oldest = self._blocks, list[bytes]()
        for key, blocks in self._told.items():
            if left <= self._most:
                break
            oldest.append(key)
            left -= len(blocks)
        self.gone(oldest)

    def looked_up(self, request: Request, hit_tokens: int, asked_tokens: int, chunk: int) -> None:
        """All servers have answered, and have so much of what was asked for: what was not known of that is told."""
        if not chunk:
            return
        at, found = 0, [key in self._told for key in self._keys(request, chunk, 0, hit_tokens)]
        for known, run in groupby(found):
            end = at + len(list(run))
            if not known:
                self.stored(request, at * chunk, end * chunk, chunk)
            at = end
        hashed = len(request.block_hashes) * self._hash_block_size
        self.gone(self._keys(request, chunk, hit_tokens, min(hashed, asked_tokens)))

    def gone(self, keys: Iterable[bytes]) -> None:
        """Chunks cannot be loaded from memory any more."""
        removed = tuple(block for key in keys for block in self._drop(key))
        if removed:
            self._events.append(Removed(removed))

    def forget(self) -> None:
        """Nothing is known to be there."""
        self.gone(tuple(self._told))

    def take(self) -> list[Stored | Removed]:
        events, self._events = self._events, []
        return events

    def _drop(self, key: bytes) -> tuple[bytes, ...]:
        blocks = self._told.pop(key, ())
        self._blocks -= len(blocks)
        return blocks

    def _keys(self, request: Request, chunk: int, start: int, end: int) -> tuple[bytes, ...]:
        return chunk_keys(request, chunk, self._hash_block_size, start // chunk, end // chunk)

    def _hashes(self, request: Request, first: int, last: int) -> tuple[bytes, ...]:
        """A block's hash is that of its last part."""
        hashes, step = request.block_hashes, self._block_size // self._hash_block_size
        return tuple(bytes(hashes[(at + 1) * step - 1]) for at in range(first, last))


class Place(Protocol):
    """What is used of a SchedulerClient."""

    @property
    def space_base(self) -> bytes: ...


class Changes(Protocol):
    """What is used of a Watcher."""

    def take(self) -> list[WatchEvent]: ...


class Departures:
    """What servers say has gone from their memory. A chunk that is gone at one of them is gone: a prefix is loaded from
    all. Where the server hashes token ids itself no key is known here, and only a Clear is understood."""

    def __init__(self, places: Sequence[tuple[Place, Changes]]) -> None:
        self._places = tuple(places)

    def tell(self, announcer: Announcer) -> None:
        for place, changes in self._places:
            gone: dict[bytes, None] = {}
            for event in changes.take():
                if event.kind in (WatchKind.STARTED, WatchKind.LOST):  # what happened before is not known
                    announcer.forget()
                elif event.space_base != place.space_base:
                    continue
                elif event.kind is WatchKind.CLEARED:
                    announcer.forget()
                elif event.kind is WatchKind.REMOVED:
                    gone.update(dict.fromkeys(event.keys))
                elif event.kind is WatchKind.STORED:
                    for key in event.keys:
                        gone.pop(key, None)
            announcer.gone(gone)
