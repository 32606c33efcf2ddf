# SPDX-License-Identifier: Apache-2.0
"""Store and Retrieve as workers make them: blocks are lent until the answer or the fence, then used otherwise."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import (
    ALL,
    MS,
    NULL_BLOCK,
    ChunkKeys,
    ChunkResult,
    LookupCommand,
    Policy,
    RetrieveCommand,
    SpaceRef,
    StoreCommand,
    TokenRange,
)
from tests.sim.calls import Call, leading_chunks
from tests.sim.engine import GONE, Client, Engine
from tests.sim.loop import Process, PromiseError
from tests.sim.memory import EngineMemory, Group, Shape, needed_from
from tests.sim.parted import groups_by_chunk
from tests.sim.truth import Lease, Prompt, Space

Ask = Callable[[int], "tuple[ChunkResult, ...] | None"]
Blocks = list[list[int]]


class Transfers:
    """The copies of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.hands = engine.hands
        self.rng: random.Random = engine.rng

    # ---- the calls --------------------------------------------------------------------------------------------------

    def retrieve(self, worker: Client, lease: Lease, span: TokenRange) -> Process:
        """Loads part of a hit into fresh blocks."""
        memory = worker.memory
        assert memory is not None
        blocks = self.take_blocks(memory, span, lease.hit_chunks)
        if blocks is None:
            return
        for group, ids in enumerate(blocks):
            for block in set(ids) - {NULL_BLOCK}:
                cells = memory.blocks[group][block]
                cells[:] = [("filled for", worker.next_call)] * len(cells)
        call, ask = self.retrieve_call(worker, lease, span, blocks)
        if self.start(worker, call, ask):
            yield from self.await_end(worker, call, ask)

    def store(self, worker: Client, prompt: Prompt, ref: SpaceRef, space: Space) -> Process:
        """Computes the prompt's KV data and stores it, mostly from its beginning."""
        assert worker.memory is not None
        align = worker.memory.shape.alignment
        length = prompt.num_tokens // align * align
        start = self.rng.randrange(0, length, align) if self.rng.random() < 0.2 else 0
        blocks = self.take_blocks(worker.memory, TokenRange(start, length))
        if blocks is None:
            return
        call, ask = self.store_call(worker, prompt, ref, space, TokenRange(start, length), blocks)
        if self.rng.random() < 0.1:
            yield self.rng.choice((2, 20)) * MS  # the prompt is hashed outside the core; a Clear may come first
        if self.start(worker, call, ask):
            yield from self.await_end(worker, call, ask)
            self.check_visible(call, ref)

    def store_then_retrieve(
        self, worker: Client, prompt: Prompt, ref: SpaceRef, lease: Lease, span: TokenRange
    ) -> Process:
        """Stores blocks and, without waiting, loads something else into them: copies keep the order of calls."""
        memory = worker.memory
        assert memory is not None
        length = prompt.num_tokens // memory.shape.alignment * memory.shape.alignment
        blocks = self.take_blocks(memory, TokenRange(0, length))
        if blocks is None:
            return
        call, ask = self.store_call(worker, prompt, ref, lease.space, TokenRange(0, length), blocks)
        needs = [(span.end - span.start) // g.block_size for g in memory.shape.groups]
        shared = [ids[:need] for ids, need in zip(blocks, needs, strict=True)]
        load, ask_load = self.retrieve_call(worker, lease, span, shared)
        fits = all(len(ids) == need for ids, need in zip(shared, needs, strict=True))
        if not self.start(worker, call, ask):
            return
        if fits and self.start(worker, load, ask_load):
            yield from self.await_end(worker, load, ask_load)
        yield from self.await_end(worker, call, ask)

    def retrieve_call(self, worker: Client, lease: Lease, span: TokenRange, blocks: Blocks) -> tuple[Call, Ask]:
        book, engine = self.hands.book, self.engine
        command = RetrieveCommand(
            engine.engine_id, self.next_call(worker), lease.job_id, span, tuple(map(tuple, blocks))
        )
        size = engine.shape.chunk_tokens
        keys = {chunk: lease.keys[chunk] for chunk in range(span.start // size, -(-span.end // size))}
        assert worker.memory is not None
        call = Call(
            worker.client_id,
            command,
            worker.memory,
            worker.kv_rank,
            worker.tp_rank,
            lease.space,
            lease.version,
            keys,
            lease,
        )
        return call, lambda now: book.retrieve(now, worker.client_id, command)

    def store_call(
        self, worker: Client, prompt: Prompt, ref: SpaceRef, space: Space, span: TokenRange, blocks: Blocks
    ) -> tuple[Call, Ask]:
        """The call, with the data of today's weights in its blocks."""
        book, engine, rng = self.hands.book, self.engine, self.rng
        policy = Policy(no_store=rng.random() < 0.02, retention_ns=30 * MS if rng.random() < 0.05 else 0)
        content = ChunkKeys(prompt.keys, prompt.num_tokens)
        command = StoreCommand(
            engine.engine_id, self.next_call(worker), ref, content, span, tuple(map(tuple, blocks)), policy
        )
        size = engine.shape.chunk_tokens
        chunks = range(-(-span.start // size), min(span.end // size, len(prompt.keys)))
        assert worker.memory is not None
        keys = {chunk: prompt.keys[chunk] for chunk in chunks}
        call = Call(
            worker.client_id, command, worker.memory, worker.kv_rank, worker.tp_rank, space, space.version, keys
        )
        for chunk, key in keys.items():
            for part in range(len(call.memory.shape.needs)):
                for index, group, block, inner in call.part(chunk, part):
                    call.memory.blocks[group][block][inner] = space.content(call.version, key, worker.kv_rank, index)

        def ask(now: int) -> tuple[ChunkResult, ...] | None:
            late = space.version != call.version
            return book.store(now, worker.client_id, replace(command, cleared=late))

        return call, ask

    # ---- from call to answer ----------------------------------------------------------------------------------------

    def start(self, worker: Client, call: Call, ask: Ask) -> bool:
        """Makes the call; False when it was refused."""
        hands = self.hands
        call.memory.own(call.call_id, call.command.blocks)
        if call.lease is not None:
            call.remember_blocks()
        call.stopped = not worker.attached
        hands.begin(call)
        worker.calls.append(call)
        try:
            results = hands.ask(ask)
        except Refusal as refusal:
            self.give_back(call)
            del hands.calls[(worker.client_id, call.call_id)]
            self.engine.check_call_refusal(refusal, worker, call)
            return False
        if results is not None and results != call.results:
            raise PromiseError(f"call {call.call_id} is answered {results} and {call.results}")
        return True

    def await_end(self, worker: Client, call: Call, ask: Ask) -> Process:
        """Waits for the answer, patiently or not, asking once or twice."""
        if call.results is None:
            if self.rng.random() < 0.25:
                self.engine.spawn(self.lose_patience(worker, call), self.rng.choice((0, 1, 5, 20, 100)) * MS)
            if self.rng.random() < 0.15:
                self.engine.spawn(self.repeat(worker, call, ask), self.rng.choice((0, 3, 30)) * MS)
            yield call.ended
        self.give_back(call)

    def repeat(self, worker: Client, call: Call, ask: Ask) -> Process:
        """The same call again joins the running one, or gets its recorded answer."""
        if call.call_id < worker.session_calls_from:
            return  # another session does not know it
        before = call.results
        try:
            results = self.hands.ask(ask)
        except Refusal as refusal:
            if refusal.reason is not Reason.CALL_REVOKED or not call.stopped:
                self.engine.check_call_refusal(refusal, worker, call)
            return
        if before is not None and results != before:
            raise PromiseError(f"a repeat of call {call.call_id} is answered {results}, not {before}")
        yield 0

    def lose_patience(self, worker: Client, call: Call) -> Process:
        """A deadline passed: the RPC is cancelled or not, the fence gives the blocks back."""
        hands, book = self.hands, self.hands.book
        if call.results is not None or not worker.attached:
            return
        call.stopped = True
        if self.rng.random() < 0.5:
            hands.ask(lambda now: book.revoke(now, worker.client_id, call.call_id))
            yield self.rng.choice((0, 2, 20)) * MS
        try:
            running = hands.ask(lambda now: book.fence(now, worker.client_id, self.engine.engine_id, (call.call_id,)))
        except Refusal as refusal:
            self.engine.check_refusal(refusal, worker, GONE | {Reason.CALL_LIMIT})
            return
        for call_id in running:
            if call_id != call.call_id:
                raise PromiseError("a fence waits for a call that it does not name")
            yield call.ended
        self.give_back(call)

    # ---- blocks -----------------------------------------------------------------------------------------------------

    def take_blocks(self, memory: EngineMemory, span: TokenRange, hit_chunks: int = 0) -> Blocks | None:
        """Free blocks for the range, in a random order; None when there are too few, or no range. The engine may lack
        those that its layers do not look at: mostly, for a hit, and now and then in what it stores."""
        needs = [(span.end - span.start) // g.block_size for g in memory.shape.groups]
        if span.end <= span.start or any(len(free) < need for free, need in zip(memory.free, needs, strict=True)):
            return None
        blocks: Blocks = []
        for free, need in zip(memory.free, needs, strict=True):
            self.rng.shuffle(free)
            blocks.append([free.pop() for _ in range(need)])
        for group, free, ids in zip(memory.shape.groups, memory.free, blocks, strict=True):
            for at in self._lacking(memory.shape, group, span, hit_chunks):
                free.append(ids[at])
                ids[at] = NULL_BLOCK
        return blocks

    def _lacking(self, shape: Shape, group: Group, span: TokenRange, hit_chunks: int) -> list[int]:
        """Places of blocks that the engine does not have."""
        count, rng = (span.end - span.start) // group.block_size, self.rng
        if group.need == ALL or rng.random() < 0.3:
            return []
        if group.tail(shape.chunk_tokens) == 1 and not hit_chunks:
            return [at for at in range(count) if rng.random() < 0.4]
        hit = hit_chunks * shape.chunk_tokens
        start = needed_from(group.need, hit) if hit else rng.choice((0, span.end // 2))
        return list(range(min(count, max(0, start - span.start) // group.block_size)))

    def next_call(self, worker: Client) -> int:
        worker.next_call += 1
        return worker.next_call

    def give_back(self, call: Call) -> None:
        """The engine has the blocks again; mostly it uses them for something else at once."""
        if not call.returned:
            call.returned = True
            scribble = ("reused after", call.call_id) if self.rng.random() < 0.8 else None
            call.memory.give_back(call.call_id, call.command.blocks, scribble)

    def check_visible(self, call: Call, ref: SpaceRef) -> None:
        """What a store says is there is found by the next lookup (one rank is all, and nothing came in between)."""
        engine, hands = self.engine, self.hands
        scheduler, chunks = engine.scheduler, leading_chunks(call)
        if (
            call.answered_at != hands.asks
            or hands.evicted_at == hands.asks
            or engine.kind.kv_world_size != 1
            or call.version != call.space.version
        ):
            return
        if not chunks or not scheduler.attached or engine.drained:
            return
        everything = (1 << len(engine.shape.groups)) - 1
        if engine.shape.parted and any(groups != everything for groups in groups_by_chunk(call).values()):
            return
        tokens = chunks * engine.shape.chunk_tokens
        content = ChunkKeys(tuple(call.keys[chunk] for chunk in range(chunks)), tokens)
        name = f"visible-{call.client_id}"
        command = LookupCommand(
            engine.engine_id, name, call.call_id, ref, content, engine.kind.tp_size, self.rng.randbytes(16)
        )
        book = hands.book
        try:
            answer = hands.ask(lambda now: book.lookup(now, scheduler.client_id, command))
        except Refusal as refusal:
            engine.check_refusal(refusal, scheduler, {Reason.JOB_LIMIT, Reason.RECORD_LIMIT} | GONE)
            return
        if not answer.status.done or answer.status.hit_tokens != tokens:
            raise PromiseError(f"{chunks} chunks are answered stored, but a lookup right after finds {answer.status}")
        hands.ask(lambda now: book.end_request(now, scheduler.client_id, engine.engine_id, name))
