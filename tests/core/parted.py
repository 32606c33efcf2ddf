# SPDX-License-Identifier: Apache-2.0
"""An engine at a desk whose layers do not all need every chunk, and what it may expect, from first principles."""

from __future__ import annotations

from collections.abc import Sequence

from kvgrpc.core import types as t
from kvgrpc.core.index import Chunk
from kvgrpc.core.keys import object_name, part_keys
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
        self.engine: EngineDesk = self.desk.engine("e", tp_size=ranks, kv_tp_size=ranks, register=False)
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
