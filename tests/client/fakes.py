# SPDX-License-Identifier: Apache-2.0
"""A steerable cache behind a real gRPC server, in a thread of the test or in a process of its own.

``FakeServer`` (thread) can be stopped and started again on its socket; ``fake_process`` can be killed and frozen.
What the clients asked for is in ``cache.seen``; ``cache.knobs`` says how it answers.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from kvgrpc import api
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import ChunkOutcome, ChunkResult, Ended, LookupAnswer, PrefetchStatus, Role, SpaceIdentity
from kvgrpc.service.server import Server, ServerOptions
from kvgrpc.transfer.host import host_id

CHUNK = 16
ENGINE = "engine-0123456789abcdef"
IDENTITY = SpaceIdentity("model", "r1", "bfloat16", 1, "sha256-u32le", "opaque:TEST:X:4")
LIMITS = api.Limits(16384, 4096, 16 << 20, 256, 4096, 60_000, 600_000, 500, 1 << 30, 1 << 30)


@dataclass
class Knobs:
    """How the fake answers. ``refuse``: a reason by method name. ``hang``: methods that do not answer. ``pending``:
    lookups stay pending until ``FakeCache.finish``. ``hold``: copies run until ``FakeCache.release``, whatever their
    caller does. ``half``: lookups hit half of the prompt's chunks instead of all."""

    refuse: dict[str, str] = field(default_factory=dict[str, str])
    hang: list[str] = field(default_factory=list[str])
    pending: bool = False
    hold: bool = False
    half: bool = False


class FakeCache:
    """One server's state. Lives on the server's loop; tests read and set attributes from outside."""

    def __init__(self, knobs: Knobs | None = None) -> None:
        self.knobs = knobs or Knobs()
        self.epoch = secrets.token_bytes(16)
        self.seen: list[tuple[str, Any]] = []
        self.streams: dict[str, asyncio.Queue[api.AttachEvent | None]] = {}
        self.sessions: dict[str, bytes] = {}
        self.jobs: dict[bytes, str] = {}
        self.done: set[bytes] = set()
        self.running: dict[int, asyncio.Event] = {}

    def client(self, client_id: str) -> FakeSession:
        return FakeSession(self, client_id)

    def asked(self, name: str) -> list[Any]:
        """What was asked of this method, in order."""
        return [request for method, request in self.seen if method == name]

    def finish(self) -> None:
        """Pending lookups become final."""
        self.done.update(self.jobs)

    def release(self) -> None:
        """Held copies end."""
        for copy in self.running.values():
            copy.set()

    async def note(self, name: str, request: Any) -> None:
        self.seen.append((name, request))
        if name in self.knobs.refuse:
            raise Refusal(Reason[self.knobs.refuse[name]], "as the test wants")
        await self.until(lambda: name not in self.knobs.hang)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 3600) -> None:
        """Polls, since the test changes knobs from another thread."""
        end = time.monotonic() + timeout_s
        for _ in iter(lambda: condition() or time.monotonic() > end, True):
            await asyncio.sleep(0.005)

    async def get_status(self) -> Any:
        raise Refusal(Reason.INTERNAL, "a fake has no status")

    async def clear(self, target: Any) -> Any:
        await self.note("clear", target)
        return api.Cleared(0, 0)

    list_engines = list_spaces = bump_generation = pin = unpin = drain_engine = get_status
    set_quota = get_quota = set_write_policy = get_status


