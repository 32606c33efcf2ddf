# SPDX-License-Identifier: Apache-2.0
"""What an engine does for one request: look up, retrieve with all readers, store, give up in every way there is."""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import (
    MS,
    ChunkKeys,
    FreeCommand,
    LookupAnswer,
    LookupCommand,
    PrefetchStatus,
    Reader,
    SpaceRef,
    TokenRange,
)
from tests.sim.engine import GONE, Engine
from tests.sim.loop import Process, PromiseError, Signal
from tests.sim.transfers import Transfers
from tests.sim.truth import Lease, Prompt, Space

REFUSED_LOOKUPS = {Reason.JOB_LIMIT, Reason.RECORD_LIMIT, Reason.SPACE_LIMIT} | GONE


class Request:
    """One request of an engine, on one space."""

    def __init__(self, engine: Engine, name: str, prompt: Prompt, ref: SpaceRef, space: Space) -> None:
        self.engine = engine
        self.hands = engine.hands
        self.rng: random.Random = engine.rng
        self.name = name
        self.prompt = prompt
        self.ref = ref
        self.space = space
        self.content = ChunkKeys(prompt.keys, prompt.num_tokens)
        self.chunk_tokens = engine.shape.chunk_tokens
        self.copies = Transfers(engine)

    def live(self) -> Process:
        """From arrival to end."""
        lease = yield from self.look_up()
        if lease is not None and lease.hit_chunks > 0:
            yield from self.use(lease)
        if self.rng.random() < 0.15:
            self.end()  # aborted, or preempted, before its store
        if self.rng.random() < 0.85:
            stores = [self.copies.store(worker, self.prompt, self.ref, self.space) for worker in self.engine.writers()]
            for task in [self.engine.spawn(store, self.rng.randint(0, 5 * MS)) for store in stores]:
                yield task.done
        if self.rng.random() < 0.7:
            self.end()

    # ---- lookup -----------------------------------------------------------------------------------------------------

    def look_up(self) -> Generator[int | Signal, Any, Lease | None]:
        """Asks, waits for the final answer (or loses interest: None), asks again now and then."""
        command = LookupCommand(
            self.engine.engine_id, self.name, 0, self.ref, self.content, self.engine.kind.tp_size,
            self.rng.randbytes(16), prefetch_wait_ns=self.rng.choice((0, 5, 50, 300)) * MS,
        )  # fmt: skip
        book, client = self.hands.book, self.engine.scheduler
        now = self.hands.loop.now
        version = self.space.version
        try:
            answer = self.hands.ask(lambda at: book.lookup(at, client.client_id, command))
        except Refusal as refusal:
            self.engine.check_refusal(refusal, client, REFUSED_LOOKUPS)
            return None
        kind = self.engine.kind
        lease = Lease(
            self.engine.engine_id, self.name, answer.job_id, self.space, version, self.prompt.keys,
            tuple(range(kind.kv_world_size)), kind.readers, now + self.hands.limits.lease_ns, self.engine.shape,
        )  # fmt: skip
        lease.readers_known = any(worker.registered and worker.attached for worker in self.engine.workers)
        lease.over = not client.attached or not lease.readers_known
        if answer.job_id:
            self.engine.leases[answer.job_id] = lease
        if self.rng.random() < 0.2:
            self.repeat_lookup(command, answer)
        if answer.status.done:
            self.note(lease, answer.status)
            if not answer.job_id and lease.hit_chunks:
                raise PromiseError("a hit without a job")
            return lease
        if self.rng.random() < 0.1:
            return None
        yield from self.await_job(lease)
        return lease if lease.status is not None else None

    def repeat_lookup(self, command: LookupCommand, first: LookupAnswer) -> None:
        """The reply got lost: the same lookup again names the same job (when there is one)."""
        book, client = self.hands.book, self.engine.scheduler
        again = self.hands.ask(lambda now: book.lookup(now, client.client_id, command))
        if first.job_id and again.job_id != first.job_id:
            raise PromiseError("a repeated lookup made another job")

    def await_job(self, lease: Lease) -> Process:
        """By long poll or by asking again and again; a pending job becomes final in bounded time."""
        signal = self.hands.jobs.setdefault(lease.job_id, Signal())
        if self.rng.random() < 0.5:
            yield signal
        for _ in range(200):
            status = self.query(lease)
            if status is None:
                return
            if status.done:
                self.note(lease, status)
                return
            yield 10 * MS
        raise PromiseError("a lookup stays pending for ever")

    def query(self, lease: Lease) -> PrefetchStatus | None:
        book, client = self.hands.book, self.engine.scheduler
        try:
            return self.hands.ask(lambda now: book.query(now, client.client_id, self.engine.engine_id, lease.job_id))
        except Refusal as refusal:
            self.engine.check_job_refusal(refusal, lease, client)
            return None

    def note(self, lease: Lease, status: PrefetchStatus) -> None:
        lease.answered(status, self.chunk_tokens, self.engine.kind.kv_tp_size)

    # ---- use of a hit -----------------------------------------------------------------------------------------------

    def use(self, lease: Lease) -> Process:
        """Every reader loads the hit, some twice, some late, some never."""
        rng = self.rng
        if rng.random() < 0.05:
            return  # forgets it: the clock ends the lease
        if rng.random() < 0.1:
            self.free(lease)
            return
        end = lease.hit_chunks * self.chunk_tokens
        align = self.engine.shape.alignment
        start = rng.randrange(0, end, align) if rng.random() < 0.3 else 0
        if start:
            self.free(lease, TokenRange(0, start))
        stop = rng.randrange(start + align, end + 1, align) if rng.random() < 0.2 else end
        stop = -(-stop // self.chunk_tokens) * self.chunk_tokens if self.engine.shape.parted else stop
        tasks = []
        for worker in self.engine.workers:
            if rng.random() < 0.05:
                continue
            late = rng.choice((0, 0, 1, 10, 80, 200)) * MS
            span = TokenRange(start, stop)
            tasks.append(self.engine.spawn(self.copies.retrieve(worker, lease, span), late))
            if rng.random() < 0.1:
                tasks.append(
                    self.engine.spawn(self.copies.store_then_retrieve(worker, self.prompt, self.ref, lease, span))
                )
            if rng.random() < 0.25:
                tasks.append(
                    self.engine.spawn(self.copies.retrieve(worker, lease, span), late + rng.choice((0, 1, 30)) * MS)
                )
        if rng.random() < 0.05:
            yield rng.choice((1, 20)) * MS
            self.end()
        for task in tasks:
            yield task.done
        if rng.random() < 0.3:
            self.free(lease)
        self.query(lease)

    def free(self, lease: Lease, span: TokenRange | None = None) -> None:
        """Gives pins back, all or in a range, of all readers or some; once more changes nothing."""
        readers: tuple[Reader, ...] = ()
        if self.rng.random() < 0.2:
            worker = self.rng.choice(self.engine.workers)
            readers = (Reader(worker.kv_rank, worker.tp_rank),)
        kind = self.engine.kind
        command = FreeCommand(self.engine.engine_id, lease.job_id, kind.tp_size, span, readers)
        book, client = self.hands.book, self.engine.scheduler
        size = self.chunk_tokens
        first, last = (0, len(lease.keys)) if span is None else (-(-span.start // size), span.end // size)
        bound = lease.left_pins()
        try:
            released = self.hands.ask(lambda now: book.free(now, client.client_id, command))
            lease.freed(first, last, readers)
            again = self.hands.ask(lambda now: book.free(now, client.client_id, command))
        except Refusal as refusal:
            lease.freed(first, last, readers)
            self.engine.check_job_refusal(refusal, lease, client)
            return
        if again or released > bound:
            raise PromiseError(f"free released {released} pins of at most {bound}, then {again}")

    def end(self) -> None:
        for lease in self.engine.leases.values():
            lease.over = lease.over or lease.request_id == self.name
        book, client = self.hands.book, self.engine.scheduler
        try:
            self.hands.ask(lambda now: book.end_request(now, client.client_id, self.engine.engine_id, self.name))
        except Refusal as refusal:
            self.engine.check_refusal(refusal, client, GONE)
