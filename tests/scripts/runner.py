# SPDX-License-Identifier: Apache-2.0
"""Runs scripts: text files whose lines are steps of one small world, each with what must come out of it.

A line is ``step -> what is expected``; a line without an arrow only acts; ``#`` begins a comment. The world has 16
chunks of room; copies wait until ``copies`` or ``copy`` reports them. Steps::

    desk OPTION=VALUE …             begins: options of CoreLimits (``lease_s`` is lease_ns in seconds), slice=CHUNKS,
                                    tiers=NAME,…
    engine NAME OPTION=VALUE …      attaches and registers an engine: tp_size, kv_tp_size, salt
    NAME[/WORKER] store PROMPT CHUNKS [as CALL] [blocks=FIRST]
    NAME lookup PROMPT CHUNKS [as JOB]             "miss", "pending", or "hit 3", "hit 3 unpinned", …
    NAME query JOB
    NAME[/WORKER] retrieve JOB [A..B] [as CALL] [blocks=FIRST]     A..B in chunks
    NAME free JOB [A..B] [reader=KV.TP]            pins released
    NAME[/WORKER] fence CALL …                     "free", or which calls still run
    NAME[/WORKER] ended CALL                       what became of a call
    NAME clear                                     "N removed, M pinned"
    NAME[/WORKER] dies | NAME[/WORKER] returns
    copy | copy fails | copies                     reports one slice, as done or as failed; or all
    probe TIER|none …                              answers the oldest probe
    read | read fails                              ends the oldest tier read
    after SECONDS                                  lets time pass
    slices                                         what is in flight: "e store 0-3, f retrieve 2"
    arena                                          chunks by state: "12 free, 4 ready"
"""

from __future__ import annotations

from pathlib import Path

from kvgrpc.core import types as t
from kvgrpc.core.errors import Refusal
from tests.core.desk import CHUNK, OBJECT, Desk, EngineDesk

ROOM = 16


