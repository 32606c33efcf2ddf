# SPDX-License-Identifier: Apache-2.0
"""Stores of whole objects by clients without memory: one object at a time is reserved, whatever a stream's length.

A stream is the core's plan of a store, whose turns are taken here as its bytes come. Unlike a store it keeps only the
object at hand in use, since nobody knows how long its peer takes. Slots are filled on the event loop between two calls
of the core, so nothing is in flight that the core does not see, and a slot that is given up is free at once. Chunks in
parts come chunk by chunk, part after part; what is needed of every chunk must come, other parts may be left out, as an
engine leaves out what it does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvgrpc.core import types as t
from kvgrpc.core.cache import Bookkeeper
from kvgrpc.core.checks import check_content, explain_forms
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.geometry import bits_of
from kvgrpc.core.index import Chunk, Space
from kvgrpc.core.parted import PartedStore, touch
from kvgrpc.core.plans import StorePlan
from kvgrpc.core.readings import BY_GROUPS, groups_of
from kvgrpc.core.slicing import ABSENT, Flight, Plan
from kvgrpc.core.slots import Slot


def begin(
    book: Bookkeeper, client_id: str, command: t.StoreCommand, objects: Sequence[t.ObjectForm], kv_rank: int
) -> Filling:
    """``objects``: one for each part of a chunk. Refuses: NOT_ATTACHED, ENGINE_UNKNOWN, ENGINE_DRAINING, SPACE_UNKNOWN,
    SPACE_LIMIT, INVALID_FIELD, RANGE, RANK, GROUP_KIND_UNSUPPORTED, GEOMETRY_MISMATCH."""
    book.check_client(client_id, command.engine_id)
    facts = book.index.facts(command.space.space_base)
    check_content(command, book.limits.chunk_tokens, book.limits)
    identity = facts.identity
    if kv_rank >= identity.kv_world_size:
        text = f"kv_rank {kv_rank} is not below kv_world_size {identity.kv_world_size}"
        raise Refusal(Reason.RANK, text, field="kv_rank")
    parts = _parts(groups_of(facts, book.limits.chunk_tokens), objects)
    book.agree_on_form(None, kv_rank, facts, parts)
    return Filling(book, client_id, command, parts, kv_rank)


def _parts(found: dict[t.Need, tuple[int, ...]], objects: Sequence[t.ObjectForm]) -> tuple[t.Part, ...]:
    """Of a chunk whose parts have these groups. Refuses: GROUP_KIND_UNSUPPORTED, INVALID_FIELD."""
    named = {need: () if [*found] == [t.ALL] else groups for need, groups in found.items()}
    parts = tuple(
        t.Part(number, need, groups, (), one.object_bytes, one.order)
        for number, ((need, groups), one) in enumerate(zip(named.items(), objects, strict=False))
    )
    said, wanted = [one.groups for one in objects], [bits_of(groups) for groups in named.values()]
    if said == [0] and wanted != [0]:
        raise Refusal(Reason.GROUP_KIND_UNSUPPORTED, BY_GROUPS, field="begin.objects")
    if said != wanted:
        text = f"objects have the groups (bits) {said}; those of this model's chunks, in their order, have {wanted}"
        raise Refusal(Reason.INVALID_FIELD, text, field="begin.objects")
    return parts


class PartFilling(StorePlan):
    """Of one part of a stream's chunks."""

    def __init__(self, book: Bookkeeper, command: t.StoreCommand, part: t.Part, space: Space, kv_rank: int) -> None:
        whose = t.Registration(command.engine_id, space.facts.identity, kv_rank, 0, 1, 1, t.Geometry(()), 0, 0, b"")
        super().__init__(book.desk, whose, command, replace(part, groups=()), space)  # no blocks are named
        self.of = part
        self._chunks: list[Chunk] = []
        self.held = self._chunks

    def let_go(self) -> None:
        """The chunk that was opened last is not in use any more."""
        self._desk.index.end_writes(self._chunks)
        self._chunks.clear()

    def leave_out(self, end: int) -> None:
        """The chunks before ``end`` that were not opened have none of it."""
        self._set(self._at, ABSENT, max(end - self._at, 0))
        self._at = max(end, self._at)

    def open(self) -> Slot | None:
        """The slot of the next chunk, or None if nobody wants its bytes."""
        opened = self._reserve(1, self._chunks)
        if opened is not None:
            self.flights.append(Flight([self._at], *opened, resumed=False, partial=False))
        self._at += 1
        return opened[1][0] if opened is not None else None


