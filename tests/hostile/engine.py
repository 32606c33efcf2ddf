# SPDX-License-Identifier: Apache-2.0
"""Engines that do what a test tells them, good things and hostile ones, with the shipped client.

Each lives in a process of its own: tests/hostile/process.py.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import secrets
import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvgrpc import api
from kvgrpc.breaker import BreakerSettings
from kvgrpc.client import SchedulerClient, SchedulerOptions, WorkerClient, WorkerOptions
from kvgrpc.client.channel import ChannelOptions
from kvgrpc.client.copies import CopyFuture
from kvgrpc.core.types import ChunkResult, SpaceIdentity, TokenRange
from kvgrpc.transfer.layout import stored_form
from tests.e2e.harness import BLOCK, CHUNK, tokens_of
from tests.hostile.lateness import Lateness
from tests.kvdata import FILL, LAYERS_OUTERMOST, MHA, Arrangement, Bytes, Image, Kv

PER_CHUNK = CHUNK // BLOCK
CANARY = 0x5C
"""What a block holds from the instant its engine was told that it may be used again."""

Outcomes = list[tuple[str, str]]
PENDING: Outcomes = [("PENDING", "")]


class TintedImage(Image):
    """An image whose data is made once: what a number means is one byte that is mixed into all others. For memory so
    large that making its bytes would take longer than what is tested.
    """

    def __init__(self, kv: Kv, arrangement: Arrangement, block_size: int, num_blocks: int, **more: Any) -> None:
        super().__init__(kv, arrangement, block_size, num_blocks, **more)
        self._made: dict[tuple[int, int], Bytes] = {}

    def _expected(self, count: int, first_token: int) -> Bytes:
        key, data = (count, first_token), self.kv.seed
        if key not in self._made:
            self.kv = replace(self.kv, seed=0)
            self._made[key] = np.ascontiguousarray(super()._expected(count, first_token))
            self.kv = replace(self.kv, seed=data)
        return self._made[key] ^ np.uint8(data)


@dataclass(frozen=True)
class Facts:
    """What an engine is. Engines of one model, kv and arrangement share what they store."""

    address: str
    name: str = field(default_factory=lambda: secrets.token_hex(4))
    model: str = "test-model"
    kv: Kv = MHA
    arrangement: Arrangement = LAYERS_OUTERMOST
    num_blocks: int = 256
    tinted: bool = False
    """The data of prompts is one byte of their numbers."""
    claim: int = 1
    """How many times its memory it says that it has."""
    mode: int = 0o600
    uid: int = 0
    """User that it becomes; 0: it stays the test's."""
    calls: int = 1024
    mounts_of: int = 0
    """Process whose /dev/shm it shares; 0: the test's."""

    @property
    def memory(self) -> str:
        return f"kvgrpc-test-{self.name}"

    @property
    def worker_id(self) -> str:
        return f"worker-{self.name}"

    @property
    def engine_id(self) -> str:
        return f"engine-of-the-hostile-tests-{self.name}"


