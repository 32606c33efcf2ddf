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
from itertools import islice

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.eviction import Account, Eviction
from kvgrpc.core.feed import Feed
from kvgrpc.core.keys import space_base, space_digest
from kvgrpc.core.ledger import Ledger
from kvgrpc.core.slots import Slot, Slots
from kvgrpc.core.states import DOOMED, FREE, READY, SETTLING
from kvgrpc.core.types import ALL, Cleared, Need, Part, Priority, SpaceIdentity, SpaceRef


@dataclass(eq=False, slots=True)
class Chunk:
    """One chunk of one table, or one part of it (``kvgrpc.core.parted``).

    ``ready`` and ``writing`` are bit sets of KV ranks. ``pins`` counts leases and running reads, ``writes`` slots being
    filled, stores that still run and writes to lower tiers, ``holds`` retention and operator pins; it may be evicted
    when all three are zero. ``complete``: all ranks are ready. ``kept``, ``offered_ns``: see ``kvgrpc.core.writes``.
    """

    key: bytes
    table: Table
    account: Account
    priority: Priority
    """The highest of its uses."""
    slots: dict[int, Slot]
    writing: int = 0
    writes: int = 0
    ready: int = 0
    ready_bytes: int = 0
    complete: bool = False
    pins: int = 0
    holds: int = 0
    kept: int = 0
    offered_ns: int = 0

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

    def unknown(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the keys, up to the first that has a chunk or is there twice, that have none."""
        unknown: dict[bytes, None] = {}
        for key in keys:
            if key in self.chunks or key in unknown:
                break
            unknown[key] = None
        return list(unknown)


@dataclass(eq=False, slots=True)
class IdentityFacts:
    """An identity that engines have named: its weights generation, and its parts of a chunk, by KV rank if known."""

    base: bytes
    identity: SpaceIdentity
    all_ranks: int
    generation: int = 0
    version: int = 0
    """Where new spaces begin: past those of spaces that were forgotten."""
    needs: tuple[Need, ...] = (ALL,)
    forms: dict[int, tuple[Part, ...]] = field(default_factory=dict[int, "tuple[Part, ...]"])


class Space:
    """One space: an identity, a LoRA adapter and a salt."""

    def __init__(self, ref: SpaceRef, facts: IdentityFacts, account: Account) -> None:
        self.ref = ref
        self.facts = facts
        self.account = account
        self.digest = space_digest(ref)
        self.version = facts.version
        """Moves with each Clear and each new generation: part of the names of objects in lower tiers."""
        self.table = Table(self)


class Index:
    """All spaces, and the use of their chunks."""

    def __init__(self, ledger: Ledger, arena_bytes: int) -> None:
        self._ledger = ledger
        self.slots = Slots(arena_bytes, ledger.limits.page_bytes)
        self.eviction = Eviction()
        self.feed = Feed(ledger)
        self.bases: dict[bytes, IdentityFacts] = {}
        self.spaces: dict[SpaceRef, Space] = {}
        self.accounts: dict[str, Account] = {}
        self.dead: deque[Table] = deque()
        self.pinned_bytes = 0
        self.held_bytes = 0
        self.on_gone: Callable[[Chunk], None] = lambda _: None  # told of each chunk that goes although it is held
        self.first_version = 0
        """Where identities that are not known begin: past all that were forgotten or cleared unseen."""
        self.known_bases: dict[bytes, tuple[int, int]] = {}
        self.known_spaces: dict[bytes, tuple[bytes, int]] = {}
        """(generation, version) of identities, (identity, version) of spaces by digest, from before a restart."""

    # ---- spaces -----------------------------------------------------------------------------------------------------

    def name_base(self, identity: SpaceIdentity, shared: Iterable[bytes] = ()) -> IdentityFacts:
        """Remembers an identity; at the limit, forgets others but for those of ``shared``. Refuses: SPACE_LIMIT."""
        base = space_base(identity, self._ledger.limits.chunk_tokens)
        facts = self.bases.get(base)
        if facts is None:
            if len(self.bases) >= self._ledger.limits.spaces:
                self._forget_bases(shared)
            ranks = (1 << identity.kv_world_size) - 1
            generation, version = self.known_bases.pop(base, (0, self.first_version))
            facts = self.bases[base] = IdentityFacts(base, identity, ranks, generation, version)
        return facts

    def _forget_bases(self, shared: Iterable[bytes]) -> None:
        """Forgets identities without spaces that nobody shares memory under. Refuses: SPACE_LIMIT."""
        self._forget_empty_spaces()
        used = {space.facts.base for space in self.spaces.values()}.union(shared)
        for base, facts in list(self.bases.items()):
            if base not in used and not facts.generation:
                self.first_version = max(self.first_version, facts.version)
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
            space.version = self.known_spaces.pop(space.digest, (b"", space.version))[1]
        return space

    def account(self, cache_salt: str) -> Account:
        """The tenant's, made now if need be."""
        return self.accounts.setdefault(cache_salt, Account())

    def _forget_empty_spaces(self) -> None:
        """A running call that names the table of one finds it dead."""
        for ref, space in list(self.spaces.items()):
            if not space.table.chunks:
                space.table.live = False
                space.facts.version = max(space.facts.version, space.version)
                del self.spaces[ref]
        in_use = {id(space.account) for space in self.spaces.values()}
        for salt, account in list(self.accounts.items()):
            if id(account) not in in_use and not account.used_bytes and account.quota_bytes is None:
                del self.accounts[salt]

    def _forget_spaces(self) -> None:
        """Forgets every space without data. Refuses: SPACE_LIMIT."""
        self._forget_empty_spaces()
        if len(self.spaces) >= self._ledger.limits.spaces:
            raise Refusal(Reason.SPACE_LIMIT, "too many spaces hold data; clear some", resource="spaces")

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
        matters = self._rest_matters()
        for chunk in chunks:
            chunk.pins -= 1
            if not chunk.pins:
                table = chunk.table
                table.pinned -= chunk.complete
                self.pinned_bytes -= chunk.ready_bytes
                if matters or not table.live or not chunk.slots:
                    self.rest(chunk)

    def end_writes(self, chunks: Sequence[Chunk]) -> None:
        """One slot less is being filled, or one running store less has a part, in each of them."""
        matters = self._rest_matters()
        for chunk in chunks:
            chunk.writes -= 1
            if not chunk.writes and (matters or not chunk.table.live or not chunk.slots):
                self.rest(chunk)

    def _rest_matters(self) -> bool:
        """Whether ``rest`` does anything for a chunk that stays: mostly not, and it would cost most of a lookup."""
        return self.eviction.quotas > 0 or any(queue.parked for queue in self.eviction.queues)

    def rest(self, chunk: Chunk) -> None:
        """A use ended: what nobody uses may be evicted, or is freed if its table is dead."""
        if chunk.pins or chunk.writes:
            return
        if not chunk.table.live:
            self.free_ready(chunk)
        elif not chunk.slots:
            self._forget((chunk,))
        elif not chunk.holds:
            self.eviction.rest(chunk)

    # ---- objects ----------------------------------------------------------------------------------------------------

    def begin_objects(
        self, table: Table, keys: Sequence[bytes], kv_rank: int, slots: Sequence[Slot], priority: Priority
    ) -> list[Chunk]:
        """WRITING slots become the objects of these chunks and this rank; new chunks get the priority."""
        bit, account, known, chunks = 1 << kv_rank, table.space.account, table.chunks, list[Chunk]()
        for key, slot in zip(keys, slots, strict=True):
            chunk = known.get(key)
            if chunk is None:
                chunk = known[key] = Chunk(key, table, account, priority, {})
            chunk.slots[kv_rank] = slot
            chunk.writing |= bit
            chunk.writes += 1
            chunks.append(chunk)
            table.used_bytes += slot.taken_bytes
            account.used_bytes += slot.taken_bytes
        return chunks

    def commit_objects(self, chunks: Sequence[Chunk], kv_rank: int) -> bool:
        """The bytes of these objects of one table are complete: they can be found from now on. False, and freed, when
        the table is dead. Whoever filled them keeps the chunks in use until their prefix is used."""
        if chunks and not chunks[0].table.live:
            for chunk in chunks:
                self.abort_object(chunk, kv_rank)
            return False
        slots, bit = [chunk.slots[kv_rank] for chunk in chunks], 1 << kv_rank
        self.slots.move_all(slots, READY)
        for chunk, slot in zip(chunks, slots, strict=True):
            chunk.writing ^= bit
            chunk.ready |= bit
            chunk.ready_bytes += slot.taken_bytes
            if chunk.pins:
                self.pinned_bytes += slot.taken_bytes
            if chunk.holds:
                self.held_bytes += slot.taken_bytes
            table = chunk.table
            if chunk.ready == table.space.facts.all_ranks:
                chunk.complete = True
                table.complete += 1
                table.pinned += chunk.pins > 0
                self.feed.stored(chunk)
        self.end_writes(chunks)
        return True

    def abort_object(self, chunk: Chunk, kv_rank: int) -> None:
        """The object will not be committed. Its memory is free, or settles while its copy is in flight."""
        slot = chunk.slots.pop(kv_rank)
        chunk.writing &= ~(1 << kv_rank)
        chunk.table.used_bytes -= slot.taken_bytes
        chunk.account.used_bytes -= slot.taken_bytes
        self.slots.abort(slot)
        self.end_writes((chunk,))

    def free_ready(self, *chunks: Chunk) -> None:
        """Frees every complete object of chunks that nobody uses, and forgets the chunks."""
        slots: list[Slot] = []
        self.feed.removed(chunks)
        for chunk in chunks:
            table = chunk.table
            for slot in chunk.slots.values():
                slots.append(slot)
                table.used_bytes -= slot.taken_bytes
                chunk.account.used_bytes -= slot.taken_bytes
            chunk.slots.clear()
            table.complete -= chunk.complete
            if chunk.holds:
                self.held_bytes -= chunk.ready_bytes
                self.on_gone(chunk)
            chunk.ready = chunk.ready_bytes = 0
            chunk.complete = False
        self._forget(chunks)
        self.slots.move_all(slots, FREE)

    def _forget(self, chunks: Sequence[Chunk]) -> None:
        self.eviction.drop(chunks)
        for chunk in chunks:
            if chunk.table.chunks.get(chunk.key) is chunk:
                del chunk.table.chunks[chunk.key]

    # ---- room -------------------------------------------------------------------------------------------------------

    def reserve(self, space: Space, size_bytes: int, most: int = 1) -> list[Slot] | str:
        """WRITING slots, at least one and up to ``most``, making room if need be; or why not: OBJECT_TOO_LARGE, QUOTA,
        NO_ROOM, SETTLING_LIMIT."""
        slots, account, limits = self.slots, space.account, self._ledger.limits
        cost = slots.cost_bytes(size_bytes)
        if cost > slots.total_bytes:
            return "OBJECT_TOO_LARGE"
        if slots.bytes_by_state[SETTLING] > slots.total_bytes * limits.settling_share:
            return "SETTLING_LIMIT"
        turns = limits.victims_per_turn
        if account.quota_bytes is not None:
            most = 1
            while (over := account.used_bytes + cost - account.quota_bytes) > 0:
                gone = 0 if cost > account.quota_bytes else self.evict(over, turns, account)
                turns -= gone
                if not gone:
                    return "QUOTA"
        while not (reserved := slots.reserve(size_bytes, cost, most)):
            gone = self.reclaim(min(turns, 1)) or self.evict(slots.lack_bytes(cost, most), turns)
            turns -= gone
            if not gone:
                return "NO_ROOM"
        return reserved

    def evict(self, size_bytes: int, most: int, account: Account | None = None) -> int:
        """Frees chunks of one tenant or of any until they had so many bytes, or one was small enough to share a page,
        but at most so many; how many."""
        victims: list[Chunk] = []
        for chunk in islice(self.eviction.take_victims(account), most):
            victims.append(chunk)
            for slot in chunk.slots.values():
                size_bytes -= slot.taken_bytes if slot.slab is None or account is not None else size_bytes
            if size_bytes <= 0:
                break
        self._ledger.counters["evicted_chunks"] += len(victims)
        self.free_ready(*victims)
        return len(victims)

    # ---- Clear ------------------------------------------------------------------------------------------------------

    def clear(self, space: Space) -> Cleared:
        """Forgets everything in the space, now; memory comes back by ``reclaim``."""
        table = space.table
        table.live = False
        self.feed.cleared(space.ref)
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
        self.eviction.drop((chunk,))
        for slot in chunk.slots.values():
            self.slots.move(slot, DOOMED)
        if chunk.pins:
            self.pinned_bytes -= chunk.ready_bytes
        if chunk.holds:
            self.held_bytes -= chunk.ready_bytes
            self.on_gone(chunk)
        chunk.ready_bytes = 0