class FakeSession:
    """CacheApi of one client."""

    def __init__(self, cache: FakeCache, client_id: str) -> None:
        self._cache = cache
        self._client_id = client_id

    def _attached(self) -> None:
        if self._client_id not in self._cache.streams:
            raise Refusal(Reason.NOT_ATTACHED, "attach first")

    async def handshake(self, hello: api.Hello) -> api.ServerInfo:
        await self._cache.note("handshake", hello)
        base = b"\x07" * 16 if hello.identity is not None else b""
        return api.ServerInfo(1, 0, "fake", self._cache.epoch, CHUNK, "sha256-u32le", LIMITS, host_id(), base)

    async def attach(self, engine_id: str, role: Role, session_id: bytes) -> AsyncIterator[api.AttachEvent]:
        await self._cache.note("attach", (engine_id, role, session_id))
        queue: asyncio.Queue[api.AttachEvent | None] = asyncio.Queue()
        resumed = self._cache.sessions.get(self._client_id) == session_id
        self._cache.sessions[self._client_id] = session_id
        self._cache.streams[self._client_id] = queue
        try:
            yield api.AttachEvent(False, self._cache.epoch, resumed)
            while (event := await queue.get()) is not None:
                yield event
        finally:
            if self._cache.streams.get(self._client_id) is queue:
                del self._cache.streams[self._client_id]

    async def register(self, request: api.RegisterRequest) -> api.RegisterAnswer:
        await self._cache.note("register", request)
        self._attached()
        return api.RegisterAnswer(b"\x07" * 16, CHUNK, 1, "opaque:TEST:X:4", 1024)

    async def unregister(self, engine_id: str) -> None:
        await self._cache.note("unregister", engine_id)

    async def lookup(self, request: api.LookupRequest) -> LookupAnswer:
        await self._cache.note("lookup", request)
        self._attached()
        job_id = secrets.token_bytes(16)
        self._cache.jobs[job_id] = request.request_id
        if self._cache.knobs.pending:
            return LookupAnswer(job_id, PrefetchStatus(False))
        return LookupAnswer(job_id, self._status(request.content.num_tokens))

    def _status(self, num_tokens: int) -> PrefetchStatus:
        hit = num_tokens // (2 if self._cache.knobs.half else 1) // CHUNK * CHUNK
        return PrefetchStatus(True, hit, True, {"l1": hit // CHUNK})

    async def query(self, engine_id: str, job_id: bytes, wait_ms: int = 0) -> PrefetchStatus:
        await self._cache.note("query", job_id)
        cache = self._cache
        await cache.until(lambda: job_id not in cache.jobs or job_id in cache.done, wait_ms / 1000)
        if job_id not in self._cache.jobs:
            raise Refusal(Reason.JOB_UNKNOWN, "it has ended")
        return self._status(2 * CHUNK) if job_id in self._cache.done else PrefetchStatus(False)

    async def store(self, request: api.StoreRequest) -> tuple[ChunkResult, ...]:
        return await self._copy("store", request, ChunkOutcome.STORED)

    async def retrieve(self, request: api.RetrieveRequest) -> tuple[ChunkResult, ...]:
        return await self._copy("retrieve", request, ChunkOutcome.LOADED)

    async def _copy(self, name: str, request: Any, outcome: ChunkOutcome) -> tuple[ChunkResult, ...]:
        await self._cache.note(name, request)
        self._attached()
        if self._cache.knobs.hold:
            ended = self._cache.running[request.call_id] = asyncio.Event()
            await ended.wait()
        return (ChunkResult(0, request.range.end // CHUNK, outcome),)

    async def free(self, request: api.FreeRequest) -> int:
        await self._cache.note("free", request)
        return 1

    async def end_request(self, engine_id: str, request_id: str) -> Ended:
        await self._cache.note("end_request", request_id)
        gone = [job_id for job_id, owner in self._cache.jobs.items() if owner == request_id]
        for job_id in gone:
            del self._cache.jobs[job_id]
        return Ended(len(gone), len(gone))

    async def fence(self, engine_id: str, call_ids: Sequence[int]) -> None:
        await self._cache.note("fence", tuple(call_ids))
        self._attached()
        for call_id in call_ids:
            if call_id in self._cache.running:
                await self._cache.running[call_id].wait()


class FakeServer:
    """A server thread on a socket; each ``start`` is a new server (new epoch, empty state)."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "s"
        self.address = f"unix:{self.socket}"
        self.cache = FakeCache()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: Server | None = None

    def start(self, knobs: Knobs | None = None) -> FakeCache:
        self.cache = FakeCache(knobs)
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), name="fake", daemon=True)
        self._thread.start()
        assert ready.wait(10)
        return self.cache

    async def _serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        server = Server(ServerOptions(socket=self.socket, drain_s=0.2), self.cache.client, self.cache)  # type: ignore[arg-type]
        await server.start()
        self._server = server
        ready.set()
        await server.wait()

    def run(self, work: Callable[[], Any]) -> Any:
        """Calls something on the server's loop."""
        assert self._loop is not None

        async def act() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(act(), self._loop).result(10)

    def drain(self) -> None:
        """Tells the clients; the server stays until ``stop``."""
        self.run(lambda: [queue.put_nowait(api.AttachEvent(True, reason="x")) for queue in self.cache.streams.values()])

    def cut_streams(self) -> None:
        """Ends every Attach stream; the server stays."""
        self.run(lambda: [queue.put_nowait(None) for queue in self.cache.streams.values()])

    def stop(self) -> None:
        if self._thread is not None and self._loop is not None and self._server is not None and self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop)
            self._thread.join(10)
            self._thread = None


@contextmanager
def short_folder() -> Iterator[Path]:
    """Socket paths must stay short, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="kvc"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def fake_process(address: str, **knobs: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A fake server in its own process, listening on ``unix:/path`` or ``host:port``; killed at the end."""
    command = [sys.executable, "-m", "tests.client.fakes", address, json.dumps(knobs)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def wait_until(condition: Callable[[], object], timeout_s: float = 30.0) -> float:
    """Seconds until the condition was true."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + timeout_s, "the condition did not come true in time"
        time.sleep(0.005)
    return time.monotonic() - start


async def _main(address: str, knobs: Knobs) -> None:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # stdout says "ready" and nothing else
    cache = FakeCache(knobs)
    path = address.removeprefix("unix:")
    options = ServerOptions(socket=Path(path)) if path != address else ServerOptions(listen=(address,))
    server = Server(options, cache.client, cache)  # type: ignore[arg-type]
    await server.start()
    print("ready", flush=True)
    await server.wait()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], Knobs(**json.loads(sys.argv[2]))))
