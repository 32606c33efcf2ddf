# SPDX-License-Identifier: Apache-2.0
"""Hit rates of eviction policies on a trace of prefix block hashes: ``python -m benchmarks.eviction [TRACE]``

A request's blocks are looked up from the first on, up to the first that is missing; then all of them are inserted. The
hit rate is the share of all blocks that were found. ``core`` is the order that the server evicts in
(``kvgrpc/core/eviction.py``), asked through its own interface; the others are small models of well-known policies, for
comparison; ``bound`` knows the future.
"""

from __future__ import annotations

import argparse
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Protocol

from kvgrpc.cli.trace.file import read_trace
from kvgrpc.cli.trace.replay import CoreOrder

TRACE = Path(__file__).parent / "data" / "conversation_trace.jsonl.gz"
SIZES = (1_000, 3_000, 10_000, 30_000)
Requests = Sequence[Sequence[int]]


class Policy(Protocol):
    """Holds at most as many blocks as it was made for."""

    def __contains__(self, block: int) -> bool: ...

    def use(self, blocks: Sequence[int], found: int) -> None:
        """A request: its first ``found`` blocks were there, the others are inserted now."""
        ...


class Fifo:
    """First in, first out."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._order: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._order

    def use(self, blocks: Sequence[int], found: int) -> None:
        for block in blocks[found:]:
            if block not in self._order:
                self._order[block] = None
        while len(self._order) > self._size:
            self._order.popitem(last=False)


class Lru:
    """Least recently used, tails of a prompt before its head."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._order: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._order

    def use(self, blocks: Sequence[int], found: int) -> None:
        for block in reversed(blocks):
            self._order[block] = None
            self._order.move_to_end(block)
        while len(self._order) > self._size:
            self._order.popitem(last=False)


class Core:
    """The server's own order; every block has one byte."""

    def __init__(self, size: int) -> None:
        self._order = CoreOrder(size)

    def __contains__(self, block: int) -> bool:
        return block in self._order

    def use(self, blocks: Sequence[int], found: int) -> None:
        self._order.use(blocks, 1)


class Arc:
    """Adaptive replacement: what was used once, what was used again, and ghosts of both that move the border."""

    def __init__(self, size: int) -> None:
        self._size, self._once_most = size, 0.0
        self._once, self._often, self._ghost_once, self._ghost_often = (OrderedDict[int, None]() for _ in range(4))

    def __contains__(self, block: int) -> bool:
        return block in self._once or block in self._often

    def use(self, blocks: Sequence[int], found: int) -> None:
        for block in reversed(blocks):
            self._use(block)

    def _use(self, block: int) -> None:
        once, often, ghost_once, ghost_often = self._once, self._often, self._ghost_once, self._ghost_often
        if block in self:
            once.pop(block, None)
            often[block] = None
            often.move_to_end(block)
            return
        if block in ghost_once:
            self._once_most = min(self._size, self._once_most + max(1, len(ghost_often) / len(ghost_once)))
            del ghost_once[block]
            self._replace(False)
            often[block] = None
            return
        if block in ghost_often:
            self._once_most = max(0, self._once_most - max(1, len(ghost_once) / len(ghost_often)))
            del ghost_often[block]
            self._replace(True)
            often[block] = None
            return
        if len(once) + len(ghost_once) >= self._size:
            if len(once) < self._size:
                ghost_once.popitem(last=False)
                self._replace(False)
            else:
                once.popitem(last=False)
        elif len(once) + len(often) + len(ghost_once) + len(ghost_often) >= self._size:
            if len(once) + len(often) + len(ghost_once) + len(ghost_often) >= 2 * self._size:
                ghost_often.popitem(last=False)
            self._replace(False)
        once[block] = None

    def _replace(self, was_often: bool) -> None:
        if len(self._once) + len(self._often) < self._size:
            return
        more = len(self._once) > self._once_most or (was_often and len(self._once) == self._once_most)
        if self._once and (more or not self._often):
            self._ghost_once[self._once.popitem(last=False)[0]] = None
        else:
            self._ghost_often[self._often.popitem(last=False)[0]] = None


class S3Fifo:
    """A small queue for the new, a main queue with second chances, and a long memory of what left the small one."""

    def __init__(self, size: int) -> None:
        self._size, self._small_most, self._ghost_most = size, max(size // 10, 1), size * 10
        self._uses: dict[int, int] = {}
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghost: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._uses

    def use(self, blocks: Sequence[int], found: int) -> None:
        for block in reversed(blocks):
            if block in self._uses:
                self._uses[block] = min(self._uses[block] + 1, 3)
                continue
            self._uses[block] = 0
            (self._main if self._ghost.pop(block, 0) is None else self._small).append(block)
            while len(self._uses) > self._size:
                self._evict()

    def _evict(self) -> None:
        if len(self._small) > self._small_most or not self._main:
            block = self._small.popleft()
            if self._uses[block]:
                self._uses[block] = 0
                self._main.append(block)
                return
            self._ghost[block] = None
            if len(self._ghost) > self._ghost_most:
                self._ghost.popitem(last=False)
        else:
            block = self._main.popleft()
            if self._uses[block]:
                self._uses[block] -= 1
                self._main.append(block)
                return
        del self._uses[block]


class Bound:
    """Evicts what is used last of all in the future, also what has just come."""

    def __init__(self, size: int, requests: Requests) -> None:
        self._size, self._now = size, 0
        self._when: dict[int, list[int]] = {}
        for number, blocks in enumerate(requests):
            for block in blocks:
                self._when.setdefault(block, []).append(number)
        self._next: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def __contains__(self, block: int) -> bool:
        return block in self._next

    def use(self, blocks: Sequence[int], found: int) -> None:
        for place, block in enumerate(blocks):
            when = self._when[block]
            at = bisect_right(when, self._now)
            self._next[block] = upcoming = when[at] if at < len(when) else 1 << 40
            heappush(self._heap, (-(upcoming * 4096 + min(place, 4095)), block))
        self._now += 1
        while len(self._next) > self._size:
            key, block = heappop(self._heap)
            if block in self._next and -key // 4096 == self._next[block]:
                del self._next[block]
        if len(self._heap) > 8 * self._size + 4096:
            self._heap = [(key, block) for key, block in self._heap if -key // 4096 == self._next.get(block, -1)]
            heapify(self._heap)


POLICIES: dict[str, Callable[[int], Policy]] = {"fifo": Fifo, "lru": Lru, "core": Core, "arc": Arc, "s3-fifo": S3Fifo}


def load(path: Path) -> list[list[int]]:
    """The blocks of each request, in the order of arrival."""
    return [list(call.chunks) for call in read_trace(path)]


def hit_rate(policy: Policy, requests: Requests) -> float:
    """The share of all blocks that were found."""
    hits = total = 0
    for blocks in requests:
        found = 0
        while found < len(blocks) and blocks[found] in policy:
            found += 1
        policy.use(blocks, found)
        hits += found
        total += len(blocks)
    return hits / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path, default=TRACE)
    requests = load(parser.parse_args().trace)
    print("policy  " + "".join(f"{size:>9,}" for size in SIZES))
    for name, make in POLICIES.items():
        print(f"{name:8}" + "".join(f"{hit_rate(make(size), requests):9.3f}" for size in SIZES))
    print(f"{'bound':8}" + "".join(f"{hit_rate(Bound(size, requests), requests):9.3f}" for size in SIZES))


if __name__ == "__main__":
    main()
