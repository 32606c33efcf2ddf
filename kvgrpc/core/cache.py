# SPDX-License-Identifier: Apache-2.0
"""The bookkeeper: the one door of the core.

One owner, one thread. Every call gets ``now``, runs to its end, and answers or raises a Refusal; what has to be done in
the world it puts into the outbox, and what the hands did comes back by ``slice_done``, ``probe_done``, ``read_done``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvgrpc.core import checks, snapshots
from kvgrpc.core import types as t
from kvgrpc.core.calls import SLICES_AHEAD, Calls, fingerprint
from kvgrpc.core.desk import Desk
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.holds import Holds
from kvgrpc.core.index import IdentityFacts, Index
from kvgrpc.core.jobs import Jobs
from kvgrpc.core.keys import OWN_HASH_ALGORITHM, space_digest
from kvgrpc.core.leases import Leases
from kvgrpc.core.ledger import Ledger
from kvgrpc.core.lookups import Lookups
from kvgrpc.core.parted import retrieve_plan, store_plan
from kvgrpc.core.prefetch import Prefetcher
from kvgrpc.core.quotas import Quotas
from kvgrpc.core.records import Records
from kvgrpc.core.sessions import Client, Sessions
from kvgrpc.core.versions import Versioning
from kvgrpc.core.writes import WriteBehind


class Bookkeeper:
    """Decides for an arena of ``arena_bytes``; ``tiers`` are the names of the lower tiers, in the order to ask them,
    ``versions`` and ``step`` as in ``kvgrpc.core.versions``."""

    def __init__(
        self,
        limits: t.CoreLimits,
        arena_bytes: int,
        tiers: tuple[str, ...] = (),
        versions: t.Versions = t.NO_VERSIONS,
        step: int = 1,
    ) -> None:
        self.limits = limits
        self.ledger = ledger = Ledger(limits)
        self.index = Index(ledger, arena_bytes)
        self.leases = Leases(ledger, self.index)
        self.jobs = Jobs(ledger, self.leases)
        self.holds = Holds(ledger, self.index)
        self.quotas = Quotas(ledger, self.index)
        self.records = Records(ledger, self.index)
        self.writes = WriteBehind(ledger, self.index, self.records, tiers)
        self.prefetcher = Prefetcher(ledger, self.index, self.leases, self.jobs, self.writes)
        self.lookups = Lookups(ledger, self.index, self.leases, self.jobs, self.prefetcher)
        self.sessions = Sessions(limits.clients)
        self.calls = Calls(ledger)
        self.versions = Versioning(self.index, versions, step)
        self.desk = Desk(ledger, self.index, self.leases, self.jobs, self.holds, self.writes)

    # ---- outbox and time --------------------------------------------------------------------------------------------

    def drain(self) -> list[t.Action]:
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
            return now + t.MS
        jobs, grace_ns = self.jobs, self.limits.reattach_grace_ns
        times = [
            next((job.lease_end_ns for job in jobs.leased), None),
            next((job.record_end_ns for job in jobs.recorded), None),
            next((job.read_end_ns for job in jobs.read), None),
            self.holds.next_end(),
            self.prefetcher.next_deadline(),
            *(client.broken_ns + grace_ns for client in self.sessions.broken.values()),
        ]
        return min((time for time in times if time is not None), default=None)

    def tick(self, now: int) -> None:
        """Lets time pass: prefetch deadlines, leases, records, holds, graces, and a bounded turn of reclaim."""
        self.prefetcher.tick(now)
        jobs = self.jobs
        while (job := next(iter(jobs.leased), None)) is not None and job.lease_end_ns <= now:
            jobs.expire_lease(job)
        while (job := next(iter(jobs.read), None)) is not None and job.read_end_ns <= now:
            jobs.drop(job)
        while (job := next(iter(jobs.recorded), None)) is not None and job.record_end_ns <= now:
            self.lookups.end(job)
        self.holds.tick(now)
        for client in list(self.sessions.broken.values()):
            if client.broken_ns + self.limits.reattach_grace_ns <= now:
                self._end_session(now, client)
        for client in self.sessions.clients.values():
            self.calls.forget_old(client, now)
        self.index.reclaim(self.limits.victims_per_turn)

    def grow(self, arena_bytes: int) -> None:
        """The arena has become this large."""
        self.index.slots.grow(arena_bytes)

    # ---- spaces -----------------------------------------------------------------------------------------------------

    def space_base(self, now: int, identity: t.SpaceIdentity) -> bytes:
        """Names an identity and remembers it. Refuses: SPACE_LIMIT."""
        return self._facts(identity).base

    def _facts(self, identity: t.SpaceIdentity) -> IdentityFacts:
        clients = self.sessions.clients.values()
        return self.index.name_base(identity, (client.facts.base for client in clients if client.facts is not None))

    def space_seed(self, ref: t.SpaceRef) -> tuple[bytes, bool]:
        """(space digest, whether keys are made of token ids here). Refuses: SPACE_UNKNOWN."""
        facts = self.index.facts(ref.space_base)
        return space_digest(ref), facts.identity.hash_algorithm == OWN_HASH_ALGORITHM

    # ---- sessions ---------------------------------------------------------------------------------------------------

    def attach(self, now: int, client_id: str, engine_id: str, role: t.Role, session_id: bytes) -> bool:
        """Opens or continues a session; True when continued. Refuses: CLIENT_EXISTS, CLIENT_LIMIT, ENGINE_DRAINING."""
        client = self.sessions.clients.get(client_id)
        if client is not None:
            if (client.session_id, client.engine.engine_id, client.role) == (session_id, engine_id, role):
                client.attached = True
                self.sessions.broken.pop(client_id, None)
                return True
            if not client.attached:
                self._end_session(now, client)
        self.sessions.open(client_id, engine_id, role, session_id)
        return False

    def detach(self, now: int, client_id: str, session_id: bytes) -> None:
        """The session's stream broke: its grace begins."""
        client = self.sessions.clients.get(client_id)
        if client is not None and client.session_id == session_id and client.attached:
            client.attached = False
            client.broken_ns = now
            self.sessions.broken[client_id] = client

    def check_client(self, client_id: str, engine_id: str) -> None:
        """Refuses: NOT_ATTACHED, ENGINE_UNKNOWN, ENGINE_DRAINING."""
        self.sessions.find_working(client_id, engine_id)

    def _end_session(self, now: int, client: Client) -> None:
        """The process is gone: its jobs, calls and memory go; what a running slice touches, when it is reported."""
        self.ledger.counters["ended_sessions"] += 1
        engine = client.engine
        self.sessions.close(client)
        for job in list(engine.jobs.values()):
            if client.role is t.Role.SCHEDULER or job.owner == client.client_id:
                self.lookups.end(job)
        self._give_up_memory(now, client)

    def _give_up_memory(self, now: int, client: Client) -> None:
        """Ends the client's calls; its mapping is unmapped when no slice is in flight."""
        self.calls.revoke_all(now, client)
        if client.registration is not None:
            client.unmaps.append(client.registration.mapping_id)
            client.registration = client.facts = None
        self._settle_client(client)

    def _settle_client(self, client: Client) -> None:
        """Emits what waited for the client's last slice."""
        if client.in_flight:
            return
        self.ledger.outbox += [t.Unmap(client.client_id, mapping_id) for mapping_id in client.unmaps]
        client.unmaps.clear()
        if client.gone:
            self.sessions.settled(client)
            self.ledger.outbox.append(t.SessionEnded(client.client_id))

    # ---- memory -----------------------------------------------------------------------------------------------------

    def register(self, now: int, client_id: str, registration: t.Registration) -> t.Registered:
        """Shares a worker's memory; replaces an earlier registration, whose calls end and whose mapping goes after its
        running slice. Refuses: NOT_ATTACHED, ENGINE_*, RANK, TP_SIZE_MISMATCH, SPACE_MISMATCH, GEOMETRY_MISMATCH."""
        client = self.sessions.find_working(client_id, registration.engine_id)
        if client.role is not t.Role.WORKER:
            raise Refusal(Reason.INVALID_FIELD, "only a worker shares memory; attach as one", field="role")
        facts = self._facts(registration.identity)
        parts = registration.geometry.parts(self.limits.chunk_tokens)
        object_bytes = sum(part.object_bytes for part in parts)
        old = client.registration
        changed = old is None or replace(old, mapping_id=registration.mapping_id) != registration
        if changed:
            mate = client.engine.mate(client)
            checks.check_ranks(registration, mate.registration if mate else None, mate is None or mate.facts is facts)
            self.agree_on_form(client, registration.kv_rank, facts, parts)
            self._give_up_memory(now, client)
            client.registration, client.facts, client.parts = registration, facts, parts
            client.registration_epoch += 1
        return t.Registered(facts.base, client.registration_epoch, object_bytes, changed)

    def agree_on_form(
        self, client: Client | None, kv_rank: int, facts: IdentityFacts, parts: tuple[t.Part, ...]
    ) -> None:
        """Objects of one space and rank have one length and order while anybody (but ``client``) has or shares such,
        and its chunks the same parts. When that changes, old lookups end: what a cleared space still pins for them has
        the other form. Refuses: GEOMETRY_MISMATCH."""
        needs = tuple(part.need for part in parts)
        known = facts.forms.get(kv_rank, parts)
        if [part.form for part in known] != [part.form for part in parts] or (needs != facts.needs and facts.forms):
            in_use = any(space.table.chunks for space in self.index.spaces.values() if space.facts is facts)
            others = (other for other in self.sessions.clients.values() if other is not client and other.facts is facts)
            if in_use or any(other.sharing().kv_rank == kv_rank or needs != facts.needs for other in others):
                raise Refusal(Reason.GEOMETRY_MISMATCH, checks.explain_forms(parts, known, facts.needs), field="groups")
            for job in [job for job in self.jobs.jobs.values() if job.space.facts is facts]:
                self.lookups.end(job)
            if needs != facts.needs:
                facts.forms.clear()
        facts.forms[kv_rank], facts.needs = parts, needs

    def unregister(self, now: int, client_id: str, engine_id: str) -> int | None:
        """Takes memory back: the mapping whose Unmap will come out; None when nothing is registered."""
        client = self.sessions.find(client_id, engine_id)
        registration = client.registration
        self._give_up_memory(now, client)
        return None if registration is None else registration.mapping_id

    # ---- lookups ----------------------------------------------------------------------------------------------------

    def lookup(self, now: int, client_id: str, command: t.LookupCommand) -> t.LookupAnswer:
        """See the protocol. Refuses: NOT_ATTACHED, ENGINE_*, SPACE_UNKNOWN, RANK, TP_SIZE_MISMATCH, JOB_LIMIT, …"""
        return self.lookups.lookup(now, self.sessions.find_working(client_id, command.engine_id), command)

    def query(self, now: int, client_id: str, engine_id: str, job_id: bytes) -> t.PrefetchStatus:
        """Refuses: NOT_ATTACHED, ENGINE_UNKNOWN, JOB_UNKNOWN."""
        return self.jobs.find(self.sessions.find(client_id, engine_id).engine, job_id).status

    def free(self, now: int, client_id: str, command: t.FreeCommand) -> int:
        """Releases pins; how many. Refuses: NOT_ATTACHED, ENGINE_*, JOB_UNKNOWN, TP_SIZE_MISMATCH, READER_UNKNOWN."""
        engine = self.sessions.find(client_id, command.engine_id).engine
        return self.lookups.free(now, self.jobs.find(engine, command.job_id), command)

    def end_request(self, now: int, client_id: str, engine_id: str, request_id: str) -> t.Ended:
        """Ends every job of a request."""
        engine = self.sessions.find(client_id, engine_id).engine
        jobs = list(engine.requests.get(request_id, {}).values())
        return t.Ended(len(jobs), sum(self.lookups.end(job) for job in jobs))

    # ---- copies -----------------------------------------------------------------------------------------------------

    def _check_space(self, client: Client, facts: IdentityFacts) -> None:
        if client.facts is not facts:
            text = "the space_base is not the one that this client registered"
            raise Refusal(Reason.SPACE_MISMATCH, text, field="space.space_base")

    def store(self, now: int, client_id: str, command: t.StoreCommand) -> tuple[t.ChunkResult, ...] | None:
        """Results, or None: they come by CallEnded. Refuses: see the protocol."""
        client = self.sessions.find_working(client_id, command.engine_id)
        content, last_key = command.content, tuple(command.content.keys[-1:])
        asked = fingerprint(command.blocks, command.range, command.space, content.num_tokens, last_key)
        repeat = self.calls.find_repeat(client, command.call_id, asked)
        if repeat is not None:
            return repeat.results
        registration = client.sharing()
        checks.check_store(command, registration, self.limits)
        self._check_space(client, self.index.facts(command.space.space_base))
        self.ledger.counters["stores"] += 1
        plan = store_plan(self.desk, client, command, self.index.space(command.space))
        return self.calls.begin(now, client, command.call_id, plan, asked).results

    def retrieve(self, now: int, client_id: str, command: t.RetrieveCommand) -> tuple[t.ChunkResult, ...] | None:
        """Results, or None: they come by CallEnded. Refuses: see the protocol."""
        client = self.sessions.find_working(client_id, command.engine_id)
        asked = fingerprint(command.blocks, command.range, command.job_id)
        repeat = self.calls.find_repeat(client, command.call_id, asked)
        if repeat is not None:
            return repeat.results
        registration = client.sharing()
        checks.check_call_id(command.call_id)
        checks.check_range(command.range, registration.geometry.block_size, self.limits)
        checks.check_blocks(command.blocks, command.range, registration, self.limits)
        job = self.jobs.find(client.engine, command.job_id)
        self._check_space(client, job.space.facts)
        if not job.status.done:
            raise Refusal(Reason.JOB_PENDING, "the lookup is still prefetching; query it first", retry_after_ms=10)
        bit = job.lease.bit(t.Reader(registration.kv_rank, registration.tp_rank))
        plan = retrieve_plan(self.desk, client, command, job, bit)
        self.ledger.counters["retrieves"] += 1
        return self.calls.begin(now, client, command.call_id, plan, asked).results

    def revoke(self, now: int, client_id: str, call_id: int) -> None:
        """Nobody waits for the call any more: it ends as soon as it can."""
        client = self.sessions.clients.get(client_id)
        call = client.calls.get(call_id) if client is not None else None
        if call is not None:
            self.calls.revoke(now, call)

    def fence(self, now: int, client_id: str, engine_id: str, call_ids: Sequence[int]) -> tuple[int, ...]:
        """Revokes calls; those that still run, until their CallEnded. Refuses: NOT_ATTACHED, ENGINE_*, CALL_LIMIT."""
        return self.calls.fence(now, self.sessions.find(client_id, engine_id), call_ids)

    def slice_done(self, now: int, slice_id: int, report: t.SliceReport) -> None:
        """A slice has ended; nothing touches its blocks and slots any more."""
        client = self.calls.slice_done(now, slice_id, report)
        self._settle_client(client)
        self.calls.advance(now, client)

    def plan_ahead(self, now: int, client_id: str, most: int = SLICES_AHEAD) -> None:
        """The client's slices have been handed over: what comes behind them is planned while they are copied, until
        ``most`` are in flight."""
        client = self.sessions.clients.get(client_id)
        if client is not None:
            self.calls.advance(now, client, most)

    def probe_done(self, now: int, probe_id: int, found: Sequence[str], silent: bool = False) -> None:
        """The tiers have answered, a tier's name or "" for each object; ``silent``: not all of them have."""
        self.prefetcher.probe_done(now, probe_id, found, silent)

    def read_done(self, now: int, read_id: int, ok: bool) -> None:
        """A tier read has ended; nothing touches its slot any more."""
        self.prefetcher.read_done(now, read_id, ok)

    def write_done(self, now: int, write_id: int, ok: bool, no_room: bool = False) -> None:
        """A write to a tier has ended; nothing reads its slot any more. ``no_room``: the tier is well."""
        self.writes.write_done(write_id, ok, no_room)

    # ---- operators --------------------------------------------------------------------------------------------------

    def clear(
        self,
        now: int,
        *,
        space: t.SpaceRef | None = None,
        model: str | None = None,
        cache_salt: str | None = None,
        everything: bool = False,
    ) -> t.Cleared:
        """Forgets; exactly one target. Objects in lower tiers get new names, so they are not found either."""
        return self.versions.clear(space, model, cache_salt, everything)

    def bump_generation(self, now: int, *, model: str = "", space_base: bytes = b"") -> t.Cleared:
        """New weights under an old name. Refuses: SPACE_UNKNOWN."""
        return self.versions.bump(model, space_base)

    def pin(self, now: int, space: t.SpaceRef, content: t.ChunkKeys, ttl_ns: int, pin_id: bytes) -> t.Held:
        """Holds the resident prefix. Refuses: SPACE_UNKNOWN, HOLD_LIMIT, PIN_LIMIT."""
        checks.check_prefix(content, self.limits)
        facts = self.index.facts(space.space_base)
        hit = self.lookups.resident(space, content.keys, facts.all_ranks)
        if not hit.size:
            return t.Held(b"", 0)
        self.holds.pin(pin_id, hit.chunks, now + ttl_ns)
        return t.Held(pin_id, hit.size * self.limits.chunk_tokens)

    def unpin(self, now: int, pin_id: bytes) -> int:
        """Ends a hold; how many chunks it held. Refuses: PIN_UNKNOWN."""
        return self.holds.unpin(pin_id)

    def drain_engine(self, now: int, engine: str) -> str:
        """Takes an engine out; its id. Refuses: ENGINE_UNKNOWN."""
        found = self.sessions.find_engine(engine)
        if not found.draining:
            found.draining = True
            for job in list(found.jobs.values()):
                self.lookups.end(job)
            self.ledger.outbox += [t.EngineDraining(client_id) for client_id in found.clients]
        return found.engine_id

    def engine_idle(self, engine_id: str) -> bool:
        """No call of the engine runs and it has no jobs."""
        engine = self.sessions.engines.get(engine_id)
        busy = engine is not None and (engine.jobs or any(client.queue for client in engine.clients.values()))
        return not busy and all(client.engine.engine_id != engine_id for client in self.sessions.ending.values())

    def set_quota(self, cache_salt: str, size_bytes: int | None) -> None:
        """Most that a tenant may hold; None = no quota."""
        self.quotas.set(cache_salt, size_bytes)

    def set_write_policy(self, model: str, policy: t.WritePolicy | None) -> t.WritePolicy:
        """When objects of a model ("": of any other) go to lower tiers; what is in force. Refuses: SPACE_LIMIT."""
        return self.writes.set_policy(model, policy, self.limits.spaces)

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def arena_status(self) -> t.ArenaStatus:
        """Bytes by state."""
        return snapshots.arena(self.index)

    def counts(self) -> t.Counts:
        """How many of what there are."""
        return snapshots.counts(self.index, self.sessions, len(self.jobs.jobs), self.leases.pins, self.calls.in_flight)

    def engines(self) -> tuple[t.EngineStatus, ...]:
        """All engines with their clients."""
        return snapshots.engines(self.sessions)

    def spaces(self) -> tuple[t.SpaceStatus, ...]:
        """All spaces that hold data."""
        return snapshots.spaces(self.index, self.writes)
