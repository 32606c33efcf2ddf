# SPDX-License-Identifier: Apache-2.0
"""Models of which not all layers need every chunk: chunks in parts, one for each need.

Theory of operation. A part of a chunk is a chunk of its own in the books, under a key of its own: it is stored, pinned
and evicted by itself. A hit is the longest prefix for which every part has what it needs, and only that is pinned. It
is good as a whole or not at all, since a shorter one needs other windows and states; so a Retrieve begins only when all
that it asks for is there, and nothing of it counts as loaded unless all is. What a use touches are the needed chunks,
and what only a shorter hit would need goes first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from kvgrpc.core import types as t
from kvgrpc.core.desk import Desk
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.index import Chunk, Space, Table
from kvgrpc.core.keys import part_keys
from kvgrpc.core.plans import RetrievePlan, StorePlan, WindowStorePlan
from kvgrpc.core.slicing import (
    ABSENT,
    AFTER_FAILURE,
    LOADED,
    MISSING,
    RESIDENT,
    STORED,
    Known,
    PartPlan,
    Plan,
    run_lengths,
)
from kvgrpc.core.types import ALL, Need
from kvgrpc.core.types import ChunkOutcome as Outcome

if TYPE_CHECKING:
    from kvgrpc.core.jobs import Job
    from kvgrpc.core.sessions import Client

WHOLE = (ALL,)
"""The needs of a model whose layers all need everything."""
_WORST = (Outcome.TORN, Outcome.MISSING, Outcome.FAILED, Outcome.REFUSED, Outcome.BEING_WRITTEN, Outcome.STORED)


class Hit(NamedTuple):
    """``size`` chunks of a prefix, and what they need: part after part, (first chunk, place in ``chunks``) of each in
    ``starts``."""

    size: int
    chunks: list[Chunk]
    starts: tuple[tuple[int, int], ...] = ((0, 0),)

    def in_order(self) -> list[Chunk]:
        """As a use touches them: chunk by chunk, so that no part outlives what makes it useful."""
        if len(self.starts) == 1:
            return self.chunks
        ends = [*(place for _, place in self.starts[1:]), len(self.chunks)]
        placed = [
            (first + at, part, chunk)
            for part, ((first, place), end) in enumerate(zip(self.starts, ends, strict=True))
            for at, chunk in enumerate(self.chunks[place:end])
        ]
        placed.sort(key=lambda one: one[:2])
        return [chunk for _, _, chunk in placed]


def find(table: Table, keys: Sequence[bytes], want: int, needs: Sequence[Need], chunk_tokens: int) -> Hit:
    """The longest prefix for which every part has, of all ranks of ``want``, what it needs."""
    get = table.chunks.get
    if needs == WHOLE:
        found: list[Chunk] = []
        for key in keys:
            chunk = get(key)
            if chunk is None or chunk.ready & want != want:
                break
            found.append(chunk)
        return Hit(len(found), found)
    return _find_parted(table, keys, want, needs, chunk_tokens)


def _find_parted(table: Table, keys: Sequence[bytes], want: int, needs: Sequence[Need], chunk_tokens: int) -> Hit:
    get = table.chunks.get
    count = len(keys)
    if needs[0] == ALL:
        gaps = (at for at, key in enumerate(keys) if (chunk := get(key)) is None or chunk.ready & want != want)
        count = next(gaps, count)
    of_part = [part_keys(keys[:count], part) for part in range(len(needs))]

    def there(part: int, at: int) -> bool:
        chunk = get(of_part[part][at])
        return chunk is not None and chunk.ready & want == want

    count = longest(count, needs, there, chunk_tokens)
    chunks: list[Chunk] = []
    starts: list[tuple[int, int]] = []
    for part, need in enumerate(needs):
        starts.append((need.first(count, chunk_tokens), len(chunks)))
        chunks += [table.chunks[key] for key in of_part[part][starts[-1][0] : count]]
    return Hit(count, chunks, tuple(starts))


def longest(count: int, needs: Sequence[Need], there: Callable[[int, int], bool], chunk_tokens: int) -> int:
    """The most chunks up to ``count`` for which all that is needed is there. No need begins later for a shorter hit, so
    a chunk that is missing rules out every hit that reaches beyond it and not further than this one."""
    lows, settled = [count] * len(needs), False  # from there on up to ``count`` all of a part is there
    while not settled:
        settled = True
        for part, need in enumerate(needs):
            at, first = min(lows[part], count), need.first(count, chunk_tokens)
            while at > first and there(part, at - 1):
                at -= 1
            if at > first:
                at = count = at - 1
                settled = False
            lows[part] = at
    return count


def store_plan(desk: Desk, client: Client, command: t.StoreCommand, space: Space) -> Plan:
    """Of all parts."""
    registration, parts = client.sharing(), client.parts
    if space.facts.needs == WHOLE:
        return StorePlan(desk, registration, command, parts[0], space)
    plain = replace(command, policy=replace(command.policy, retention_ns=0))
    kinds = [WindowStorePlan if part.need.window else StorePlan for part in parts]
    plans = [kind(desk, registration, plain, part, space) for kind, part in zip(kinds, parts, strict=True)]
    return PartedStore(desk, command, space, plans)


def retrieve_plan(desk: Desk, client: Client, command: t.RetrieveCommand, job: Job, bit: int) -> Plan:
    """Of what the hit needs of each part, in the range. Refuses: RANGE."""
    registration, parts, chunk_tokens = client.sharing(), client.parts, desk.ledger.limits.chunk_tokens
    if job.space.facts.needs == WHOLE:
        return RetrievePlan(desk, registration, command, parts[0], job, bit)
    if command.range.end % chunk_tokens:
        text = f"layers that do not need everything are loaded up to the end of a chunk of {chunk_tokens} tokens"
        raise Refusal(Reason.RANGE, text, field="range.end")
    plans = [RetrievePlan(desk, registration, command, part, job, bit) for part in parts]
    chunks = range(command.range.start // chunk_tokens, command.range.end // chunk_tokens)
    return PartedRetrieve(desk, job, chunks, plans)


def touch(desk: Desk, table: Table, keys: Sequence[bytes], first_key: int, priority: t.Priority) -> None:
    """A prefix was used; ``keys`` are those from chunk ``first_key`` on."""
    needs, end = table.space.facts.needs, first_key + len(keys)
    if needs != WHOLE:
        placed: list[tuple[int, int, bytes]] = []
        for part, need in enumerate(needs):
            start = max(need.first(end, desk.ledger.limits.chunk_tokens) - first_key, 0)
            placed += [(at, part, key) for at, key in enumerate(part_keys(keys[start:], part), start)]
        keys = [key for *_, key in sorted(placed)]
    desk.index.use(table, keys, priority)


class PartedPlan(Plan):
    """A call on all parts of its chunks, one part after the other."""

    def __init__(self, desk: Desk, chunks: range, plans: Sequence[PartPlan]) -> None:
        self._desk = desk
        self._chunks = chunks
        self.plans = plans
        self.direction = plans[0].direction
        self.num_blocks = sum(plan.num_blocks for plan in plans)
        self.block_ids = [ids for plan in plans for ids in plan.block_ids]
        self.part = 0
        self._left = deque(plans)
        self._flying: deque[PartPlan] = deque()
        """Whose the slices in flight are."""

    @cached_property
    def _block_set(self) -> frozenset[int]:
        return frozenset(chain.from_iterable(self.block_ids)) - {t.NULL_BLOCK}

    def next_slice(self) -> tuple[t.Piece, ...]:
        """As for every plan."""
        while self._left:
            plan = self._left[0]
            self.part = plan.part
            if pieces := plan.next_slice():
                self._flying.append(plan)
                return pieces
            self._left.popleft()
        return ()

    def slice_done(self, now: int, report: t.SliceReport, *, discard: bool) -> bool:
        """As for every plan: no part goes on after another has failed."""
        plan = self._flying.popleft()
        goes_on = plan.slice_done(now, report, discard=discard)
        if not goes_on and not discard:
            for other in self.plans:
                if other is not plan:
                    other.abandon()
                    other.stop(AFTER_FAILURE)
        return goes_on

    def abandon(self) -> None:
        """As for every plan."""
        for plan in self.plans:
            plan.abandon()

    def stop(self, reason: str) -> None:
        """As for every plan."""
        for plan in self.plans:
            plan.stop(reason)
        self._left.clear()

    def finish(self, now: int) -> None:
        """As for every plan."""
        for plan in self.plans:
            plan.finish(now)

    @abstractmethod
    def _outcome(self, at: int) -> tuple[Known, int]:
        """Of a chunk, and the groups (bits) that have it."""

    def _results(self) -> tuple[t.ChunkResult, ...]:
        return run_lengths(self._chunks.start, map(self._outcome, self._chunks))

    def _of(self, at: int) -> list[tuple[Known, int]]:
        """What became of each part of a chunk that the call is about, and its groups."""
        outcomes = [
            (plan.outcomes[at - plan.first], plan.of.group_bits) for plan in self.plans if plan.first <= at < plan.end
        ]
        return [(known, groups) for known, groups in outcomes if known is not None]


class PartedStore(PartedPlan):
    """Stores what the engine has of every part."""

    def __init__(self, desk: Desk, command: t.StoreCommand, space: Space, plans: Sequence[StorePlan]) -> None:
        super().__init__(desk, range(plans[0].first, plans[0].end), plans)
        self._content = command.content
        self._policy = command.policy
        self._space = space
        self._table = space.table

    def _outcome(self, at: int) -> tuple[Known, int]:
        """The worst of its parts, of those that the engine has."""
        known = [one for one, _ in self._of(at) if one != ABSENT]
        there = sum(groups for one, groups in self._of(at) if one in (STORED, RESIDENT))
        worst = (one for outcome in _WORST for one in known if one[0] is outcome)
        return next(worst, RESIDENT if known else ABSENT), there

    def finish(self, now: int) -> None:
        """As for every plan."""
        super().finish(now)
        content, table, needs = self._content, self._table, self._space.facts.needs
        keys = content.keys[: max(self._chunks.stop - content.first_chunk, 0)]
        touch(self._desk, table, keys, content.first_chunk, self._policy.priority)
        if self._policy.retention_ns and table.live and not content.first_chunk:
            here = sum(1 << rank for rank in self._space.facts.forms)
            hit = find(table, keys, here, needs, self._desk.ledger.limits.chunk_tokens)
            self._desk.holds.retain(hit.in_order(), now + self._policy.retention_ns)


class PartedRetrieve(PartedPlan):
    """Loads what the hit needs of every part: all of it, or none of it counts."""

    def __init__(self, desk: Desk, job: Job, chunks: range, plans: Sequence[RetrievePlan]) -> None:
        super().__init__(desk, chunks, plans)
        self._job = job
        self._loads = plans
        self._begun = False

    def next_slice(self) -> tuple[t.Piece, ...]:
        """As for every plan; the first one pins everything, and is empty if something is missing."""
        if not self._begun:
            self._begun = True
            if [plan for plan in self._loads if not plan.whole]:
                for plan in self._loads:
                    plan.give_up()
                self._left.clear()
        return super().next_slice()

    @cached_property
    def _loaded(self) -> bool:
        """Everything of the hit that was asked for."""
        end = len(self._job.keys)
        return all(known == LOADED for plan in self.plans for known in plan.outcomes[: max(end - plan.first, 0)])

    def _outcome(self, at: int) -> tuple[Known, int]:
        """Its blocks hold nothing of use unless all is loaded, and undefined bytes where something was."""
        outcomes = self._of(at)
        if at >= len(self._job.keys):
            return MISSING, 0
        written = sum(groups for (outcome, _), groups in outcomes if outcome in (Outcome.LOADED, Outcome.TORN))
        if self._loaded and all(known == LOADED for known, _ in outcomes):
            return LOADED, written
        if written:
            return (Outcome.TORN, next((why for (_, why), _ in outcomes if why), AFTER_FAILURE)), written
        worst = (known for outcome in _WORST for known, _ in outcomes if known[0] is outcome)
        return next(worst, (Outcome.FAILED, AFTER_FAILURE)), 0

    def finish(self, now: int) -> None:
        """As for every plan."""
        super().finish(now)
        keys = self._job.keys[: self._chunks.stop]
        touch(self._desk, self._job.table, keys, 0, self._job.priority)
