# SPDX-License-Identifier: Apache-2.0
"""The gRPC server: one event loop, its listeners, its services, and its end.

Life: ``start``, then ``drain`` (new calls are refused, running ones end) or ``stop`` (at once); ``run`` obeys signals.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from kvgrpc.api import AdminApi
from kvgrpc.core.types import MIB
from kvgrpc.service.admin import AdminServicer
from kvgrpc.service.calls import RULES, SERVICES
from kvgrpc.service.guard import Admit, CallGuard, CallLimits, Check
from kvgrpc.service.health import HEALTH_SERVICE, Health
from kvgrpc.service.listeners import ListenError, SocketFile, bind_tcp
from kvgrpc.service.reflection import reflection_handlers
from kvgrpc.service.servicer import READERS, ClientFor, EngineServicer, KvCacheServicer
from kvgrpc.service.tls import TlsFiles, read_certificates
from kvgrpc.service.traffic import Traffic
from kvgrpc.service.watchdog import Watchdog
from kvgrpc.telemetry.log import logger
from kvgrpc.telemetry.rpcs import RpcFigures
from kvgrpc.v1 import admin_pb2_grpc, cache_pb2_grpc, engine_pb2_grpc

log = logger("service")
Signals: TypeAlias = "asyncio.Queue[signal.Signals]"

MESSAGE_SLACK_BYTES = MIB
"""How far beyond the limit a message still gets our rich error; beyond that gRPC refuses it, naming its own limit."""

PING_INTERVAL_MS = 10_000
LOOKAHEAD_BYTES = 4 * MIB
"""What a peer may send ahead in one call. gRPC's own 64 KiB make a long prompt wait for acknowledgements, and so do its
probes of the bandwidth, which make the window small again: without both, and in frames of a mebibyte instead of 16 KiB,
a message of 512 KiB takes 2.6 ms where it took 3.3, one of 2 MiB 5.3 where it took 9.1 (two slow cores)."""
STOP_S = 1.0
"""What calls that outlived the drain get to end, and again after they were cancelled."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where and how the server listens. ``socket`` None = no Unix socket; ``listen``: ``HOST:PORT``, port 0 chooses.
    ``tls`` is for all TCP listeners. ``health_listen``: one more, without TLS, that answers health and nothing else.
    ``stall_s``: how long one piece of work may run before ``liveness`` fails."""

    socket: Path | None = None
    socket_mode: int = 0o600
    socket_group: str = ""
    listen: tuple[str, ...] = ()
    insecure: bool = False
    tls: TlsFiles | None = None
    health_listen: str = ""
    reflection: bool = False
    message_bytes: int = 16 * MIB
    running_calls: int = 16384
    running_bytes: int = 128 * MIB
    deadline_s: float = 5.0
    copy_deadline_s: float = 30.0
    drain_s: float = 25.0
    stall_s: float = 30.0


class Server:
    """Serves a cache over gRPC. Everything happens on the event loop that awaits ``start``.

    ``client_for`` answers the cache as one client sees it, ``admin`` is the operator's view; ``checks`` are asked for
    every call after the built-in ones; ``busy_s`` answers how long the longest-running piece of work has been running;
    ``at_rest`` returns when nothing that a call began runs any more: the socket's lock and the ports are kept until
    then, so that the next server under this path or port starts after the last copy of this one. ``admit``, if it is
    set before the start, is asked for every call; without it, whoever can connect may call.
    """

    def __init__(
        self,
        options: ServerOptions,
        client_for: ClientFor,
        admin: AdminApi,
        checks: Sequence[Check] = (),
        busy_s: Callable[[], float] = lambda: 0.0,
        at_rest: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._options = options
        self._client_for = client_for
        self._admin = admin
        self._checks = checks
        self.admit: Admit | None = None
        self._traffic = Traffic()
        self.rpcs = RpcFigures(RULES)
        self._health = Health(SERVICES)
        self._watchdog = Watchdog(self._health, busy_s, options.stall_s)
        self._at_rest = at_rest
        self._watching: asyncio.Task[None] | None = None
        self._socket: SocketFile | None = None
        self._ports: list[socket.socket] = []
        self._server: grpc.aio.Server | None = None
        self._health_server: grpc.aio.Server | None = None
        self._health_address = ""
        self._addresses: tuple[str, ...] = ()
        self._stopped = asyncio.Event()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the started server listens, as gRPC targets: ``unix:/path``, ``127.0.0.1:50051``."""
        return self._addresses

    @property
    def health_address(self) -> str:
        """Where health alone is answered; empty when that was not asked for."""
        return self._health_address

    @property
    def traffic(self) -> Traffic:
        """Running calls and the state of the drain."""
        return self._traffic

    async def start(self) -> None:
        """Binds every listener and serves. ListenError when one of them cannot be had; then nothing is left behind."""
        server = self._build()
        try:
            self._addresses = self._bind(server)
            await self._start_health()
            await server.start()
        except BaseException:
            await self._stop_health()
            await server.stop(None)
            self._release()
            raise
        self._server = server
        self._watching = asyncio.create_task(self._watchdog.run())
        log.info("serving", addresses=list(self._addresses), reflection=self._options.reflection)

    async def drain(self, grace_s: float | None = None) -> None:
        """Readiness fails, attached clients are told, new calls are refused, running calls have ``grace_s`` (default:
        ``drain_s``) to end; then streams end and the server stops."""
        grace_s = self._options.drain_s if grace_s is None else grace_s
        log.info("draining", running_calls=self._traffic.holding_calls, grace_s=grace_s)
        self._health.begin_drain()
        self._traffic.begin_drain("it is shutting down")
        if not await self._traffic.wait_idle(grace_s):
            log.warning("drain time is over", running_calls=self._traffic.holding_calls)
        await self._end(STOP_S)

    async def stop(self) -> None:
        """Ends now: running calls are cancelled. Harmless when repeated."""
        await self._end(None)

    async def wait(self) -> None:
        """Returns when the server has stopped."""
        await self._stopped.wait()

    async def _end(self, grace_s: float | None) -> None:
        self._traffic.close()
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if self._server is not None:
            await self._server.stop(grace_s)
            # gRPC has cancelled what was left, but not waited for it; after this, nobody calls the cache any more
            await self._traffic.wait_empty(STOP_S)
            if self._at_rest is not None:
                await self._at_rest()
            await self._stop_health()
            self._server = None  # only now: when a second signal cuts the drain short, all of this is awaited again
            log.info("stopped")
        self._release()
        self._stopped.set()

    def _release(self) -> None:
        if self._socket is not None:
            self._socket.release()
            self._socket = None
        while self._ports:
            self._ports.pop().close()

    def _build(self) -> grpc.aio.Server:
        options = self._options
        limits = CallLimits(
            message_bytes=options.message_bytes,
            running_calls=options.running_calls,
            running_bytes=options.running_bytes,
            deadline_s=options.deadline_s,
            copy_deadline_s=options.copy_deadline_s,
        )
        guard = CallGuard(self._traffic, limits, self._checks, READERS, self.rpcs, self.admit)
        services: Any = guard  # the generated code wants a server, and uses of it what the guard has
        cache_pb2_grpc.add_KvCacheServiceServicer_to_server(KvCacheServicer(self._client_for, self._traffic), services)
        engine_pb2_grpc.add_EngineServiceServicer_to_server(EngineServicer(self._client_for, self._traffic), services)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(self._admin, self._traffic), services)
        server = grpc.aio.server(options=channel_options(options))
        server.add_generic_rpc_handlers((guard,))
        server.add_generic_rpc_handlers((self._health.handlers(),))
        if options.reflection:
            server.add_generic_rpc_handlers(reflection_handlers((*SERVICES, HEALTH_SERVICE)))
        return server

    async def _start_health(self) -> None:
        if self._options.health_listen:
            self._health_server = server = grpc.aio.server(options=channel_options(self._options))
            server.add_generic_rpc_handlers((self._health.handlers(),))
            self._health_address = bind_tcp(
                self._options.health_listen, True, server.add_insecure_port, "--health-listen"
            )
            await server.start()

    async def _stop_health(self) -> None:
        """Last of all: probes are answered to the end."""
        if self._health_server is not None:
            await self._health_server.stop(None)
            self._health_server = None

    def _bind(self, server: grpc.aio.Server) -> tuple[str, ...]:
        options = self._options
        addresses: list[str] = []
        if options.socket is not None:
            self._socket = SocketFile(options.socket, options.socket_mode, options.socket_group)
            addresses.append(self._socket.bind(server.add_insecure_port))
        bind = server.add_insecure_port
        if options.tls is not None:
            bind = partial(server.add_secure_port, server_credentials=read_certificates(options.tls).credentials())
        allowed = options.insecure or options.tls is not None
        addresses += [bind_tcp(address, allowed, bind, keep=self._ports) for address in options.listen]
        if not addresses:
            raise ListenError("no listener: give --socket or --listen")
        return tuple(addresses)


