# SPDX-License-Identifier: Apache-2.0
"""Bytes from the network and from tiers are data: nothing in them is executed, and nobody far away is let in by
default.
"""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kvgrpc.core.types import Role
from kvgrpc.tiers.memory import MemoryTier
from kvgrpc.v1 import admin_pb2, cache_pb2, common_pb2, engine_pb2
from kvgrpc.wire.cache import encode_lookup_request, encode_retrieve_request, encode_store_request
from kvgrpc.wire.engine import encode_attach_request, encode_register_request
from tests.e2e.harness import CHUNK, Engine, local_server, outcomes, tokens_of
from tests.e2e.probes import TINY, assert_serving, found, keep_in_tier
from tests.served import serving

EIGHT = tokens_of(1, 8 * CHUNK)
FILES = (cache_pb2, engine_pb2, admin_pb2)


def pickles(marker: Path) -> list[bytes]:
    """The trap in a binary and in the text protocol, and as text in base64."""
    code = f"open({str(marker)!r}, 'w')"
    text = f"cbuiltins\neval\n(V{code}\ntR.".encode()
    assert not marker.exists()
    pickle.loads(text).close()  # the trap works
    assert marker.exists()
    marker.unlink()
    binary = b"\x80\x04" + text
    return [binary, text, base64.b64encode(text)]


def requests(engine: Engine, job_id: bytes) -> dict[str, Message]:
    """A good request of each method of all services."""
    engine_id, tokens = engine.engine_id, EIGHT
    store = encode_store_request(engine.store_request(tokens, range(32), ready_event=b""))
    hashes = common_pb2.Content(hashes=common_pb2.ChunkHashes(hashes=[bytes(32)] * 8, num_tokens=128))
    cuda = engine_pb2.Memory(cuda=engine_pb2.CudaIpcMemory(handle=bytes(64), device_uuid="GPU-0", size_bytes=1))
    register = encode_register_request(engine.registration())
    good: list[Message] = [
        encode_lookup_request(engine.lookup_request(tokens)),
        cache_pb2.LookupRequest(engine_id=engine_id, request_id="h", space=store.space, content=hashes, tp_size=1),
        cache_pb2.QueryPrefetchStatusRequest(engine_id=engine_id, job_id=job_id),
        store,
        encode_retrieve_request(engine.retrieve_request(job_id, range(32))),
        cache_pb2.FreeLookupLocksRequest(engine_id=engine_id, job_id=job_id, tp_size=1),
        cache_pb2.EndRequestRequest(engine_id=engine_id, request_id="nobody's"),
        cache_pb2.FenceRequest(engine_id=engine_id, call_ids=[999]),
        engine_pb2.HandshakeRequest(protocol_major=1, client_version="test", identity=register.identity),
        encode_attach_request(engine_id, Role.WORKER, bytes(16)),
        register,
        engine_pb2.RegisterKvCacheRequest(engine_id=engine_id, identity=register.identity, memory=[cuda]),
        engine_pb2.UnregisterKvCacheRequest(engine_id="an engine of nobody"),
        admin_pb2.ClearRequest(space=common_pb2.SpaceRef(space_base=b"n" * 16)),
        admin_pb2.ClearRequest(model="nobody"),
        admin_pb2.ClearRequest(cache_salt="nobody"),
        admin_pb2.BumpGenerationRequest(space_base=b"n" * 16),
        admin_pb2.BumpGenerationRequest(model="nobody"),
        admin_pb2.PinRequest(space=store.space, content=store.content, ttl_ms=1),
        admin_pb2.UnpinRequest(pin_id=b"n" * 16),
        admin_pb2.SetQuotaRequest(cache_salt="nobody"),
        admin_pb2.GetQuotaRequest(cache_salt="nobody"),
        admin_pb2.DrainEngineRequest(engine="nobody"),
    ]
    return {f"{at} {type(message).__name__}": message for at, message in enumerate(good)}