class Filling:
    """One stream. For each object ``take`` and ``open_next``, and ``done`` when its slot is full; ``close`` however it
    ends, and then ``results``."""

    def __init__(
        self, book: Bookkeeper, client_id: str, command: t.StoreCommand, parts: tuple[t.Part, ...], kv_rank: int
    ) -> None:
        self._book, self._named, self._command = book, (client_id, command.engine_id), command
        self._space, self._kv_rank = book.index.space(command.space), kv_rank
        self._table, self._whole = self._space.table, parts[0].need == t.ALL
        alone = len(parts) == 1 and self._whole
        each = command if alone else replace(command, policy=replace(command.policy, retention_ns=0))
        self.parts = [PartFilling(book, each, part, self._space, kv_rank) for part in parts]
        self._plan: Plan = self.parts[0] if alone else PartedStore(book.desk, command, self._space, self.parts)
        self.first, self.end = self.parts[0].first, self.parts[0].end
        self._taken = self._next = (self.first, 0)
        """(chunk, part) of the object at hand, and the first that may follow."""
        book.calls.streams.append(self._plan)

    def take(self, chunk: int, groups: int) -> int:
        """The object that comes now; its bytes. Those between it and the one before are left out. Refuses:
        INVALID_FIELD when it cannot come now."""
        bits = [part.of.group_bits for part in self.parts]
        at, part = self._next
        due = (at + (part > 0), 0) if self._whole else (self.end - 1, len(bits) - 1)
        if at >= self.end or chunk >= self.end:
            text = f"part.chunk is {chunk}: it is not in the range, or all of that has come"
            raise Refusal(Reason.INVALID_FIELD, text, field="part.chunk")
        if groups not in bits or not self._next <= (chunk, bits.index(groups)) <= due:
            text = f"an object of chunk {chunk} with the groups (bits) {groups} cannot come now; due are chunk {at}'s "
            raise Refusal(Reason.INVALID_FIELD, f"{text}{bits[part:]}", field="part.groups")
        self._taken = chunk, bits.index(groups)
        return self.parts[self._taken[1]].of.object_bytes

    def open_next(self) -> Slot | None:
        """The slot of the object that was taken, or None if nobody wants its bytes. Refuses: NOT_ATTACHED,
        ENGINE_UNKNOWN, ENGINE_DRAINING, GEOMETRY_MISMATCH."""
        self._book.check_client(*self._named)
        facts, own = self._space.facts, [part.of for part in self.parts]
        forms = facts.forms.get(self._kv_rank, ())
        if self._table.live and [part.form for part in forms] != [part.form for part in own]:
            raise Refusal(Reason.GEOMETRY_MISMATCH, explain_forms(own, forms, facts.needs), field="order")
        content, (at, part), (chunk, taken) = self._command.content, self._next, self._taken
        begun = content.keys[: at + (part > 0) - content.first_chunk]
        touch(self._book.desk, self._table, begun, content.first_chunk, self._command.policy.priority)
        for number, one in enumerate(self.parts):
            one.let_go()
            one.leave_out(chunk + (number < taken))
        self._next = (chunk, taken + 1) if taken + 1 < len(self.parts) else (chunk + 1, 0)
        return self.parts[taken].open()

    def done(self, now: int) -> None:
        """The slot is full."""
        self.parts[self._taken[1]].slice_done(now, t.SliceReport(1), discard=False)

    def close(self, now: int) -> None:
        """Nothing comes any more; what has no outcome was not sent. Harmless when repeated."""
        if self._plan in self._book.calls.streams:
            self._book.calls.streams.remove(self._plan)
            at, part = self._next
            for one in self.parts[part:] if part else ():
                one.leave_out(at + 1)
            self._plan.abandon()
            for one in self.parts:
                one.flights.clear()
            self._plan.stop("NOT_SENT")
            self._plan.finish(now)

    @property
    def results(self) -> tuple[t.ChunkResult, ...]:
        """As of a store."""
        return self._plan.results