def channel_options(options: ServerOptions) -> list[tuple[str, Any]]:
    """gRPC's own settings. Clients may ping every 10 s, with or without calls, and are never sent away for it."""
    return [
        ("grpc.max_receive_message_length", options.message_bytes + MESSAGE_SLACK_BYTES),
        ("grpc.max_send_message_length", options.message_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_MS),
        ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.max_frame_size", MIB),
    ]


@contextmanager
def caught_signals() -> Generator[Signals, None, None]:
    """SIGTERM and SIGINT as they come; ignored at the end, when what they would end has ended. Main thread only."""
    loop = asyncio.get_running_loop()
    signals: Signals = asyncio.Queue()

    def catch(number: int, _: object) -> None:
        loop.call_soon_threadsafe(signals.put_nowait, signal.Signals(number))

    # Not the loop's own handlers: whoever takes those away lets a signal end the process for a moment.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, catch)
    try:
        yield signals
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


async def run(server: Server, started: Callable[[], None], signals: Signals) -> None:
    """Starts the server, calls ``started``, and serves until the first signal; then drains it; a second stops it at
    once. Raises as ``Server.start``."""
    await server.start()
    started()
    await _first(server.wait(), signals.get())
    await _first(server.drain(), signals.get())
    await server.stop()


async def _first(*acts: Any) -> None:
    """Returns when the first of them has ended; the others are cancelled."""
    tasks = [asyncio.ensure_future(act) for act in acts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()
