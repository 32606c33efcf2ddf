# SPDX-License-Identifier: Apache-2.0
"""A server process with a disk tier that is killed and started again, and an engine whose prompts all differ.

with contextlib.closing(DiskServer(tmp_path)) as server:
    server.start()
    with engine(server.address) as one:
        one.store(7)                         # prompt 7: 8 chunks, bytes of its own at every position
        server.wait_written(8)
        server.kill()
        ...
        one.load(7) == 8                     # chunks that came back right; anything else in their blocks fails
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvgrpc import api
from kvgrpc.client import Client, SchedulerClient, WorkerClient
from kvgrpc.core.types import SpaceIdentity, TokenRange
from tests.e2e.harness import loaded_chunks, outcomes, tokens_of
from tests.kvdata import LAYERS_OUTERMOST, Image, Kv, shared_memory
from tests.served import stop, wait_until

CHUNK = 16
CHUNKS = 8
TOKENS = CHUNK * CHUNKS
KV = Kv(layers=4, planes=2, heads=8, head_dim=64)
OBJECT_BYTES = KV.token_bytes * CHUNK
"""128 KiB."""
ENGINE_ID = "engine-of-the-disk-tests"
IDENTITY = SpaceIdentity("model", "", "bfloat16", 1, api.OWN_HASH_ALGORITHM, "token-major:8:64:2")
SOURCE, TARGET = list(range(1, 65, 2)), list(range(128, 192, 2))


class DiskServer:
    """`kvgrpc serve` on one socket and one directory, again and again."""

    def __init__(self, folder: Path, name: str = "s", *, disk: Path | None = None, disk_size: str = "1GiB") -> None:
        self.socket = folder / name
        self.disk = disk or folder / "disk"
        self.disk.mkdir(exist_ok=True)
        self.flags = ["--disk-path", str(self.disk), "--disk-size", disk_size, "--page-size", "64KiB"]
        self.flags += ["--prefetch-wait-ms", "10000"]  # a busy machine
        self.log_file = folder / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def start(self, *flags: str, l1_size: str = "64MiB") -> None:
        command = [sys.executable, "-m", "kvgrpc", "serve", "--socket", str(self.socket), "--chunk-tokens", str(CHUNK)]
        with self.log_file.open("ab") as log:
            command += [*(["--l1-size", l1_size] if l1_size else []), *self.flags, *flags]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(self._is_open, 60)

    def _is_open(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log
        with socket.socket(socket.AF_UNIX) as sock:
            try:
                sock.connect(str(self.socket))
            except OSError:
                return False
        return True

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)  # beyond the longest --flush-ms of the tests

    def close(self) -> None:
        if self.process is not None:
            stop(self.process)

    def status(self) -> api.ServerStatus:
        with Client(self.address, "operator") as operator:
            return operator.get_status()

    def tier(self) -> api.TierStatus:
        (tier,) = self.status().tiers
        return tier

    def counter(self, name: str) -> int:
        return self.status().counters.get(name, 0)

    def wait_written(self, objects: int, timeout_s: float = 60) -> None:
        wait_until(lambda: self.counter("written_objects") >= objects, timeout_s)

    def wait_quiet(self) -> None:
        """Nothing is being written or waits for it."""

        def quiet() -> bool:
            tier = self.tier()
            return not tier.writes_in_flight and not tier.writes_queued

        wait_until(quiet, 30)

    def files(self) -> list[Path]:
        """Of all objects, least recently used first."""
        return sorted(self.disk.glob("slot-*/??/*"), key=lambda path: path.stat().st_mtime_ns)

    def bytes_on_disk(self) -> int:
        total = 0
        for path in self.disk.glob("slot-*/*/*"):
            with contextlib.suppress(FileNotFoundError):  # the server goes on meanwhile
                total += path.stat().st_blocks * 512
        return total


def wait_known(address: str, worker: WorkerClient, scheduler: SchedulerClient) -> None:
    """Until the server knows both and the engine's memory (before that it cannot know how long objects are), and they
    know it: who has a session with it no longer takes the last server for alive."""
    with Client(address, "looker") as operator:

        def known() -> bool:
            clients = [client for one in operator.list_engines() for client in one.clients]
            registered = any(client.client_id == worker.client_id and client.registered for client in clients)
            attached = any(client.client_id == scheduler.client_id and client.attached for client in clients)
            return registered and attached and worker.attached and scheduler.attached

        wait_until(known, 30)


@dataclass
class DiskEngine:
    """A worker with its memory, and a scheduler."""

    worker: WorkerClient
    scheduler: SchedulerClient
    image: Image
    address: str
    lookups: int = 0

    def start(self) -> None:
        assert self.worker.start(20)
        assert self.scheduler.start(20)

    def wait_back(self) -> None:
        wait_known(self.address, self.worker, self.scheduler)

    def _is(self, prompt: int) -> None:
        self.image.kv = replace(KV, seed=prompt)

    def store(self, prompt: int) -> list[str]:
        self._is(prompt)
        self.image.write(SOURCE)
        return outcomes(self.worker.store(tokens_of(prompt, TOKENS), [SOURCE]).result(30))

    def load(self, prompt: int, *, wait_s: float = 10) -> int:
        """Chunks of the prompt that came back; whatever else is in the blocks is as it was."""
        self._is(prompt)
        self.lookups += 1
        name = f"{prompt}-{self.lookups}"
        found = self.scheduler.lookup(name, tokens_of(prompt, TOKENS), timeout_s=wait_s)
        self.image.memory[:] = 0xA5
        count = found.hit_tokens // CHUNK
        if count:
            span = TokenRange(0, found.hit_tokens)
            blocks = TARGET[: found.hit_tokens // 4]
            results = self.worker.retrieve(found.job_id, span, [blocks]).result(30)
            count = len(loaded_chunks(results))
            assert loaded_chunks(results) == list(range(count))
        blocks = TARGET[: count * CHUNK // 4]
        assert not count or self.image.wrong_tokens(blocks) == []
        assert self.image.untouched(blocks)
        self.scheduler.discard(name)
        return count


@contextlib.contextmanager
def engine(address: str) -> Iterator[DiskEngine]:
    plain = Image(KV, LAYERS_OUTERMOST, 4, 256)
    with shared_memory(plain.size_bytes) as (name, buffer):
        image = Image(KV, LAYERS_OUTERMOST, 4, 256, buffer=buffer)
        request = api.RegisterRequest(ENGINE_ID, IDENTITY, 0, 0, 1, 1, image.layout(name))
        worker, scheduler = WorkerClient(address, request), SchedulerClient(address, ENGINE_ID, IDENTITY)
        one = DiskEngine(worker, scheduler, image, address)
        try:
            one.start()
            yield one
        finally:
            scheduler.close()
            worker.close(timeout_s=2)
