# SPDX-License-Identifier: Apache-2.0
"""Whose a TCP port is, until when."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.service.asks import until
from tests.service.conftest import World
from tests.service.test_server import refusal_to_start, serves


def listens(port: int) -> bool:
    try:
        socket.create_connection(("localhost", port), 1).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "other"),
    [
        *[(host, host) for host in ("127.0.0.1", "localhost", "0.0.0.0")],
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "localhost"),
        ("0.0.0.0", "127.0.0.1"),
        ("127.0.0.1", "0.0.0.0"),
    ],
)
async def test_a_port_is_kept_until_nothing_runs_any_more(world: World, host: str, other: str) -> None:
    """Found by review: gRPC gives the port up when it stops to listen. Whoever had it then was taken by clients for the
    end of this server, and their blocks for free, while its last copy still wrote into them."""
    copied = asyncio.Event()

    async def at_rest() -> None:
        await copied.wait()

    server = world.server(socket=None, listen=(f"{host}:0",), insecure=True)
    server._at_rest = at_rest
    await server.start()
    port = server.addresses[0].rpartition(":")[2]
    await serves(world, server)
    stopping = asyncio.create_task(server.stop())
    await until(lambda: not listens(int(port)))
    next_one = {"socket": None, "listen": (f"{other}:{port}",), "insecure": True}
    try:
        assert "Address already in use" in await refusal_to_start(world.server(**next_one))
        assert not stopping.done()
    finally:
        copied.set()
        await stopping
    await serves(world, await world.start(**next_one))
