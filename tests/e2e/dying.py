# SPDX-License-Identifier: Apache-2.0
"""Engines that get killed: ``python -m tests.e2e.dying`` forks one process for every order that it reads.

An order is a line of JSON, its answer a line with the new process's id. The process attaches, registers its memory and
does one thing: ``idle``, ``store`` or ``retrieve`` once and then nothing, or ``churn``: everything again and again.
Nothing but a signal (or ``LIFE_S``) ends it. Processes are forked before gRPC has started anything, so each begins
within milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import grpc

from kvgrpc.v1 import cache_pb2, cache_pb2_grpc, engine_pb2, engine_pb2_grpc

LIFE_S = 120


class Nursery:
    """The forking process, as seen by a test; every engine that still lives is killed with it."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._living: set[int] = set()
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Nursery:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.e2e.dying", stdin=pipe, stdout=pipe
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for pid in tuple(self._living):
            await self.kill(pid)
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    async def start(self, order: dict[str, str]) -> int:
        """Process id of a new engine."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        async with self._turn:
            process.stdin.write(json.dumps(order).encode() + b"\n")
            pid = int(await process.stdout.readline())
        self._living.add(pid)
        return pid

    async def kill(self, pid: int) -> None:
        """SIGKILL; returns when the process is gone."""
        self._living.discard(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            while True:
                os.kill(pid, 0)
                await asyncio.sleep(0.001)

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Sends a signal that does not end it."""
        os.kill(pid, number)


def order(address: str, act: str, client_id: str, engine_id: str, **messages: Any) -> dict[str, str]:
    """An order; ``messages`` are requests: register, and what the act needs of store, lookup and retrieve."""
    fields = {"address": address, "act": act, "client_id": client_id, "engine_id": engine_id}
    return fields | {name: message.SerializeToString().hex() for name, message in messages.items()}


class DyingEngine:
    """One worker. It never comes to an end by itself."""

    def __init__(self, order: dict[str, str]) -> None:
        self._order = order
        self._channel = grpc.insecure_channel(order["address"])
        self._cache: Any = cache_pb2_grpc.KvCacheServiceStub(self._channel)
        self._engine: Any = engine_pb2_grpc.EngineServiceStub(self._channel)
        self._named = {"metadata": (("kvgrpc-client-id", order["client_id"]),)}
        self._stream: Any = None

    def _message(self, kind: Any, name: str) -> Any:
        return kind.FromString(bytes.fromhex(self._order[name]))

    def join(self) -> None:
        request = engine_pb2.AttachRequest(
            engine_id=self._order["engine_id"], role=engine_pb2.CLIENT_ROLE_WORKER, session_id=os.urandom(16)
        )
        self._stream = self._engine.Attach(request, **self._named)
        next(self._stream)
        self.register()

    def register(self) -> None:
        self._engine.RegisterKvCache(self._message(engine_pb2.RegisterKvCacheRequest, "register"), **self._named)

    def idle(self) -> None:
        pass

    def store(self, call_id: int = 1) -> None:
        request = self._message(cache_pb2.StoreRequest, "store")
        request.call_id = call_id
        self._cache.Store(request, **self._named)

    def retrieve(self, call_id: int = 1) -> None:
        lookup = self._message(cache_pb2.LookupRequest, "lookup")
        lookup.request_id = f"{lookup.request_id}-{call_id}"
        found = self._cache.Lookup(lookup, **self._named)
        if not found.job_id:
            return
        request = self._message(cache_pb2.RetrieveRequest, "retrieve")
        request.call_id, request.job_id = call_id, found.job_id
        self._cache.Retrieve(request, **self._named)

    def churn(self) -> None:
        leave = engine_pb2.UnregisterKvCacheRequest(engine_id=self._order["engine_id"])
        for call_id in itertools.count(1):
            try:
                if call_id % 5 == 0:
                    self._engine.UnregisterKvCache(leave, **self._named)
                    self.register()
                elif call_id % 2:
                    self.store(call_id)
                else:
                    self.retrieve(call_id)
            except grpc.RpcError:
                pass


def live(order: dict[str, str]) -> None:
    engine = DyingEngine(order)
    engine.join()
    getattr(engine, order["act"])()
    signal.pause()


def main(lines: Iterator[str]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the killed
    for line in lines:
        pid = os.fork()
        if not pid:
            signal.alarm(LIFE_S)
            live(json.loads(line))
        os.write(1, b"%d\n" % pid)


if __name__ == "__main__":
    main(iter(sys.stdin.readline, ""))