class Engine:
    """A worker and a scheduler with their memory. Every method that is not private may be told from outside.

    A prompt is a number; so is the data that its chunks have. ``key`` names a copy of this engine.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        kv, arrangement, num_blocks = facts.kv, facts.arrangement, facts.num_blocks
        self._path = f"/dev/shm/{facts.memory}"
        self._size = kv.token_bytes * BLOCK * num_blocks
        make = TintedImage if facts.tinted else Image
        self._image = make(kv, arrangement, BLOCK, num_blocks, buffer=self._create())
        request = self._registration()
        channel = ChannelOptions(retries=False)
        self._worker = WorkerClient(
            facts.address, request, WorkerOptions(facts.calls, client_id=facts.worker_id, channel=channel)
        )
        self._scheduler = SchedulerClient(
            facts.address,
            facts.engine_id,
            request.identity,
            SchedulerOptions(client_id=f"scheduler-{facts.name}", breaker=BreakerSettings(failures=1_000_000)),
        )
        self._copies: dict[str, CopyFuture] = {}
        self._found: dict[str, str] = {}
        self._blocks: dict[str, list[int]] = {}
        self._freed: set[str] = set()
        self._requests = map("request-{}".format, itertools.count())

    def _create(self) -> mmap.mmap:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._facts.mode)
        try:
            os.ftruncate(fd, self._size)
            return mmap.mmap(fd, self._size)
        finally:
            os.close(fd)

    def _registration(self) -> api.RegisterRequest:
        facts = self._facts
        layout = self._image.layout(facts.memory)
        pieces = [piece for piece in layout.memory if isinstance(piece, api.SharedMemory)]
        said = tuple(replace(piece, size_bytes=piece.size_bytes * facts.claim) for piece in pieces)
        layout = replace(layout, memory=said)
        form = stored_form(layout.groups)
        identity = SpaceIdentity(facts.model, "", "bfloat16", 1, api.OWN_HASH_ALGORITHM, form)
        return api.RegisterRequest(facts.engine_id, identity, 0, 0, 1, 1, layout)

    # ---- life -------------------------------------------------------------------------------------------------------

    def start(self, wait_s: float = 10.0) -> bool:
        """Whether it is attached and registered."""
        return self._worker.start(wait_s) and self._scheduler.start(wait_s)

    def problem(self) -> tuple[str, str]:
        """(reason, sentence) of why it is not."""
        problem = self._worker.problem
        return (problem.reason.value, str(problem)) if problem is not None else ("", "")

    def attached(self) -> bool:
        return self._worker.attached and self._scheduler.attached

    def lost(self) -> bool:
        """Whether both have seen that their server has gone; from here on ``attached`` speaks of the next one."""
        return not self._worker.attached and not self._scheduler.attached

    def leave(self) -> bool:
        """Ends the sessions; whether all blocks are free."""
        self._scheduler.close()
        return self._worker.close(10)

    # ---- copies -----------------------------------------------------------------------------------------------------

    def write(self, data: int, blocks: list[int], first_token: int = 0) -> None:
        """Position-coded data into blocks; the same wherever ``data`` is the same."""
        self._image.kv = replace(self._facts.kv, seed=data)
        self._image.write(blocks, first_token)

    def store(
        self,
        key: str,
        prompt: int,
        chunks: int,
        blocks: list[int],
        data: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Begins to store a prompt whose data is its own number, or ``data``, which is written into the blocks."""
        self.write(prompt if data is None else data, blocks)
        self.store_as_it_is(key, prompt, chunks, blocks, timeout_s)

    def store_as_it_is(
        self, key: str, prompt: int, chunks: int, blocks: list[int], timeout_s: float | None = None
    ) -> None:
        """As ``store``, of whatever the blocks hold."""
        self._blocks[key] = blocks
        self._copies[key] = self._worker.store(tokens_of(prompt, chunks * CHUNK), [blocks], timeout_s=timeout_s)

    def lookup(self, prompt: int, chunks: int, timeout_s: float = 20.0) -> tuple[str, int, bytes, str]:
        """(request id, hit chunks, job, reason)."""
        name = next(self._requests)
        found = self._scheduler.lookup(name, tokens_of(prompt, chunks * CHUNK), timeout_s=timeout_s)
        return name, found.hit_tokens // CHUNK, found.job_id, found.reason

    def hits(self, prompt: int, chunks: int) -> int:
        """Chunks that a lookup finds; its pins are given back."""
        name, hit, _, reason = self.lookup(prompt, chunks)
        assert not reason, reason
        self._scheduler.discard(name)
        return hit

    def retrieve(self, key: str, prompt: int, chunks: int, blocks: list[int], timeout_s: float | None = None) -> None:
        """Begins to load a prompt that is all there, into blocks."""
        name, hit, job, reason = self.lookup(prompt, chunks)
        assert hit == chunks, (hit, reason)
        self._blocks[key] = blocks
        self._copies[key] = self._worker.retrieve(job, TokenRange(0, chunks * CHUNK), [blocks], timeout_s=timeout_s)
        self._found[key] = name

    def ended(self, key: str, timeout_s: float = 30.0) -> Outcomes | None:
        """(outcome, reason) of each chunk; None when it has not ended in the time."""
        try:
            results = self._copies[key].result(timeout_s)
        except FutureTimeoutError:
            return None
        if key in self._found:
            self._scheduler.discard(self._found.pop(key))
        return _by_chunk(results)

    def cancel(self, key: str) -> None:
        self._copies[key].cancel()

    def guard(self, key: str) -> None:
        """From the instant the copy's blocks are free, they hold canaries."""
        self._copies[key].add_done_callback(lambda _: self._free(key))

    def _free(self, key: str) -> None:
        self._image.blocks[self._blocks[key]] = CANARY
        self._freed.add(key)

    def pending(self) -> list[str]:
        """Guarded copies whose blocks are not free yet."""
        return [key for key in self._copies if key not in self._freed]

    def dead_canaries(self) -> list[str]:
        """Copies in whose blocks something was written after they were free."""
        return [key for key in tuple(self._freed) if (self._image.blocks[self._blocks[key]] != CANARY).any()]

    def storm(self, stored: int, first_new: int, calls: int, chunks: int, timeout_s: float) -> None:
        """Begins as many guarded Stores of new prompts and Retrieves of one that is all there as it is told, each in
        blocks of its own."""
        name, hit, job, _ = self.lookup(stored, chunks)
        assert hit == chunks
        for number in range(calls):
            blocks = list(range(number * chunks * PER_CHUNK, (number + 1) * chunks * PER_CHUNK))
            if number % 2:
                self.store(f"{number}", first_new + number, chunks, blocks, timeout_s=timeout_s)
            else:
                self._blocks[f"{number}"] = blocks
                tokens = TokenRange(0, chunks * CHUNK)
                self._copies[f"{number}"] = self._worker.retrieve(job, tokens, [blocks], timeout_s=timeout_s)
            self.guard(f"{number}")
        self._found["0"] = name

    def settled(self, timeout_s: float) -> dict[str, Outcomes]:
        """What became of the guarded copies, once all have ended and their canaries are there."""
        end = time.monotonic() + timeout_s
        while self._freed != set(self._copies) and time.monotonic() < end:
            time.sleep(0.001)
        return {key: _by_chunk(copy.result(0)) if copy.done() else PENDING for key, copy in self._copies.items()}

    def forget(self) -> None:
        """All copies, which have ended, and their canaries."""
        for key in tuple(self._copies):
            assert self.ended(key, 0) is not None
        self._copies.clear()
        self._freed.clear()

    def load(self, prompt: int, chunks: int, blocks: list[int], data: int | None = None) -> int:
        """Chunks that are found; they are loaded, right, and nothing else was written."""
        name, hit, job, reason = self.lookup(prompt, chunks)
        assert not reason, reason
        if hit:
            target = blocks[: hit * PER_CHUNK]
            self._image.memory[:] = FILL
            results = self._worker.retrieve(job, TokenRange(0, hit * CHUNK), [target]).result(20)
            assert _by_chunk(results) == [("LOADED", "")] * hit, results
            self._image.kv = replace(self._facts.kv, seed=prompt if data is None else data)
            assert self._image.wrong_tokens(target) == [], "wrong bytes"
            assert self._image.untouched(target), "bytes in other blocks"
        self._scheduler.discard(name)
        return hit

    # ---- looking ----------------------------------------------------------------------------------------------------

    def fill(self) -> None:
        self._image.memory[:] = FILL

    def wrong(self, data: int, blocks: list[int], first_token: int = 0) -> list[int]:
        """Tokens of which a byte in these blocks is not as ``write`` makes it."""
        self._image.kv = replace(self._facts.kv, seed=data)
        return self._image.wrong_tokens(blocks, first_token)

    def untouched(self, blocks: list[int]) -> bool:
        """Whether every byte outside these blocks is 0xA5."""
        return self._image.untouched(blocks)

    # ---- hostile ----------------------------------------------------------------------------------------------------

    def truncate(self, size_bytes: int) -> None:
        """Of its own memory, which it does not touch from here on."""
        os.truncate(self._path, size_bytes)

    def restore(self) -> None:
        """The same memory at its old size; what was cut off is zeros."""
        os.truncate(self._path, self._size)

    def punch(self) -> None:
        """The same memory without a page behind it, until somebody reads or writes one."""
        self.truncate(0)
        self.restore()

    def take_room(self) -> int:
        """Fills its file system; how many bytes there were."""
        with open("/dev/shm/kvgrpc-test-filler", "wb", buffering=0) as file:
            for size in (1 << 20, 4096):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass
            return file.tell()

    def give_room(self) -> None:
        os.unlink("/dev/shm/kvgrpc-test-filler")

    def truncate_when_loading(self, block: int, size_bytes: int) -> None:
        """As ``truncate``, the moment the server writes this block, which holds 0xA5 until then."""
        end, where = time.monotonic() + 10, self._image.blocks[block, 0, 0, 0, 0, :8]
        while (where == FILL).all():
            assert time.monotonic() < end, "nothing is loaded"
        os.truncate(self._path, size_bytes)

    def truncate_when_storing(self, prompt: int, chunks: int, size_bytes: int) -> None:
        """As ``truncate``, the moment a first chunk of the prompt is found."""
        end = time.monotonic() + 10
        while not self.hits(prompt, chunks):
            assert time.monotonic() < end, "nothing is stored"
        os.truncate(self._path, size_bytes)

    def replace(self) -> None:
        """Another object under the same name. The image is still the old one."""
        os.unlink(self._path)
        self._second = self._create()
        self._second[:] = bytes([FILL]) * self._size

    def second_untouched(self) -> bool:
        """Whether the object made by ``replace`` is as it was made."""
        return self._second[:] == bytes([FILL]) * self._size

    def chmod(self, mode: int) -> None:
        os.chmod(self._path, mode)

    # ---- beside -----------------------------------------------------------------------------------------------------

    def traffic(self, connection: Connection, first_prompt: int, least: int = 0) -> tuple[int, float]:
        """Stores, finds and loads prompts until it is told something and has done so ``least`` times; (rounds, seconds
        of the longest, without those that the machine was busy with other things)."""
        chunks, longest = 4, 0.0
        blocks = list(range(1, 2 * chunks * PER_CHUNK, 2))
        target = list(range(self._facts.num_blocks - 1, self._facts.num_blocks - 1 - 2 * chunks * PER_CHUNK, -2))
        with contextlib.closing(Lateness()) as lateness:
            for rounds in itertools.count():
                if rounds >= least and connection.poll():
                    return rounds, longest
                began, prompt = time.monotonic() - lateness.late_s, first_prompt + rounds
                self.store("traffic", prompt, chunks, blocks)
                assert self.ended("traffic", 60) == [("STORED", "")] * chunks
                assert self.load(prompt, chunks, target) == chunks
                longest = max(longest, time.monotonic() - lateness.late_s - began)
        raise AssertionError


def _by_chunk(results: tuple[ChunkResult, ...]) -> Outcomes:
    return [(result.outcome.value, result.reason) for result in results for _ in range(result.count)]
