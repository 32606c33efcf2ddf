# SPDX-License-Identifier: Apache-2.0
"""What is cached: spaces, their tables, and in them chunks with the objects of their KV ranks.

A table is the memory of one space between two Clears. Clear swaps the table for an empty one, which is O(1) and makes
everything that was stored, or is being stored, impossible to find or commit; the dead table's chunks are reclaimed in
bounded turns, those in use when their last user lets go.
"""

from __future__ import annotations

from collections import deque

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.eviction import Account, Eviction
from kvgrpc.core.keys import fingerprint, space_base, space_digest
from kvgrpc.core.ledger import Ledger
from kvgrpc.core.slots import Slot, Slots
from kvgrpc.core.states import SlotState
from kvgrpc.core.types import Cleared, Priority, SpaceIdentity, SpaceRef, SpaceStatus


class Chunk:
    """One chunk of one table.

    ``ready`` and ``writing`` are bit sets of KV ranks. ``pins`` counts leases and running reads, ``writes`` slots being
    filled and stores that still run, ``holds`` retention and operator pins. It is queued for eviction exactly while all
    three are zero and some rank is ready.
    """

    __slots__ = (
        "account",
        "holds",
        "key",
        "pins",
        "priority",
        "ready",
        "ready_bytes",
        "slots",
        "table",
        "writes",
        "writing",
    )

    def __init__(self, key: bytes, table: Table, account: Account) -> None:
        self.key = key
        self.table = table
        self.account = account
        self.slots: dict[int, Slot] = {}
        self.ready = 0
        self.writing = 0
        self.ready_bytes = 0
        self.pins = 0
        self.writes = 0
        self.holds = 0
        self.priority = Priority.NORMAL


class Table:
    """Chunks of a space since its last Clear. ``live`` until the next one."""

    __slots__ = ("chunks", "complete", "live", "pinned", "space", "used_bytes")

    def __init__(self, space: Space) -> None:
        self.space = space
        self.chunks: dict[bytes, Chunk] = {}
        self.live = True
        self.complete = 0
        self.pinned = 0
        self.used_bytes = 0


class BaseFacts:
    """An identity that engines have named: its weights generation, and how long one rank's objects are."""

    __slots__ = ("all_ranks", "base", "generation", "identity", "object_bytes")

    def __init__(self, base: bytes, identity: SpaceIdentity) -> None:
        self.base = base
        self.identity = identity
        self.generation = 0
        self.all_ranks = (1 << identity.kv_world_size) - 1
        self.object_bytes: dict[int, int] = {}


class Space:
    """One space: an identity, a LoRA adapter and a salt."""

    __slots__ = ("account", "digest", "facts", "ref", "table")

    def __init__(self, ref: SpaceRef, facts: BaseFacts, account: Account) -> None:
        self.ref = ref
        self.facts = facts
        self.account = account
        self.digest = space_digest(ref)
        self.table = Table(self)