def fields_with_text(message: Message, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every string and bytes field (descriptor) of a message and of those in it, by a path of names and indexes."""
    for field in message.DESCRIPTOR.fields:
        here = (*path, field.name)
        if field.message_type is not None:
            if field.is_repeated:
                for at, item in enumerate(getattr(message, field.name)):
                    yield from fields_with_text(item, (*here, at))
            elif field.containing_oneof is None or message.HasField(field.name):
                yield from fields_with_text(getattr(message, field.name), here)
        elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            yield here, field


def poisoned(message: Message, path: tuple[Any, ...], field: FieldDescriptor, value: bytes) -> Message | None:
    """A copy with ``value`` in one field; None when text cannot hold it."""
    copy = type(message)()
    copy.CopyFrom(message)
    place: Any = copy
    for step in path[:-1]:
        place = place[step] if isinstance(step, int) else getattr(place, step)
    filled: Any = value
    if field.type == FieldDescriptor.TYPE_STRING:
        try:
            filled = value.decode()
        except UnicodeDecodeError:
            return None
    if field.is_repeated:
        getattr(place, path[-1])[0] = filled
    else:
        setattr(place, path[-1], filled)
    return copy


def methods() -> dict[str, str]:
    """Method path by the name of its request."""
    return {
        method.input_type.name: f"/{service.full_name}/{method.name}"
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


async def call(channel: grpc.aio.Channel, path: str, message: Message | bytes, client_id: str) -> tuple[str, bytes]:
    """(code, first answer's bytes) of any method."""
    raw = message if isinstance(message, bytes) else message.SerializeToString()
    metadata = (("kvgrpc-client-id", client_id), ("pickle-bin", raw[:512]))
    kind = channel.unary_stream if path.endswith("/Attach") else channel.unary_unary
    method: Any = kind(path, request_serializer=bytes, response_deserializer=bytes)
    try:
        answer = method(raw, metadata=metadata, timeout=10)
        return "OK", (await answer.read() if path.endswith("/Attach") else await answer)
    except grpc.aio.AioRpcError as error:
        return error.code().name, b""


async def test_pickles_in_every_field_are_data(tmp_path: Path) -> None:
    """Field report 7: a pickle that makes a file, in every string and bytes field of every request (also cut to the
    lengths of ids and handles): INVALID_ARGUMENT, not found, or a miss; no file, and the server goes on."""
    marker = tmp_path / "marker"
    async with local_server(tmp_path) as server:
        engine = await server.engine(kv=TINY)
        await engine.store(EIGHT, range(32))
        answer = await engine.lookup(EIGHT)
        paths, sent = methods(), 0
        # names that may be any text (of some length and letters): what is sent under them is just another name
        names = {"model", "revision", "kv_dtype", "hash_algorithm", "lora", "cache_salt", "backend", "layout"}
        names |= {"request_id", "client_version"}
        async with grpc.aio.insecure_channel(server.address) as channel:
            for name, message in requests(engine, answer.job_id).items():
                path = paths[name.split()[1]]
                for where, field in fields_with_text(message):
                    for trap in pickles(marker):
                        for value in (trap, trap.ljust(64, b".")[:64], trap[:32], trap[:16]):
                            bad = poisoned(message, where, field, value)
                            if bad is None:
                                continue
                            sent += 1
                            code, body = await call(channel, path, bad, engine.worker.client_id)
                            allowed = {"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "ALREADY_EXISTS"}
                            if path.endswith("/RegisterKvCache") or field.name == "ready_event":
                                allowed.add("UNIMPLEMENTED")
                            free = field.name in names or path.endswith("/Handshake")
                            assert code in allowed or (code == "OK" and free), (path, where, value, code)
                            if path.endswith("/Lookup") and code == "OK" and field.name != "request_id":
                                assert cache_pb2.LookupResponse.FromString(body).status.hit_tokens == 0
        assert sent > 400
        assert not marker.exists()
        await assert_serving(server)
        # an accepted model name has replaced the registration; the good one brings all back
        await engine.worker.register(engine.registration())
        assert outcomes(await engine.retrieve(answer, range(100, 132))) == ["LOADED"] * 8
        assert engine.image.wrong_tokens(range(100, 132)) == []
        server.check()


async def test_pickles_as_messages_and_as_client_id(tmp_path: Path) -> None:
    """Field report 7: a pickle instead of a message, and as the client id: INVALID_ARGUMENT."""
    marker = tmp_path / "marker"
    async with local_server(tmp_path) as server, grpc.aio.insecure_channel(server.address) as channel:
        for path in methods().values():
            if "Admin" in path and "Get" not in path and "List" not in path:
                continue
            for trap in pickles(marker):
                code, _ = await call(channel, path, trap, "somebody")
                assert code in ("INVALID_ARGUMENT", "FAILED_PRECONDITION"), path
        client_id = base64.b64encode(pickles(marker)[1]).decode().ljust(65, "=")
        request = cache_pb2.EndRequestRequest(engine_id="e" * 16, request_id="r")
        path = methods()["EndRequestRequest"]
        assert (await call(channel, path, request, client_id))[0] == "INVALID_ARGUMENT"
        assert not marker.exists()
        await assert_serving(server)


async def test_pickles_in_a_tier_are_a_miss(tmp_path: Path) -> None:
    """Field report 7: objects of a lower tier replaced by pickles, bare and behind a true header: a miss, no file."""
    marker, tier = tmp_path / "marker", MemoryTier()
    async with local_server(tmp_path, tier=tier) as server:
        engine = await server.engine(kv=TINY)
        for seed, trap in enumerate(pickles(marker)):
            tokens = tokens_of(seed, 8 * CHUNK)
            names = await keep_in_tier(server, engine, tokens)
            true = tier.get_raw(names[2])
            tier.put_raw(names[2], true[:128] + trap.ljust(len(true) - 128, b"."))
            tier.put_raw(names[5], trap)
            job_id, status = await found(engine, tokens)
            assert status.hit_tokens == 2 * CHUNK
            target = range(100, 132)
            results = await engine.worker.retrieve(engine.retrieve_request(job_id, target))
            assert outcomes(results) == ["LOADED"] * 2 + ["MISSING"] * 6
            assert engine.image.wrong_tokens(target[:8]) == [] and engine.image.untouched(target[:8])
            engine.image.memory[:] = 0xA5
        assert not marker.exists()
        await assert_serving(server)


def test_default_listener_is_a_socket_of_this_user() -> None:
    """Field report 7: a server without options about listeners has no network socket; its file is this user's only."""
    with serving("--l1-size", "16MiB") as server:
        process = psutil.Process(server.process.pid)
        assert process.net_connections(kind="inet") == []
        assert server.socket.stat().st_mode & 0o777 == 0o600
        assert server.socket.stat().st_uid == os.geteuid()


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
def test_wider_bind_is_refused_at_start(tmp_path: Path, address: str) -> None:
    """Field report 7: off the loopback without TLS and without --insecure: the server does not start and says why."""
    command = [sys.executable, "-m", "kvgrpc", "serve", "--socket", str(tmp_path / "s"), "--listen", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert address in done.stderr and "--insecure" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "s").exists()


def test_loopback_is_let_through() -> None:
    """Field report 7: a listener on the loopback needs no word, and is on the loopback only."""
    with serving("--l1-size", "16MiB", "--listen", "127.0.0.1:0") as server:
        ends = [one.laddr.ip for one in psutil.Process(server.process.pid).net_connections(kind="inet")]
        assert {end.removeprefix("::ffff:") for end in ends} == {"127.0.0.1"}
