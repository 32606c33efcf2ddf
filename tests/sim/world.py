# SPDX-License-Identifier: Apache-2.0
"""A seeded world: engines that come, work and crash, operators that clear and pin, and an end with all given back."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import partial

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import ALL, MS, ChunkKeys, CoreLimits, Need, S, SpaceIdentity, SpaceRef, WritePolicy
from tests.sim.engine import Client, Engine, Kind
from tests.sim.hands import Hands
from tests.sim.loop import Loop, Process, PromiseError, Signal
from tests.sim.memory import CELL_BYTES, EngineMemory, Group, Shape, needed_from
from tests.sim.requests import Request
from tests.sim.tiers import Tiers
from tests.sim.truth import Prompt, Space

CHUNK_TOKENS = 4
WORK_NS = 500 * MS
SAME_NAME = 0.5
"""How often a restarted engine has the client ids of the dead one."""
KINDS = {
    1: (Kind(1, 1, 1), Kind(2, 1, 1), Kind(3, 1, 1)),  # alone, or MLA: every worker reads the one object
    2: (Kind(2, 2, 2), Kind(4, 2, 2), Kind(1, 1, 2)),  # plain, replicated heads, pipeline of two stages
}
"""By KV world size: engines of one row share data."""


@dataclass
class Model:
    """What engines of one model have in common."""

    identity: SpaceIdentity
    families: tuple[int, ...]
    paging: tuple[tuple[int, Need], ...]
    """Block size and need of each group; none given: engines have block sizes of their own and need everything."""
    prompts: list[Prompt]
    spaces: list[tuple[SpaceRef, Space]]


class World:
    """Everything of one seed."""

    def __init__(self, seed: int, verbose: bool = False, with_invariants: bool = True) -> None:
        self.rng = random.Random(seed)
        self.loop = Loop()
        self.models: list[Model] = []
        self.engines: list[Engine] = []
        self.number = 0
        rng = self.rng
        identities = [self._identity(rng.choice((1, 1, 2)), number) for number in range(rng.choice((1, 1, 2)))]
        families = [rng.choice(((1,), (2,), (1, 1))) for _ in identities]
        paging = [self._paging() if rng.random() < 0.4 else () for _ in identities]
        families = [(1,) * len(groups) if groups else one for one, groups in zip(families, paging, strict=True)]
        biggest = max(sum(f) for f in families) * CHUNK_TOKENS
        arena_cells = biggest * rng.randint(6, 24)
        names: tuple[str, ...] = rng.choice(((), ("disk",), ("disk", "remote")))
        tiers = Tiers(rng, names, rng.choice((0.3, 0.7)))
        self.hands = Hands(self.loop, rng, self._limits(biggest), arena_cells, tiers, verbose)
        self.hands.check_every *= with_invariants
        self.hands.book.set_write_policy("", rng.choice(list(WritePolicy)))
        for identity, family, groups in zip(identities, families, paging, strict=True):
            self._make_model(identity, family, groups)

    def run(self) -> int:
        """Lives the whole life; the number of events. Raises on the first wrong thing."""
        for _ in range(self.rng.randint(2, 3)):
            self.new_engine()
        self.loop.spawn(self._trouble())
        end = self.loop.now + WORK_NS
        self.loop.run(end, self.hands.move_bytes)
        self.hands.closing = True
        self.loop.run(end + 5 * S, self.hands.move_bytes)
        self.hands.check_every = min(self.hands.check_every, 1)
        self._check_quiet()
        self._leave()
        return self.loop.events

    # ---- making -----------------------------------------------------------------------------------------------------

    def _limits(self, object_cells: int) -> CoreLimits:
        rng = self.rng
        return CoreLimits(
            chunk_tokens=CHUNK_TOKENS,
            page_bytes=CELL_BYTES * rng.choice((2, 4, object_cells)),
            slice_bytes=CELL_BYTES * rng.choice((3, object_cells, 3 * object_cells, 100 * object_cells)),
            lease_ns=rng.choice((30, 120, 400)) * MS,
            record_ns=1500 * MS,
            read_record_ns=50 * MS,
            pin_share=rng.choice((0.5, 0.8, 1.0)),
            settling_share=rng.choice((0.05, 0.5, 1.0, 1.0)),
            prefetch_share=rng.choice((0.25, 1.0)),
            prefetch_wait_ns=60 * MS,
            write_share=rng.choice((0.125, 0.5)),
            write_ahead_share=rng.choice((0.25, 1.0)),
            writes_in_flight=rng.choice((1, 3, 8)),
            writes_queued=rng.choice((2, 64)),
            jobs_per_engine=rng.choice((4, 64)),
            victims_per_turn=rng.choice((1, 3, 1024)),
            call_record_ns=1500 * MS,
            reattach_grace_ns=40 * MS,
        )

    @staticmethod
    def _identity(kv_world_size: int, number: int) -> SpaceIdentity:
        return SpaceIdentity(f"model-{number}", "r1", "bfloat16", kv_world_size, "engine-hash", "opaque:SIM:flat:1")

    def _paging(self) -> tuple[tuple[int, Need], ...]:
        """Groups that do not all need everything."""
        rng = self.rng
        groups: list[tuple[int, Need]] = []
        for _ in range(rng.randint(1, 4)):
            block_size = rng.choice((1, 2, 4))
            kinds = (ALL, Need(rng.randint(1, 12)), Need(rng.choice((2, 4, 6, 8)), aligned=True), Need(block_size))
            groups.append((block_size, rng.choices(kinds, (3, 3, 1, 2))[0]))
        return tuple(groups)

    def _make_model(
        self, identity: SpaceIdentity, families: tuple[int, ...], paging: tuple[tuple[int, Need], ...]
    ) -> None:
        book, rng = self.hands.book, self.rng
        base = self.hands.ask(lambda now: book.space_base(now, identity))
        refs = [SpaceRef(base, lora, salt) for lora, salt in (("", ""), ("", "tenant"), ("adapter", ""))]
        number = len(self.models) * 3
        spaces = [
            (ref, Space(number + i, book.space_seed(ref)[0])) for i, ref in enumerate(refs[: rng.choice((1, 2, 3))])
        ]
        prompts = self._prompts(number)
        keys = sorted({key for prompt in prompts for key in prompt.keys})
        cells = [sum(families) * CHUNK_TOKENS]
        if paging:
            cells = list(map(len, Shape(CHUNK_TOKENS, self._groups(families, paging)).places()))
        for _, space in spaces:
            self.hands.tiers.know(space, keys, identity.kv_world_size, cells)
        self.models.append(Model(identity, families, paging, prompts, spaces))
        if not paging or any(need == ALL for _, need in paging):
            self.hands.watch.chains(prompt.keys for prompt in prompts)

    def _prompts(self, number: int) -> list[Prompt]:
        """Prompts that share prefixes: paths in a small tree."""
        rng = self.rng
        prompts: list[Prompt] = []
        for _ in range(8):
            path = [rng.randrange(2)]
            while len(path) < 7 and rng.random() < 0.85:
                path.append(0 if rng.random() < 0.6 else rng.randrange(3))
            keys = tuple(
                hashlib.sha256(repr((number, path[: depth + 1])).encode()).digest()[:16] for depth in range(len(path))
            )
            prompts.append(Prompt(keys, len(keys) * CHUNK_TOKENS + rng.choice((0, 0, 1, 2))))
        return prompts

    def new_engine(self) -> None:
        model = self.rng.choice(self.models)
        kind = self.rng.choice(KINDS[model.identity.kv_world_size])
        self._start(model, kind, self._memories(model, kind))

    def _start(self, model: Model, kind: Kind, memories: list[EngineMemory], name: str = "") -> None:
        self.number += 1
        engine = Engine(name or f"e{self.number}", kind, model.identity, memories, self.hands)
        self.engines.append(engine)
        engine.spawn(self._serve(engine, model))

    def _memories(self, model: Model, kind: Kind) -> list[EngineMemory]:
        """One a worker, all of one shape; other engines of the model may have other block sizes."""
        rng = self.rng
        block_sizes = [rng.choice((1, 2, 4)) for _ in model.families]
        paging = model.paging or tuple((size, ALL) for size in block_sizes)
        groups = self._groups(model.families, paging)
        return [EngineMemory(Shape(CHUNK_TOKENS, groups), rng.randbytes(8)) for _ in kind.ranks()]

    @staticmethod
    def _groups(families: tuple[int, ...], paging: tuple[tuple[int, Need], ...]) -> tuple[Group, ...]:
        return tuple(Group(f, size, 80 // size, need) for f, (size, need) in zip(families, paging, strict=True))

    # ---- life -------------------------------------------------------------------------------------------------------

    def _serve(self, engine: Engine, model: Model) -> Process:
        """The engine's own program: requests as they come, until the world closes."""
        yield from engine.start()
        number = 0
        while not self.hands.closing and not engine.drained:
            number += 1
            ref, space = self.rng.choice(model.spaces)
            request = Request(engine, f"r{number}", self.rng.choice(model.prompts), ref, space)
            engine.spawn(request.live())
            yield self.rng.choice((1, 5, 20, 60)) * MS

    def _trouble(self) -> Process:
        """Operators and accidents."""
        acts = (
            self._crash,
            self._break_stream,
            self._clear,
            self._bump,
            self._pin,
            self._reregister,
            self._drain,
            self._quota,
            self._warm,
        )
        weights = (3, 3, 4, 2, 3, 2, 0.3, 0.5, 3)
        while True:
            yield self.rng.choice((20, 60, 120)) * MS
            if self.hands.closing:
                return
            self.rng.choices(acts, weights)[0]()

    def _living(self) -> Engine | None:
        living = [e for e in self.engines if e.alive and e.ready.fired]
        return self.rng.choice(living) if living else None

    def _crash(self) -> None:
        engine = self._living()
        if engine is None:
            return
        model = next(m for m in self.models if m.identity == engine.identity)
        engine.crash()
        self.loop.spawn(self._restart(engine, model))

    def _restart(self, dead: Engine, model: Model) -> Process:
        """A new engine, often under the old names: with other memory at once, or with the dead one's as soon as the
        server has let go of it."""
        memories = self._memories(model, dead.kind)
        if self.rng.random() < 0.5:
            for worker in dead.workers:
                assert worker.memory is not None
                yield worker.memory.unmapped
            memories = [EngineMemory(m.shape, self.rng.randbytes(8)) for m in dead.memories()]
        yield self.rng.choice((0, 1, 20)) * MS
        if not self.hands.closing:
            self._start(model, dead.kind, memories, dead.name if self.rng.random() < SAME_NAME else "")

    def _break_stream(self) -> None:
        engine = self._living()
        if engine is None:
            return
        client = self.rng.choice(engine.clients)
        engine.break_stream(client)
        engine.spawn(self._come_back(engine, client), self.rng.choice((1, 10, 60)) * MS)

    def _come_back(self, engine: Engine, client: Client) -> Process:
        if not client.attached:
            yield from engine.attach(client)
        if client.memory is not None and not client.registered and client.attached:
            engine.register(client)

    def _clear(self) -> None:
        """Forgets a space, a model, a tenant or everything."""
        book, rng = self.hands.book, self.rng
        model = rng.choice(self.models)
        ref, space = rng.choice(model.spaces)
        everything = [s for m in self.models for _, s in m.spaces]
        of_salt = [s for m in self.models for r, s in m.spaces if r.cache_salt == ref.cache_salt]
        act, gone = rng.choice((
            (partial(book.clear, space=ref), [space]),
            (partial(book.clear, model=model.identity.model), [s for _, s in model.spaces]),
            (partial(book.clear, cache_salt=ref.cache_salt), of_salt),
            (partial(book.clear, everything=True), everything),
        ))  # fmt: skip
        for one in gone:
            one.version += 1
        self.hands.ask(act)

    def _bump(self) -> None:
        """New weights."""
        book, model = self.hands.book, self.rng.choice(self.models)
        for _, space in model.spaces:
            space.version += 1
        base = model.spaces[0][0].space_base
        if self.rng.random() < 0.5:
            self.hands.ask(lambda now: book.bump_generation(now, model=model.identity.model))
        else:
            self.hands.ask(lambda now: book.bump_generation(now, space_base=base))

    def _pin(self) -> None:
        """An operator keeps a prefix for a while."""
        model = self.rng.choice(self.models)
        ref, space = self.rng.choice(model.spaces)
        need = next((need for _, need in sorted(model.paging, key=lambda one: one[1] != ALL)), ALL)
        self.loop.spawn(self._hold(self.rng.choice(model.prompts), ref, space, need))

    def _hold(self, prompt: Prompt, ref: SpaceRef, space: Space, need: Need) -> Process:
        """``need`` is that of the first part of its chunks."""
        book, rng = self.hands.book, self.rng
        ttl_ns, pin_id = rng.choice((20, 200)) * MS, rng.randbytes(16)
        content = ChunkKeys(prompt.keys, prompt.num_tokens)
        try:
            held = self.hands.ask(lambda now: book.pin(now, ref, content, ttl_ns, pin_id))
        except Refusal as refusal:
            if refusal.reason not in (Reason.HOLD_LIMIT, Reason.PIN_LIMIT):
                raise
            return
        chunks = held.pinned_tokens // CHUNK_TOKENS
        if bool(chunks) != bool(held.pin_id):
            raise PromiseError(f"a pin of {held.pinned_tokens} tokens with id {held.pin_id!r}")
        if not chunks:
            return
        first = needed_from(need, held.pinned_tokens) // CHUNK_TOKENS
        hold = self.hands.watch.hold(space, prompt.keys[first:chunks], self.loop.now + ttl_ns)
        yield rng.randint(1, 250) * MS
        hold.over = True
        try:
            self.hands.ask(lambda now: book.unpin(now, held.pin_id))
        except Refusal as refusal:
            if refusal.reason is not Reason.PIN_UNKNOWN or self.loop.now < hold.until_ns:
                raise

    def _warm(self) -> None:
        """An operator has a prefix read ahead of its traffic."""
        model = self.rng.choice(self.models)
        ref, _ = self.rng.choice(model.spaces)
        self.loop.spawn(self._read_ahead(self.rng.choice(model.prompts), ref))

    def _read_ahead(self, prompt: Prompt, ref: SpaceRef) -> Process:
        lookups, rng = self.hands.book.lookups, self.rng
        job_id, wait_ns = rng.randbytes(16), rng.choice((5, 60)) * MS
        try:
            warmed = self.hands.ask(lambda now: lookups.warm(now, ref, prompt.keys, wait_ns, job_id))
        except Refusal as refusal:
            if refusal.reason not in (Reason.JOB_LIMIT, Reason.RECORD_LIMIT):
                raise
            return
        if warmed is None:
            yield self.hands.jobs.setdefault(job_id, Signal()) if rng.random() < 0.7 else rng.randint(0, 30) * MS
            warmed = self.hands.ask(lambda _: lookups.warmed(job_id))
        if warmed.resident_tokens > len(prompt.keys) * CHUNK_TOKENS:
            raise PromiseError(f"{len(prompt.keys)} chunks were warmed, but there are {warmed}")

    def _reregister(self) -> None:
        """A worker takes its memory back, or shares it anew."""
        engine = self._living()
        if engine is None or engine.drained:
            return
        worker = self.rng.choice(engine.workers)
        if not worker.attached or not worker.registered:
            return
        if self.rng.random() < 0.5:
            engine.unregister(worker)
        else:
            engine.share_anew(worker)

    def _drain(self) -> None:
        engine = self._living()
        if engine is not None and not engine.drained:
            engine.drain()

    def _quota(self) -> None:
        salt = self.rng.choice(("", "tenant"))
        limit = self.rng.choice((None, self.rng.randint(0, 60) * CELL_BYTES))
        self.hands.ask(lambda _: self.hands.book.set_quota(salt, limit))

    # ---- the end ----------------------------------------------------------------------------------------------------

    def _check_quiet(self) -> None:
        """Nothing is under way any more and all leases are over: no pin, no slot in between, every call answered."""
        hands = self.hands
        open_calls = [c.call_id for c in hands.calls.values() if c.results is None]
        if hands.under_way() or open_calls:
            raise PromiseError(f"{hands.under_way()} copies and the calls {open_calls} never end")
        counts, arena = hands.book.counts(), hands.book.arena_status()
        if counts.pins or counts.calls_in_flight or counts.jobs:
            raise PromiseError(f"all is over, but there are {counts}")
        if arena.free_bytes + arena.ready_bytes != arena.total_bytes or arena.held_bytes:
            raise PromiseError(f"all is over, but the arena has {arena}")

    def _leave(self) -> None:
        """All engines go, everything is cleared: sessions and mappings end, the arena is free."""
        hands = self.hands
        for engine in self.engines:
            if engine.alive:
                engine.crash()
        hands.ask(lambda now: hands.book.clear(now, everything=True))
        self.loop.run(self.loop.now + 5 * S, hands.move_bytes)
        arena, counts = hands.book.arena_status(), hands.book.counts()
        if arena.free_bytes != arena.total_bytes or counts.chunks or counts.clients:
            raise PromiseError(f"everybody has left, but there are {arena} and {counts}")
        if hands.mappings:
            raise PromiseError(f"mappings {sorted(hands.mappings)} are never unmapped")
        open_sessions = [name for name, ended in hands.sessions.items() if not ended.fired]
        if open_sessions:
            raise PromiseError(f"the sessions of {open_sessions} never end")
