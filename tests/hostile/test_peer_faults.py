# SPDX-License-Identifier: Apache-2.0
"""Faults that were seen live in a server of the same kind and that no other test stands for (docs/peer-faults.md)."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import struct
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from kvgrpc import api
from kvgrpc.client import Client
from tests.hostile.engine import PER_CHUNK
from tests.hostile.stand import Stand, stand, until

MIB = 1 << 20
CHUNKS = 8
BLOCKS = list(range(0, 2 * CHUNKS * PER_CHUNK, 2))
STORED = [("STORED", "")] * CHUNKS
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def junk(chance: random.Random) -> list[bytes]:
    """Beginnings of connections that are none of gRPC's, or stop being so."""
    settings = PREFACE + frame(4, 0, 0, b"")
    return [
        b"",
        b"\0",
        b"\xff" * 64,
        chance.randbytes(4096),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + chance.randbytes(500),
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03",
        PREFACE[:10],
        PREFACE + chance.randbytes(1000),
        settings + frame(1, 4, 1, chance.randbytes(100)),
        settings + frame(0, 1, 7, b"no such stream"),
        settings + frame(6, 0, 0, b"short"),
        settings + frame(6, 0, 0, bytes(8)) * 2000,
        settings + frame(3, 0, 1, bytes(4)) * 2000,
        settings + struct.pack(">I", 0xFFFFFF)[1:] + struct.pack(">BBI", 0, 0, 1),
    ]


def test_bytes_that_are_no_protocol() -> None:
    """Connections that send anything but gRPC, end at once or stay without a word: nobody else notices."""
    chance = random.Random(12)
    with stand("--listen", "127.0.0.1:0") as server, contextlib.ExitStack() as held:
        engine = server.engine()
        counts, files = server.counts(), len(server.files())
        engine.tell("traffic", 1000)
        for number in itertools.count():
            if number >= 20 and server.operator.get_status().counters.get("stored_chunks", 0) >= 40:
                break  # ten rounds of the engine
            for data in junk(chance):
                sock = socket.socket(socket.AF_UNIX)
                sock.connect(str(server.served.socket))
                sock.settimeout(2)
                with contextlib.suppress(OSError):
                    sock.sendall(data)
                if number % 2 or number >= 20:
                    sock.close()
                else:
                    held.enter_context(sock)
        assert health(server) == health_pb2.HealthCheckResponse.SERVING
        rounds, longest_s = engine.stop_traffic()
        print(f"engine: {rounds} rounds, the longest {longest_s:.3f} s")
        assert rounds >= 10 and longest_s < 4
        assert engine.do("load", 1000 + rounds - 1, 4, BLOCKS) == 4
        held.close()
        until(lambda: server.counts() == counts)
        until(lambda: len(server.files()) <= files + 1, what="the end of all connections")
        server.assert_well()


def health(server: Stand) -> int:
    with grpc.insecure_channel(server.served.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(), timeout=5).status


def memory(server: Stand, name: str) -> int:
    status = Path(f"/proc/{server.served.process.pid}/status").read_text()
    return 1024 * int(status.split(f"{name}:")[1].split()[0])


@pytest.mark.parametrize("packed", [False, True], ids=["as they are", "compressed"])
def test_large_messages_take_no_memory(packed: bool) -> None:
    """Messages of 300 MiB are refused by size and cost a fraction of it, whatever they are packed into."""
    with stand() as server:
        until(lambda: memory(server, "RssShmem") >= 64 * MIB, what="the arena in use")
        assert server.counts()["clients"] == 0
        Path(f"/proc/{server.served.process.pid}/clear_refs").write_text("5")
        before = memory(server, "VmHWM")
        compression = grpc.Compression.Gzip if packed else grpc.Compression.NoCompression
        options = [("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(server.served.address, options, compression) as channel:
            methods = ("KvCacheService/Lookup", "EngineService/RegisterKvCache", "AdminService/GetStatus")
            for method in methods[:1] if packed else methods:
                call = channel.unary_unary(f"/kvgrpc.v1.{method}")
                with pytest.raises(grpc.RpcError) as refused:
                    call(bytes(300 * MIB), timeout=60)
                error: Any = refused.value
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
        grown = memory(server, "VmHWM") - before
        print(f"grown by {grown / MIB:.1f} MiB at the most")
        assert grown < 64 * MIB
        server.assert_well()


def test_nobody_is_told_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret in the server's environment is in no answer and no line of log; the server calls nobody."""
    secret = "a-secret-of-the-environment"
    monkeypatch.setenv("SOME_TOKEN", secret)
    with stand("--log-level", "debug") as server:
        engine = server.engine()
        engine.do("store", "s", 1, CHUNKS, BLOCKS)
        assert engine.do("ended", "s") == STORED
        with Client(server.served.address) as client:
            told = [client.handshake(api.Hello()), client.get_status(), client.list_engines(), client.list_spaces()]
            told.append(client.clear(api.ClearTarget(all=True)))
        with grpc.insecure_channel(server.served.address) as channel:
            told += [str(name) for name in ProtoReflectionDescriptorDatabase(channel).get_services()]
        assert secret in Path(f"/proc/{server.served.process.pid}/environ").read_text()
        assert secret not in repr(told) and secret not in server.served.log
        assert internet_sockets(server) == []


def table(name: str) -> list[str]:
    return Path(f"/proc/net/{name}").read_text().splitlines()


def internet_sockets(server: Stand) -> list[str]:
    """Of the server, listening or connected."""
    mine = {name.removeprefix("socket:[").removesuffix("]") for name in server.files() if name.startswith("socket:")}
    lines = [line for name in ("tcp", "tcp6", "udp", "udp6") for line in table(name)[1:]]
    return [line for line in lines if line.split()[9] in mine]