class Index:
    """All spaces, and the use of their chunks."""

    def __init__(self, ledger: Ledger, arena_bytes: int) -> None:
        self._ledger = ledger
        self.slots = Slots(arena_bytes, ledger.limits.page_bytes)
        self.eviction = Eviction()
        self.bases: dict[bytes, BaseFacts] = {}
        self.spaces: dict[SpaceRef, Space] = {}
        self.accounts: dict[str, Account] = {}
        self.dead: deque[Table] = deque()
        self.pinned_bytes = 0
        self.held_bytes = 0

    # ---- spaces -----------------------------------------------------------------------------------------------------

    def name_base(self, identity: SpaceIdentity) -> BaseFacts:
        """Remembers an identity. Refuses: SPACE_LIMIT."""
        base = space_base(identity, self._ledger.limits.chunk_tokens)
        facts = self.bases.get(base)
        if facts is None:
            if len(self.bases) >= self._ledger.limits.spaces:
                raise Refusal(Reason.SPACE_LIMIT, "too many identities are in use on this server", resource="spaces")
            facts = self.bases[base] = BaseFacts(base, identity)
        return facts

    def facts(self, base: bytes) -> BaseFacts:
        facts = self.bases.get(base)
        if facts is None:
            text = "this server does not know the space_base; register, or send the identity in Handshake, again"
            raise Refusal(Reason.SPACE_UNKNOWN, text, field="space.space_base")
        return facts

    def space(self, ref: SpaceRef) -> Space:
        """The space, made now if need be. Refuses: SPACE_UNKNOWN, SPACE_LIMIT."""
        space = self.spaces.get(ref)
        if space is None:
            facts = self.facts(ref.space_base)
            if len(self.spaces) >= self._ledger.limits.spaces:
                self._drop_empty_spaces()
            account = self.accounts.get(ref.cache_salt)
            if account is None:
                account = self.accounts[ref.cache_salt] = Account()
            space = self.spaces[ref] = Space(ref, facts, account)
        return space

    def _drop_empty_spaces(self) -> None:
        """Forgets every space without data; a running call that still names its table finds it dead."""
        for ref, space in list(self.spaces.items()):
            if not space.table.chunks:
                space.table.live = False
                del self.spaces[ref]
        if len(self.spaces) >= self._ledger.limits.spaces:
            raise Refusal(Reason.SPACE_LIMIT, "too many spaces hold data; clear some", resource="spaces")
        in_use = {space.account for space in self.spaces.values()}
        for salt, account in list(self.accounts.items()):
            if account not in in_use and not account.used_bytes and account.quota_bytes is None:
                del self.accounts[salt]

    def statuses(self) -> tuple[SpaceStatus, ...]:
        return tuple(
            SpaceStatus(
                space_base=space.ref.space_base,
                identity=space.facts.identity,
                lora=space.ref.lora,
                salt_fingerprint=fingerprint(space.ref.cache_salt) if space.ref.cache_salt else "",
                generation=space.facts.generation,
                chunks=space.table.complete,
                bytes=space.table.used_bytes,
                pinned_chunks=space.table.pinned,
            )
            for space in self.spaces.values()
            if space.table.chunks
        )

    # ---- use --------------------------------------------------------------------------------------------------------

    def pin(self, chunk: Chunk) -> None:
        """One more lease or read holds the chunk."""
        if not chunk.pins:
            if not chunk.writes and not chunk.holds:
                self.eviction.remove(chunk)
            chunk.table.pinned += 1
            self.pinned_bytes += chunk.ready_bytes
        chunk.pins += 1

    def unpin(self, chunk: Chunk) -> None:
        """One less."""
        chunk.pins -= 1
        if not chunk.pins:
            chunk.table.pinned -= 1
            self.pinned_bytes -= chunk.ready_bytes
            self._rest(chunk)

    def hold(self, chunk: Chunk) -> None:
        """One more retention or operator pin keeps the chunk."""
        if not chunk.holds:
            if not chunk.writes and not chunk.pins:
                self.eviction.remove(chunk)
            self.held_bytes += chunk.ready_bytes
        chunk.holds += 1

    def unhold(self, chunk: Chunk) -> None:
        chunk.holds -= 1
        if not chunk.holds:
            self.held_bytes -= chunk.ready_bytes
            self._rest(chunk)

    def begin_write(self, chunk: Chunk) -> None:
        """One more slot is being filled, or one more running store has a part in the chunk."""
        if not chunk.writes and not chunk.pins and not chunk.holds:
            self.eviction.remove(chunk)
        chunk.writes += 1

    def end_write(self, chunk: Chunk) -> None:
        chunk.writes -= 1
        if not chunk.writes:
            self._rest(chunk)

    def touch(self, chunk: Chunk, priority: Priority) -> None:
        """The chunk was used just now, by a request of this priority."""
        queued = not chunk.pins and not chunk.writes and not chunk.holds and chunk.ready
        if queued:
            self.eviction.remove(chunk)
        chunk.priority = max(chunk.priority, priority)
        if queued:
            self.eviction.add(chunk)

    def set_priority(self, chunk: Chunk, priority: Priority) -> None:
        """For a chunk that is in use: raises it; a new one may also start LOW."""
        chunk.priority = priority if not chunk.ready else max(chunk.priority, priority)

    def _rest(self, chunk: Chunk) -> None:
        """A use ended: what nobody uses is evictable, or freed if its table is dead."""
        if chunk.pins or chunk.writes:
            return
        if not chunk.table.live:
            self.free_ready(chunk)
        elif chunk.ready and not chunk.holds:
            self.eviction.add(chunk)
        self._forget_if_empty(chunk)

    # ---- objects ----------------------------------------------------------------------------------------------------

    def begin_object(self, table: Table, key: bytes, kv_rank: int, slot: Slot) -> Chunk:
        """A WRITING slot becomes the object of this chunk and rank."""
        chunk = table.chunks.get(key)
        if chunk is None:
            chunk = table.chunks[key] = Chunk(key, table, table.space.account)
        self.begin_write(chunk)
        chunk.writing |= 1 << kv_rank
        chunk.slots[kv_rank] = slot
        table.used_bytes += slot.taken_bytes
        chunk.account.used_bytes += slot.taken_bytes
        return chunk

    def commit_object(self, chunk: Chunk, kv_rank: int) -> bool:
        """The object's bytes are complete: it can be found from now on. False, and freed, when its table is dead."""
        slot = chunk.slots[kv_rank]
        if not may_commit(chunk, slot):
            self.abort_object(chunk, kv_rank)
            return False
        chunk.writing &= ~(1 << kv_rank)
        self.slots.move(slot, SlotState.READY)
        chunk.ready |= 1 << kv_rank
        chunk.ready_bytes += slot.taken_bytes
        if chunk.pins:
            self.pinned_bytes += slot.taken_bytes
        if chunk.holds:
            self.held_bytes += slot.taken_bytes
        if chunk.ready == chunk.table.space.facts.all_ranks:
            chunk.table.complete += 1
        self.end_write(chunk)
        return True

    def abort_object(self, chunk: Chunk, kv_rank: int) -> None:
        """The object will not be committed. Its memory is free, or settles while its copy is in flight."""
        slot = chunk.slots.pop(kv_rank)
        chunk.writing &= ~(1 << kv_rank)
        self._uncount(chunk, slot)
        self.slots.abort(slot)
        self.end_write(chunk)

    def free_ready(self, chunk: Chunk) -> None:
        """Frees every complete object of a chunk that nobody uses."""
        if chunk.ready == chunk.table.space.facts.all_ranks:
            chunk.table.complete -= 1
        for kv_rank in [rank for rank in chunk.slots if chunk.ready >> rank & 1]:
            slot = chunk.slots.pop(kv_rank)
            self._uncount(chunk, slot)
            self.slots.move(slot, SlotState.FREE)
        if chunk.holds:
            self.held_bytes -= chunk.ready_bytes
        chunk.ready = 0
        chunk.ready_bytes = 0

    def _uncount(self, chunk: Chunk, slot: Slot) -> None:
        chunk.table.used_bytes -= slot.taken_bytes
        chunk.account.used_bytes -= slot.taken_bytes

    def _forget_if_empty(self, chunk: Chunk) -> None:
        if not chunk.slots and chunk.table.chunks.get(chunk.key) is chunk:
            del chunk.table.chunks[chunk.key]

    # ---- room -------------------------------------------------------------------------------------------------------

    def reserve(self, space: Space, size_bytes: int) -> Slot | str:
        """A WRITING slot, making room if need be; or why not: OBJECT_TOO_LARGE, QUOTA, NO_ROOM, SETTLING_LIMIT."""
        slots = self.slots
        cost = slots.cost_bytes(size_bytes)
        if cost > slots.total_bytes:
            return "OBJECT_TOO_LARGE"
        settling = slots.bytes_by_state[SlotState.SETTLING]
        if settling > slots.total_bytes * self._ledger.limits.settling_share:
            return "SETTLING_LIMIT"
        account = space.account
        turns = self._ledger.limits.victims_per_turn
        if account.quota_bytes is not None:
            while account.used_bytes + cost > account.quota_bytes:
                victim = self.eviction.victim(account)
                if victim is None or not turns or cost > account.quota_bytes:
                    return "QUOTA"
                self.evict(victim)
                turns -= 1
        slot = slots.reserve(size_bytes)
        while slot is None:
            if not turns or not self._make_room():
                return "NO_ROOM"
            turns -= 1
            slot = slots.reserve(size_bytes)
        return slot

    def _make_room(self) -> bool:
        if self.reclaim(1):
            return True
        victim = self.eviction.victim()
        if victim is None:
            return False
        self.evict(victim)
        return True

    def evict(self, chunk: Chunk) -> None:
        """Frees a queued chunk."""
        self._ledger.counters["evicted_chunks"] += 1
        self.eviction.remove(chunk)
        self.free_ready(chunk)
        self._forget_if_empty(chunk)

    # ---- Clear ------------------------------------------------------------------------------------------------------

    def clear(self, space: Space) -> Cleared:
        """Forgets everything in the space, now; memory comes back by ``reclaim``."""
        table = space.table
        table.live = False
        space.table = Table(space)
        if table.chunks:
            self.dead.append(table)
        return Cleared(table.complete, table.pinned, space.facts.generation)

    def reclaim(self, most: int) -> int:
        """Frees or dooms up to ``most`` chunks of dead tables; how many were visited."""
        done = 0
        while self.dead and done < most:
            table = self.dead[0]
            if not table.chunks:
                self.dead.popleft()
                continue
            chunk = table.chunks.popitem()[1]
            done += 1
            self.eviction.remove(chunk)
            if chunk.pins or chunk.writes:
                self._doom(chunk)
            else:
                self.free_ready(chunk)
        while self.dead and not self.dead[0].chunks:
            self.dead.popleft()
        return done

    def _doom(self, chunk: Chunk) -> None:
        for slot in chunk.slots.values():
            if slot.state in (SlotState.READY, SlotState.WRITING):
                self.slots.move(slot, SlotState.DOOMED)
        if chunk.pins:
            self.pinned_bytes -= chunk.ready_bytes
        if chunk.holds:
            self.held_bytes -= chunk.ready_bytes
        chunk.ready_bytes = 0


def may_commit(chunk: Chunk, slot: Slot) -> bool:
    """Whether a complete object may be found: not after a Clear."""
    return chunk.table.live and slot.state is SlotState.WRITING


def state_of(chunk: Chunk, slot: Slot) -> SlotState:
    """A slot's state with PINNED told apart from READY."""
    return SlotState.PINNED if slot.state is SlotState.READY and chunk.pins else slot.state
