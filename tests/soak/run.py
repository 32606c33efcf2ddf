# SPDX-License-Identifier: Apache-2.0
"""The soak: eight engines under random traffic, killed, stopped and robbed of their memory at random, for a time."""

from __future__ import annotations

import contextlib
import random
import secrets
import signal
import time
from collections import Counter
from dataclasses import dataclass

from kvgrpc import api
from kvgrpc.bench.results import commit
from kvgrpc.client import Client
from tests.hostile.stand import HARMLESS, complaints
from tests.served import Served, serving
from tests.soak.engine import Place
from tests.soak.process import CONTEXT, EngineProcess
from tests.soak.prompts import MODELS
from tests.soak.tally import Tally
from tests.soak.watch import Watch, engine_memory

ENGINES = 8
FLAGS = ("--chunk-tokens", "16", "--l1-size", "24MiB", "--page-size", "4KiB", "--slice-size", "256KiB")
"""L1 holds a fraction of what there is, so everything is evicted again and again."""
LOOK_S = 1.0
ACCIDENT_S = 4.0
"""Mean time between two accidents."""
FORGET_S = 15.0
STUCK_S = 60.0
END_S = 10.0
"""What the counts may take to become zero after the last engine has gone."""


@dataclass(frozen=True)
class Soaked:
    """What a soak has shown. ``left`` are counts that did not become zero."""

    seconds: float
    seed: int
    commit: str
    """Of the code that ran, as it was at the start."""
    tally: dict[str, int]
    accidents: dict[str, int]
    counters: dict[str, int]
    left: dict[str, int]
    watch: Watch
    complaints: list[str]
    unawaited: int
    """Answers that came when their clients had just given up, by gRPC's log."""
    status_s: list[float]
    """Seconds that each GetStatus took."""


class SoakError(AssertionError):
    """An engine saw what must not be, or the server is no longer well."""


