# SPDX-License-Identifier: Apache-2.0
"""Looks into the index after every step, for what no answer shows: which chunks went, and whether they had to stay."""

from __future__ import annotations

from collections.abc import Iterable

from kvgrpc.core.cache import Bookkeeper
from kvgrpc.core.index import Table
from tests.sim.loop import Loop, PromiseError
from tests.sim.truth import Hold, Space


class Watch:
    """Knows the chains of keys and the operators' holds. The only part of the world that reads the core's state."""

    def __init__(self, book: Bookkeeper, loop: Loop) -> None:
        self._book = book
        self._loop = loop
        self._tails: dict[bytes, set[bytes]] = {}
        self._holds: list[Hold] = []
        self._before: dict[tuple[Table, bytes], bool] = {}

    def chains(self, prompts: Iterable[tuple[bytes, ...]]) -> None:
        for keys in prompts:
            for depth, key in enumerate(keys):
                self._tails.setdefault(key, set()).update(keys[depth + 1 :])

    def hold(self, space: Space, keys: tuple[bytes, ...], until_ns: int) -> Hold:
        hold = Hold(space, space.version, keys, until_ns)
        self._holds.append(hold)
        return hold

    def step(self) -> None:
        """Compares with the step before: what was evicted was nobody's, and no tail of it could have gone first."""
        after = self._resident()
        for table, key in self._before.keys() - after.keys():
            if not table.live:
                continue
            self._check_holds(table, key)
            for tail in self._tails.get(key, ()):
                evictable = not self._before.get((table, tail), True) and not after.get((table, tail), True)
                if evictable:
                    raise PromiseError(f"chunk {key.hex()[:8]} was evicted before its tail {tail.hex()[:8]}")
        self._before = after

    def _resident(self) -> dict[tuple[Table, bytes], bool]:
        """Every chunk with a complete object, and whether somebody uses it."""
        return {
            (space.table, key): bool(chunk.pins or chunk.writes or chunk.holds)
            for space in self._book.index.spaces.values()
            for key, chunk in space.table.chunks.items()
            if chunk.ready
        }

    def _check_holds(self, table: Table, key: bytes) -> None:
        for hold in self._holds:
            if hold.space.digest == table.space.digest and key in hold.keys and hold.counts(self._loop.now):
                raise PromiseError(f"chunk {key.hex()[:8]} was evicted, though an operator holds it")
