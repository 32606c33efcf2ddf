# SPDX-License-Identifier: Apache-2.0
"""Who is there: engines and their clients.

A client is attached while its stream is open, and for a grace after it broke; the same process (session_id) may come back
in it. Then its session ends: see ``kvgrpc.core.cache``, which lets jobs, calls and memory go.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.keys import fingerprint
from kvgrpc.core.types import ClientStatus, EngineStatus, Registration, Role

if TYPE_CHECKING:
    from kvgrpc.core.calls import Call
    from kvgrpc.core.jobs import Job


class Engine:
    """One engine: its clients and its jobs."""

    __slots__ = ("by_request", "clients", "draining", "engine_id", "finished", "jobs", "requests")

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.clients: dict[str, Client] = {}
        self.jobs: dict[bytes, Job] = {}
        self.requests: dict[tuple[str, int], Job] = {}
        self.by_request: dict[str, dict[bytes, Job]] = {}
        self.finished: OrderedDict[Job, None] = OrderedDict()
        """Jobs that are final and pin nothing, oldest first: the ones to forget at a limit."""
        self.draining = False

    def registration(self) -> Registration | None:
        """Any worker's registration: they agree on tp_size, kv_tp_size and identity."""
        return next((client.registration for client in self.clients.values() if client.registration), None)


class Client:
    """One process of an engine. Outlives its session until its last slice is reported (``gone``)."""

    __slots__ = (
        "attached",
        "broken_ns",
        "calls",
        "client_id",
        "ended",
        "engine",
        "gone",
        "queue",
        "registration",
        "registration_epoch",
        "role",
        "running",
        "session_id",
        "unmaps",
    )

    def __init__(self, client_id: str, engine: Engine, role: Role, session_id: bytes) -> None:
        self.client_id = client_id
        self.engine = engine
        self.role = role
        self.session_id = session_id
        self.attached = True
        self.gone = False
        self.broken_ns = 0
        self.registration: Registration | None = None
        self.registration_epoch = 0
        self.calls: dict[int, Call] = {}
        self.ended: OrderedDict[int, Call] = OrderedDict()
        self.queue: deque[Call] = deque()
        self.running: Call | None = None
        """The call whose slice is in flight."""
        self.unmaps: list[int] = []
        """Mappings to give up when no slice is in flight."""


class Sessions:
    """Engines and clients by name."""

    def __init__(self, clients_most: int) -> None:
        self._clients_most = clients_most
        self.engines: dict[str, Engine] = {}
        self.clients: dict[str, Client] = {}
        self.broken: dict[str, Client] = {}
        self.ending: dict[str, Client] = {}
        """Clients whose session is over but not their last slice. Their ids stay taken: a new session under such an id would
        not know the call whose copy still runs, and would fence it in vain."""

    def open(self, client_id: str, engine_id: str, role: Role, session_id: bytes) -> Client:
        """A new session. Refuses: CLIENT_EXISTS while a copy of an earlier one runs, CLIENT_LIMIT."""
        if client_id in self.ending:
            text = "copies of this client's earlier session are still running; try again"
            raise Refusal(Reason.CLIENT_EXISTS, text, retry_after_ms=100, resource=client_id)
        if len(self.clients) + len(self.ending) >= self._clients_most:
            text = f"{self._clients_most} clients are attached already; raise --clients"
            raise Refusal(Reason.CLIENT_LIMIT, text, resource="clients")
        engine = self.engines.get(engine_id)
        if engine is None:
            engine = self.engines[engine_id] = Engine(engine_id)
        client = Client(client_id, engine, role, session_id)
        self.clients[client_id] = client
        engine.clients[client_id] = client
        return client

    def close(self, client: Client) -> None:
        """Forgets a session; its engine goes with its last client."""
        client.gone = True
        if client.running is not None:
            self.ending[client.client_id] = client
        self.broken.pop(client.client_id, None)
        del self.clients[client.client_id]
        engine = client.engine
        del engine.clients[client.client_id]
        if not engine.clients:
            del self.engines[engine.engine_id]

    def find(self, client_id: str, engine_id: str) -> Client:
        """The client, if it is attached and of this engine. Refuses: NOT_ATTACHED, ENGINE_UNKNOWN."""
        client = self.clients.get(client_id)
        if client is None:
            text = (
                "this client is not attached (or its session has ended); open EngineService.Attach and register again"
            )
            raise Refusal(Reason.NOT_ATTACHED, text)
        if client.engine.engine_id != engine_id:
            raise Refusal(
                Reason.ENGINE_UNKNOWN, "the engine_id is not the one this client attached with", field="engine_id"
            )
        return client

    def find_working(self, client_id: str, engine_id: str) -> Client:
        """As ``find``, for calls that begin something new. Refuses also: ENGINE_DRAINING."""
        client = self.find(client_id, engine_id)
        if client.engine.draining:
            raise Refusal(Reason.ENGINE_DRAINING, "this engine is being drained", retry_after_ms=1000)
        return client

    def find_engine(self, name: str) -> Engine:
        """By engine_id or fingerprint. Refuses: ENGINE_UNKNOWN."""
        engine = self.engines.get(name)
        if engine is None:
            engine = next((e for e in self.engines.values() if fingerprint(e.engine_id) == name), None)
        if engine is None:
            raise Refusal(
                Reason.ENGINE_UNKNOWN, "no engine of that name is attached", field="engine", resource="engine"
            )
        return engine

    def statuses(self) -> tuple[EngineStatus, ...]:
        return tuple(
            EngineStatus(
                engine=fingerprint(engine.engine_id),
                clients=tuple(_client_status(client) for client in engine.clients.values()),
                jobs=len(engine.jobs),
                pins=sum(job.lease.pins for job in engine.jobs.values()),
                draining=engine.draining,
            )
            for engine in self.engines.values()
        )


