# SPDX-License-Identifier: Apache-2.0
"""The core with one rule taken out, to see that the world notices. Patched from outside; the core knows nothing of it.

Each mutant stays consistent with itself: it breaks no assertion of the core, only its promises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

from kvgrpc.core import eviction, plans
from kvgrpc.core.calls import Calls
from kvgrpc.core.index import Chunk, Index, Space
from kvgrpc.core.jobs import Job
from kvgrpc.core.leases import Leases
from kvgrpc.core.parted import PartedRetrieve
from kvgrpc.core.plans import RetrievePlan
from kvgrpc.core.sessions import Client
from kvgrpc.core.slots import Slot, Slots
from kvgrpc.core.states import SlotState
from kvgrpc.core.types import Cleared, Need
from kvgrpc.core.writes import WriteBehind


def no_settling(stack: ExitStack) -> None:
    """A slot that nobody wants any more is free at once, whatever a copy still writes into it."""

    def abort(self: Slots, slot: Slot) -> None:
        self.move(slot, SlotState.FREE)

    stack.enter_context(patch.object(Slots, "abort", abort))


def no_doomed(stack: ExitStack) -> None:
    """Clear leaves what is pinned or being written where lookups and commits find it."""

    def clear(self: Index, space: Space) -> Cleared:
        table = space.table
        cleared = Cleared(table.complete, table.pinned)
        for chunk in list(table.chunks.values()):
            if not chunk.pins and not chunk.writes:
                self.free_ready(chunk)
        return cleared

    stack.enter_context(patch.object(Index, "clear", clear))


def no_reader_once(stack: ExitStack) -> None:
    """A reader that reads again uses up another reader's turn."""

    def finish_read(leases: Leases, job: Job, chunk_at: int, bit: int) -> None:
        left = job.lease.remaining[chunk_at] if chunk_at < len(job.lease.remaining) else 0
        leases.release(job.lease, chunk_at, chunk_at + 1, bit if left & bit else left & -left)

    stack.enter_context(patch.object(plans, "finish_read", finish_read))


def no_tail_first(stack: ExitStack) -> None:
    """Uses of a prefix end head first."""

    def heads_first(chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        return chunks

    stack.enter_context(patch.object(eviction, "touch_order", heads_first))


def no_fence(stack: ExitStack) -> None:
    """A fence answers at once, while a copy of its call runs on."""
    fence = Calls.fence

    def at_once(self: Calls, now: int, client: Client, call_ids: Sequence[int]) -> tuple[int, ...]:
        fence(self, now, client, call_ids)
        return ()

    stack.enter_context(patch.object(Calls, "fence", at_once))


def no_read_pin(stack: ExitStack) -> None:
    """A retrieve relies on its lease alone: when that ends, what a copy still reads may be evicted."""
    pin_resident, finish = RetrievePlan._pin_resident, RetrievePlan.finish

    def unpinned(self: RetrievePlan) -> list[Chunk]:
        chunks = pin_resident(self)
        self._desk.index.unpin(chunks)
        return [replace(chunk, slots=dict(chunk.slots)) for chunk in chunks]

    def end(self: RetrievePlan, now: int) -> None:
        self.pinned = []
        finish(self, now)

    stack.enter_context(patch.object(RetrievePlan, "_pin_resident", unpinned))
    stack.enter_context(patch.object(RetrievePlan, "finish", end))


def no_write_pin(stack: ExitStack) -> None:
    """What is being written to a tier is in nobody's use: it may be evicted, or freed by a Clear."""
    launch, done = WriteBehind._launch, WriteBehind.write_done

    def unpinned(self: WriteBehind) -> None:
        before = set(self.flights)
        launch(self)
        self._index.end_writes([self.flights[one].chunk for one in self.flights if one not in before])

    def end(self: WriteBehind, write_id: int, ok: bool, no_room: bool) -> None:
        self.flights[write_id].chunk.writes += 1
        done(self, write_id, ok, no_room)

    stack.enter_context(patch.object(WriteBehind, "_launch", unpinned))
    stack.enter_context(patch.object(WriteBehind, "write_done", end))


def no_other_needs(stack: ExitStack) -> None:
    """A hit needs of windows and states what the last chunk has."""

    def first(self: Need, chunks: int, chunk_tokens: int) -> int:
        return max(chunks - 1, 0) if self.window else 0

    stack.enter_context(patch.object(Need, "first", first))


def no_whole_hit(stack: ExitStack) -> None:
    """A hit of which one part is not there any more is loaded as far as the others go."""
    stack.enter_context(patch.object(RetrievePlan, "whole", property(lambda self: self.pinned is None or True)))
    stack.enter_context(patch.object(PartedRetrieve, "_loaded", True))


MUTANTS: dict[str, Callable[[ExitStack], None]] = {
    mutant.__name__.replace("_", "-"): mutant
    for mutant in (
        no_settling,
        no_read_pin,
        no_doomed,
        no_reader_once,
        no_tail_first,
        no_fence,
        no_write_pin,
        no_other_needs,
        no_whole_hit,
    )
}


@contextmanager
def mutated(name: str | None) -> Iterator[None]:
    """Inside, the core lacks the rule; None: it is whole."""
    with ExitStack() as stack:
        if name is not None:
            MUTANTS[name](stack)
        yield
