# SPDX-License-Identifier: Apache-2.0
"""Copying down to lower tiers what stores have brought, behind their backs.

An object that is to be written waits in a bounded queue for each tier, where nothing keeps it: when it is evicted or
cleared meanwhile it is not written. While it is written its chunk is in use, as by a store: it is not evicted, and what
a Clear takes away stays DOOMED until the write is reported. So a tier that is slow costs the objects that do not get
their turn, and one that fails gets one object at a time until one succeeds; stores and lookups never wait.

Tiers do not tell what they drop. So it is believed for ten minutes that they have what they were given; a use after
that forgets it, and the chunk is offered anew, as its policy says. A tier that still has it is only asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.index import Chunk, Index, Space
from kvgrpc.core.keys import describe, object_name, part_of
from kvgrpc.core.ledger import Ledger
from kvgrpc.core.limits import S
from kvgrpc.core.records import Records
from kvgrpc.core.slots import Slot
from kvgrpc.core.states import FREE
from kvgrpc.core.types import ObjectName, WriteObject, WritePolicy

BELIEVED_NS = 600 * S
_AHEAD_MOST = 1024
"""Chunks that are looked at, from the next victim on, for some that were not written yet."""


@dataclass(eq=False, slots=True)
class Write:
    """One object on its way into a tier."""

    lane: Lane
    chunk: Chunk
    kv_rank: int
    slot: Slot


@dataclass(eq=False, slots=True)
class Lane:
    """What one tier is to get. ``failing``: its last write failed."""

    tier: str
    number: int
    queue: deque[tuple[Chunk, int]] = field(default_factory=deque[tuple[Chunk, int]])
    flights: int = 0
    flying_bytes: int = 0
    failing: bool = False


class WriteBehind:
    """Says what is written when. A chunk's ``kept`` has a bit for each tier and KV rank: it has the object, or will, as
    was last said at ``offered_ns``."""

    def __init__(self, ledger: Ledger, index: Index, records: Records, tiers: tuple[str, ...]) -> None:
        self._ledger = ledger
        self._index = index
        self._records = records
        self.lanes = [Lane(tier, number) for number, tier in enumerate(tiers)]
        self.flights: dict[int, Write] = {}
        self.policies: dict[str, WritePolicy] = {}
        """By model; "" is any other."""

    def set_policy(self, model: str, policy: WritePolicy | None, most: int) -> WritePolicy:
        """What is in force then. Refuses: SPACE_LIMIT."""
        if policy is None:
            self.policies.pop(model, None)
        elif model not in self.policies and len(self.policies) >= most:
            raise Refusal(Reason.SPACE_LIMIT, "too many models have a policy on this server", resource="spaces")
        else:
            self.policies[model] = policy
        return self._policy_of(model)

    def _policy_of(self, model: str) -> WritePolicy:
        return self.policies.get(model) or self.policies.get("", WritePolicy.THROUGH)

    def policy(self, space: Space) -> WritePolicy:
        """In force."""
        return self._policy_of(space.facts.identity.model)

    # ---- what happens -----------------------------------------------------------------------------------------------

    def stored(self, now: int, chunks: Sequence[Chunk], kv_rank: int) -> None:
        """A store has filled these objects of one table."""
        self._records.ready(chunks, kv_rank)
        if self.lanes and chunks and chunks[0].table.live:
            policy = self.policy(chunks[0].table.space)
            if policy is WritePolicy.THROUGH:
                self._offer(now, chunks, 1 << kv_rank)
            elif policy is WritePolicy.EVICTION:
                self._write_ahead(now)
            self._launch()

    def used(self, now: int, chunks: Sequence[Chunk]) -> None:
        """A lookup has found these chunks of one table."""
        if not self.lanes or not chunks:
            return
        policy, wanted = self.policy(chunks[0].table.space), self._forgotten(now, chunks)
        if policy is WritePolicy.SECOND_USE:
            full = (1 << chunks[0].table.space.facts.identity.kv_world_size * len(self.lanes)) - 1
            wanted = [chunk for chunk in chunks if chunk.kept != full]
        if wanted and policy in (WritePolicy.THROUGH, WritePolicy.SECOND_USE):
            self._offer(now, wanted, -1)
            self._launch()

    def _forgotten(self, now: int, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Those that nothing is believed of any more. While others wait to be written they are believed on: what is new
        goes first, and nothing is queued twice."""
        if any(lane.queue for lane in self.lanes):
            return []
        old = [chunk for chunk in chunks if now - chunk.offered_ns >= BELIEVED_NS and not chunk.writes]
        for chunk in old:
            chunk.kept = 0
        return old

    def has(self, now: int, chunk: Chunk, kv_rank: int, tier: str) -> None:
        """The tier has the object: it has just come from there."""
        self._records.ready((chunk,), kv_rank)
        chunk.offered_ns = now
        for lane in self.lanes:
            if lane.tier == tier:
                chunk.kept |= self._bit(lane, kv_rank)

    def write_done(self, write_id: int, ok: bool, no_room: bool) -> None:
        """A write has ended; nothing reads its slot any more. ``no_room``: it failed, but the tier is well."""
        write = self.flights.pop(write_id)
        lane = write.lane
        lane.flights -= 1
        lane.flying_bytes -= write.slot.taken_bytes
        lane.failing = not ok and not no_room
        self._ledger.counters["written_objects" if ok else "failed_writes"] += 1
        if not ok:
            self._skip(lane, write.chunk, write.kv_rank)
            while lane.queue and lane.failing:
                self._skip(lane, *lane.queue.popleft())
        self._index.end_writes((write.chunk,))
        self._launch()

    # ---- queues -----------------------------------------------------------------------------------------------------

    def _bit(self, lane: Lane, kv_rank: int) -> int:
        return 1 << kv_rank * len(self.lanes) + lane.number

    def _skip(self, lane: Lane, chunk: Chunk, kv_rank: int) -> None:
        chunk.kept &= ~self._bit(lane, kv_rank)
        self._ledger.counters["skipped_writes"] += 1

    def _offer(self, now: int, chunks: Iterable[Chunk], ranks: int) -> None:
        """Queues those ready objects of these KV ranks that a tier does not have."""
        most = self._ledger.limits.writes_queued
        for chunk in chunks:
            if all(lane.failing and lane.flights + len(lane.queue) for lane in self.lanes):
                self._ledger.counters["skipped_writes"] += 1
                break  # nobody takes more for now; the rest is not even counted
            for rank in chunk.slots:
                if not (chunk.ready & ranks) >> rank & 1:
                    continue
                for lane in self.lanes:
                    bit = self._bit(lane, rank)
                    if chunk.kept & bit:
                        continue
                    if len(lane.queue) >= (1 - lane.flights if lane.failing else most):
                        self._ledger.counters["skipped_writes"] += 1
                        continue
                    chunk.kept |= bit
                    chunk.offered_ns = now
                    lane.queue.append((chunk, rank))

    def _write_ahead(self, now: int) -> None:
        """When memory becomes short, what is next to be evicted is written before it is."""
        slots = self._index.slots
        ahead = slots.total_bytes * self._ledger.limits.write_ahead_share - slots.bytes_by_state[FREE]
        order = chain.from_iterable(queue.order for queue in self._index.eviction.queues)
        for chunk in islice(order, _AHEAD_MOST):
            if ahead <= 0:
                break
            ahead -= chunk.ready_bytes
            if self.policy(chunk.table.space) is WritePolicy.EVICTION:
                self._offer(now, (chunk,), -1)

    def _launch(self) -> None:
        """Orders as many writes as may be under way."""
        limits, total_bytes = self._ledger.limits, self._index.slots.total_bytes
        for lane in self.lanes:
            while lane.queue and lane.flights < (1 if lane.failing else limits.writes_in_flight):
                chunk, rank = lane.queue[0]
                slot = chunk.slots.get(rank)
                if slot is None or not chunk.table.live or not chunk.ready >> rank & 1:
                    lane.queue.popleft()
                    self._skip(lane, chunk, rank)
                    continue
                if lane.flights and lane.flying_bytes + slot.taken_bytes > total_bytes * limits.write_share:
                    break
                lane.queue.popleft()
                lane.flights += 1
                lane.flying_bytes += slot.taken_bytes
                chunk.writes += 1
                write_id = self._ledger.next_id()
                self.flights[write_id] = Write(lane, chunk, rank, slot)
                self._ledger.outbox.append(WriteObject(write_id, lane.tier, _name(chunk, rank, slot), slot.extents))


def _name(chunk: Chunk, kv_rank: int, slot: Slot) -> ObjectName:
    space = chunk.table.space
    order = space.facts.forms[kv_rank][part_of(chunk.key)].order
    name = object_name(space.digest, space.version, chunk.key, kv_rank, order)
    return ObjectName(name, slot.size_bytes, describe(space.digest, space.version, chunk.key, kv_rank, order))
