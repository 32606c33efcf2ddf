# SPDX-License-Identifier: Apache-2.0
"""What is cached: spaces, their tables, and in them chunks with the objects of their KV ranks.

A table is the memory of one space between two Clears. Clear swaps the table for an empty one, which is O(1) and makes
everything that was stored, or is being stored, impossible to find or commit; the dead table's chunks are reclaimed in
bounded turns, those in use when their last user lets go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.eviction import Account, Eviction
from kvgrpc.core.keys import space_base, space_digest
from kvgrpc.core.ledger import Ledger
from kvgrpc.core.slots import Slot, Slots
from kvgrpc.core.states import DOOMED, FREE, PINNED, READY, SETTLING, WRITING, SlotState
from kvgrpc.core.types import Cleared, Priority, SpaceIdentity, SpaceRef


@dataclass(eq=False, slots=True)
class Chunk:
    """One chunk of one table.

    ``ready`` and ``writing`` are bit sets of KV ranks. ``pins`` counts leases and running reads, ``writes`` slots being
    filled and stores that still run, ``holds`` retention and operator pins; it may be evicted when all three are zero.
    """

    key: bytes
    table: Table
    account: Account
    priority: Priority
    """The highest of its uses."""
    slots: dict[int, Slot]
    ready: int = 0
    writing: int = 0
    ready_bytes: int = 0
    complete: bool = False
    """All ranks of the space are ready."""
    pins: int = 0
    writes: int = 0
    holds: int = 0

    @property
    def in_use(self) -> bool:
        return bool(self.pins or self.writes or self.holds)


@dataclass(eq=False, slots=True)
class Table:
    """Chunks of a space since its last Clear. ``live`` until the next one."""

    space: Space
    chunks: dict[bytes, Chunk] = field(default_factory=dict[bytes, Chunk])
    live: bool = True
    complete: int = 0
    pinned: int = 0
    """Complete chunks that somebody pins."""
    used_bytes: int = 0


@dataclass(eq=False, slots=True)
class IdentityFacts:
    """An identity that engines have named: its weights generation, and how long one rank's objects are."""

    base: bytes
    identity: SpaceIdentity
    all_ranks: int
    generation: int = 0
    clears: int = 0
    """Where new spaces begin to count: past those of spaces that were forgotten."""
    object_bytes: dict[int, int] = field(default_factory=dict[int, int])
    orders: dict[int, str] = field(default_factory=dict[int, str])


class Space:
    """One space: an identity, a LoRA adapter and a salt."""

    def __init__(self, ref: SpaceRef, facts: IdentityFacts, account: Account) -> None:
        self.ref = ref
        self.facts = facts
        self.account = account
        self.digest = space_digest(ref)
        self.clears = facts.clears
        self.table = Table(self)

    @property
    def version(self) -> int:
        """Grows with each Clear and each new generation: part of the names of objects in lower tiers."""
        return self.facts.generation + self.clears


