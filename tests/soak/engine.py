# SPDX-License-Identifier: Apache-2.0
"""One engine of the soak: random traffic through the shipped client, every byte of its memory known at all times.

A block is free, and holds 0xA5; or it is the source of a Store, and holds the prompt's data; or it is the target of a
Retrieve, and holds 0xA5 or the prompt's data, as the answer will say. Free blocks are looked at all the time.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvgrpc import api
from kvgrpc.client import LookupResult, SchedulerClient, WorkerClient
from kvgrpc.client.copies import CopyFuture
from kvgrpc.core.types import ChunkOutcome, SpaceIdentity, TokenRange
from kvgrpc.transfer.layout import stored_form
from tests.e2e.harness import BLOCK, CHUNK
from tests.kvdata import FILL, Image
from tests.soak.prompts import MODELS, PER_CHUNK, Expected, Prompt, any_prompt
from tests.soak.tally import Tally

BLOCKS = 384
COPIES = 6
"""Most copies at a time."""
LOOK_EVERY = 10
"""Steps between two looks at all free blocks."""
THINK_S = 0.01
STORE_OUTCOMES = {"STORED", "RESIDENT", "BEING_WRITTEN", "REFUSED", "FAILED", "TORN"}


class WrongBytesError(AssertionError):
    """What must never be."""


@dataclass(frozen=True)
class Place:
    """Who an engine is: its row, the how-manieth of that row, and what its choices follow from."""

    address: str
    row: int
    generation: int
    seed: int
    engine_id: str
    memory: str = field(default_factory=lambda: f"kvgrpc-test-{secrets.token_hex(8)}")

    @property
    def model(self) -> int:
        return (0, 0, 0, 1, 1, 1, 2, 2)[self.row % 8]


@dataclass(eq=False)
class Doing:
    """A copy under way. ``first`` is the first block of the prompt that it moves."""

    future: CopyFuture
    prompt: Prompt
    blocks: list[int]
    first: int = 0
    request: str = ""
    cancel_at: float = float("inf")

    @property
    def is_store(self) -> bool:
        return not self.request


class Engine:
    """Runs until it is told to end, or is killed."""

    def __init__(self, place: Place, tally: Tally) -> None:
        self._place, self._tally = place, tally
        self._chance = random.Random(f"{place.seed}/{place.row}/{place.generation}")
        self._model = MODELS[place.model]
        self._expected = Expected(self._model)
        self._image = Image(self._model.kv, self._model.arrangement, BLOCK, BLOCKS, buffer=self._create())
        self._free = list(range(BLOCKS))
        self._doing: list[Doing] = []
        self._names = map(f"{place.row}-{place.generation}-{{}}".format, itertools.count())
        self._unended: list[str] = []
        self._worker, self._scheduler = self._join()

    def _create(self) -> mmap.mmap:
        size = self._model.kv.token_bytes * BLOCK * BLOCKS
        fd = os.open(f"/dev/shm/{self._place.memory}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size)
            return mmap.mmap(fd, size)
        finally:
            os.close(fd)

    def _join(self) -> tuple[WorkerClient, SchedulerClient]:
        place, layout = self._place, self._image.layout(self._place.memory)
        form = stored_form(layout.groups)
        identity = SpaceIdentity(self._model.name, "", "bfloat16", 1, api.OWN_HASH_ALGORITHM, form)
        worker = WorkerClient(place.address, api.RegisterRequest(place.engine_id, identity, 0, 0, 1, 1, layout))
        scheduler = SchedulerClient(place.address, place.engine_id, identity)
        assert worker.start(20) and scheduler.start(20), worker.problem or scheduler.problem
        self._count(sessions=1)
        return worker, scheduler

    def _count(self, **counts: int) -> None:
        self._tally.add(self._place.row, counts)

    # ---- life -------------------------------------------------------------------------------------------------------

    def run(self, ended: Callable[[], bool]) -> None:
        acts = (self._store, self._store, self._load, self._load, self._load, self._load, self._look_only)
        steps = 0
        while not ended():
            steps += 1
            if self._chance.random() < 0.002:
                self._rejoin()
            elif len(self._doing) < COPIES:
                self._chance.choice(acts)(any_prompt(self._chance))
            self._tend()
            if steps % LOOK_EVERY == 0:
                self._look_at_free_blocks()
            self._count(steps=1)
            time.sleep(self._chance.random() * THINK_S)
        self._settle()
        self._leave()

    def _settle(self) -> None:
        """Waits for all copies and looks at everything."""
        for doing in tuple(self._doing):
            doing.future.result(60)
        self._tend()
        assert len(self._free) == BLOCKS
        self._look_at_free_blocks()

    def _rejoin(self) -> None:
        self._settle()
        self._leave()
        self._worker, self._scheduler = self._join()

    def _leave(self) -> None:
        self._unended.clear()
        self._scheduler.close()
        assert self._worker.close(30), "blocks are not free"

    # ---- acts -------------------------------------------------------------------------------------------------------

    def _take(self, count: int) -> list[int]:
        """Free blocks in random order; none when there are too few."""
        if count > len(self._free):
            return []
        self._chance.shuffle(self._free)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def _patience(self) -> tuple[float | None, float]:
        """(deadline of a copy, when it is cancelled): mostly its own, never."""
        kind, time_s = self._chance.random(), self._chance.random() * 0.02
        if kind < 0.1:
            return 0.001 + time_s, float("inf")
        return None, time.monotonic() + time_s if kind < 0.2 else float("inf")

    def _store(self, prompt: Prompt) -> None:
        blocks = self._take(prompt.chunks * PER_CHUNK)
        if not blocks:
            return
        for chunk in range(prompt.chunks):
            self._image.blocks[blocks[chunk * PER_CHUNK : (chunk + 1) * PER_CHUNK]] = self._expected.of(prompt, chunk)
        timeout_s, cancel_at = self._patience()
        future = self._worker.store(prompt.tokens, [blocks], cache_salt=prompt.tenant, timeout_s=timeout_s)
        self._doing.append(Doing(future, prompt, blocks, cancel_at=cancel_at))
        self._count(stores=1)

    def _find(self, prompt: Prompt) -> tuple[str, LookupResult]:
        name = next(self._names)
        found = self._scheduler.lookup(name, prompt.tokens, cache_salt=prompt.tenant, timeout_s=5)
        assert found.hit_tokens % CHUNK == 0 and found.hit_tokens <= prompt.chunks * CHUNK
        self._count(lookups=1, asked_chunks=prompt.chunks, found_chunks=found.hit_tokens // CHUNK)
        return name, found

    def _load(self, prompt: Prompt) -> None:
        name, found = self._find(prompt)
        hit = found.hit_tokens // BLOCK
        first = self._chance.randrange(hit) if hit and self._chance.random() < 0.3 else 0
        blocks = self._take(hit - first)
        if not blocks:
            self._scheduler.discard(name)
            return
        timeout_s, cancel_at = self._patience()
        tokens = TokenRange(first * BLOCK, hit * BLOCK)
        future = self._worker.retrieve(found.job_id, tokens, [blocks], timeout_s=timeout_s)
        self._doing.append(Doing(future, prompt, blocks, first, name, cancel_at))
        self._count(retrieves=1)

    def _look_only(self, prompt: Prompt) -> None:
        """A lookup that nobody uses: given back, ended, or forgotten for a while."""
        name, found = self._find(prompt)
        match self._chance.randrange(3):
            case 0:
                tokens = TokenRange(0, self._chance.randint(0, found.hit_tokens // CHUNK) * CHUNK)
                self._scheduler.free(name, tokens)
                self._scheduler.discard(name)
            case 1:
                self._scheduler.discard(name)
            case _:
                self._unended.append(name)
                if len(self._unended) > 20:
                    self._scheduler.discard(self._unended.pop(0))

    # ---- looking ----------------------------------------------------------------------------------------------------

    def _tend(self) -> None:
        now = time.monotonic()
        for doing in tuple(self._doing):
            if doing.future.done():
                self._end(doing)
            elif doing.cancel_at < now:
                doing.future.cancel()
                doing.cancel_at = float("inf")
                self._count(cancelled_copies=1)

    def _end(self, doing: Doing) -> None:
        """Compares what the answer says with what the blocks hold, and gives them back."""
        outcomes, results = Counter[str](), doing.future.result()
        self._count(expired_copies=any(result.reason == "DEADLINE" for result in results))
        for result in results:
            outcomes[result.outcome.value] += result.count
            for chunk in range(result.first_chunk, result.first_chunk + result.count):
                self._check(doing, chunk, result.outcome)
        if doing.is_store:
            assert set(outcomes) <= STORE_OUTCOMES, outcomes
            self._count(stored_chunks=outcomes["STORED"])
        else:
            self._scheduler.discard(doing.request)
            self._count(loaded_chunks=outcomes["LOADED"], torn_chunks=outcomes["TORN"])
            self._count(failed_chunks=outcomes["FAILED"] + outcomes["MISSING"])
        self._image.blocks[doing.blocks] = FILL
        self._free += doing.blocks
        self._doing.remove(doing)

    def _check(self, doing: Doing, chunk: int, outcome: ChunkOutcome) -> None:
        if outcome is ChunkOutcome.TORN and not doing.is_store:
            return  # undefined
        begin = max(chunk * PER_CHUNK - doing.first, 0)
        blocks = doing.blocks[begin : (chunk + 1) * PER_CHUNK - doing.first]
        if doing.is_store or outcome is ChunkOutcome.LOADED:
            right = self._expected.of(doing.prompt, chunk)[PER_CHUNK - len(blocks) :]
        else:
            right = FILL
        found = self._image.blocks[blocks]
        if (found != right).any():
            self._count(wrong_places=1)
            kind = "source" if doing.is_store else "target"
            raise WrongBytesError(f"{kind} of {doing.prompt}, chunk {chunk} ({outcome.value}), in {self._place}")
        self._count(right_bytes=found.size)

    def _look_at_free_blocks(self) -> None:
        if (self._image.blocks[self._free] != FILL).any():
            self._count(wrong_places=1)
            wrong = [block for block in self._free if (self._image.blocks[block] != FILL).any()]
            raise WrongBytesError(f"free blocks {wrong} were written, in {self._place}")
        self._count(canary_looks=1)
