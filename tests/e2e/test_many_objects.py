# SPDX-License-Identifier: Apache-2.0
"""Engines whose memory is in very many pieces leave the server descriptors for connections."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from kvgrpc.client import Client
from kvgrpc.core.types import MIB
from kvgrpc.transfer.host import host_id
from kvgrpc.v1 import common_pb2, engine_pb2, engine_pb2_grpc
from tests.served import serving

DESCRIPTORS = 1024
"""A small limit, so that it is quick to reach."""


@contextlib.contextmanager
def objects(count: int) -> Iterator[list[str]]:
    run = secrets.token_hex(4)
    names = [f"kvgrpc-test-{run}-{at}" for at in range(count)]
    try:
        for name in names:
            fd = os.open(f"/dev/shm/{name}", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            os.posix_fallocate(fd, 0, 4096)
            os.close(fd)
        yield names
    finally:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"/dev/shm/{name}")


def registration(engine_id: str, names: Sequence[str]) -> engine_pb2.RegisterKvCacheRequest:
    request = engine_pb2.RegisterKvCacheRequest(engine_id=engine_id, host_id=host_id(), tp_size=1, kv_tp_size=1)
    identity = common_pb2.SpaceIdentity(model="m", kv_dtype="uint8", kv_world_size=1, hash_algorithm="sha256-u32le")
    request.identity.CopyFrom(identity)
    for name in names:
        request.memory.add().shared.CopyFrom(engine_pb2.SharedMemory(name=name, size_bytes=4096))
    group = request.groups.add(kind=engine_pb2.GROUP_KIND_FULL, block_size=16, num_blocks=1)
    group.form, group.backend, group.layout = engine_pb2.BLOCK_FORM_OPAQUE, "T", "L"
    group.runs.add(layers=1, planes=1, run_bytes=16, block_stride_bytes=16)
    return request


def register_all(stub: Any, metadata: Any, engine_id: str, names: Sequence[str]) -> int:
    """Registers as many of the objects as the server takes, halving; how many."""
    count = len(names)
    while count:
        try:
            stub.RegisterKvCache(registration(engine_id, names[:count]), metadata=metadata, timeout=60)
            return count
        except grpc.RpcError:
            count //= 2
    return 0


def test_memory_of_engines_leaves_descriptors_for_connections() -> None:
    flags = ("--l1-size", f"{64 * MIB}")
    with serving(*flags) as served, objects(DESCRIPTORS) as names, contextlib.ExitStack() as stack:
        resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
        stub: Any = engine_pb2_grpc.EngineServiceStub(stack.enter_context(grpc.insecure_channel(served.address)))
        shared = 0
        for number in range(12):
            metadata, engine_id = (("kvgrpc-client-id", f"worker-{number}"),), f"engine-of-sixteen-{number:04}"
            request = engine_pb2.AttachRequest(
                engine_id=engine_id, role=engine_pb2.CLIENT_ROLE_WORKER, session_id=secrets.token_bytes(16)
            )
            stream = stub.Attach(request, metadata=metadata)
            stack.callback(stream.cancel)
            next(stream)
            shared += register_all(stub, metadata, engine_id, names)
        assert shared > DESCRIPTORS // 8
        held = len(os.listdir(f"/proc/{served.process.pid}/fd"))
        assert held < DESCRIPTORS // 2 + 100, f"engines' memory holds {held} of {DESCRIPTORS} descriptors"
        for _ in range(8):
            assert stack.enter_context(Client(served.address)).get_status().clients == 12
