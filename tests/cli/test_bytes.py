# SPDX-License-Identifier: Apache-2.0
"""Bytes of the KV cache never travel over the connection."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvgrpc.api import BlockForm, KvGroup, Layout, RegisterRequest, Runs, SharedMemory, Tokens
from kvgrpc.cli.demo import shared
from kvgrpc.client.worker import WorkerClient
from kvgrpc.core.types import ChunkOutcome, ChunkResult, SpaceIdentity
from tests.served import Served, serving

MIB = 1 << 20
BLOCK_BYTES = MIB
BLOCKS = 256


class CountingProxy:
    """A TCP listener that passes everything on and counts it. Threads: one a direction, counted under a lock."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.passed_bytes = 0
        self._target = target
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        for end in self._open:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                with self._lock:
                    self.passed_bytes += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return


def tcp_address(server: Served) -> tuple[str, int]:
    started = next(json.loads(line) for line in server.log.splitlines() if '"started"' in line)
    port = started["listens"].split("127.0.0.1:")[1].split()[0]
    return "127.0.0.1", int(port)


@contextmanager
def engine_memory(size_bytes: int) -> Iterator[str]:
    name = f"kvgrpc-test-{secrets.token_hex(8)}"
    memory = shared.create(name, size_bytes)
    try:
        yield name
    finally:
        shared.unlink(name)
        memory.close()


def test_a_store_of_256_mib_costs_no_megabyte_on_the_connection():
    """Field report 64."""
    group = KvGroup(256, BLOCKS, (Runs(0, 0, 1, 0, 1, 0, BLOCK_BYTES, BLOCK_BYTES),), BlockForm.OPAQUE, backend="x")
    identity = SpaceIdentity("model", "", "uint8", 1, "sha256-u32le", "")
    prompt = Tokens(bytes(4) * (256 * BLOCKS))
    with (
        serving("--l1-size", "320MiB", "--listen", "127.0.0.1:0") as server,
        engine_memory(BLOCKS * BLOCK_BYTES) as name,
    ):
        proxy = CountingProxy(tcp_address(server))
        layout = Layout((SharedMemory(name, 0, BLOCKS * BLOCK_BYTES),), (group,))
        worker = WorkerClient(proxy.address, RegisterRequest(secrets.token_hex(16), identity, 0, 0, 1, 1, layout))
        try:
            assert worker.start(30), worker.problem
            results = worker.store(prompt, (range(BLOCKS),)).result(60)
        finally:
            worker.close()
            proxy.close()
    assert results == (ChunkResult(0, BLOCKS, ChunkOutcome.STORED),)
    assert 0 < proxy.passed_bytes < MIB
