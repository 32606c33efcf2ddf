# SPDX-License-Identifier: Apache-2.0
"""A gRPC server that does nothing: the floor of a call. ``python -m kvgrpc.bench.bare SOCKET``."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc.aio

from kvgrpc.service.server import ServerOptions, channel_options

EMPTY_CALL = "/grpc.health.v1.Health/Check"
SERVING = b"\x08\x01"


async def answer(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    return SERVING


async def main(socket: str) -> None:
    """Until SIGTERM."""
    server = grpc.aio.server(options=channel_options(ServerOptions()))
    service, _, method = EMPTY_CALL[1:].partition("/")
    handlers: dict[str, Any] = {method: grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