def _client_status(client: Client) -> ClientStatus:
    registration = client.registration
    return ClientStatus(
        client_id=client.client_id,
        role=client.role,
        attached=client.attached,
        registered=registration is not None,
        kv_rank=registration.kv_rank if registration else 0,
        tp_rank=registration.tp_rank if registration else 0,
        memory_bytes=registration.memory_bytes if registration else 0,
        calls_in_flight=len(client.queue),
    )


def check_ranks(registration: Registration, others: Registration | None, base: bytes, other_base: bytes) -> None:
    """Whether a worker's place in its engine makes sense. Refuses: RANK, TP_SIZE_MISMATCH, SPACE_MISMATCH."""
    r = registration
    world = r.identity.kv_world_size
    if not 1 <= r.tp_size <= 128 or not 1 <= r.kv_tp_size <= r.tp_size or r.tp_size % r.kv_tp_size:
        text = f"kv_tp_size {r.kv_tp_size} does not divide tp_size {r.tp_size}"
        raise Refusal(Reason.TP_SIZE_MISMATCH, text, field="kv_tp_size")
    if world % r.kv_tp_size:
        text = f"kv_tp_size {r.kv_tp_size} does not divide kv_world_size {world}"
        raise Refusal(Reason.TP_SIZE_MISMATCH, text, field="kv_tp_size")
    if not 0 <= r.tp_rank < r.tp_size:
        raise Refusal(Reason.RANK, f"tp_rank {r.tp_rank} is not below tp_size {r.tp_size}", field="tp_rank")
    if not 0 <= r.kv_rank < world:
        raise Refusal(Reason.RANK, f"kv_rank {r.kv_rank} is not below kv_world_size {world}", field="kv_rank")
    place = r.tp_rank // (r.tp_size // r.kv_tp_size)
    if r.kv_rank % r.kv_tp_size != place:
        text = f"tp_rank {r.tp_rank} of {r.tp_size} holds KV rank {place} of its stage, not kv_rank {r.kv_rank}"
        raise Refusal(Reason.RANK, text, field="kv_rank")
    if others is None:
        return
    if (r.tp_size, r.kv_tp_size) != (others.tp_size, others.kv_tp_size):
        text = f"the engine's other workers have tp_size {others.tp_size} and kv_tp_size {others.kv_tp_size}"
        raise Refusal(Reason.TP_SIZE_MISMATCH, text, field="tp_size")
    if base != other_base:
        raise Refusal(Reason.SPACE_MISMATCH, "the engine's other workers registered another identity", field="identity")
