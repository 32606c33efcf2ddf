# SPDX-License-Identifier: Apache-2.0
"""What routers are told of the cache: which blocks of this engine can be loaded from it, by vLLM's block hashes.

The server does not report what it evicts. That blocks are gone is told when a lookup finds out, when the cache is
reset, and of the oldest when more than ``most`` are told of.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from kvgrpc.engines.vllm.ports import Request

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
        self._step = block_size // hash_block_size
        self._most = most
        self._told: dict[bytes, None] = {}
        self._events: list[Stored | Removed] = []

    def stored(self, request: Request, start: int, end: int) -> None:
        """The tokens ``start`` to ``end`` can be found from now on."""
        first, last = start // self._block_size, end // self._block_size
        if last <= first:
            return
        hashes = self._hashes(request, first, last)
        parent = self._hashes(request, first - 1, first)[0] if first else None
        tokens = tuple(islice(request.all_token_ids, first * self._block_size, last * self._block_size))
        self._events.append(Stored(request, first * self._block_size, hashes, parent, tokens))
        for block in hashes:
            self._told.pop(block, None)
            self._told[block] = None
        self._remove(list(islice(self._told, max(0, len(self._told) - self._most))))

    def looked_up(self, request: Request, hit_tokens: int, asked_tokens: int) -> None:
        """All servers have answered, and have so much of what was asked for."""
        end = min(len(request.block_hashes) // self._step, asked_tokens // self._block_size)
        self._remove(self._hashes(request, hit_tokens // self._block_size, end))

    def reset(self) -> None:
        self._remove(list(self._told))

    def take(self) -> list[Stored | Removed]:
        events, self._events = self._events, []
        return events

    def _hashes(self, request: Request, first: int, last: int) -> tuple[bytes, ...]:
        """A block's hash is that of its last part."""
        hashes = request.block_hashes
        return tuple(bytes(hashes[(at + 1) * self._step - 1]) for at in range(first, last))

    def _remove(self, hashes: Iterable[bytes]) -> None:
        gone = tuple(block for block in hashes if block in self._told)
        for block in gone:
            del self._told[block]
        if gone:
            self._events.append(Removed(gone))
