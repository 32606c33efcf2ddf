# SPDX-License-Identifier: Apache-2.0
"""The bookkeeper and its oracle side by side: every contact goes to both, every order is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvgrpc.core import invariants
from kvgrpc.core.cache import Bookkeeper
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.slicing import SKIPPED
from kvgrpc.core.types import (
    Action,
    CallEnded,
    CancelRead,
    EngineDraining,
    JobDone,
    PrefetchStatus,
    ProbeTiers,
    ReadTier,
    Role,
    RunSlice,
    SessionEnded,
    SliceReport,
    SpaceRef,
    Unmap,
    WriteObject,
    WritePolicy,
)
from tests.model.cluster import (
    ARENA_BYTES,
    OBJECT_BYTES,
    TOKEN_BYTES,
    EngineModel,
    Member,
    identity,
    limits,
    piece_bytes,
)
from tests.model.oracle import Job, Kind, Oracle, Place
from tests.sim.tiers import object_name

T = TypeVar("T")
ObjectOf = tuple[Place, int, bytes, int]
"""(place, version, key, kv_rank)."""


class Bench:
    """``ask`` is the only way to the core."""

    def __init__(self, slice_tokens: int, tiers: tuple[str, ...], policy: WritePolicy = WritePolicy.THROUGH) -> None:
        self.limits = limits(slice_tokens)
        self.book = Bookkeeper(self.limits, ARENA_BYTES, tiers)
        self.book.set_write_policy("", policy)
        self.policy = policy
        self.oracle = Oracle()
        self.now = 1
        self.engines: list[EngineModel] = []
        self.pending: dict[bytes, Job] = {}
        self.probes: dict[int, ProbeTiers] = {}
        self.reads: dict[int, ReadTier] = {}
        self.cancelled: set[int] = set()
        self.writes: dict[int, WriteObject] = {}
        self.names: dict[str, ObjectOf] = {}
        self.digests: list[tuple[Place, bytes, int]] = []
        self.keys: set[bytes] = set()
        self.known: list[tuple[int, list[int], str]] = []
        """(KV world size, prompt, salt) of every store."""
        self.places: dict[tuple[int, str], tuple[SpaceRef, Place]] = {}
        """By KV world size and salt."""
        self.ids = 0
        self.ended_mappings: set[int] = set()

    def ask(self, act: Callable[[int], T]) -> T:
        """One call of the core, and what it orders."""
        try:
            answer = act(self.now)
        except Refusal:
            self._settle()
            raise
        self._settle()
        return answer

    def _settle(self) -> None:
        invariants.check(self.book)
        for action in self.book.drain():
            self._note(action)

    def refused(self, act: Callable[[int], object], *reasons: Reason) -> None:
        """The core refuses this, for one of these reasons, and nothing changes."""
        before = self.book.counts()
        try:
            answer = self.ask(act)
        except Refusal as refusal:
            told(refusal, *reasons)
            assert self.book.counts() == before
        else:
            raise AssertionError(f"not refused ({reasons}), but answered {answer}")

    def member(self, client_id: str) -> Member:
        for engine in self.engines:
            for member in engine.members():
                if member.client_id == client_id:
                    return member
        raise AssertionError(f"unknown client {client_id}")

    def engine_of(self, client_id: str) -> EngineModel:
        return next(e for e in self.engines if self.member(client_id) in e.members())

    # ---- engines ----------------------------------------------------------------------------------------------------

    def new_id(self) -> bytes:
        self.ids += 1
        return self.ids.to_bytes(16, "big")

    def add_spaces(self) -> None:
        """Two models, of one and of two KV ranks, each with and without a tenant's salt."""
        for world in (1, 2):
            base = self.ask(lambda now, w=world: self.book.space_base(now, identity(w)))
            for salt in ("", "tenant"):
                ref = SpaceRef(base, "", salt)
                self.places[(world, salt)] = (ref, Place())
                self.digests.append((self.places[(world, salt)][1], self.book.space_seed(ref)[0], world))

    def add_engine(self, kind: Kind, block_size: int) -> None:
        name = f"e{len(self.engines)}"
        engine = EngineModel(name, kind, block_size, Member(f"{name}-s", self.new_id(), is_worker=False))
        engine.workers = [Member(f"{name}-w{i}", self.new_id(), k, t) for i, (k, t) in enumerate(kind.workers())]
        self.engines.append(engine)
        for member in engine.members():
            assert not self.attach(engine, member)
        for worker in engine.workers:
            self.register(engine, worker)

    def attach(self, engine: EngineModel, member: Member) -> bool:
        role = Role.WORKER if member.is_worker else Role.SCHEDULER
        return self.ask(lambda now: self.book.attach(now, member.client_id, engine.engine_id, role, member.session_id))

    def register(self, engine: EngineModel, worker: Member) -> None:
        """Shares memory that is not the one before."""
        self.ids += 1
        registration = engine.registration(worker, self.ids)
        answer = self.ask(lambda now: self.book.register(now, worker.client_id, registration))
        assert answer.changed
        assert answer.object_bytes == OBJECT_BYTES
        worker.mapping_id = self.ids

    def stop_calls(self, client_id: str) -> None:
        for call in self.oracle.calls.values():
            call.stopped = call.stopped or (call.client == client_id and call.results is None)

    # ---- orders -----------------------------------------------------------------------------------------------------

    def _note(self, action: Action) -> None:
        oracle = self.oracle
        if isinstance(action, RunSlice):
            assert action.mapping_id not in self.ended_mappings, "a copy on a mapping that is unmapped"
            oracle.ordered(action)
        elif isinstance(action, CallEnded):
            oracle.ended(oracle.calls[(action.client_id, action.call_id)], action.results, self.now)
        elif isinstance(action, ProbeTiers):
            self.probes[action.probe_id] = action
        elif isinstance(action, ReadTier):
            self.reads[action.read_id] = action
            oracle.read_ordered(action.read_id, *self.name_of(action.object.name))
        elif isinstance(action, WriteObject):
            place, version, key, rank = self.name_of(action.object.name)
            assert self.policy is not WritePolicy.NONE
            assert (version, key, rank) in place.stored | place.maybe, "what was never stored is written to a tier"
            assert all(w.object.name != action.object.name for w in self.writes.values()), "written twice at a time"
            self.writes[action.write_id] = action
        elif isinstance(action, CancelRead):
            assert action.read_id in self.reads
            self.cancelled.add(action.read_id)
        elif isinstance(action, Unmap):
            assert action.mapping_id not in self.ended_mappings, "unmapped twice"
            assert all(s.mapping_id != action.mapping_id for s in oracle.slices.values()), "unmapped under a copy"
            self.ended_mappings.add(action.mapping_id)
        elif isinstance(action, SessionEnded):
            self._end_session(action)
        elif isinstance(action, JobDone):
            if action.job_id in self.pending:
                self.pending[action.job_id].expires_ns = self.now + self.limits.lease_ns
        else:
            assert isinstance(action, EngineDraining), f"nobody watches: {action}"
            assert self.engine_of(action.client_id).drained

    def _end_session(self, action: SessionEnded) -> None:
        member = self.member(action.client_id)
        assert not member.attached, "the session of a living client ended"
        grace_ns = 0 if member.taken_over else self.limits.reattach_grace_ns
        assert self.now >= member.broken_ns + grace_ns, "the grace was cut short"
        assert all(s.client_id != member.client_id for s in self.oracle.slices.values()), "a copy runs on"
        if member.mapping_id:
            assert member.mapping_id in self.ended_mappings, "the session ended, its memory is still mapped"
        member.ended, member.mapping_id = True, 0
        if not member.is_worker:
            engine = self.engine_of(member.client_id).name
            self.oracle.end_jobs(engine)
            self.pending = {job_id: job for job_id, job in self.pending.items() if job.engine != engine}
        for call in self.oracle.calls.values():
            assert call.client != member.client_id or call.results is not None, "a call of a dead client never ends"

    # ---- copies and tiers -------------------------------------------------------------------------------------------

    def report(self, slice_id: int, report: SliceReport) -> None:
        order = self.oracle.slices[slice_id]
        if slice_id in self.oracle.skipped:
            report = SliceReport(0, SKIPPED)
        block_bytes = self.engine_of(order.client_id).block_size * TOKEN_BYTES
        self.oracle.reported(order, report, [piece_bytes(piece, block_bytes) for piece in order.pieces], OBJECT_BYTES)
        self.ask(lambda now: self.book.slice_done(now, slice_id, report))

    def name_of(self, name: str) -> ObjectOf:
        """What an object name of the core means; a name must not outlive a Clear."""
        if name not in self.names:
            for place, digest, ranks in self.digests:
                for generation in range(place.version + 2):
                    for key in self.keys:
                        for rank in range(ranks):
                            if object_name(digest, generation, key, rank) == name:
                                self.names[name] = (place, place.version, key, rank)
        assert name in self.names, "an unknown object name"
        place, version, _, _ = self.names[name]
        assert version == place.version, "a tier is asked for an object from before a Clear"
        return self.names[name]

    def read_ended(self, read_id: int, ok: bool) -> None:
        del self.reads[read_id]
        place, version, key, rank = self.oracle.reads.pop(read_id)
        if ok:
            sure = read_id not in self.cancelled
            (place.stored if sure else place.maybe).add((version, key, rank))
        self.ask(lambda now: self.book.read_done(now, read_id, ok))

    def write_ended(self, write_id: int, ok: bool) -> None:
        del self.writes[write_id]
        self.ask(lambda now: self.book.write_done(now, write_id, ok))

    def finish_lookup(self, job_id: bytes, status: PrefetchStatus) -> None:
        """A pending lookup is final: what is hit has arrived, and what was there has not gone."""
        job = self.pending.pop(job_id)
        hit = status.hit_tokens // self.limits.chunk_tokens
        versions = range(job.version, job.place.version + 1)
        for key in job.keys[:hit]:
            for rank in job.ranks:
                assert any((v, key, rank) in job.place.stored | job.place.maybe for v in versions), "a hit on nothing"
        assert hit >= job.hit or job.version != job.place.version, "a pending lookup lost what was there"
        assert sum(status.hit_chunks_by_tier.values()) == hit
        assert status.limited_by in ("", "PREFETCH_TIMEOUT", "PREFETCH_FAILED")
        job.status = status
        self.oracle.grant(job_id, job, hit)
        self.oracle.pass_time(self.now)


def told(refusal: Refusal, *reasons: Reason) -> None:
    """The refusal has one of these reasons; any other is passed on."""
    if refusal.reason not in reasons:
        raise refusal
