# SPDX-License-Identifier: Apache-2.0
"""What an answer must be worth to an engine whose layers do not all need every chunk."""

from __future__ import annotations

from kvgrpc.core.types import NULL_BLOCK, ChunkOutcome
from tests.sim.calls import STORE_REFUSALS, Call, check_loaded, flatten
from tests.sim.loop import PromiseError

FAILURES = (ChunkOutcome.FAILED, ChunkOutcome.TORN, ChunkOutcome.MISSING)


def check_parted(call: Call, now: int) -> None:
    if call.lease is None:
        _check_store(call)
    else:
        _check_retrieve(call, now)


def groups_by_chunk(call: Call) -> dict[int, int]:
    """Bits of the groups that the answer names."""
    results = call.results or ()
    return {chunk: r.groups for r in results for chunk in range(r.first_chunk, r.first_chunk + r.count)}


def given(call: Call, chunk: int, part: int) -> bool:
    """The engine has every block of the object."""
    return len(call.part(chunk, part)) == len(call.memory.places[part])


def _check_store(call: Call) -> None:
    """A group is named only where its bytes are there; STORED means all that the engine has."""
    shape, named = call.memory.shape, groups_by_chunk(call)
    broken = bool(call.broken) or call.stopped
    for chunk, (outcome, reason) in flatten(call).items():
        parts = [part for part in range(len(shape.needs)) if given(call, chunk, part)]
        for part in range(len(shape.needs)):
            bits = sum(1 << group for group in shape.groups_of(part))
            if not named[chunk] & bits:
                if part in parts and outcome in (ChunkOutcome.STORED, ChunkOutcome.RESIDENT):
                    raise PromiseError(f"chunk {chunk} of call {call.call_id} lacks part {part}, but is {outcome}")
                continue
            arrived = call.kv_rank in call.space.whole.get((call.version, call.keys[chunk], part), ())
            if named[chunk] & bits != bits or not arrived:
                raise PromiseError(f"groups {named[chunk]:b} of chunk {chunk} are answered stored, which never arrived")
        if outcome is ChunkOutcome.REFUSED and reason == "NULL_BLOCKS":
            if parts:
                raise PromiseError(f"chunk {chunk} is refused for null blocks, but parts {parts} have all of theirs")
        elif outcome is ChunkOutcome.REFUSED and reason not in STORE_REFUSALS:
            raise PromiseError(f"store refused for an unknown reason: {reason!r}")
        elif outcome in (ChunkOutcome.FAILED, ChunkOutcome.TORN) and not broken:
            raise PromiseError(f"chunk {chunk} of call {call.call_id} failed without a cause")
        elif outcome in (ChunkOutcome.LOADED, ChunkOutcome.MISSING):
            raise PromiseError(f"a store answered {outcome}")


def _check_retrieve(call: Call, now: int) -> None:
    """All of the hit is there, in every group that it needs; or nothing counts, and what is not TORN is untouched."""
    lease, shape = call.lease, call.memory.shape
    assert lease is not None
    reader, named = (call.kv_rank, call.tp_rank), groups_by_chunk(call)
    outcomes = flatten(call)
    hit = {chunk: outcome for chunk, (outcome, _) in outcomes.items() if chunk < lease.hit_chunks}
    if ChunkOutcome.LOADED in hit.values() and set(hit.values()) != {ChunkOutcome.LOADED}:
        raise PromiseError(f"call {call.call_id} has loaded a part of a hit that is good as a whole only: {outcomes}")
    missing = ChunkOutcome.MISSING in hit.values()
    touched: set[tuple[int, int]] = set()
    for chunk, (outcome, reason) in outcomes.items():
        parts = shape.parts_of_hit(chunk, lease.hit_chunks) if chunk < lease.hit_chunks else []
        written = [part for part in parts if named[chunk] >> shape.groups_of(part)[0] & 1]
        if outcome is ChunkOutcome.LOADED and (written != parts or chunk >= lease.hit_chunks):
            raise PromiseError(f"chunk {chunk} needs parts {parts}, but {written} were loaded")
        for part in written:
            cells = call.part(chunk, part)
            touched |= {(group, block) for _, group, block, _ in cells}
            if outcome is ChunkOutcome.LOADED:
                found = [call.memory.blocks[group][block][inner] for _, group, block, inner in cells]
                check_loaded(found, lease, call.keys[chunk], call.kv_rank, [cell[0] for cell in cells])
        if outcome is ChunkOutcome.MISSING and chunk < lease.hit_chunks:
            if lease.holds(now, chunk, reader) and not call.stopped:
                raise PromiseError(f"chunk {chunk} is missing for reader {reader}, though its lease pins all of it")
        elif outcome in FAILURES and chunk < lease.hit_chunks and not (call.broken or call.stopped or missing):
            raise PromiseError(f"chunk {chunk} of call {call.call_id} is {outcome} ({reason}) without a cause")
    for (group, block), before in call.before.items():
        if (group, block) not in touched and block != NULL_BLOCK and call.memory.blocks[group][block] != before:
            raise PromiseError(f"block {block} of group {group} was written, which call {call.call_id} did not answer")