class Script:
    """One script being run. ``run`` raises AssertionError that names the line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.desk = Desk(ROOM, auto=False)
        self.engines: dict[str, EngineDesk] = {}
        self.jobs: dict[str, t.LookupAnswer] = {}
        self.calls: dict[str, int] = {}

    def run(self) -> None:
        for number, line in enumerate(self.path.read_text().splitlines(), 1):
            step, _, expected = line.partition("#")[0].partition("->")
            if step.strip():
                came = self._step(step.split())
                if expected.strip():
                    assert came == expected.strip(), f"{self.path.name}:{number}: {came!r}, not {expected.strip()!r}"

    def _step(self, words: list[str]) -> str:
        options = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        name = plain[0].partition("/")[0]
        try:
            if name in self.engines:
                return self._engine_step(plain, options)
            return getattr(self, f"do_{plain[0]}")(plain[1:], options)
        except Refusal as refusal:
            self.desk.step()
            return f"refused {refusal.reason.value}"

    # ---- the world --------------------------------------------------------------------------------------------------

    def do_desk(self, _: list[str], options: dict[str, str]) -> str:
        tiers = tuple(name for name in options.pop("tiers", "").split(",") if name)
        limits: dict[str, float] = {"slice_bytes": int(options.pop("slice", "100")) * OBJECT}
        for option, value in options.items():
            if option.endswith("_s"):
                limits[f"{option[:-2]}_ns"] = int(float(value) * t.S)
            else:
                limits[option] = float(value) if option.endswith("_share") else int(value)
        self.desk = Desk(ROOM, tiers, t.CoreLimits(**limits), auto=False)  # type: ignore[arg-type]
        return ""

    def do_engine(self, words: list[str], options: dict[str, str]) -> str:
        shape = {key: int(value) if value.isdigit() else value for key, value in options.items()}
        self.engines[words[0]] = self.desk.engine(words[0], **shape)
        return ""

    def do_copy(self, words: list[str], _: dict[str, str]) -> str:
        if words == ["fails"]:
            self.desk.report(report=t.SliceReport(0, "MEMORY_GONE", torn=True))
        else:
            self.desk.report()
        return self.do_slices([], {})

    def do_copies(self, _: list[str], __: dict[str, str]) -> str:
        self.desk.run_copies()
        return ""

    def do_probe(self, words: list[str], _: dict[str, str]) -> str:
        self.desk.answer_probe(*("" if word == "none" else word for word in words))
        return f"{len(self.desk.reads)} reads"

    def do_read(self, words: list[str], _: dict[str, str]) -> str:
        self.desk.end_read(words != ["fails"])
        return f"{len(self.desk.reads)} reads"

    def do_after(self, words: list[str], _: dict[str, str]) -> str:
        self.desk.pass_time(int(float(words[0]) * t.S))
        return ""

    def do_slices(self, _: list[str], __: dict[str, str]) -> str:
        shown: list[str] = []
        for order in self.desk.slices.values():
            chunks = [piece.chunk for piece in order.pieces]
            span = f"{chunks[0]}-{chunks[-1]}" if len(chunks) > 1 else f"{chunks[0]}"
            shown.append(f"{order.client_id.removesuffix('/0')} {order.direction.value} {span}")
        return ", ".join(shown) or "none"

    def do_arena(self, _: list[str], __: dict[str, str]) -> str:
        return self.desk.states()

    # ---- engines ----------------------------------------------------------------------------------------------------

    def _engine_step(self, words: list[str], options: dict[str, str]) -> str:
        name, _, worker = words[0].partition("/")
        engine, number, verb, rest = self.engines[name], int(worker or 0), words[1], words[2:]
        name_it = rest[rest.index("as") + 1] if "as" in rest else ""
        rest = rest[: rest.index("as")] if name_it else rest
        blocks = int(options.get("blocks", "0"))
        match verb:
            case "store":
                came = engine.store(rest[0], int(rest[1]), worker=number, block=blocks, call_id=self.calls.get(name_it))
                self.calls[name_it] = engine.last_call.call_id
                return came
            case "retrieve":
                job, (start, end) = self.jobs[rest[0]], _chunks(rest[1:])
                last = None if end is None else end * CHUNK
                known = self.calls.get(name_it)
                came = engine.retrieve(job, worker=number, start=start * CHUNK, end=last, block=blocks, call_id=known)
                self.calls[name_it] = engine.last_call.call_id
                return came
            case "lookup":
                answer = engine.lookup(rest[0], int(rest[1]))
                self.jobs[name_it] = answer
                return _status(answer.status)
            case "query":
                return _status(engine.query(self.jobs[rest[0]]))
            case "free":
                start, end = _chunks(rest[1:])
                readers = [t.Reader(*map(int, options["reader"].split(".")))] if "reader" in options else []
                return str(
                    engine.free(self.jobs[rest[0]], start=None if end is None else start, end=end or 0, readers=readers)
                )
            case "fence":
                names = {self.calls.setdefault(call, self.desk.number()): call for call in rest}
                running = [names[call_id] for call_id in engine.fence(*names, worker=number)]
                return " ".join(running) or "free"
            case "ended":
                return engine.ended(self.calls[rest[0]], worker=number)
            case "clear":
                cleared = engine.clear()
                return f"{cleared.removed_chunks} removed, {cleared.still_pinned_chunks} pinned"
            case "dies":
                engine.die(engine.worker(number) if worker else engine.scheduler)
                return ""
            case "returns":
                client, role = (
                    (engine.worker(number), t.Role.WORKER) if worker else (engine.scheduler, t.Role.SCHEDULER)
                )
                return "resumed" if engine.attach(client, role) else "afresh"
            case _:
                raise AssertionError(f"no such step: {verb}")


def _chunks(words: list[str]) -> tuple[int, int | None]:
    if not words:
        return 0, None
    start, _, end = words[0].partition("..")
    return int(start), int(end)


def _status(status: t.PrefetchStatus) -> str:
    if not status.done:
        return "pending"
    if not status.hit_tokens:
        return f"miss {status.limited_by}".strip()
    pinned = "" if status.pinned else "unpinned"
    return " ".join(filter(None, ("hit", str(status.hit_tokens // CHUNK), pinned, status.limited_by)))
