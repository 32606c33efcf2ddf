# SPDX-License-Identifier: Apache-2.0
"""Sessions, memory, operators, tiers and the clock, against the oracle."""

from __future__ import annotations

from functools import partial

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import MS, ChunkKeys, S
from tests.model.bench import told
from tests.model.cluster import CHUNK_TOKENS, Member, keys_of
from tests.model.rules import Rules, paths, pick, salts


class WorldRules(Rules):
    """What happens around the calls."""

    # ---- sessions and memory ----------------------------------------------------------------------------------------

    def member(self, number: int, who: int) -> Member:
        engine = self.engine(number)
        return engine.members()[who % len(engine.members())]

    @rule(number=pick, who=pick, really=st.integers(0, 3))
    def break_stream(self, number: int, who: int, really: int) -> None:
        bench, member = self.bench, self.member(number, who)
        if member.attached and not really:
            member.attached, member.broken_ns, member.ended = False, bench.now, False
            bench.stop_calls(member.client_id)
            bench.ask(lambda now: bench.book.detach(now, member.client_id, member.session_id))

    @precondition(lambda self: any(not m.attached for e in self.bench.engines for m in e.members()))
    @rule(number=pick, fresh=st.booleans())
    def come_back(self, number: int, fresh: bool) -> None:
        """Within the grace the session goes on; afterwards it is a new one; another process has to wait."""
        bench = self.bench
        away = [(e, m) for e in bench.engines for m in e.members() if not m.attached]
        engine, member = away[number % len(away)]
        if engine.drained:
            return
        if fresh:
            member.session_id, member.taken_over = bench.new_id(), True
            bench.stop_calls(member.client_id)
        try:
            resumed = bench.attach(engine, member)
        except Refusal as refusal:
            told(refusal, Reason.CLIENT_EXISTS)
            assert any(s.client_id == member.client_id for s in bench.oracle.slices.values()), "its id is free"
            return
        assert resumed == (not member.taken_over and not member.ended)
        member.attached, member.ended, member.taken_over = True, False, False

    @rule(number=pick, who=pick)
    def share_or_unshare(self, number: int, who: int) -> None:
        """A worker takes its memory back, or shares other memory; the old mapping goes when no copy uses it."""
        bench, engine = self.bench, self.engine(number)
        worker = engine.workers[who % len(engine.workers)]
        if not worker.attached or engine.drained:
            return
        if not worker.mapping_id:
            bench.register(engine, worker)
            return
        bench.stop_calls(worker.client_id)
        old, worker.mapping_id = worker.mapping_id, 0
        answer = bench.ask(lambda now: bench.book.unregister(now, worker.client_id, engine.engine_id))
        assert answer == old
        copying = any(s.client_id == worker.client_id for s in bench.oracle.slices.values())
        assert (old in bench.ended_mappings) != copying

    @rule(number=pick, really=st.integers(0, 9))
    def drain_engine(self, number: int, really: int) -> None:
        bench, engine = self.bench, self.engine(number)
        if really or engine.drained or not engine.scheduler.attached:
            return
        engine.drained = True
        for member in engine.members():
            bench.stop_calls(member.client_id)
        bench.oracle.end_jobs(engine.name)
        for job_id in [j for j, job in bench.pending.items() if job.engine == engine.name]:
            del bench.pending[job_id]
        assert bench.ask(lambda now: bench.book.drain_engine(now, engine.engine_id)) == engine.engine_id

    # ---- operators --------------------------------------------------------------------------------------------------

    @rule(
        world=st.sampled_from([1, 2]),
        salt=salts,
        how=st.sampled_from(["space", "space", "model", "salt", "all", "bump", "bump base", "", "", "", ""]),
    )
    def forget(self, world: int, salt: str, how: str) -> None:
        """Clear and BumpGeneration: at once nothing of before is found."""
        bench = self.bench
        if not how:
            return
        book = bench.book
        ref, place = bench.places[(world, salt)]
        model = f"model-{world}"
        of_model = [p for (w, _), (_, p) in bench.places.items() if w == world]
        gone = {
            "space": [place],
            "salt": [p for (_, s), (_, p) in bench.places.items() if s == salt],
            "all": [p for _, p in bench.places.values()],
        }.get(how, of_model)
        chunks = sum(len({key for version, key, _ in p.stored | p.maybe if version == p.version}) for p in gone)
        for one in gone:
            one.version += 1
        act = {
            "space": partial(book.clear, space=ref),
            "model": partial(book.clear, model=model),
            "salt": partial(book.clear, cache_salt=salt),
            "all": partial(book.clear, everything=True),
            "bump": partial(book.bump_generation, model=model),
            "bump base": partial(book.bump_generation, space_base=ref.space_base),
        }[how]
        cleared = bench.ask(act)
        assert not how.startswith("bump") or cleared.generation > 0
        assert cleared.still_pinned_chunks <= cleared.removed_chunks <= chunks
        if how == "all":
            assert book.counts().chunks == 0

    @rule(world=st.sampled_from([1, 2]), salt=salts, path=paths)
    def pin(self, world: int, salt: str, path: list[int]) -> None:
        """An operator holds the resident prefix."""
        bench = self.bench
        ref, place = bench.places[(world, salt)]
        keys, pin_id = keys_of(path), bench.new_id()
        bench.keys.update(keys)
        hits = place.prefix(keys, tuple(range(world)))
        content = ChunkKeys(keys, len(keys) * CHUNK_TOKENS)
        held = bench.ask(lambda now: bench.book.pin(now, ref, content, 60 * S, pin_id))
        assert held.pinned_tokens // CHUNK_TOKENS in hits
        assert held.pin_id == (pin_id if held.pinned_tokens else b"")
        if held.pin_id:
            self.operator_pins[pin_id] = (held.pinned_tokens // CHUNK_TOKENS, bench.now + 60 * S, place, place.version)

    @precondition(lambda self: bool(self.operator_pins))
    @rule(number=pick)
    def unpin(self, number: int) -> None:
        bench = self.bench
        pin_id = list(self.operator_pins)[number % len(self.operator_pins)]
        chunks, until_ns, place, version = self.operator_pins.pop(pin_id)
        try:
            released = bench.ask(lambda now: bench.book.unpin(now, pin_id))
            assert released == chunks or (version != place.version and released <= chunks)
        except Refusal as refusal:
            told(refusal, Reason.PIN_UNKNOWN)
            assert bench.now >= until_ns
        bench.refused(lambda now: bench.book.unpin(now, pin_id), Reason.PIN_UNKNOWN)

    # ---- time and tiers ---------------------------------------------------------------------------------------------

    @rule(jump_ns=st.sampled_from([1, 1 * MS, 1 * MS, 500 * MS, 500 * MS, 3 * S, 3 * S, 61 * S, 700 * S]))
    def pass_time(self, jump_ns: int) -> None:
        """Leases, records, graces and pins end by the clock, in bounded turns."""
        bench = self.bench
        bench.now += jump_ns
        bench.oracle.pass_time(bench.now)
        for _ in range(1000):
            bench.ask(bench.book.tick)
            wake = bench.book.next_wake(bench.now)
            if wake is None or wake > bench.now:
                return
        raise AssertionError("tick is wanted again and again without an end")

    @precondition(lambda self: bool(self.bench.probes))
    @rule(number=pick, has=st.lists(st.booleans(), min_size=1, max_size=10))
    def end_probe(self, number: int, has: list[bool]) -> None:
        bench = self.bench
        probe_id = list(bench.probes)[number % len(bench.probes)]
        probe = bench.probes.pop(probe_id)
        found = ["disk" if has[i % len(has)] else "" for i in range(len(probe.objects))]
        bench.ask(lambda now: bench.book.probe_done(now, probe_id, found))

    @precondition(lambda self: bool(self.bench.reads))
    @rule(number=pick, ok=st.booleans())
    def end_read(self, number: int, ok: bool) -> None:
        self.bench.read_ended(list(self.bench.reads)[number % len(self.bench.reads)], ok)

    @precondition(lambda self: bool(self.bench.writes))
    @rule(number=pick, ok=st.booleans())
    def end_write(self, number: int, ok: bool) -> None:
        self.bench.write_ended(list(self.bench.writes)[number % len(self.bench.writes)], ok)
