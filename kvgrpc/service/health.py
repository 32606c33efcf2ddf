# SPDX-License-Identifier: Apache-2.0
"""grpc.health.v1, answered on the event loop itself, so that it depends on nothing that can be busy.

Names: ``""``, ``readiness`` and the services turn NOT_SERVING when the server drains; ``liveness`` stays SERVING to the
end, unless the watchdog finds that work stands still. The library's servicer is not used: it forgets all watchers of a
name when the first of them leaves, and a watcher that does not read holds up the change of a status.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2

HEALTH_SERVICE = "grpc.health.v1.Health"
LIVENESS = "liveness"
READINESS = "readiness"
WATCHERS_MOST = 1024

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Health:
    """Statuses by name, and who watches them. Used on one event loop."""

    def __init__(self, services: Sequence[str]) -> None:
        self._statuses: dict[str, health_pb2.HealthCheckResponse.ServingStatus] = dict.fromkeys(
            ("", READINESS, LIVENESS, *services), _SERVING
        )
        self._changed = asyncio.Event()
        self._watchers = 0

    def begin_drain(self) -> None:
        """Everything but ``liveness`` becomes NOT_SERVING, and watchers learn it."""
        for name in self._statuses:
            if name != LIVENESS:
                self._statuses[name] = _NOT_SERVING
        self._tell()

    def set_alive(self, alive: bool) -> None:
        """What ``liveness`` says; watchers learn it."""
        self._statuses[LIVENESS] = _SERVING if alive else _NOT_SERVING
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def check(self, request: health_pb2.HealthCheckRequest, context: _Context) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"{request.service[:100]!r} is not a name of this server")
        return health_pb2.HealthCheckResponse(status=status)

    async def watch(
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        if self._watchers >= WATCHERS_MOST:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{WATCHERS_MOST} watchers, the limit, are here")
        self._watchers += 1
        told: health_pb2.HealthCheckResponse.ServingStatus | None = None
        try:
            while True:
                changed = self._changed
                status = self._statuses.get(request.service, _UNKNOWN)
                if status != told:
                    told = status
                    yield health_pb2.HealthCheckResponse(status=status)
                await changed.wait()
        finally:
            self._watchers -= 1

    def handlers(self) -> grpc.GenericRpcHandler:
        """The service, to be added to a server."""
        read = health_pb2.HealthCheckRequest.FromString
        write = health_pb2.HealthCheckResponse.SerializeToString
        return grpc.method_handlers_generic_handler(
            HEALTH_SERVICE,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self.check, read, write),
                "Watch": grpc.unary_stream_rpc_method_handler(self.watch, read, write),
            },
        )
