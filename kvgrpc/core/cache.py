# SPDX-License-Identifier: Apache-2.0
"""The bookkeeper: the one door of the core.

Every call gets ``now``, runs to its end, and answers or raises a Refusal; what has to be done in the world it puts into
the outbox (``drain``), and what the hands did comes back by ``slice_done``, ``probe_done`` and ``read_done``.
One owner, one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvgrpc.core import checks
from kvgrpc.core.calls import Calls
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.eviction import Account
from kvgrpc.core.holds import Holds
from kvgrpc.core.index import Index
from kvgrpc.core.jobs import Jobs
from kvgrpc.core.keys import space_digest
from kvgrpc.core.leases import Leases
from kvgrpc.core.ledger import Ledger
from kvgrpc.core.lookups import Lookups
from kvgrpc.core.plans import Desk, RetrievePlan, StorePlan
from kvgrpc.core.prefetch import Prefetcher
from kvgrpc.core.sessions import Client, Engine, Sessions, check_ranks
from kvgrpc.core.states import SlotState
from kvgrpc.core.types import (
    MS,
    Action,
    ArenaStatus,
    ChunkKeys,
    ChunkResult,
    Cleared,
    CoreLimits,
    Counts,
    Ended,
    EngineDraining,
    EngineStatus,
    FreeCommand,
    Held,
    LookupAnswer,
    LookupCommand,
    PrefetchStatus,
    Reader,
    Registered,
    Registration,
    RetrieveCommand,
    Role,
    SessionEnded,
    SliceReport,
    SpaceIdentity,
    SpaceRef,
    SpaceStatus,
    StoreCommand,
    Unmap,
)

OWN_HASH_ALGORITHM = "sha256-u32le"


class Bookkeeper:
    """Decides for an arena of ``arena_bytes``; ``tiers`` are the names of the lower tiers, in the order to ask them."""

    def __init__(self, limits: CoreLimits, arena_bytes: int, tiers: tuple[str, ...] = ()) -> None:
        ledger = Ledger(limits)
        self.limits = limits
        self.ledger = ledger
        self.index = Index(ledger, arena_bytes)
        self.leases = Leases(ledger, self.index)
        self.jobs = Jobs(ledger, self.leases)
        self.holds = Holds(ledger, self.index)
        self.prefetcher = Prefetcher(ledger, self.index, self.leases, self.jobs, tiers)
        self.lookups = Lookups(ledger, self.index, self.leases, self.jobs, self.prefetcher)
        self.sessions = Sessions(limits.clients)
        self.calls = Calls(ledger)
        self._desk = Desk(ledger, self.index, self.leases, self.jobs, self.holds)

    # ---- outbox and time --------------------------------------------------------------------------------------------

    def drain(self) -> list[Action]:
        """Takes the outbox."""
        actions, self.ledger.outbox = self.ledger.outbox, []
        return actions

    @property
    def counters(self) -> dict[str, int]:
        """Counts since the start, by name."""
        return self.ledger.counters

    def next_wake(self, now: int) -> int | None:
        """When ``tick`` will have something to do; None = not before the next call."""
        if self.index.dead:
            return now + MS
        times = [
            next(iter(self.jobs.leased)).lease_end_ns if self.jobs.leased else None,
            next(iter(self.jobs.recorded)).record_end_ns if self.jobs.recorded else None,
            next(iter(self.jobs.read)).read_end_ns if self.jobs.read else None,
            self.prefetcher.next_deadline(),
            self.holds.next_end(),
        ]
        times += [client.broken_ns + self.limits.reattach_grace_ns for client in self.sessions.broken.values()]
        return min((time for time in times if time is not None), default=None)

    def tick(self, now: int) -> None:
        """Lets time pass: prefetch deadlines, leases, records, holds, graces, and a bounded turn of reclaim."""
        self.prefetcher.tick(now)
        jobs = self.jobs
        while jobs.leased and (job := next(iter(jobs.leased))).lease_end_ns <= now:
            jobs.expire_lease(job)
        while jobs.read and (job := next(iter(jobs.read))).read_end_ns <= now:
            jobs.drop(job)
        while jobs.recorded and (job := next(iter(jobs.recorded))).record_end_ns <= now:
            self.lookups.end(job)
        self.holds.tick(now)
        for client in list(self.sessions.broken.values()):
            if client.broken_ns + self.limits.reattach_grace_ns <= now:
                self._end_session(now, client)
        for client in self.sessions.clients.values():
            self.calls.forget_old(client, now)
        self.index.reclaim(self.limits.victims_per_turn)

    # ---- spaces -----------------------------------------------------------------------------------------------------

    def space_base(self, now: int, identity: SpaceIdentity) -> bytes:
        """Names an identity and remembers it. Refuses: SPACE_LIMIT."""
        return self.index.name_base(identity).base

    def space_seed(self, ref: SpaceRef) -> tuple[bytes, bool]:
        """(space digest, whether keys are made of token ids here). Refuses: SPACE_UNKNOWN."""
        facts = self.index.facts(ref.space_base)
        return space_digest(ref), facts.identity.hash_algorithm == OWN_HASH_ALGORITHM

    # ---- sessions ---------------------------------------------------------------------------------------------------

    def attach(self, now: int, client_id: str, engine_id: str, role: Role, session_id: bytes) -> bool:
        """Opens or continues a session; True when continued. Refuses: CLIENT_EXISTS, CLIENT_LIMIT, ENGINE_DRAINING."""
        client = self.sessions.clients.get(client_id)
        if client is not None:
            same = client.session_id == session_id and client.engine.engine_id == engine_id and client.role is role
            if same:
                client.attached = True
                self.sessions.broken.pop(client_id, None)
                return True
            if client.attached:
                text = "another live process is attached with this client id; give each process its own"
                raise Refusal(Reason.CLIENT_EXISTS, text, resource=client_id)
            self._end_session(now, client)
        engine = self.sessions.engines.get(engine_id)
        if engine is not None and engine.draining:
            raise Refusal(Reason.ENGINE_DRAINING, "this engine is being drained", retry_after_ms=1000)
        self.sessions.open(client_id, engine_id, role, session_id)
        return False

    def detach(self, now: int, client_id: str, session_id: bytes) -> None:
        """The session's stream broke: its grace begins."""
        client = self.sessions.clients.get(client_id)
        if client is None or client.session_id != session_id or not client.attached:
            return
        client.attached = False
        client.broken_ns = now
        self.sessions.broken[client_id] = client

    def check_client(self, client_id: str, engine_id: str) -> None:
        """Refuses: NOT_ATTACHED, ENGINE_UNKNOWN, ENGINE_DRAINING."""
        self.sessions.find_working(client_id, engine_id)

    def _end_session(self, now: int, client: Client) -> None:
        """The process is gone: its calls, jobs and memory go, those that a running slice touches when it is reported."""
        self.ledger.counters["ended_sessions"] += 1
        engine = client.engine
        self.sessions.close(client)
        for job in list(engine.jobs.values()):
            if client.role is Role.SCHEDULER or job.owner == client.client_id or not engine.clients:
                self.lookups.end(job)
        self._give_up_memory(now, client)
        self._settle_client(client)

    def _give_up_memory(self, now: int, client: Client) -> None:
        """Ends the client's calls; its mapping is unmapped when no slice is in flight."""
        registration, client.registration = client.registration, None
        self.calls.revoke_all(now, client)
        if registration is not None:
            client.unmaps.append(registration.mapping_id)

    def _settle_client(self, client: Client) -> None:
        """Emits what waited for the client's last slice."""
        if client.running is not None:
            return
        for mapping_id in client.unmaps:
            self.ledger.outbox.append(Unmap(client.client_id, mapping_id))
        client.unmaps.clear()
        if client.gone:
            self.sessions.ending.pop(client.client_id, None)
            self.ledger.outbox.append(SessionEnded(client.client_id))

    # ---- memory -----------------------------------------------------------------------------------------------------

    def register(self, now: int, client_id: str, registration: Registration) -> Registered:
        """Shares a worker's memory; replaces an earlier registration, whose queued calls end and whose mapping goes after
        its running slice. Refuses: NOT_ATTACHED, ENGINE_*, RANK, TP_SIZE_MISMATCH, SPACE_MISMATCH, GEOMETRY_MISMATCH."""
        client = self.sessions.find_working(client_id, registration.engine_id)
        if client.role is not Role.WORKER:
            raise Refusal(Reason.INVALID_FIELD, "only a worker shares memory; attach as one", field="role")
        facts = self.index.name_base(registration.identity)
        object_bytes = registration.geometry.object_bytes(self.limits.chunk_tokens)
        old = client.registration
        if old is not None and replace(old, mapping_id=registration.mapping_id) == registration:
            return Registered(facts.base, client.registration_epoch, object_bytes, changed=False)
        others = next(
            (c.registration for c in client.engine.clients.values() if c.registration and c is not client), None
        )
        other_base = self.index.name_base(others.identity).base if others else b""
        check_ranks(registration, others, facts.base, other_base)
        self._check_geometry(client, registration, facts.base, object_bytes)
        facts.object_bytes[registration.kv_rank] = object_bytes
        self._give_up_memory(now, client)
        client.registration = registration
        client.registration_epoch += 1
        self._settle_client(client)
        return Registered(facts.base, client.registration_epoch, object_bytes, changed=True)

    def _check_geometry(self, client: Client, registration: Registration, base: bytes, object_bytes: int) -> None:
        """Objects of one space and rank have one length, for as long as anybody has or shares such objects."""
        rank = registration.kv_rank
        known = self.index.bases[base].object_bytes.get(rank)
        if known is None or known == object_bytes:
            return
        in_use = any(space.table.chunks for ref, space in self.index.spaces.items() if ref.space_base == base)
        shared = any(
            other.registration is not None
            and other.registration.kv_rank == rank
            and self.index.name_base(other.registration.identity).base == base
            for other in self.sessions.clients.values()
            if other is not client
        )
        if in_use or shared:
            text = f"a chunk of this rank has {object_bytes} bytes here and {known} elsewhere in the same space"
            raise Refusal(Reason.GEOMETRY_MISMATCH, text, field="groups")

    def unregister(self, now: int, client_id: str, engine_id: str) -> int | None:
        """Takes memory back: the mapping whose Unmap will come out; None when nothing is registered."""
        client = self.sessions.find(client_id, engine_id)
        registration = client.registration
        if registration is None:
            return None
        self._give_up_memory(now, client)
        self._settle_client(client)
        return registration.mapping_id

    # ---- lookups ----------------------------------------------------------------------------------------------------

    def find_lookup(
        self, now: int, client_id: str, engine_id: str, request_id: str, attempt: int
    ) -> LookupAnswer | None:
        """The recorded answer of a lookup that is asked again."""
        client = self.sessions.find_working(client_id, engine_id)
        job = client.engine.requests.get((request_id, attempt))
        return None if job is None else job.answer

    def lookup(self, now: int, client_id: str, command: LookupCommand) -> LookupAnswer:
        """See the protocol. Refuses: NOT_ATTACHED, ENGINE_*, SPACE_UNKNOWN, RANK, TP_SIZE_MISMATCH, JOB_LIMIT, …"""
        client = self.sessions.find_working(client_id, command.engine_id)
        return self.lookups.lookup(now, client, command)

    def query(self, now: int, client_id: str, engine_id: str, job_id: bytes) -> PrefetchStatus:
        """Refuses: NOT_ATTACHED, ENGINE_UNKNOWN, JOB_UNKNOWN."""
        client = self.sessions.find(client_id, engine_id)
        return self.jobs.find(client.engine, job_id).status

    def free(self, now: int, client_id: str, command: FreeCommand) -> int:
        """Releases pins; how many. Refuses: NOT_ATTACHED, ENGINE_UNKNOWN, JOB_UNKNOWN, TP_SIZE_MISMATCH, READER_UNKNOWN."""
        client = self.sessions.find(client_id, command.engine_id)
        return self.lookups.free(now, self.jobs.find(client.engine, command.job_id), command)

    def end_request(self, now: int, client_id: str, engine_id: str, request_id: str) -> Ended:
        """Ends every job of a request."""
        client = self.sessions.find(client_id, engine_id)
        jobs = list(client.engine.by_request.get(request_id, {}).values())
        return Ended(len(jobs), sum(self.lookups.end(job) for job in jobs))

    # ---- copies -----------------------------------------------------------------------------------------------------

    def _registered(self, client: Client) -> Registration:
        if client.registration is None:
            raise Refusal(Reason.NOT_REGISTERED, "this client shares no memory; call RegisterKvCache first")
        return client.registration

    def store(self, now: int, client_id: str, command: StoreCommand) -> tuple[ChunkResult, ...] | None:
        """Results, or None: they come by CallEnded. Refuses: see the protocol."""
        client = self.sessions.find_working(client_id, command.engine_id)
        last_key = tuple(command.content.keys[-1:])
        blocks = tuple(map(tuple, command.blocks))
        fingerprint = hash((command.range, command.space, command.content.num_tokens, last_key, blocks))
        repeat = self.calls.find_repeat(client, command.call_id, fingerprint)
        if repeat is not None:
            return repeat.results
        registration = self._registered(client)
        checks.check_store(command, registration, self.limits)
        facts = self.index.facts(command.space.space_base)
        self._check_space(registration, facts.base)
        self.ledger.counters["stores"] += 1
        plan = StorePlan(self._desk, registration, command, self.index.space(command.space))
        return self.calls.begin(now, client, command.call_id, plan, fingerprint).results

    def _check_space(self, registration: Registration, base: bytes) -> None:
        if self.index.name_base(registration.identity).base != base:
            text = "the space_base is not the one that this client registered"
            raise Refusal(Reason.SPACE_MISMATCH, text, field="space.space_base")

    def retrieve(self, now: int, client_id: str, command: RetrieveCommand) -> tuple[ChunkResult, ...] | None:
        """Results, or None: they come by CallEnded. Refuses: see the protocol."""
        client = self.sessions.find_working(client_id, command.engine_id)
        fingerprint = hash((command.range, command.job_id, tuple(map(tuple, command.blocks))))
        repeat = self.calls.find_repeat(client, command.call_id, fingerprint)
        if repeat is not None:
            return repeat.results
        registration = self._registered(client)
        checks.check_call_id(command.call_id)
        checks.check_range(command.range, registration, self.limits)
        checks.check_blocks(command.blocks, command.range, registration)
        job = self.jobs.find(client.engine, command.job_id)
        self._check_space(registration, job.space.facts.base)
        if not job.status.done:
            raise Refusal(Reason.JOB_PENDING, "the lookup is still prefetching; query it first", retry_after_ms=10)
        bit = job.lease.bit(Reader(registration.kv_rank, registration.tp_rank))
        self.ledger.counters["retrieves"] += 1
        plan = RetrievePlan(self._desk, registration, command, job, bit)
        return self.calls.begin(now, client, command.call_id, plan, fingerprint).results

    def revoke(self, now: int, client_id: str, call_id: int) -> None:
        """Nobody waits for the call any more: it ends as soon as it can."""
        client = self.sessions.clients.get(client_id)
        call = client.calls.get(call_id) if client is not None else None
        if client is not None and call is not None:
            self.calls.revoke(now, call)
            self.calls.advance(now, client)

    def fence(self, now: int, client_id: str, engine_id: str, call_ids: Sequence[int]) -> tuple[int, ...]:
        """Revokes calls; those that still run, each until its CallEnded. Refuses: NOT_ATTACHED, ENGINE_UNKNOWN, CALL_LIMIT."""
        client = self.sessions.find(client_id, engine_id)
        running = self.calls.fence(now, client, call_ids)
        self.calls.advance(now, client)
        return running

    def slice_done(self, now: int, slice_id: int, report: SliceReport) -> None:
        """A slice has ended; nothing touches its blocks and slots any more."""
        client = self.calls.slice_done(now, slice_id, report)
        self._settle_client(client)
        if not client.gone:
            self.calls.advance(now, client)

    def probe_done(self, now: int, probe_id: int, found: Sequence[str]) -> None:
        """The tiers have answered, a tier's name or "" for each object."""
        self.prefetcher.probe_done(now, probe_id, list(found))

    def read_done(self, now: int, read_id: int, ok: bool) -> None:
        """A tier read has ended; nothing touches its slot any more."""
        self.prefetcher.read_done(now, read_id, ok)

    # ---- operators --------------------------------------------------------------------------------------------------

    def clear(
        self,
        now: int,
        *,
        space: SpaceRef | None = None,
        model: str | None = None,
        cache_salt: str | None = None,
        everything: bool = False,
    ) -> Cleared:
        """Forgets; exactly one target."""
        if space is not None:
            self.index.facts(space.space_base)
        hit = [
            found
            for ref, found in self.index.spaces.items()
            if everything
            or ref == space
            or (model is not None and found.facts.identity.model == model)
            or (cache_salt is not None and ref.cache_salt == cache_salt)
        ]
        cleared = [self.index.clear(found) for found in hit]
        return Cleared(sum(c.removed_chunks for c in cleared), sum(c.still_pinned_chunks for c in cleared))

    def bump_generation(self, now: int, *, model: str = "", space_base: bytes = b"") -> Cleared:
        """New weights under an old name. Refuses: SPACE_UNKNOWN."""
        facts = [f for f in self.index.bases.values() if f.base == space_base or (model and f.identity.model == model)]
        if not facts:
            raise Refusal(Reason.SPACE_UNKNOWN, "no engine has named such a model or space", field="target")
        for one in facts:
            one.generation += 1
        cleared = [self.index.clear(space) for space in self.index.spaces.values() if space.facts in facts]
        return Cleared(
            sum(c.removed_chunks for c in cleared),
            sum(c.still_pinned_chunks for c in cleared),
            max(one.generation for one in facts),
        )

    def pin(self, now: int, space: SpaceRef, content: ChunkKeys, ttl_ns: int, pin_id: bytes) -> Held:
        """Holds the resident prefix. Refuses: SPACE_UNKNOWN, HOLD_LIMIT, PIN_LIMIT."""
        checks.check_prefix(content, self.limits)
        facts = self.index.facts(space.space_base)
        chunks = self.lookups.resident(space, content.keys, facts.all_ranks)
        if not chunks:
            return Held(b"", 0)
        self.holds.pin(pin_id, chunks, now + ttl_ns)
        return Held(pin_id, len(chunks) * self.limits.chunk_tokens)

    def unpin(self, now: int, pin_id: bytes) -> int:
        """Ends a hold; how many chunks it held. Refuses: PIN_UNKNOWN."""
        return self.holds.unpin(pin_id)

    def drain_engine(self, now: int, engine: str) -> str:
        """Takes an engine out; its id. Refuses: ENGINE_UNKNOWN."""
        found: Engine = self.sessions.find_engine(engine)
        if not found.draining:
            found.draining = True
            for job in list(found.jobs.values()):
                self.lookups.end(job)
            self.ledger.outbox += [EngineDraining(client_id) for client_id in found.clients]
        return found.engine_id

    def engine_idle(self, engine_id: str) -> bool:
        """No call of the engine runs and it pins nothing."""
        engine = self.sessions.engines.get(engine_id)
        if engine is None:
            return True
        return not engine.jobs and all(not client.queue for client in engine.clients.values())

    def set_quota(self, cache_salt: str, size_bytes: int | None) -> None:
        """Most that a tenant may hold; None = no quota."""
        account = self.index.accounts.get(cache_salt)
        if account is None:
            account = self.index.accounts[cache_salt] = Account()
        self.index.eviction.set_quota(account, size_bytes)

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def arena_status(self) -> ArenaStatus:
        """Bytes by state."""
        by_state = self.index.slots.bytes_by_state
        pinned = self.index.pinned_bytes
        return ArenaStatus(
            total_bytes=self.index.slots.total_bytes,
            free_bytes=by_state[SlotState.FREE],
            writing_bytes=by_state[SlotState.WRITING],
            ready_bytes=by_state[SlotState.READY] - pinned,
            pinned_bytes=pinned,
            doomed_bytes=by_state[SlotState.DOOMED],
            settling_bytes=by_state[SlotState.SETTLING],
            held_bytes=self.index.held_bytes,
        )

    def counts(self) -> Counts:
        """How many of what there are."""
        spaces = self.index.spaces.values()
        return Counts(
            chunks=sum(space.table.complete for space in spaces),
            spaces=sum(1 for space in spaces if space.table.chunks),
            engines=len(self.sessions.engines),
            clients=len(self.sessions.clients) - len(self.sessions.broken),
            jobs=len(self.jobs.jobs),
            pins=self.leases.pins,
            calls_in_flight=self.calls.in_flight,
        )

    def engines(self) -> tuple[EngineStatus, ...]:
        return self.sessions.statuses()

    def spaces(self) -> tuple[SpaceStatus, ...]:
        return self.index.statuses()
