# SPDX-License-Identifier: Apache-2.0
"""Who is there: engines and their clients.

A client is attached while its stream is open, and for a grace after it broke; the same process (session_id) may come
back in it. Then its session ends: see ``kvgrpc.core.cache``, which lets jobs, calls and memory go.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.keys import fingerprint
from kvgrpc.core.types import Part, Registration, Role

if TYPE_CHECKING:
    from kvgrpc.core.calls import Call
    from kvgrpc.core.index import IdentityFacts
    from kvgrpc.core.jobs import Job


class Engine:
    """One engine: its clients and its jobs."""

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.clients: dict[str, Client] = {}
        self.jobs: dict[bytes, Job] = {}
        self.requests: dict[str, dict[int, Job]] = {}
        """Jobs by request id and attempt."""
        self.finished: OrderedDict[Job, None] = OrderedDict()
        """Jobs that are final and pin nothing, oldest first: the ones to forget at a limit."""
        self.draining = False

    def registration(self) -> Registration | None:
        """Any worker's registration: they agree on tp_size, kv_tp_size and identity."""
        return next((client.registration for client in self.clients.values() if client.registration), None)

    def mate(self, client: Client) -> Client | None:
        """Another client that shares memory."""
        return next((one for one in self.clients.values() if one is not client and one.registration), None)


@dataclass(eq=False, slots=True)
class Client:
    """One process of an engine. Outlives its session until its last slice is reported (``gone``)."""

    client_id: str
    engine: Engine
    role: Role
    session_id: bytes
    attached: bool = True
    gone: bool = False
    broken_ns: int = 0
    registration: Registration | None = None
    facts: IdentityFacts | None = None
    """Of the registration's identity."""
    parts: tuple[Part, ...] = ()
    """Of the registration's geometry."""
    registration_epoch: int = 0
    calls: dict[int, Call] = field(default_factory=dict[int, "Call"])
    ended: OrderedDict[int, Call] = field(default_factory=OrderedDict[int, "Call"])
    queue: deque[Call] = field(default_factory=deque["Call"])
    retrieves: deque[Call] = field(default_factory=deque["Call"])
    """Those of the queue that are Retrieves."""
    in_flight: list[Call] = field(default_factory=list["Call"])
    """The calls of the slices in flight, in the order of these, once for each."""
    unmaps: list[int] = field(default_factory=list[int])
    """Mappings to give up when no slice is in flight."""

    def sharing(self) -> Registration:
        """Refuses: NOT_REGISTERED."""
        if self.registration is None:
            raise Refusal(Reason.NOT_REGISTERED, "this client shares no memory; call RegisterKvCache first")
        return self.registration


class Sessions:
    """Engines and clients by name."""

    def __init__(self, clients_most: int) -> None:
        self._clients_most = clients_most
        self.engines: dict[str, Engine] = {}
        self.clients: dict[str, Client] = {}
        self.broken: dict[str, Client] = {}
        self.ending: dict[str, Client] = {}
        """Clients whose session is over but not their last slice. Their ids stay taken: a new session under such an id
        would not know the call whose copy still runs, and would fence it in vain."""

    def open(self, client_id: str, engine_id: str, role: Role, session_id: bytes) -> None:
        """A new session. Refuses: ENGINE_DRAINING, CLIENT_LIMIT, CLIENT_EXISTS: one lives, or a copy of one runs."""
        if client_id in self.clients:
            text = "another live process is attached with this client id; give each process its own"
            raise Refusal(Reason.CLIENT_EXISTS, text, resource=client_id)
        engine = self.engines.get(engine_id)
        if engine is not None:
            self._check_draining(engine)
        if client_id in self.ending:
            text = "copies of this client's earlier session are still running; try again"
            raise Refusal(Reason.CLIENT_EXISTS, text, retry_after_ms=100, resource=client_id)
        if len(self.clients) + len(self.ending) >= self._clients_most:
            text = f"{self._clients_most} clients are attached already; raise --clients"
            raise Refusal(Reason.CLIENT_LIMIT, text, resource="clients")
        if engine is None:
            engine = self.engines[engine_id] = Engine(engine_id)
        self.clients[client_id] = engine.clients[client_id] = Client(client_id, engine, role, session_id)

    def close(self, client: Client) -> None:
        """Forgets a session; its engine goes with its last client."""
        client.gone = True
        if client.in_flight:
            self.ending[client.client_id] = client
        self.broken.pop(client.client_id, None)
        engine = client.engine
        del self.clients[client.client_id], engine.clients[client.client_id]
        if not engine.clients:
            del self.engines[engine.engine_id]

    def settled(self, client: Client) -> None:
        """The last slice of a session that is over has been reported: its id is free. Its records and it name each
        other, so they would wait for a full collection, which may be an hour away."""
        self.ending.pop(client.client_id, None)
        client.calls.clear()
        client.ended.clear()

    def find(self, client_id: str, engine_id: str) -> Client:
        """The client, if it is attached and of this engine. Refuses: NOT_ATTACHED, ENGINE_UNKNOWN."""
        client = self.clients.get(client_id)
        if client is None:
            text = "this client is not attached, or its session has ended; open EngineService.Attach and register again"
            raise Refusal(Reason.NOT_ATTACHED, text)
        if client.engine.engine_id != engine_id:
            text = "the engine_id is not the one this client attached with"
            raise Refusal(Reason.ENGINE_UNKNOWN, text, field="engine_id")
        return client

    def find_working(self, client_id: str, engine_id: str) -> Client:
        """As ``find``, for calls that begin something new. Refuses also: ENGINE_DRAINING."""
        client = self.find(client_id, engine_id)
        self._check_draining(client.engine)
        return client

    def _check_draining(self, engine: Engine) -> None:
        if engine.draining:
            raise Refusal(Reason.ENGINE_DRAINING, "this engine is being drained", retry_after_ms=1000)

    def find_engine(self, name: str) -> Engine:
        """By engine_id or fingerprint. Refuses: ENGINE_UNKNOWN."""
        engine = self.engines.get(name)
        if engine is None:
            engine = next((e for e in self.engines.values() if fingerprint(e.engine_id) == name), None)
        if engine is None:
            text = "no engine of that name is attached"
            raise Refusal(Reason.ENGINE_UNKNOWN, text, field="engine", resource="engine")
        return engine
