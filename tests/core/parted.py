# SPDX-License-Identifier: Apache-2.0
"""An engine at a desk whose layers do not all need every chunk, and what it may expect, from first principles."""

from __future__ import annotations

from collections.abc import Sequence

from kvgrpc.core import types as t
from kvgrpc.core.fillings import Filling
from kvgrpc.core.fillings import begin as begin_filling
from kvgrpc.core.index import Chunk
from kvgrpc.core.keys import object_name, part_keys
from kvgrpc.core.readings import Reading
from kvgrpc.core.readings import begin as begin_reading
from tests.core.desk import BLOCK, CHUNK, Desk, EngineDesk, block_ids

NUM_BLOCKS = 4096
NULL = t.NULL_BLOCK
Ids = list[list[int]]


def first_token(need: t.Need, tokens: int) -> int:
    """Where a hit of so many tokens begins to need these layers: at what its last token looks back to."""
    if not need.window or not tokens:
        return 0
    if need.aligned:
        return max(at for at in range(0, tokens, need.window))
    return max(0, tokens - need.window)


def needed_chunks(need: t.Need, chunks: int) -> range:
    return range(first_token(need, chunks * CHUNK) // CHUNK, chunks)


def stored_form(need: t.Need) -> str:
    """Of a group whose layers need this."""
    kind = "chunked-local" if need.aligned else "sliding-window"
    if need == t.Need(BLOCK):
        return f"recurrent:opaque:x:y:{BLOCK}"
    return f"{kind}:{need.window}:opaque:x:y:{BLOCK}" if need.window else f"opaque:x:y:{BLOCK}"


class PartedDesk:
    """One engine of one worker a KV rank, with a group for each need; block ``i`` of a prompt is block ``i`` of every
    group's list."""

    def __init__(
        self,
        needs: Sequence[t.Need],
        chunks: int = 256,
        ranks: int = 1,
        limits: t.CoreLimits | None = None,
        tiers: tuple[str, ...] = (),
        register: bool = True,
    ) -> None:
        self.needs = tuple(needs)
        self.desk = Desk(chunks, tiers, limits=limits or t.CoreLimits(pin_share=1.0, hold_share=1.0))
        form = "+".join(map(stored_form, needs))
        shape = {"tp_size": ranks, "kv_tp_size": ranks, "stored_form": form}
        self.engine: EngineDesk = self.desk.engine("e", register=False, **shape)
        self.ranks = ranks
        if register:
            self.share()
        self.parts = sorted(dict.fromkeys(self.needs), key=lambda need: need != t.ALL)

    def share(self) -> None:
        geometry = t.Geometry(tuple(t.GroupGeometry(BLOCK, NUM_BLOCKS, 64, need) for need in self.needs))
        for rank in range(self.ranks):
            self.engine.share(rank, geometry=geometry)

    # ---- calls ------------------------------------------------------------------------------------------------------

    def ids(self, chunks: int, base: int = 0) -> Ids:
        blocks = CHUNK // BLOCK * chunks
        return [[base + group * 256 + at for at in range(blocks)] for group in range(len(self.needs))]

    def store(
        self, prompt: str = "a", chunks: int = 8, ids: Ids | None = None, rank: int = 0, start: int = 0, **how: object
    ) -> tuple[t.ChunkResult, ...]:
        e = self.engine
        ids = self.ids(chunks) if ids is None else ids
        policy = t.Policy(**how)  # type: ignore[arg-type]
        blocks = tuple(one[start * CHUNK // BLOCK :] for one in ids)
        command = t.StoreCommand(
            e.engine_id,
            self.desk.number(),
            e.space,
            e.content(prompt, chunks),
            t.TokenRange(start * CHUNK, chunks * CHUNK),
            blocks,
            policy,
        )
        results = self.desk.book.store(self.desk.now, e.worker(rank), command)
        self.desk.step()
        return results if results is not None else self.desk.ended[e.worker(rank), command.call_id]

    def retrieve(
        self, job: t.LookupAnswer, end: int, ids: Ids | None = None, rank: int = 0, start: int = 0
    ) -> tuple[t.ChunkResult, ...]:
        """Chunks [start, end) of a job."""
        e = self.engine
        blocks = tuple(one[start * CHUNK // BLOCK :] for one in (self.ids(end) if ids is None else ids))
        span = t.TokenRange(start * CHUNK, end * CHUNK)
        command = t.RetrieveCommand(e.engine_id, self.desk.number(), job.job_id, span, blocks)
        self.desk.history.clear()
        results = self.desk.book.retrieve(self.desk.now, e.worker(rank), command)
        self.desk.step()
        return results if results is not None else self.desk.ended[e.worker(rank), command.call_id]

    def written(self) -> set[tuple[int, int]]:
        """(group, block) that the slices since the last ``retrieve`` touched."""
        found: set[tuple[int, int]] = set()
        for order in self.desk.history:
            groups = [at for at, need in enumerate(self.needs) if need == self.parts[order.part]]
            for piece in order.pieces:
                for group, blocks in zip(groups, block_ids(piece), strict=True):
                    found |= {(group, block) for block in blocks}
        return found

    # ---- streams ----------------------------------------------------------------------------------------------------

    @property
    def forms(self) -> list[t.ObjectForm]:
        """Of the objects of a chunk, in their order."""
        bits = [sum(1 << at for at, one in enumerate(self.needs) if one == need) for need in self.parts]
        counts = [self.needs.count(need) for need in self.parts]
        return [
            t.ObjectForm(bit if self.parts != [t.ALL] else 0, need.tail(BLOCK, CHUNK) * 64 * count, "")
            for need, bit, count in zip(self.parts, bits, counts, strict=True)
        ]

    def fill(self, prompt: str, chunks: int, rank: int = 0, start: int = 0) -> Filling:
        """A stream of chunks [start, chunks)."""
        e, span = self.engine, t.TokenRange(start * CHUNK, chunks * CHUNK)
        command = t.StoreCommand(e.engine_id, 0, e.space, e.content(prompt, chunks), span, ())
        filling = begin_filling(self.desk.book, e.scheduler, command, self.forms, rank)
        self.desk.step()
        return filling

    def put(self, filling: Filling, at: int, part: int) -> bool:
        """One object comes; whether somebody wanted it."""
        form = self.forms[part]
        assert filling.take(at, form.groups) == form.object_bytes
        slot = filling.open_next()
        self.desk.step()
        if slot is not None:
            assert slot.size_bytes == form.object_bytes
            filling.done(self.desk.now)
            self.desk.step()
        return slot is not None

    def close(self, filling: Filling) -> tuple[t.ChunkResult, ...]:
        filling.close(self.desk.now)
        self.desk.step()
        return filling.results

    def reading(self, job: t.LookupAnswer, end: int, rank: int = 0, start: int = 0) -> Reading:
        """Of chunks [start, end) of a job."""
        e, span = self.engine, t.TokenRange(start * CHUNK, end * CHUNK)
        asked = (e.scheduler, e.engine_id, job.job_id, e.reader(rank), span)
        return begin_reading(self.desk.book, *asked, by_groups=True)

    def read_one(self, reading: Reading) -> tuple[int, int] | None:
        """The next object: (chunk, part); None at the end."""
        if (slot := reading.open_next()) is None:
            reading.close()
            return None
        self.desk.step()
        forms = [(form.groups, form.object_bytes) for form in self.forms]
        part = forms.index((reading.groups, slot.size_bytes))
        reading.done(self.desk.now)
        self.desk.step()
        return reading.at, part

    # ---- below ------------------------------------------------------------------------------------------------------

    @property
    def below(self) -> set[str]:
        """Names of what was written to the tier."""
        return {write.object.name for write in self.desk.written}

    def name(self, group: int, at: int, prompt: str = "a", rank: int = 0) -> str:
        """Of an object below, under today's version of the space."""
        space = self.desk.book.index.space(self.engine.space)
        (key,) = part_keys([self.engine.content(prompt, at + 1).keys[at]], self.parts.index(self.needs[group]))
        return object_name(space.digest, space.version, key, rank, "")

    def answer(self, below: set[str]) -> None:
        """Answers the probe under way."""
        (probe,) = self.desk.probes.values()
        self.desk.answer_probe(*("disk" if one.name in below else "" for one in probe.objects), "")

    # ---- faults -----------------------------------------------------------------------------------------------------

    def chunk(self, group: int, at: int, prompt: str = "a") -> Chunk | None:
        part = self.parts.index(self.needs[group])
        (key,) = part_keys([self.engine.content(prompt, at + 1).keys[at]], part)
        return self.desk.book.index.space(self.engine.space).table.chunks.get(key)

    def evict(self, group: int, at: int, prompt: str = "a") -> bool:
        """What room for others might do at any time; False when somebody uses it."""
        chunk = self.chunk(group, at, prompt)
        if chunk is None or chunk.in_use:
            return False
        self.desk.book.index.free_ready(chunk)
        self.desk.step()
        return True


def outcomes(results: Sequence[t.ChunkResult]) -> list[tuple[str, int]]:
    """(outcome, groups) of each chunk."""
    return [(result.outcome.value, result.groups) for result in results for _ in range(result.count)]
