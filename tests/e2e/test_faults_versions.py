# SPDX-License-Identifier: Apache-2.0
"""Peers that are newer, older, or speak of things that this server has not: cards, fields, values; and what a server
shows of itself.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvgrpc import api
from kvgrpc.core.errors import Refusal
from kvgrpc.core.types import CoreLimits
from kvgrpc.v1 import cache_pb2, common_pb2, engine_pb2
from kvgrpc.wire.cache import encode_lookup_request, encode_store_request
from kvgrpc.wire.engine import encode_register_request
from tests.e2e.harness import CHUNK, Engine, LocalServer, local_server, outcomes, tokens_of
from tests.e2e.probes import TINY, assert_serving, nothing_changes, refused
from tests.served import serving
from tests.service.asks import Details

LIMITS = CoreLimits(chunk_tokens=CHUNK, page_bytes=1024)
BLOCKS = list(range(1, 16, 2))
SERVICES = "/kvgrpc.v1."
NEWER = b"\xc2>\x05newer" + b"\xca>\x02\x08\x01" + b"\xd0>\x07"
"""Fields 1000 to 1002, which no version knows: text, a message, a number."""


class Raw:
    """Calls by bytes, as a peer makes them that was built from another version of the protocol."""

    def __init__(self, channel: grpc.aio.Channel, client_id: str) -> None:
        self._channel = channel
        self._named = (("kvgrpc-client-id", client_id),)

    async def call(self, method: str, message: bytes) -> bytes:
        return await self._channel.unary_unary(SERVICES + method)(message, metadata=self._named, timeout=10)

    async def refused(self, method: str, message: Any) -> tuple[str, str]:
        """(code, reason)."""
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await self.call(method, message.SerializeToString())
        details = Details(error.value)
        return details.code.name, details.reason


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[LocalServer]:
    async with local_server(tmp_path, limits=LIMITS) as local:
        yield local


@pytest.fixture
async def channel(server: LocalServer) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(server.address) as opened:
        yield opened


# ---- field report 10 ------------------------------------------------------------------------------------------------


async def test_unknown_fields_are_ignored(server: LocalServer, channel: grpc.aio.Channel) -> None:
    """Field report 10: a newer client's fields change nothing, in requests and in messages inside them."""
    engine = await server.engine(kv=TINY)
    worker, scheduler = Raw(channel, engine.worker.client_id), Raw(channel, engine.scheduler.client_id)
    tokens = tokens_of(1, 2 * CHUNK)
    hello = engine_pb2.HandshakeRequest(protocol_major=1, protocol_minor=99).SerializeToString()
    answer = engine_pb2.HandshakeResponse.FromString(await worker.call("EngineService/Handshake", hello + NEWER))
    assert answer.server_epoch == server.driver.facts.server_epoch
    register = encode_register_request(engine.registration())
    for part in (register.identity, register.memory[0].shared, register.groups[0], register.groups[0].runs[0]):
        part.MergeFromString(NEWER)
    again = await worker.call("EngineService/RegisterKvCache", register.SerializeToString() + NEWER)
    assert engine_pb2.RegisterKvCacheResponse.FromString(again).registration_epoch == 1, "the same registration"
    engine.image.write(BLOCKS)
    store = encode_store_request(engine.store_request(tokens, BLOCKS))
    for part in (store.space, store.content, store.content.tokens, store.blocks[0]):
        part.MergeFromString(NEWER)
    stored = await worker.call("KvCacheService/Store", store.SerializeToString() + NEWER)
    results = cache_pb2.StoreResponse.FromString(stored).results
    assert [(r.first_chunk, r.count, r.outcome) for r in results] == [(0, 2, cache_pb2.CHUNK_OUTCOME_STORED)]
    lookup = encode_lookup_request(engine.lookup_request(tokens)).SerializeToString()
    found = cache_pb2.LookupResponse.FromString(await scheduler.call("KvCacheService/Lookup", lookup + NEWER))
    assert found.status.hit_tokens == 2 * CHUNK
    retrieved = await engine.worker.retrieve(engine.retrieve_request(found.job_id, BLOCKS))
    assert outcomes(retrieved) == ["LOADED"] * 2


