# SPDX-License-Identifier: Apache-2.0
"""Lookup, query, free and the end of requests, against the oracle."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import ChunkKeys, FreeCommand, LookupCommand, Reader, TokenRange
from tests.model.bench import told
from tests.model.cluster import CHUNK_TOKENS, EngineModel, keys_of
from tests.model.oracle import Job
from tests.model.rules import Rules, paths, pick, salts


class LookupRules(Rules):
    """What schedulers do."""

    @rule(number=pick, path=paths, salt=salts, subset=st.sampled_from([(), (0,), (1,)]), request=st.integers(0, 3))
    def look_up(self, number: int, path: list[int], salt: str, subset: tuple[int, ...], request: int) -> None:
        self.look_up_by(self.engine(number), path, salt, subset, request)

    @precondition(lambda self: bool(self.bench.known))
    @rule(number=pick, which=pick, request=st.integers(0, 3))
    def look_up_known(self, number: int, which: int, request: int) -> None:
        """Something that an engine of the same model has stored, or tried to."""
        world, path, salt = self.bench.known[which % len(self.bench.known)]
        engines = [engine for engine in self.bench.engines if engine.kind.kv_world_size == world]
        self.look_up_by(engines[number % len(engines)], path, salt, (), request)

    def look_up_by(
        self, engine: EngineModel, path: list[int], salt: str, subset: tuple[int, ...], request: int
    ) -> None:
        bench = self.bench
        kind, world = engine.kind, engine.kind.kv_world_size
        ref, place = bench.places[(world, salt)]
        keys = keys_of(path)
        bench.keys.update(keys)
        ranks = tuple(r for r in subset if r < world) or tuple(range(world))
        wanted = () if len(ranks) == world and not subset else ranks
        job_id = bench.new_id()
        content = ChunkKeys(keys, len(keys) * CHUNK_TOKENS + 1)
        command = LookupCommand(
            engine.engine_id, f"r{request}", bench.ids, ref, content, kind.tp_size, job_id, kv_ranks=wanted
        )
        hits = place.prefix(keys, ranks)
        try:
            answer = bench.ask(lambda now: bench.book.lookup(now, engine.scheduler.client_id, command))
        except Refusal as refusal:
            self.refused_as_gone(refusal, engine, engine.scheduler)
            return
        status = answer.status
        until_ns, name = bench.now + bench.limits.lease_ns, f"r{request}"
        job = Job(engine.name, name, place, place.version, keys, ranks, engine.readers(ranks), until_ns, status)
        if not status.done:
            assert self.has_tiers
            assert hits[0] < len(keys)
            job.hit = hits[0]
            bench.pending[job_id] = job
            return
        hit = status.hit_tokens // CHUNK_TOKENS
        assert status.hit_tokens % CHUNK_TOKENS == 0
        assert hit in hits
        assert {t: n for t, n in status.hit_chunks_by_tier.items() if n} == ({"l1": hit} if hit else {})
        assert (answer.job_id, status.pinned) == ((job_id, True) if hit else (b"", False))
        if hit:
            self.commands[job_id] = command
            bench.oracle.grant(job_id, job, hit)

    @precondition(Rules.has_jobs)
    @rule(number=pick)
    def repeat_lookup(self, number: int) -> None:
        """A lost reply: the same lookup names the same job with the same answer."""
        bench = self.bench
        job_id, job, engine = self.job(number)
        if job_id not in self.commands or not job.pins or not engine.scheduler.attached:
            return
        answer = bench.ask(lambda now: bench.book.lookup(now, engine.scheduler.client_id, self.commands[job_id]))
        assert (answer.job_id, answer.status) == (job_id, job.status)

    @precondition(Rules.has_jobs)
    @rule(number=pick)
    def query(self, number: int) -> None:
        """The answer stays as it was for as long as there are pins; a foreign engine does not see the job."""
        bench = self.bench
        job_id, job, engine = self.job(number)
        if not engine.scheduler.attached or engine.drained:
            return
        try:
            status = bench.ask(lambda now: bench.book.query(now, engine.scheduler.client_id, engine.engine_id, job_id))
            assert status == job.status
        except Refusal as refusal:
            told(refusal, Reason.JOB_UNKNOWN)
            assert not job.pins
        for other in bench.engines:
            if other is not engine and other.scheduler.attached:
                name = other.scheduler.client_id
                bench.refused(
                    lambda now, n=name, e=other: bench.book.query(now, n, e.engine_id, job_id),
                    Reason.JOB_UNKNOWN, Reason.ENGINE_DRAINING,
                )  # fmt: skip

    @rule(number=pick)
    def query_pending(self, number: int) -> None:
        bench = self.bench
        for job_id, job in list(bench.pending.items())[:3]:
            engine = next(e for e in bench.engines if e.name == job.engine)
            try:
                status = bench.ask(
                    lambda now, e=engine, j=job_id: bench.book.query(now, e.scheduler.client_id, e.engine_id, j)
                )
            except Refusal as refusal:
                if refusal.reason is not Reason.JOB_UNKNOWN:
                    self.refused_as_gone(refusal, engine, engine.scheduler)
                continue
            if status.done:
                bench.finish_lookup(job_id, status)

    @precondition(Rules.has_jobs)
    @rule(number=pick, start=st.integers(0, 5), stop=st.integers(0, 6), who=st.none() | pick, wrong=st.booleans())
    def free(self, number: int, start: int, stop: int, who: int | None, wrong: bool) -> None:
        bench = self.bench
        job_id, job, engine = self.job(number)
        if not engine.scheduler.attached or engine.drained:
            return
        size, client = engine.kind.tp_size, engine.scheduler.client_id
        known = sorted(job.readers)
        named = () if who is None else (known[who % len(known)],)
        span = TokenRange(start * CHUNK_TOKENS, stop * CHUNK_TOKENS) if start < stop else None
        readers = tuple(Reader(k, t) for k, t in named)
        command = FreeCommand(engine.engine_id, job_id, size, span, readers)
        if wrong and job.pins:
            bad = FreeCommand(engine.engine_id, job_id, size + 1, span, readers)
            bench.refused(lambda now: bench.book.free(now, client, bad), Reason.TP_SIZE_MISMATCH)
        reading = bench.oracle.reading()
        had = bool(job.pins)
        expected = bench.oracle.free(job, range(start, stop) if span else range(len(job.keys)), set(named) or None)
        try:
            released = bench.ask(lambda now: bench.book.free(now, client, command))
        except Refusal as refusal:
            told(refusal, Reason.JOB_UNKNOWN)
            assert not had
            return
        assert expected - reading <= released <= expected
        if not expected or not job.pins:
            return
        assert bench.ask(lambda now: bench.book.free(now, client, command)) == 0

    @rule(number=pick, request=st.integers(0, 4))
    def end_request(self, number: int, request: int) -> None:
        bench, engine = self.bench, self.engine(number)
        client, name = engine.scheduler.client_id, f"r{request}"
        for job_id in [j for j, job in bench.pending.items() if job.engine == engine.name and job.request == name]:
            if engine.scheduler.attached:
                del bench.pending[job_id]
        pins = sum(len(j.pins) for j in bench.oracle.jobs.values() if (j.engine, j.request) == (engine.name, name))
        reading = bench.oracle.reading()
        try:
            ended = bench.ask(lambda now: bench.book.end_request(now, client, engine.engine_id, name))
        except Refusal as refusal:
            self.refused_as_gone(refusal, engine, engine.scheduler)
            return
        bench.oracle.end_jobs(engine.name, name)
        if not self.has_tiers:
            assert pins - reading <= ended.released_pins <= pins
