# SPDX-License-Identifier: Apache-2.0
"""Stores of whole objects by clients without memory: one chunk at a time is reserved, whatever a stream's length.

A stream is the core's plan of a store, whose turns are taken here as its bytes come. Unlike a store it keeps only the
chunk at hand in use, since nobody knows how long its peer takes. Slots are filled on the event loop between two calls
of the core, so nothing is in flight that the core does not see, and a slot that is given up is free at once.
"""

from __future__ import annotations

from kvgrpc.core import types as t
from kvgrpc.core.cache import Bookkeeper
from kvgrpc.core.checks import check_content, explain_forms
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.index import Chunk
from kvgrpc.core.plans import StorePlan
from kvgrpc.core.readings import IN_PARTS
from kvgrpc.core.slicing import Flight
from kvgrpc.core.slots import Slot


def begin(book: Bookkeeper, client_id: str, command: t.StoreCommand, part: t.Part, kv_rank: int) -> Filling:
    """Refuses: NOT_ATTACHED, ENGINE_UNKNOWN, ENGINE_DRAINING, SPACE_UNKNOWN, SPACE_LIMIT, INVALID_FIELD, RANGE, RANK,
    GROUP_KIND_UNSUPPORTED, GEOMETRY_MISMATCH."""
    book.check_client(client_id, command.engine_id)
    facts = book.index.facts(command.space.space_base)
    check_content(command, book.limits.chunk_tokens, book.limits)
    identity = facts.identity
    if kv_rank >= identity.kv_world_size:
        text = f"kv_rank {kv_rank} is not below kv_world_size {identity.kv_world_size}"
        raise Refusal(Reason.RANK, text, field="kv_rank")
    if not all(form.startswith(("opaque:", "token-major:")) for form in identity.stored_form.split("+")):
        raise Refusal(Reason.GROUP_KIND_UNSUPPORTED, IN_PARTS, field="space.space_base")
    book.agree_on_form(None, kv_rank, facts, (part,))
    return Filling(book, client_id, command, part, kv_rank)


class Filling(StorePlan):
    """One stream. ``open_next`` for each chunk of the range, and ``done`` when its slot is full; ``close`` however it
    ends, and then ``results``."""

    def __init__(self, book: Bookkeeper, client_id: str, command: t.StoreCommand, part: t.Part, kv_rank: int) -> None:
        space = book.index.space(command.space)
        whose = t.Registration(command.engine_id, space.facts.identity, kv_rank, 0, 1, 1, t.Geometry(()), 0, 0, b"")
        super().__init__(book.desk, whose, command, part, space)
        self._book, self._named = book, (client_id, command.engine_id)
        self._chunks: list[Chunk] = []
        self.held = self._chunks
        book.calls.streams.append(self)

    def open_next(self) -> Slot | None:
        """The slot of the next chunk, or None if nobody wants its bytes. Refuses: NOT_ATTACHED, ENGINE_UNKNOWN,
        ENGINE_DRAINING, GEOMETRY_MISMATCH."""
        self._book.check_client(*self._named)
        forms = self._space.facts.forms.get(self._kv_rank, ())
        if self._table.live and [part.form for part in forms] != [self.of.form]:
            raise Refusal(Reason.GEOMETRY_MISMATCH, explain_forms((self.of,), forms, (self.of.need,)), field="order")
        index, prefix = self._desk.index, self._keys[: self._at - self._first_key]
        index.use(self._table, prefix, self._policy.priority)
        index.end_writes(self._chunks)
        self._chunks.clear()
        opened = self._reserve(1, self._chunks)
        if opened is not None:
            self.flights.append(Flight([self._at], *opened, resumed=False, partial=False))
        self._at += 1
        return opened[1][0] if opened is not None else None

    def done(self, now: int) -> None:
        """The slot is full."""
        self.slice_done(now, t.SliceReport(1), discard=False)

    def close(self, now: int) -> None:
        """Nothing comes any more; what has no outcome was not sent. Harmless when repeated."""
        if self in self._book.calls.streams:
            self._book.calls.streams.remove(self)
            self.abandon()
            self.flights.clear()
            self.stop("NOT_SENT")
            self.finish(now)
