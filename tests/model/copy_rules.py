# SPDX-License-Identifier: Apache-2.0
"""Store, Retrieve, Fence and the copies that they order, against the oracle."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import ChunkKeys, RetrieveCommand, SliceReport, StoreCommand, TokenRange
from tests.model.cluster import CHUNK_TOKENS, NUM_BLOCKS, TOKEN_BYTES, EngineModel, Member, keys_of
from tests.model.oracle import Call, Job
from tests.model.rules import Rules, paths, pick, salts

cuts = st.sampled_from([(0, 0), (0, 0), (1, 0), (0, 1), (2, 3), (3, 0)])
"""Blocks to leave out at the start and at the end."""


class CopyRules(Rules):
    """What workers and movers do."""

    def worker(self, engine: EngineModel, number: int) -> Member:
        return engine.workers[number % len(engine.workers)]

    def make(self, engine: EngineModel, worker: Member, call: Call, command: StoreCommand | RetrieveCommand) -> None:
        """Asks for a copy; a repeat at once joins it or has the same answer."""
        bench = self.bench
        act = bench.book.store if isinstance(command, StoreCommand) else bench.book.retrieve
        call.stopped = not worker.attached
        bench.oracle.begin(call)
        try:
            results = bench.ask(lambda now: act(now, worker.client_id, command))  # pyright: ignore[reportArgumentType]
        except Refusal as refusal:
            del bench.oracle.calls[(call.client, call.call_id)]
            if refusal.reason is Reason.JOB_UNKNOWN:
                assert call.job is not None
                assert not call.job.pins
            elif refusal.reason is Reason.READER_UNKNOWN:
                assert call.job is not None
                assert call.reader not in call.job.readers
            else:
                self.refused_as_gone(refusal, engine, worker)
            return
        assert results in (None, call.results)
        again = bench.ask(lambda now: act(now, worker.client_id, command))  # pyright: ignore[reportArgumentType]
        assert again == call.results

    @rule(number=pick, path=paths, salt=salts, times=st.integers(0, 9))
    def store_all(self, number: int, path: list[int], salt: str, times: int) -> None:
        """Every worker stores the prompt; up to so many slices are copied right away."""
        engine = self.engine(number)
        for worker in engine.workers:
            self.store_by(engine, worker, path, salt, (0, 0))
            self.copy(worker, times)

    @rule(number=pick, who=pick, path=paths, salt=salts, cut=cuts)
    def store(self, number: int, who: int, path: list[int], salt: str, cut: tuple[int, int]) -> None:
        engine = self.engine(number)
        self.store_by(engine, self.worker(engine, who), path, salt, cut)

    def copy(self, worker: Member, times: int) -> None:
        """The worker's copies go well, so many slices of them."""
        for _ in range(times):
            order = next((s for s in self.bench.oracle.slices.values() if s.client_id == worker.client_id), None)
            if order is not None:
                self.bench.report(order.slice_id, SliceReport(len(order.pieces)))

    def store_by(self, engine: EngineModel, worker: Member, path: list[int], salt: str, cut: tuple[int, int]) -> None:
        bench = self.bench
        ref, place = bench.places[(engine.kind.kv_world_size, salt)]
        keys, size = keys_of(path), engine.block_size
        bench.keys.update(keys)
        bench.known.append((engine.kind.kv_world_size, path, salt))
        tokens = len(keys) * CHUNK_TOKENS
        start, end = cut[0] * size, tokens - cut[1] * size
        if end <= start:
            start, end = 0, tokens
        worker.calls += 1
        content = ChunkKeys(keys, tokens)
        command = StoreCommand(
            engine.engine_id, worker.calls, ref, content, TokenRange(start, end), (range((end - start) // size),)
        )
        chunks = {c: keys[c] for c in range(-(-start // CHUNK_TOKENS), end // CHUNK_TOKENS)}
        parts = dict.fromkeys(chunks, CHUNK_TOKENS * TOKEN_BYTES)
        reader = (worker.kv_rank, worker.tp_rank)
        call = Call(worker.client_id, worker.calls, place, place.version, chunks, worker.kv_rank, reader, None, parts)
        self.make(engine, worker, call, command)

    @precondition(Rules.has_jobs)
    @rule(number=pick, times=st.integers(0, 9))
    def retrieve_all(self, number: int, times: int) -> None:
        """Every reader loads the whole hit; up to so many slices are copied right away."""
        job_id, job, engine = self.job(number)
        for worker in engine.workers:
            self.retrieve_by(engine, worker, job_id, job, (0, 0), apart=True)
            self.copy(worker, times)

    @precondition(Rules.has_jobs)
    @rule(number=pick, who=pick, cut=cuts, apart=st.booleans(), times=st.integers(0, 3))
    def retrieve(self, number: int, who: int, cut: tuple[int, int], apart: bool, times: int) -> None:
        job_id, job, engine = self.job(number)
        worker = self.worker(engine, who)
        self.retrieve_by(engine, worker, job_id, job, cut, apart=apart)
        self.copy(worker, times)

    def retrieve_by(
        self, engine: EngineModel, worker: Member, job_id: bytes, job: Job, cut: tuple[int, int], *, apart: bool
    ) -> None:
        """``apart``: into blocks that no store names."""
        if worker.kv_rank not in job.ranks:
            return
        size, first = engine.block_size, NUM_BLOCKS // 2 if apart else 0
        tokens = len(job.keys) * CHUNK_TOKENS
        start, end = cut[0] * size, tokens - cut[1] * size
        if end <= start:
            start, end = 0, tokens
        worker.calls += 1
        span = TokenRange(start, end)
        command = RetrieveCommand(
            engine.engine_id, worker.calls, job_id, span, (range(first, first + (end - start) // size),)
        )
        chunks = {c: job.keys[c] for c in range(start // CHUNK_TOKENS, -(-end // CHUNK_TOKENS))}
        parts = {c: (min(end, (c + 1) * CHUNK_TOKENS) - max(start, c * CHUNK_TOKENS)) * TOKEN_BYTES for c in chunks}
        reader = (worker.kv_rank, worker.tp_rank)
        call = Call(worker.client_id, worker.calls, job.place, job.version, chunks, worker.kv_rank, reader, job, parts)
        self.make(engine, worker, call, command)

    @precondition(lambda self: bool(self.bench.oracle.slices))
    @rule(number=pick, fate=st.sampled_from(["ok", "ok", "ok", "fail", "torn"]), at=pick)
    def end_slice(self, number: int, fate: str, at: int) -> None:
        slices = self.bench.oracle.slices
        chosen = slices[list(slices)[number % len(slices)]]
        slice_id = next(s.slice_id for s in slices.values() if s.client_id == chosen.client_id)
        count = len(slices[slice_id].pieces)
        report = SliceReport(count) if fate == "ok" else SliceReport(at % count, "COPY_FAILED", torn=fate == "torn")
        self.bench.report(slice_id, report)

    @precondition(lambda self: bool(self.bench.oracle.slices))
    @rule(number=pick, most=st.sampled_from((2, 3)))
    def plan_ahead(self, number: int, most: int) -> None:
        slices = list(self.bench.oracle.slices.values())
        self.bench.ask(lambda now: self.bench.book.plan_ahead(now, slices[number % len(slices)].client_id, most))

    @precondition(lambda self: bool(self.bench.oracle.calls))
    @rule(number=pick, cancel=st.booleans(), ahead=st.booleans())
    def fence(self, number: int, cancel: bool, ahead: bool) -> None:
        """Ends calls: those that wait at once, a running one at its slice's report, those to come when they come."""
        bench = self.bench
        calls = bench.oracle.calls
        call = list(calls.values())[number % len(calls)]
        engine, member = bench.engine_of(call.client), bench.member(call.client)
        if not member.attached or engine.drained:
            return
        call.stopped = call.stopped or call.results is None
        if cancel:
            bench.ask(lambda now: bench.book.revoke(now, call.client, call.call_id))
        to_come = member.calls + 1
        member.calls += ahead
        ids = (call.call_id, to_come) if ahead else (call.call_id,)
        running = bench.ask(lambda now: bench.book.fence(now, call.client, engine.engine_id, ids))
        copying = {s.call_id for s in bench.oracle.slices.values() if s.client_id == call.client}
        assert set(running) == ({call.call_id} & copying)
        assert (call.results is None) == (call.call_id in running)
        if ahead and member.mapping_id:
            ref, _ = bench.places[(engine.kind.kv_world_size, "")]
            content = ChunkKeys(keys_of([0]), CHUNK_TOKENS)
            blocks = (range(CHUNK_TOKENS // engine.block_size),)
            late = StoreCommand(engine.engine_id, to_come, ref, content, TokenRange(0, CHUNK_TOKENS), blocks)
            bench.refused(lambda now: bench.book.store(now, call.client, late), Reason.CALL_REVOKED)
