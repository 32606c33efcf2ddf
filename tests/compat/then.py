# SPDX-License-Identifier: Apache-2.0
"""A small server of a recorded version: it knows that version's descriptors and nothing newer.

Its messages are made of descriptors.binpb alone, so a field or a method that came later does not exist for it. It keeps
what is stored in a dictionary, for layouts of one run a block.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.status import DETAILS_KEY, REASON_CODES, rich_status
from kvgrpc.transfer.host import host_id

CHUNK = 16
BASE = b"a space of then."
MAJOR, MINOR = 1, 0


class Then(grpc.GenericRpcHandler):
    """``called`` are the methods that reached it, ``unknown`` those that it does not have."""

    def __init__(self, version: Path, major: int = MAJOR) -> None:
        files = FileDescriptorSet.FromString((version / "descriptors.binpb").read_bytes()).file
        pool = descriptor_pool.DescriptorPool()
        for file in files:
            pool.Add(file)
        services = [pool.FindServiceByName(f"{file.package}.{one.name}") for file in files for one in file.service]
        self._methods = {f"/{one.full_name}/{method.name}": method for one in services for method in one.methods}
        self._major = major
        self._objects: dict[tuple[int, ...], bytes] = {}
        self._jobs: dict[bytes, list[tuple[int, ...]]] = {}
        self._memory: dict[str, tuple[mmap.mmap, Any, int]] = {}
        self.called: list[str] = []
        self.unknown: list[str] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        path = handler_call_details.method
        method = self._methods.get(path)
        if method is None:
            self.unknown.append(path)
            return None
        asked, answered = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
        act = getattr(self, method.name, None)

        async def answer(request: Any, context: Any) -> Any:
            self.called.append(method.name)
            client = dict(context.invocation_metadata()).get("kvgrpc-client-id", "")
            try:
                return answered(**(act(request, client) if act is not None else {}))
            except Refusal as refusal:
                details = ((DETAILS_KEY, rich_status(refusal).SerializeToString()),)
                await context.abort(REASON_CODES[refusal.reason], refusal.message, details)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            self.called.append(method.name)
            yield answered(attached={"server_epoch": bytes(16)})
            await asyncio.Event().wait()  # until the client leaves

        how: dict[str, Any] = {
            "request_deserializer": asked.FromString,
            "response_serializer": lambda one: one.SerializeToString(),
        }
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, **how)
        return grpc.unary_unary_rpc_method_handler(answer, **how)

    # ---- what each method answers ------------------------------------------------------------------------------------

    def Handshake(self, request: Any, client: str) -> dict[str, Any]:
        if request.protocol_major != self._major:
            text = f"the client speaks protocol {request.protocol_major}.{request.protocol_minor}, this server "
            raise Refusal(Reason.PROTOCOL_VERSION, f"{text}{self._major}.{MINOR}; the major versions must be equal")
        return {
            "protocol_major": self._major,
            "protocol_minor": MINOR,
            "server_version": "0.1",
            "server_epoch": bytes(16),
            "chunk_tokens": CHUNK,
            "hash_algorithm": "sha256-u32le",
            "host_id": host_id(),
            "space_base": BASE if request.HasField("identity") else b"",
        }

    def RegisterKvCache(self, request: Any, client: str) -> dict[str, Any]:
        (group,), (piece,) = request.groups, request.memory
        fd = os.open(f"/dev/shm/{piece.shared.name}", os.O_RDWR)
        try:
            self._memory[client] = mmap.mmap(fd, piece.shared.size_bytes), group.runs[0], group.block_size
        finally:
            os.close(fd)
        form = f"opaque:{group.backend}:{group.layout}:{group.block_size}"
        object_bytes = group.runs[0].run_bytes * CHUNK // group.block_size
        return {"space_base": BASE, "chunk_tokens": CHUNK, "registration_epoch": 1, "stored_form": form} | {
            "object_bytes": object_bytes
        }

    def _blocks(self, client: str, ids: Sequence[int]) -> list[slice]:
        _, runs, _ = self._memory[client]
        starts = [runs.base_bytes + block * runs.block_stride_bytes for block in ids]
        return [slice(start, start + runs.run_bytes) for start in starts]

    def Store(self, request: Any, client: str) -> dict[str, Any]:
        memory, _, block_size = self._memory[client]
        ids, each = request.content.tokens.ids, CHUNK // block_size
        count = (request.range.end if request.HasField("range") else len(ids)) // CHUNK
        for at in range(count):
            blocks = request.blocks[0].ids[at * each : (at + 1) * each]
            self._objects[tuple(ids[: (at + 1) * CHUNK])] = b"".join(
                memory[one] for one in self._blocks(client, blocks)
            )
        return {"results": [{"first_chunk": 0, "count": count, "outcome": "CHUNK_OUTCOME_STORED"}]}

    def Lookup(self, request: Any, client: str) -> dict[str, Any]:
        ids, found = request.content.tokens.ids, list[tuple[int, ...]]()
        while (key := tuple(ids[: (len(found) + 1) * CHUNK])) in self._objects and len(key) > len(found) * CHUNK:
            found.append(key)
        job_id = len(self._jobs).to_bytes(16, "big") if found else b""
        self._jobs[job_id] = found
        return {"job_id": job_id, "status": self._status(found)}

    def QueryPrefetchStatus(self, request: Any, client: str) -> dict[str, Any]:
        return {"status": self._status(self._jobs[request.job_id])}

    def _status(self, found: list[tuple[int, ...]]) -> dict[str, Any]:
        return {"state": "STATE_DONE", "hit_tokens": len(found) * CHUNK, "pinned": True}

    def Retrieve(self, request: Any, client: str) -> dict[str, Any]:
        memory, runs, block_size = self._memory[client]
        found, each = self._jobs[request.job_id], CHUNK // block_size
        for at, key in enumerate(found):
            data = self._objects[key]
            for number, block in enumerate(self._blocks(client, request.blocks[0].ids[at * each : (at + 1) * each])):
                memory[block] = data[number * runs.run_bytes : (number + 1) * runs.run_bytes]
        return {"results": [{"first_chunk": 0, "count": len(found), "outcome": "CHUNK_OUTCOME_LOADED"}]}

    def GetStatus(self, request: Any, client: str) -> dict[str, Any]:
        return {"chunks": len(self._objects)}
