# SPDX-License-Identifier: Apache-2.0
"""Sends spoiled messages to every RPC of a server, from a client that is attached and registered.

A refusal is right, and so is an answer; a fault of the server, no answer in time, and wrong data are not.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import zlib
from pathlib import Path
from random import Random
from typing import Any

import grpc
from google.protobuf.message import Message

from kvgrpc.api import ChunkPart, ClearTarget, FreeRequest, Hello, ReadChunksRequest, WriteChunksRequest
from kvgrpc.client import object_order
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import Reader, Role, TokenRange
from kvgrpc.service.calls import ADMIN_SERVICE, CACHE_SERVICE, ENGINE_SERVICE, RULES
from kvgrpc.v1 import admin_pb2, cache_pb2
from kvgrpc.wire import admin, cache, engine, streams
from tests.e2e.harness import BLOCK, CHUNK, Engine, LocalServer, outcomes, tokens_of
from tests.fuzz.messages import metadata, spoiled

ANSWER_S = 5.0
FAULTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
ROUND = 10
"""Messages an RPC, before the engine is made anew: some of them end it."""

WRITTEN = tokens_of(2, 3 * CHUNK)
PROMPT, BLOCKS = tokens_of(1, 3 * CHUNK), tuple(range(3 * CHUNK // BLOCK))


def requests(one: Engine, job_id: bytes, chance: Random) -> dict[str, Message]:
    """A right message for every method."""
    call_id = chance.randrange(1, 2**63)
    return {
        f"/{CACHE_SERVICE}/Lookup": cache.encode_lookup_request(one.lookup_request(PROMPT)),
        f"/{CACHE_SERVICE}/QueryPrefetchStatus": cache.encode_query_request(one.engine_id, job_id, 10),
        f"/{CACHE_SERVICE}/Store": cache.encode_store_request(one.store_request(PROMPT, BLOCKS, call_id=call_id)),
        f"/{CACHE_SERVICE}/Retrieve": cache.encode_retrieve_request(one.retrieve_request(job_id, BLOCKS)),
        f"/{CACHE_SERVICE}/FreeLookupLocks": cache.encode_free_request(FreeRequest(one.engine_id, job_id, 1)),
        f"/{CACHE_SERVICE}/EndRequest": cache.encode_end_request(one.engine_id, "r"),
        f"/{CACHE_SERVICE}/Fence": cache.encode_fence_request(one.engine_id, [1, 2]),
        f"/{CACHE_SERVICE}/ReadChunks": streams.encode_read_request(
            ReadChunksRequest(one.engine_id, job_id, Reader(0, 0), TokenRange(0, 3 * CHUNK))
        ),
        f"/{CACHE_SERVICE}/WriteChunks": streams.encode_write_begin(
            WriteChunksRequest(one.engine_id, one.space, WRITTEN, one.object_bytes, order_of(one))
        ),
        f"/{CACHE_SERVICE}/Watch": cache_pb2.WatchRequest(space_base=one.space.space_base, snapshot=True),
        f"/{ENGINE_SERVICE}/Handshake": engine.encode_handshake_request(Hello(identity=one.identity)),
        f"/{ENGINE_SERVICE}/Attach": engine.encode_attach_request(one.engine_id, Role.WORKER, secrets.token_bytes(16)),
        f"/{ENGINE_SERVICE}/RegisterKvCache": engine.encode_register_request(one.registration()),
        f"/{ENGINE_SERVICE}/UnregisterKvCache": engine.encode_unregister_request(one.engine_id),
        f"/{ADMIN_SERVICE}/GetStatus": admin_pb2.GetStatusRequest(),
        f"/{ADMIN_SERVICE}/ListEngines": admin_pb2.ListEnginesRequest(),
        f"/{ADMIN_SERVICE}/ListSpaces": admin_pb2.ListSpacesRequest(),
        f"/{ADMIN_SERVICE}/Clear": admin.encode_clear_request(ClearTarget(cache_salt="none")),
        f"/{ADMIN_SERVICE}/BumpGeneration": admin_pb2.BumpGenerationRequest(model="none"),
        f"/{ADMIN_SERVICE}/Pin": admin.encode_pin_request(one.space, PROMPT, 1000),
        f"/{ADMIN_SERVICE}/Warm": admin.encode_warm_request(one.space, PROMPT, 1),
        f"/{ADMIN_SERVICE}/Inspect": admin.encode_inspect_request(one.space, PROMPT),
        f"/{ADMIN_SERVICE}/RecordTrace": admin_pb2.RecordTraceRequest(),
        f"/{ADMIN_SERVICE}/Unpin": admin_pb2.UnpinRequest(pin_id=b"0" * 16),
        f"/{ADMIN_SERVICE}/SetQuota": admin.encode_set_quota_request("none", 1 << 30),
        f"/{ADMIN_SERVICE}/GetQuota": admin_pb2.GetQuotaRequest(cache_salt="none"),
        f"/{ADMIN_SERVICE}/SetWritePolicy": admin_pb2.SetWritePolicyRequest(
            model="none", policy=admin_pb2.WRITE_POLICY_NONE
        ),
        f"/{ADMIN_SERVICE}/DrainEngine": admin_pb2.DrainEngineRequest(engine="none", wait_ms=1),
    }


def order_of(one: Engine) -> str:
    return object_order(one.image.layout("none").groups)


def stream_of(one: Engine, begin: Message, chance: Random) -> list[bytes]:
    """A stream of WriteChunks in which one message or some are spoiled, lost, repeated or in each other's places."""
    parts = [
        streams.encode_write_part(ChunkPart(at, 0, one.object_bytes, zlib.crc32(data), data))
        for at in range(3)
        for data in (bytes([at]) * one.object_bytes,)
    ]
    messages = [message.SerializeToString() for message in (begin, *parts)]
    for _ in range(chance.randrange(1, 3)):
        at = chance.randrange(len(messages))
        messages[at] = spoiled((begin, *parts)[at % 4], chance)
        turn = chance.random()
        if turn < 0.2:
            del messages[at]
        elif turn < 0.4:
            messages.insert(chance.randrange(len(messages)), messages[at])
        messages = messages or [b""]
    return messages


