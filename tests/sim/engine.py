# SPDX-License-Identifier: Apache-2.0
"""Engines: a scheduler and workers, their sessions, their memory, and how they die."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import MS, Registration, Role, SpaceIdentity
from tests.sim.calls import Call
from tests.sim.hands import Hands
from tests.sim.loop import Process, PromiseError, Signal, Task
from tests.sim.memory import EngineMemory, Shape
from tests.sim.truth import Lease

GONE = {Reason.NOT_ATTACHED, Reason.NOT_REGISTERED, Reason.ENGINE_UNKNOWN, Reason.ENGINE_DRAINING}
"""Refusals that a client gets whose session or engine is ending."""
REFUSED_CALLS = {Reason.CALL_LIMIT, Reason.CALL_REVOKED} | GONE


@dataclass(frozen=True)
class Kind:
    """How an engine spreads its KV heads."""

    tp_size: int
    kv_tp_size: int
    kv_world_size: int

    @property
    def readers(self) -> int:
        return self.tp_size // self.kv_tp_size

    def ranks(self) -> list[tuple[int, int]]:
        """(kv_rank, tp_rank) of each worker."""
        stages = self.kv_world_size // self.kv_tp_size
        return [
            (stage * self.kv_tp_size + tp_rank // self.readers, tp_rank)
            for stage in range(stages)
            for tp_rank in range(self.tp_size)
        ]


@dataclass
class Client:
    """One process of an engine."""

    client_id: str
    session_id: bytes
    role: Role
    kv_rank: int = 0
    tp_rank: int = 0
    memory: EngineMemory | None = None
    mapping_id: int = 0
    attached: bool = False
    was_here: bool = False
    registered: bool = False
    next_call: int = 1
    session_calls_from: int = 0
    """The first call id of this session; earlier calls may be forgotten."""
    calls: list[Call] = field(default_factory=list)


class Engine:
    """One deployment. ``tasks`` are its processes' doings; a crash ends them all."""

    def __init__(
        self, name: str, kind: Kind, identity: SpaceIdentity, memories: list[EngineMemory], hands: Hands
    ) -> None:
        self.name = name
        self.engine_id = f"engine-{name}-{hands.rng.randbytes(4).hex()}"
        self.kind = kind
        self.identity = identity
        self.hands = hands
        self.rng: random.Random = hands.rng
        self.scheduler = Client(f"{name}-s", hands.rng.randbytes(16), Role.SCHEDULER)
        self.workers = [
            Client(f"{name}-w{number}", hands.rng.randbytes(16), Role.WORKER, kv_rank, tp_rank, memory)
            for number, ((kv_rank, tp_rank), memory) in enumerate(zip(kind.ranks(), memories, strict=True))
        ]
        self.leases: dict[bytes, Lease] = {}
        self.tasks: list[Task] = []
        self.alive = True
        self.drained = False
        self.ready = Signal()

    @property
    def shape(self) -> Shape:
        memory = self.workers[0].memory
        assert memory is not None
        return memory.shape

    @property
    def clients(self) -> list[Client]:
        return [self.scheduler, *self.workers]

    def memories(self) -> list[EngineMemory]:
        return [w.memory for w in self.workers if w.memory is not None]

    def writers(self) -> list[Client]:
        """The workers that store: the first reader of each KV rank."""
        return [w for w in self.workers if w.tp_rank % self.kind.readers == 0]

    def spawn(self, process: Process, delay_ns: int = 0) -> Task:
        task = self.hands.loop.spawn(process, delay_ns)
        self.tasks.append(task)
        return task

    # ---- coming -----------------------------------------------------------------------------------------------------

    def start(self) -> Process:
        """Attaches every process and shares every worker's memory, then fires ``ready``."""
        for client in self.clients:
            yield from self.attach(client)
            yield self.rng.randint(0, 2 * MS)
        for worker in self.workers:
            assert worker.memory is not None
            self.register(worker)
        self.hands.loop.fire(self.ready)

    def attach(self, client: Client) -> Process:
        """Opens the session; an older session under the same client id may still be ending."""
        hands = self.hands
        while True:
            try:
                resumed = hands.ask(
                    lambda now: hands.book.attach(now, client.client_id, self.engine_id, client.role, client.session_id)
                )
            except Refusal as refusal:
                if refusal.reason not in (Reason.CLIENT_EXISTS, Reason.CLIENT_LIMIT, Reason.ENGINE_DRAINING):
                    raise
                if self.drained:
                    return
                yield 10 * MS
                continue
            if resumed and not client.was_here:
                raise PromiseError(f"{client.client_id} is told that it was here before")
            client.was_here = True
            hands.present.add(client.client_id)
            if not resumed:
                client.registered = False
                client.session_calls_from = client.next_call + 1
                hands.sessions[client.client_id] = Signal()
            client.attached = True
            return

    def register(self, worker: Client) -> None:
        memory = worker.memory
        assert memory is not None
        hands = self.hands
        mapping_id = hands.map(memory)
        kind = self.kind
        registration = Registration(
            engine_id=self.engine_id,
            identity=self.identity,
            kv_rank=worker.kv_rank,
            tp_rank=worker.tp_rank,
            tp_size=kind.tp_size,
            kv_tp_size=kind.kv_tp_size,
            geometry=memory.shape.geometry,
            memory_bytes=1 << 20,
            mapping_id=mapping_id,
            layout_digest=memory.digest,
        )
        try:
            answer = hands.ask(lambda now: hands.book.register(now, worker.client_id, registration))
        except Refusal as refusal:
            del hands.mappings[mapping_id]
            if refusal.reason not in GONE:
                raise
            return
        if answer.changed:
            worker.mapping_id = mapping_id
        else:
            del hands.mappings[mapping_id]
        worker.registered = True

    def unregister(self, worker: Client) -> None:
        """Takes the memory back, and shares it again a little later."""
        hands = self.hands
        for call in worker.calls:
            call.stopped = True
        mapping_id = hands.ask(lambda now: hands.book.unregister(now, worker.client_id, self.engine_id))
        if mapping_id != worker.mapping_id:
            raise PromiseError(f"unregister answers mapping {mapping_id}, not {worker.mapping_id}")
        worker.registered = False
        self.spawn(self._share_later(worker), self.rng.choice((0, 5, 50)) * MS)

    def _share_later(self, worker: Client) -> Process:
        yield 0
        if worker.attached and not worker.registered:
            self.register(worker)

    def share_anew(self, worker: Client) -> None:
        """The same memory again (nothing changes), or mapped in another way (the old mapping goes)."""
        assert worker.memory is not None
        if self.rng.random() < 0.5:
            worker.memory.digest = self.rng.randbytes(8)
            for call in worker.calls:
                call.stopped = True
        self.register(worker)

    def drain(self) -> None:
        """An operator takes the engine out."""
        self.drained = True
        for lease in self.leases.values():
            lease.over = True
        for client in self.clients:
            for call in client.calls:
                call.stopped = True
        self.hands.ask(lambda now: self.hands.book.drain_engine(now, self.engine_id))

    # ---- refusals ---------------------------------------------------------------------------------------------------

    def check_refusal(self, refusal: Refusal, client: Client, allowed: set[Reason]) -> None:
        if refusal.reason not in allowed:
            raise refusal
        gone = not client.attached or self.drained or not self.alive
        if refusal.reason in GONE and not gone and (client.registered or client is self.scheduler):
            raise PromiseError(f"{client.client_id} is refused: {refusal}")

    def check_job_refusal(self, refusal: Refusal, lease: Lease, client: Client) -> None:
        if refusal.reason is Reason.READER_UNKNOWN and not lease.readers_known:
            return
        if refusal.reason is not Reason.JOB_UNKNOWN:
            self.check_refusal(refusal, client, GONE)
        elif lease.must_be_known(self.hands.loop.now):
            raise PromiseError("a job with live pins is unknown")

    def check_call_refusal(self, refusal: Refusal, worker: Client, call: Call) -> None:
        if refusal.reason in (Reason.JOB_UNKNOWN, Reason.READER_UNKNOWN) and call.lease is not None:
            self.check_job_refusal(refusal, call.lease, worker)
        else:
            self.check_refusal(refusal, worker, REFUSED_CALLS)

    # ---- going ------------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Every process dies at once; the server sees each socket close a little later."""
        self.alive = False
        for task in self.tasks:
            task.end()
        for lease in self.leases.values():
            lease.over = True
        for client in self.clients:
            self.hands.loop.at(self.hands.loop.now + self.rng.randint(0, 30 * MS), self._close, client)
        for worker in self.workers:
            assert worker.memory is not None
            if worker.memory not in self.hands.mappings.values():
                self.hands.loop.fire(worker.memory.unmapped)

    def break_stream(self, client: Client) -> None:
        """The connection breaks; the process lives on. A scheduler's break may end the engine's jobs."""
        for lease in self.leases.values():
            lease.over = lease.over or client is self.scheduler
        self._close(client)

    def _close(self, client: Client) -> None:
        if not client.attached:
            return
        client.attached = False
        self.hands.present.discard(client.client_id)
        for call in client.calls:
            call.stopped = True
        self.hands.ask(lambda now: self.hands.book.detach(now, client.client_id, client.session_id))
