# SPDX-License-Identifier: Apache-2.0
"""A real server over the fake cache, on a Unix socket and on 127.0.0.1, and real channels to it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvgrpc.service.server import Server, ServerOptions
from kvgrpc.v1 import admin_pb2_grpc, cache_pb2_grpc, engine_pb2_grpc
from tests.service.fakes import FakeCache

METADATA = (("kvgrpc-client-id", "worker-0"),)
ENGINE = "engine-0123456789abcdef"


class World:
    """Servers over one fake cache, and channels; all end with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = FakeCache()
        self._servers: list[Server] = []
        self._channels: list[grpc.aio.Channel] = []

    @property
    def socket(self) -> Path:
        return self.folder / "kv.sock"

    def server(self, **options: Any) -> Server:
        wanted = replace(ServerOptions(socket=self.socket), **options)
        server = Server(wanted, self.cache.client, self.cache)
        self._servers.append(server)
        return server

    async def start(self, **options: Any) -> Server:
        server = self.server(**options)
        await server.start()
        return server

    def channel(self, server: Server, at: int = 0, options: Any = ()) -> grpc.aio.Channel:
        channel = grpc.aio.insecure_channel(server.addresses[at], options=[*options])
        self._channels.append(channel)
        return channel

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
        for server in self._servers:
            await server.stop()


class Stubs:
    """The generated stubs of one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.cache = cache_pb2_grpc.KvCacheServiceStub(channel)
        self.engine = engine_pb2_grpc.EngineServiceStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path that every user may enter, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="kvsvc"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def world(folder: Path) -> AsyncIterator[World]:
    made = World(folder)
    yield made
    await made.close()
