# SPDX-License-Identifier: Apache-2.0
"""One engine as a client of either server, through that server's own public client, in that client's environment.

Both have the same methods and the same memory: a tensor [2, blocks, 16, heads, dim] of bf16 a layer, seen in ``planes``
as words [2, blocks, words]. Both are given token ids as a tuple of Python integers, as the peer's client takes them.
``lookup`` returns the tokens that hit, which are locked then; ``store`` and ``retrieve`` return when the server has
acknowledged, with whether it took, or gave, everything.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

BLOCK, CHUNK, ITEM_BYTES, TIMEOUT_S = 16, 256, 2, 60.0
Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """Paged KV memory. Block 0 is not to be used: it has a meaning of its own for the peer."""

    layers: int
    heads: int
    dim: int
    num_blocks: int


class Ours:
    """``mode`` says what a lookup is given: "ids", which it packs; ids that are "packed"; or "hashes" of chunks."""

    def __init__(self, address: str) -> None:
        grpc, health = import_module("grpc"), import_module("grpc_health.v1.health_pb2")
        client, self._api = import_module("kvgrpc.client"), import_module("kvgrpc.api")
        self._client: Any = client.Client(address)
        self._channel = grpc.insecure_channel(address)
        self._health = import_module("grpc_health.v1.health_pb2_grpc").HealthStub(self._channel)
        self._question, self._serving = health.HealthCheckRequest(), health.HealthCheckResponse.SERVING
        self._calls, self._jobs, self._name = itertools.count(1), dict[str, bytes](), ""

    def register(self, mode: str, shape: Shape) -> None:
        from kvgrpc.cli.demo import shared
        from kvgrpc.core.types import Role, SpaceIdentity, SpaceRef
        from kvgrpc.transfer.host import host_id

        api, self._mode, self._engine_id = self._api, mode, secrets.token_hex(16)
        self._session = self._client.attach(self._engine_id, Role.WORKER, secrets.token_bytes(16))
        next(self._session)
        run = BLOCK * shape.heads * shape.dim * ITEM_BYTES
        plane = run * shape.num_blocks
        self._name, size = f"kvgrpc-peer-{secrets.token_hex(8)}", 2 * plane * shape.layers
        words = np.frombuffer(shared.create(self._name, size), np.int64)
        self.planes = list(words.reshape(shape.layers, 2, shape.num_blocks, -1))
        runs, form = api.Runs(0, 0, shape.layers, 2 * plane, 2, plane, run, run), api.BlockForm.TOKEN_MAJOR
        group = api.KvGroup(BLOCK, shape.num_blocks, (runs,), form, heads=shape.heads, head_dim=shape.dim)
        layout = api.Layout((api.SharedMemory(self._name, 0, size),), (group,))
        algorithm = "peer-sha256" if mode == "hashes" else api.OWN_HASH_ALGORITHM
        identity = SpaceIdentity("peer", "", "bfloat16", 1, algorithm, "")
        request = api.RegisterRequest(self._engine_id, identity, 0, 0, 1, 1, layout, host_id())
        self._space = SpaceRef(self._client.register(request).space_base)

    def empty(self) -> None:
        assert self._health.Check(self._question).status == self._serving

    def prepare(self, ids: Ids) -> Any:
        """What an engine of this mode has in hand before it looks up."""
        if self._mode == "hashes":
            names = (f"{ids[:2]} {at}".encode() for at in range(len(ids) // CHUNK))
            return self._api.Hashes(tuple(hashlib.sha256(name).digest() for name in names), len(ids))
        return ids if self._mode == "ids" else self._packed(ids)

    def _packed(self, prompt: Any) -> Any:
        return self._api.Tokens(memoryview(array("I", prompt)).cast("B")) if isinstance(prompt, tuple) else prompt

    def lookup(self, name: str, prompt: Any) -> int:
        request = self._api.LookupRequest(self._engine_id, name, self._space, self._packed(prompt))
        answer = self._client.lookup(request)
        assert answer.status.done, "without lower tiers a lookup is final at once"
        self._jobs[name] = answer.job_id
        return answer.status.hit_tokens

    def free(self, name: str, ids: Ids) -> None:
        assert self._client.free(self._api.FreeRequest(self._engine_id, self._jobs[name], 1)) == len(ids) // CHUNK

    def end(self, name: str) -> None:
        if self._jobs.pop(name, b""):  # a miss leaves nothing on the server
            self._client.end_request(self._engine_id, name)

    def store(self, name: str, ids: Ids, blocks: Sequence[int]) -> bool:
        content = self._packed(self.prepare(ids))
        request = self._api.StoreRequest(self._engine_id, next(self._calls), self._space, content, (blocks,))
        return all(result.outcome.value == "STORED" for result in self._client.store(request))

    def retrieve(self, name: str, ids: Ids, blocks: Sequence[int]) -> bool:
        from kvgrpc.core.types import TokenRange

        tokens, job_id = TokenRange(0, len(ids)), self._jobs[name]
        request = self._api.RetrieveRequest(self._engine_id, next(self._calls), job_id, tokens, (blocks,))
        return all(result.outcome.value == "LOADED" for result in self._client.retrieve(request))

    def clear(self) -> None:
        self._client.clear(self._api.ClearTarget(all=True))

    def close(self) -> None:
        self._client.close()
        self._channel.close()
        if self._name:
            Path("/dev/shm", self._name).unlink()

    @staticmethod
    def versions() -> dict[str, str]:
        return {}  # the coordinator runs in the same environment


class Peer:
    """LMCache's request client and transfer context. ``mode`` is its transfer mode: engine_driven, where this process
    copies, or lmcache_driven, where the server does."""

    def __init__(self, address: str) -> None:
        package = "lmcache.v1.multiprocess"
        self._torch, self._utils = import_module("torch"), import_module("lmcache.utils")
        self._groups, self._types = import_module(f"{package}.group_view"), import_module(f"{package}.custom_types")
        self._contexts = import_module(f"{package}.transfer_context")
        factory = import_module(f"{package}.transport.factory").RequestClientFactory
        self._client: Any = factory.create(address)
        self._transfer: Any = None

    def register(self, mode: str, shape: Shape) -> None:
        torch, form = self._torch, (2, shape.num_blocks, BLOCK, shape.heads, shape.dim)
        self._kv = {f"layer.{at}": torch.zeros(form, dtype=torch.bfloat16) for at in range(shape.layers)}
        make, group = self._contexts.create_transfer_context, self._groups.EngineGroupInfo
        self._transfer = make(self._kv, mode=mode, instance_id=os.getpid(), req_client=self._client)
        more = {"layout_hints": {"kv_layout": "NHD"}, "engine_type": self._utils.EngineType.VLLM}
        groups = [group(0, tuple(range(shape.layers)), BLOCK)]
        self._transfer.register(self._kv, "peer", 1, CHUNK // BLOCK, TIMEOUT_S, engine_group_infos=groups, **more)
        words = [layer.view(torch.int64).numpy() for layer in self._kv.values()]  # registering may have moved them
        self.planes = [layer.reshape(2, shape.num_blocks, -1) for layer in words]

    def _key(self, name: str, ids: Ids, worker: int | None = None) -> Any:
        return self._types.IPCCacheServerKey("peer", 1, worker, ids, 0, len(ids), name, num_kv_readers=1)

    def empty(self) -> None:
        self._client.noop().result(timeout=TIMEOUT_S)

    def prepare(self, ids: Ids) -> Any:
        return ids

    def lookup(self, name: str, prompt: Any) -> int:
        self._client.lookup(self._key(name, prompt), 1).result(timeout=TIMEOUT_S)
        while (chunks := self._client.query_prefetch_status(name).result(timeout=TIMEOUT_S)) is None:
            pass
        return chunks * CHUNK

    def free(self, name: str, ids: Ids) -> None:
        self._client.free_lookup_locks(self._key(name, ids), 1).result(timeout=TIMEOUT_S)

    def end(self, name: str) -> None:
        self._client.end_session(name).result(timeout=TIMEOUT_S)

    def store(self, name: str, ids: Ids, blocks: Sequence[int]) -> bool:
        return self._move(self._transfer.submit_store, name, ids, blocks)

    def retrieve(self, name: str, ids: Ids, blocks: Sequence[int]) -> bool:
        return self._move(self._transfer.submit_retrieve, name, ids, blocks)

    def _move(self, submit: Any, name: str, ids: Ids, blocks: Sequence[int]) -> bool:
        event = self._transfer.create_recorded_event()
        future = submit(name, self._key(name, ids, 0), self._kv, [blocks], event, CHUNK // BLOCK)
        return bool(future.result(timeout=TIMEOUT_S))

    def clear(self) -> None:
        self._client.clear(False).result(timeout=TIMEOUT_S)

    def close(self) -> None:
        if self._transfer is not None:
            self._transfer.unregister().result(timeout=TIMEOUT_S)
            self._transfer.close()
        self._client.close()
        for left in Path("/dev/shm").glob(f"lmcache_kv_{os.getpid()}_*"):
            left.unlink()

    @staticmethod
    def versions() -> dict[str, str]:
        return {f"peer {name}": version(name) for name in ("lmcache", "torch", "grpcio", "pyzmq", "protobuf")}