async def send_stream(channel: Any, path: str, messages: list[bytes], sent: Any) -> grpc.StatusCode:
    call: Any = channel.stream_unary(path)(iter(messages), metadata=sent, timeout=ANSWER_S)
    code: grpc.StatusCode = await call.code()
    if code is grpc.StatusCode.INTERNAL and "Internal error from Core" in (await call.details() or ""):
        return grpc.StatusCode.CANCELLED  # gRPC's own client lost the status behind a message on its way
    return code


async def send(channel: Any, path: str, data: bytes, sent: Any) -> grpc.StatusCode:
    """How the server ended the call. A call that it still answers after a while is cancelled."""
    if path.endswith(("/Attach", "/Watch", "/ReadChunks", "/RecordTrace")):
        stream: Any = channel.unary_stream(path)(data, metadata=sent, timeout=ANSWER_S)
        try:
            await asyncio.wait_for(stream.read(), ANSWER_S)
        except grpc.aio.AioRpcError as error:
            return error.code()
        stream.cancel()
        return grpc.StatusCode.OK
    try:
        await channel.unary_unary(path)(data, metadata=sent, timeout=ANSWER_S)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def fuzz(server: LocalServer, seed: int, rounds: int, until_s: float = float("inf")) -> dict[str, int]:
    """Messages by code. Raises AssertionError, with the seed, for what must not be."""
    codes: dict[str, int] = {}
    for number in range(rounds):
        if time.monotonic() > until_s:
            break
        chance = Random(f"{seed}:{number}")
        one = await server.engine()
        await one.store(PROMPT, BLOCKS)
        answer = await one.lookup(PROMPT)
        right = requests(one, answer.job_id, chance)
        assert set(right) == set(RULES)
        for path, message in right.items():
            for at in range(ROUND):
                data = spoiled(message, chance)
                sent = metadata(one.worker.client_id, chance)
                where = f"seed {seed}, round {number}, {path}, message {at}: {data[:200]!r}, metadata {sent}"
                channel = one.worker._stubs().channel
                began = time.monotonic()
                if path.endswith("/WriteChunks"):
                    messages = stream_of(one, message, chance)
                    where = f"seed {seed}, round {number}, {path}, message {at}, metadata {sent}"
                    code = await send_stream(channel, path, messages, sent)
                else:
                    code = await send(channel, path, data, sent)
                codes[code.name] = codes.get(code.name, 0) + 1
                assert code not in FAULTS, f"{code.name} at {where}"
                assert time.monotonic() - began < ANSWER_S + 2, f"no answer at {where}"
        await one.stop()
        await still_right(server)
    return codes


async def still_right(server: LocalServer) -> None:
    """Another engine's work, as if nothing had been: its own bytes, and no others."""
    other = await server.engine()
    try:
        await other.worker.set_quota("", None)  # a spoiled SetQuota may be a right one, for requests without a salt
    except Refusal as refusal:
        if refusal.reason is not Reason.NOT_ALLOWED:  # where it is, no message could set one, either
            raise
    prompt = tokens_of(secrets.randbelow(1 << 30), 2 * CHUNK)
    blocks = BLOCKS[: 2 * CHUNK // BLOCK]
    assert outcomes(await other.store(prompt, blocks)) == ["STORED"] * 2
    assert outcomes(await other.retrieve(await other.lookup(prompt), blocks)) == ["LOADED"] * 2
    assert other.image.wrong_tokens(blocks) == []
    await other.stop()


def resident_bytes(process: int) -> int:
    """Memory of a process that is not L1: its anonymous pages."""
    line = next(one for one in Path(f"/proc/{process}/status").read_text().splitlines() if one.startswith("RssAnon"))
    return int(line.split()[1]) << 10