class Soak:
    """One run. ``seed`` decides what engines ask for and when what happens to them, as far as processes allow."""

    def __init__(self, served: Served, operator: Client, seconds: float, seed: int) -> None:
        self._served, self._operator, self._seconds, self._seed = served, operator, seconds, seed
        self._commit = commit()
        self._chance = random.Random(seed)
        numbers = CONTEXT.RawArray("Q", Tally.size(ENGINES))
        self._tally = Tally(numbers)
        self._engines: list[EngineProcess] = []
        self._generations = [0] * ENGINES
        self._accidents = Counter[str]()
        self._stopped: dict[int, tuple[float, bool]] = {}
        """Rows that stand still: until when, and whether they are killed then."""
        self._steps = [(0, time.monotonic())] * ENGINES
        self._watch = Watch(served.process.pid)
        self._status_s: list[float] = []

    def run(self) -> Soaked:
        try:
            self._engines = [self._new(row) for row in range(ENGINES)]
            self._go_on()
            self._end()
            left = self._left()
        finally:
            for engine in self._engines:
                engine.kill()
        counters = self._operator.get_status().counters
        return Soaked(
            self._watch.times[-1],
            self._seed,
            self._commit,
            self._tally.total(),
            dict(self._accidents),
            counters,
            left,
            self._watch,
            complaints(self._served.log),
            self._served.log.count(HARMLESS),
            self._status_s,
        )

    def _new(self, row: int) -> EngineProcess:
        keeps_id = bool(self._generations[row]) and self._chance.random() < 0.5
        engine_id = self._engines[row].place.engine_id if keeps_id else f"soak-engine-{secrets.token_hex(8)}"
        self._generations[row] += 1
        place = Place(self._served.address, row, self._generations[row], self._seed, engine_id)
        self._steps[row] = (self._tally.of(row)["steps"], time.monotonic())
        return EngineProcess(place, self._tally.numbers, int(self._seconds) + 300)

    # ---- while it runs ----------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        began = time.monotonic()
        look = began
        accident, forget = began + self._next(ACCIDENT_S), began + self._next(FORGET_S)
        while (now := time.monotonic()) < began + self._seconds:
            if now >= look:
                self._look()
                look = now + LOOK_S
            if now >= accident:
                self._have_accident(now)
                accident = now + self._next(ACCIDENT_S)
            if now >= forget:
                self._forget()
                forget = now + self._next(FORGET_S)
            for row, (until, dies) in tuple(self._stopped.items()):
                if now >= until:
                    self._wake(row, dies)
            time.sleep(0.02)
        for row, (_, dies) in tuple(self._stopped.items()):
            self._wake(row, dies)

    def _next(self, mean_s: float) -> float:
        return self._chance.expovariate(1 / mean_s)

    def _look(self) -> None:
        if self._served.process.poll() is not None:
            raise SoakError(f"the server has ended: {self._served.log[-4000:]}")
        self._watch.look()
        began = time.monotonic()
        arena = self._operator.get_status().arena
        self._status_s.append(time.monotonic() - began)
        states = (arena.free_bytes, arena.writing_bytes, arena.ready_bytes, arena.pinned_bytes)
        if sum(states) + arena.doomed_bytes + arena.settling_bytes != arena.total_bytes:
            raise SoakError(f"bytes are lost: {arena}")
        for row, engine in enumerate(self._engines):
            self._look_at(row, engine)

    def _look_at(self, row: int, engine: EngineProcess) -> None:
        problem = engine.problem()
        if problem is not None:
            raise SoakError(problem)
        steps, since = self._tally.of(row)["steps"], time.monotonic()
        if steps != self._steps[row][0] or row in self._stopped:
            self._steps[row] = (steps, since)
        elif since - self._steps[row][1] > STUCK_S:
            raise SoakError(f"the engine has been stuck for {STUCK_S} s: {engine.place}")

    def _have_accident(self, now: float) -> None:
        row = self._chance.randrange(ENGINES)
        kind = self._chance.choices(("killed", "stopped", "stopped and killed", "robbed"), (6, 2, 1, 1))[0]
        time_s = self._chance.random() * 3
        if row in self._stopped:
            return
        self._accidents[f"engines {kind}"] += 1
        match kind:
            case "killed":
                self._replace(row)
            case "robbed":  # its copies fail while it stands still
                self._engines[row].signal(signal.SIGSTOP)
                self._engines[row].truncate()
                self._stopped[row] = (now + time_s / 3, True)
            case _:
                self._engines[row].signal(signal.SIGSTOP)
                self._stopped[row] = (now + time_s, kind == "stopped and killed")

    def _wake(self, row: int, dies: bool) -> None:
        del self._stopped[row]
        if dies:
            self._replace(row)
        else:
            self._engines[row].signal(signal.SIGCONT)
        self._steps[row] = (self._tally.of(row)["steps"], time.monotonic())

    def _replace(self, row: int) -> None:
        problem = self._engines[row].problem()
        if problem is not None:
            raise SoakError(problem)
        self._engines[row].kill()
        self._engines[row] = self._new(row)

    def _forget(self) -> None:
        model = self._chance.choice(MODELS).name
        kind = self._chance.choice(("cleared all", "cleared a model", "cleared a tenant", "began a generation"))
        self._accidents[f"operator {kind}"] += 1
        match kind:
            case "cleared all":
                self._operator.clear(api.ClearTarget(all=True))
            case "cleared a model":
                self._operator.clear(api.ClearTarget(model=model))
            case "cleared a tenant":
                self._operator.clear(api.ClearTarget(cache_salt="tenant"))
            case _:
                self._operator.bump_generation(model=model)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        for engine in self._engines:
            engine.end()
        for engine in self._engines:
            problem = engine.problem(STUCK_S)
            if problem != "":
                raise SoakError(problem or f"the engine does not end: {engine.place}")
            engine.kill()
        self._watch.look()

    def _left(self) -> dict[str, int]:
        """Counts that are not zero, once all that can end has ended and everything is forgotten."""
        self._operator.clear(api.ClearTarget(all=True))
        end = time.monotonic() + END_S
        while (left := self._counts()) and time.monotonic() < end:
            time.sleep(0.05)
        return left

    def _counts(self) -> dict[str, int]:
        status = self._operator.get_status()
        counts = {
            "clients": status.clients,
            "engines": status.engines,
            "jobs": status.jobs,
            "pins": status.pins,
            "calls": status.calls_in_flight,
            "slices": sum(executor.queued for executor in status.executors),
            "chunks": status.chunks,
            "bytes": status.arena.total_bytes - status.arena.free_bytes,
            "mappings": engine_memory(self._served.process.pid),
        }
        return {name: count for name, count in counts.items() if count}


def soak(seconds: float, seed: int) -> Soaked:
    """Runs it. SoakError, with the seed, when anything is wrong on the way."""
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(serving(*FLAGS))
        operator = stack.enter_context(Client(served.address, "operator"))
        try:
            return Soak(served, operator, seconds, seed).run()
        except SoakError as error:
            raise SoakError(f"seed {seed}: {error}") from None