async def test_unknown_values_are_refused_cleanly(server: LocalServer, channel: grpc.aio.Channel) -> None:
    """Field report 10: an enum value or a kind that only a newer peer knows is refused, and nothing happens."""
    engine = await server.engine(kv=TINY)
    await engine.store(tokens_of(1, CHUNK), BLOCKS[:4])
    scheduler = Raw(channel, engine.scheduler.client_id)
    worker = Raw(channel, engine.worker.client_id)
    async with nothing_changes(server, engine):
        lookup = encode_lookup_request(engine.lookup_request(tokens_of(1, CHUNK)))
        lookup.policy.priority = 77  # type: ignore[assignment]
        assert await scheduler.refused("KvCacheService/Lookup", lookup) == ("INVALID_ARGUMENT", "INVALID_FIELD")
        store = encode_store_request(engine.store_request(tokens_of(1, CHUNK), BLOCKS[:4]))
        store.content.CopyFrom(common_pb2.Content.FromString(NEWER))
        assert await worker.refused("KvCacheService/Store", store) == ("INVALID_ARGUMENT", "CONTENT_KIND")
        for name, code in (("kind", "UNIMPLEMENTED"), ("form", "INVALID_ARGUMENT")):
            register = encode_register_request(engine.registration())
            setattr(register.groups[0], name, 9)
            assert (await worker.refused("EngineService/RegisterKvCache", register))[0] == code
        register = encode_register_request(engine.registration())
        register.memory[0].CopyFrom(engine_pb2.Memory.FromString(NEWER))
        assert (await worker.refused("EngineService/RegisterKvCache", register))[0] == "INVALID_ARGUMENT"
    newcomer = channel.unary_stream(SERVICES + "EngineService/Attach")
    attach = engine_pb2.AttachRequest(engine_id=engine.engine_id, session_id=bytes(16))
    attach.role = 42  # type: ignore[assignment]
    stream: Any = newcomer(attach.SerializeToString(), metadata=(("kvgrpc-client-id", "newcomer"),))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stream.read()
    assert Details(error.value).code is grpc.StatusCode.INVALID_ARGUMENT
    assert await engine.hits(tokens_of(1, CHUNK)) == 1


@pytest.mark.parametrize("major", [0, 2, 4_294_967_295])
async def test_wrong_major_version(server: LocalServer, major: int) -> None:
    """Field report 10: FAILED_PRECONDITION that names both versions, within 1 s."""
    times: list[float] = []
    while not times or (times[-1] >= 1 and len(times) < 3):  # the machine may have other work
        started, client = time.monotonic(), server.client(f"stranger-{len(times)}")
        with pytest.raises(Refusal) as refusal:
            await client.handshake(api.Hello(protocol_major=major, protocol_minor=3))
        times.append(time.monotonic() - started)
        error = refusal.value.__context__
        assert isinstance(error, grpc.aio.AioRpcError)
        details = Details(error)
        assert (details.code, details.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL_VERSION")
        assert f"{major}.3" in details.text
        assert f"{api.PROTOCOL_MAJOR}.{api.PROTOCOL_MINOR}" in details.text
    assert times[-1] < 1, times


# ---- field report 17 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "uuid", ["GPU-8f6d2c1e-0a3b-4c5d-9e7f-112233445566", "MIG-3f1a5b70-9c2e-5d41-8a6b-99aabbccddee"]
)
async def test_cards_that_this_server_does_not_have(server: LocalServer, uuid: str) -> None:
    """Field report 17, the part without a card: refused within 1 s by a sentence with the card that was asked for; the
    server serves on, and so do clients with host memory."""
    neighbour, engine = await server.engine(kv=TINY), await server.engine(kv=TINY)
    await neighbour.store(tokens_of(1, CHUNK), BLOCKS[:4])
    layout = engine.image.layout(engine.memory_name)
    cards = tuple(
        api.CudaIpcMemory(secrets.token_bytes(64), uuid, memory.offset_bytes, memory.size_bytes)
        for memory in layout.memory
    )
    request = replace(engine.registration(), layout=replace(layout, memory=cards))
    async with nothing_changes(server, neighbour, engine):
        times: list[float] = []
        while not times or (times[-1] >= 1 and len(times) < 3):  # the machine may have other work
            started = time.monotonic()
            code, reason, field = await refused(engine.worker.register(request))
            times.append(time.monotonic() - started)
            assert (code, reason, field) == ("UNIMPLEMENTED", "CUDA_UNSUPPORTED", "memory[0].cuda")
        assert times[-1] < 1, times
        with pytest.raises(Refusal, match=uuid):
            await engine.worker.register(request)
    await assert_serving(server)
    await use(neighbour)
    await use(engine)


async def use(engine: Engine) -> None:
    answer = await engine.lookup(tokens_of(1, CHUNK))
    assert outcomes(await engine.retrieve(answer, BLOCKS[:4])) == ["LOADED"]
    assert engine.image.wrong_tokens(BLOCKS[:4]) == []


# ---- field report 68 ------------------------------------------------------------------------------------------------


def listed(*flags: str) -> list[str]:
    """Services that a server lists through reflection, asked over its TCP port on the loopback."""
    with serving("--l1-size", "16MiB", *flags) as server:
        port = server.log.split('"listens": "')[1].split('"')[0].split(", ")[-1].split(" ")[0].rsplit(":", 1)[1]
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            asks = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            answer = next(stub.ServerReflectionInfo(asks, timeout=10))
    return sorted(service.name for service in answer.list_services_response.service)


def test_reflection_is_off_where_strangers_may_listen() -> None:
    """Field report 68: a listener off the loopback (asked over the loopback here) shows nothing unless a flag says
    so; a server that only this machine reaches does."""
    open_to_all = ("--listen", "0.0.0.0:0", "--insecure")
    with pytest.raises(grpc.RpcError) as error:
        listed(*open_to_all)
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]
    services = listed(*open_to_all, "--reflection")
    assert "kvgrpc.v1.KvCacheService" in services
    assert listed("--listen", "127.0.0.1:0") == services