class Index:
    """All spaces, and the use of their chunks."""

    def __init__(self, ledger: Ledger, arena_bytes: int) -> None:
        self._ledger = ledger
        self.slots = Slots(arena_bytes, ledger.limits.page_bytes)
        self.eviction = Eviction()
        self.bases: dict[bytes, IdentityFacts] = {}
        self.spaces: dict[SpaceRef, Space] = {}
        self.accounts: dict[str, Account] = {}
        self.dead: deque[Table] = deque()
        self.pinned_bytes = 0
        self.held_bytes = 0
        self.on_gone: Callable[[Chunk], None] = lambda _: None
        """Told of each chunk that goes although it is held."""
        self.first_version = 0
        """Where identities that are not known begin to count: past all that were forgotten or cleared unseen."""

    # ---- spaces -----------------------------------------------------------------------------------------------------

    def name_base(self, identity: SpaceIdentity, shared: Iterable[bytes] = ()) -> IdentityFacts:
        """Remembers an identity; at the limit, forgets others but for those of ``shared``. Refuses: SPACE_LIMIT."""
        base = space_base(identity, self._ledger.limits.chunk_tokens)
        facts = self.bases.get(base)
        if facts is None:
            if len(self.bases) >= self._ledger.limits.spaces:
                self._forget_bases(shared)
            ranks = (1 << identity.kv_world_size) - 1
            facts = self.bases[base] = IdentityFacts(base, identity, ranks, clears=self.first_version)
        return facts

    def _forget_bases(self, shared: Iterable[bytes]) -> None:
        """Forgets identities without spaces that nobody shares memory under. Refuses: SPACE_LIMIT."""
        self._forget_empty_spaces()
        used = {space.facts.base for space in self.spaces.values()}.union(shared)
        for base, facts in list(self.bases.items()):
            if base not in used and not facts.generation:
                self.first_version = max(self.first_version, facts.clears)
                del self.bases[base]
        if len(self.bases) >= self._ledger.limits.spaces:
            raise Refusal(Reason.SPACE_LIMIT, "too many identities are in use on this server", resource="spaces")

    def facts(self, base: bytes) -> IdentityFacts:
        """Refuses: SPACE_UNKNOWN."""
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
                self._forget_spaces()
            space = self.spaces[ref] = Space(ref, facts, self.account(ref.cache_salt))
        return space

    def account(self, cache_salt: str) -> Account:
        """The tenant's, made now if need be."""
        account = self.accounts.get(cache_salt)
        if account is None:
            account = self.accounts[cache_salt] = Account()
        return account

    def _forget_empty_spaces(self) -> None:
        """A running call that names the table of one finds it dead."""
        for ref, space in list(self.spaces.items()):
            if not space.table.chunks:
                space.table.live = False
                space.facts.clears = max(space.facts.clears, space.clears)
                del self.spaces[ref]

    def _forget_spaces(self) -> None:
        """Forgets every space without data. Refuses: SPACE_LIMIT."""
        self._forget_empty_spaces()
        if len(self.spaces) >= self._ledger.limits.spaces:
            raise Refusal(Reason.SPACE_LIMIT, "too many spaces hold data; clear some", resource="spaces")
        in_use = {id(space.account) for space in self.spaces.values()}
        for salt, account in list(self.accounts.items()):
            if id(account) not in in_use and not account.used_bytes and account.quota_bytes is None:
                del self.accounts[salt]

    # ---- use --------------------------------------------------------------------------------------------------------

    def use(self, table: Table, keys: Sequence[bytes], priority: Priority) -> None:
        """What is there of a prefix was used just now. ``keys`` begin with the prompt, as far as they are known."""
        get = table.chunks.get
        if table.live:
            self.eviction.use([chunk for key in keys if (chunk := get(key)) is not None], priority)

    def pin(self, chunks: Sequence[Chunk]) -> None:
        """One more lease or read holds each of them."""
        for chunk in chunks:
            if not chunk.pins:
                chunk.table.pinned += chunk.complete
                self.pinned_bytes += chunk.ready_bytes
            chunk.pins += 1

    def unpin(self, chunks: Sequence[Chunk]) -> None:
        """One less each."""
        queues = self.eviction.queues
        for chunk in chunks:
            chunk.pins -= 1
            if not chunk.pins:
                table = chunk.table
                table.pinned -= chunk.complete
                self.pinned_bytes -= chunk.ready_bytes
                if not table.live or not chunk.slots or queues[chunk.priority].parked or chunk.account.queues:
                    self._rest(chunk)  # else that changes nothing, and most of a lookup's time goes here

    def hold(self, chunk: Chunk) -> None:
        """One more retention or operator pin keeps the chunk."""
        if not chunk.holds:
            self.held_bytes += chunk.ready_bytes
        chunk.holds += 1

    def unhold(self, chunk: Chunk) -> None:
        """One less."""
        chunk.holds -= 1
        if not chunk.holds:
            self.held_bytes -= chunk.ready_bytes
            self._rest(chunk)

    def end_write(self, chunk: Chunk) -> None:
        """One slot less is being filled, or one running store less has a part in the chunk."""
        chunk.writes -= 1
        if not chunk.writes:
            self._rest(chunk)

    def _rest(self, chunk: Chunk) -> None:
        """A use ended: what nobody uses may be evicted, or is freed if its table is dead."""
        if chunk.pins or chunk.writes:
            return
        if not chunk.table.live:
            self.free_ready(chunk)
        elif not chunk.slots:
            self._forget(chunk)
        elif not chunk.holds:
            self.eviction.rest(chunk)

    # ---- objects ----------------------------------------------------------------------------------------------------

    def begin_object(self, table: Table, key: bytes, kv_rank: int, slot: Slot, priority: Priority) -> Chunk:
        """A WRITING slot becomes the object of this chunk and rank; a new chunk gets the priority."""
        chunk = table.chunks.get(key)
        if chunk is None:
            chunk = table.chunks[key] = Chunk(key, table, table.space.account, priority, {})
        chunk.writes += 1
        chunk.writing |= 1 << kv_rank
        chunk.slots[kv_rank] = slot
        table.used_bytes += slot.taken_bytes
        chunk.account.used_bytes += slot.taken_bytes
        return chunk

    def commit_object(self, chunk: Chunk, kv_rank: int) -> bool:
        """The object's bytes are complete: it can be found from now on. False, and freed, when its table is dead.

        Whoever filled it keeps the chunk in use until its prefix is used, which gives the chunk its place in the order.
        """
        slot = chunk.slots[kv_rank]
        if not may_commit(chunk, slot):
            self.abort_object(chunk, kv_rank)
            return False
        chunk.writing &= ~(1 << kv_rank)
        self.slots.move(slot, READY)
        chunk.ready |= 1 << kv_rank
        chunk.ready_bytes += slot.taken_bytes
        if chunk.pins:
            self.pinned_bytes += slot.taken_bytes
        if chunk.holds:
            self.held_bytes += slot.taken_bytes
        if chunk.ready == chunk.table.space.facts.all_ranks:
            chunk.complete = True
            chunk.table.complete += 1
            chunk.table.pinned += chunk.pins > 0
        self.end_write(chunk)
        return True

    def abort_object(self, chunk: Chunk, kv_rank: int) -> None:
        """The object will not be committed. Its memory is free, or settles while its copy is in flight."""
        chunk.writing &= ~(1 << kv_rank)
        self.slots.abort(self._take_slot(chunk, kv_rank))
        self.end_write(chunk)

    def free_ready(self, chunk: Chunk) -> None:
        """Frees every complete object of a chunk that nobody uses, and forgets the chunk."""
        chunk.table.complete -= chunk.complete
        for kv_rank in list(chunk.slots):
            self.slots.move(self._take_slot(chunk, kv_rank), FREE)
        if chunk.holds:
            self.held_bytes -= chunk.ready_bytes
            self.on_gone(chunk)
        chunk.ready = chunk.ready_bytes = 0
        chunk.complete = False
        self._forget(chunk)

    def _take_slot(self, chunk: Chunk, kv_rank: int) -> Slot:
        slot = chunk.slots.pop(kv_rank)
        chunk.table.used_bytes -= slot.taken_bytes
        chunk.account.used_bytes -= slot.taken_bytes
        return slot

    def _forget(self, chunk: Chunk) -> None:
        self.eviction.drop(chunk)
        if chunk.table.chunks.get(chunk.key) is chunk:
            del chunk.table.chunks[chunk.key]

    # ---- room -------------------------------------------------------------------------------------------------------

    def reserve(self, space: Space, size_bytes: int) -> Slot | str:
        """A WRITING slot, making room if need be; or why not: OBJECT_TOO_LARGE, QUOTA, NO_ROOM, SETTLING_LIMIT."""
        slots, account, limits = self.slots, space.account, self._ledger.limits
        cost = slots.cost_bytes(size_bytes)
        if cost > slots.total_bytes:
            return "OBJECT_TOO_LARGE"
        if slots.bytes_by_state[SETTLING] > slots.total_bytes * limits.settling_share:
            return "SETTLING_LIMIT"
        turns = limits.victims_per_turn
        if account.quota_bytes is not None:
            while account.used_bytes + cost > account.quota_bytes:
                turns -= 1
                if turns < 0 or cost > account.quota_bytes or not self._evict(account):
                    return "QUOTA"
        while (slot := slots.reserve(size_bytes, cost)) is None:
            turns -= 1
            if turns < 0 or not (self.reclaim(1) or self._evict()):
                return "NO_ROOM"
        return slot

    def _evict(self, account: Account | None = None) -> bool:
        """Frees one chunk, of one tenant or of any; False when nothing may go."""
        victim = self.eviction.victim(account)
        if victim is None:
            return False
        self._ledger.counters["evicted_chunks"] += 1
        self.free_ready(victim)
        return True

    # ---- Clear ------------------------------------------------------------------------------------------------------

    def clear(self, space: Space) -> Cleared:
        """Forgets everything in the space, now; memory comes back by ``reclaim``."""
        table = space.table
        table.live = False
        space.table = Table(space)
        if table.chunks:
            self.dead.append(table)
        return Cleared(table.complete, table.pinned)

    def reclaim(self, most: int) -> int:
        """Frees or dooms up to ``most`` chunks of dead tables; how many were visited."""
        done = 0
        while self.dead and done < most:
            chunks = self.dead[0].chunks
            if chunks:
                done += 1
                chunk = chunks.popitem()[1]
                if chunk.pins or chunk.writes:
                    self._doom(chunk)
                else:
                    self.free_ready(chunk)
            if not chunks:
                self.dead.popleft()
        return done

    def _doom(self, chunk: Chunk) -> None:
        self.eviction.drop(chunk)
        for slot in chunk.slots.values():
            self.slots.move(slot, DOOMED)
        if chunk.pins:
            self.pinned_bytes -= chunk.ready_bytes
        if chunk.holds:
            self.held_bytes -= chunk.ready_bytes
            self.on_gone(chunk)
        chunk.ready_bytes = 0


def may_commit(chunk: Chunk, slot: Slot) -> bool:
    """Whether a complete object may be found: not after a Clear."""
    return chunk.table.live and slot.state is WRITING


def state_of(chunk: Chunk, slot: Slot) -> SlotState:
    """A slot's state with PINNED told apart from READY."""
    return PINNED if slot.state is READY and chunk.pins else slot.state
