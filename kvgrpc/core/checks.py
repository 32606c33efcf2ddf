# SPDX-License-Identifier: Apache-2.0
"""Checks of commands and registrations, before anything is recorded."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import astuple, fields

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.index import IdentityFacts
from kvgrpc.core.types import (
    NULL_BLOCK,
    ChunkKeys,
    CoreLimits,
    GroupGeometry,
    LookupCommand,
    Need,
    Part,
    Registration,
    SpaceIdentity,
    StoreCommand,
    TokenRange,
)

U32 = 1 << 32
READERS_MOST = 4096
"""Readers of one object of a lookup: a job keeps a bit for each of them and chunk."""


def check_range(tokens: TokenRange, size: int, limits: CoreLimits) -> None:
    """Ordered, aligned to ``size``, no longer than a call may be. Refuses: RANGE."""
    if not 0 <= tokens.start <= tokens.end < U32:
        raise Refusal(Reason.RANGE, f"range [{tokens.start}, {tokens.end}) is not ordered", field="range")
    if tokens.start % size or tokens.end % size:
        text = f"range [{tokens.start}, {tokens.end}) is not aligned to {size} tokens"
        raise Refusal(Reason.RANGE, text, field="range")
    most = limits.keys_per_call * limits.chunk_tokens
    if tokens.end - tokens.start > most:
        raise Refusal(Reason.RANGE, f"range has more than {most} tokens", field="range")


def check_blocks(
    blocks: tuple[Sequence[int], ...], tokens: TokenRange, registration: Registration, limits: CoreLimits
) -> None:
    """Enough ids for the range in every group, each inside the pool, or NULL_BLOCK in groups that do not need
    everything; more are ignored. Refuses: BLOCK_IDS."""
    groups = registration.geometry.groups
    if len(blocks) != len(groups):
        text = f"blocks name {len(blocks)} KV groups; the registration has {len(groups)}"
        raise Refusal(Reason.BLOCK_IDS, text, field="blocks")
    for at, (ids, group) in enumerate(zip(blocks, groups, strict=True)):
        needed = (tokens.end - tokens.start) // group.block_size
        if len(ids) < needed:
            text = f"the range needs {needed} blocks of group {at}, {len(ids)} are named"
            raise Refusal(Reason.BLOCK_IDS, text, field=f"blocks[{at}].ids")
        used = ids[:needed]
        if group.need.window:
            used = _named(used, group, at, limits.chunk_tokens)
        unsigned = getattr(used, "typecode", "") == "I"  # as they come; to look for the least would take time
        if used and not (max(used) < group.num_blocks and (unsigned or min(used) >= 0)):
            text = (
                f"block ids of group {at} are {min(used)} to {max(used)}, not all below num_blocks {group.num_blocks}"
            )
            raise Refusal(Reason.BLOCK_IDS, text, field=f"blocks[{at}].ids")


def _named(ids: Sequence[int], group: GroupGeometry, at: int, chunk_tokens: int) -> Sequence[int]:
    """Those that are not NULL_BLOCK. Where an object has several blocks, all others follow them."""
    named = array("I", (block_id for block_id in ids if block_id != NULL_BLOCK))
    if group.need.tail(group.block_size, chunk_tokens) > 1 and NULL_BLOCK in ids[len(ids) - len(named) :]:
        text = f"a null block of group {at} comes after another block"
        raise Refusal(Reason.BLOCK_IDS, text, field=f"blocks[{at}].ids")
    return named


def check_store(command: StoreCommand, registration: Registration, limits: CoreLimits) -> None:
    """Refuses: INVALID_FIELD, RANGE, BLOCK_IDS, SPACE_MISMATCH is the caller's."""
    check_call_id(command.call_id)
    check_content(command, registration.geometry.block_size, limits)
    check_blocks(command.blocks, command.range, registration, limits)


def check_content(command: StoreCommand, size: int, limits: CoreLimits) -> None:
    """Keys for all chunks of the range, which is aligned to ``size``. Refuses: INVALID_FIELD, RANGE."""
    content = command.content
    check_keys(content, limits)
    check_range(command.range, size, limits)
    if command.range.end > content.num_tokens:
        text = f"range ends at {command.range.end}, the content at {content.num_tokens}"
        raise Refusal(Reason.RANGE, text, field="range.end")
    last = content.first_chunk + len(content.keys)
    if command.range.end // limits.chunk_tokens > last:
        raise Refusal(Reason.RANGE, f"content has keys up to chunk {last} only", field="content")
    if -(-command.range.start // limits.chunk_tokens) < content.first_chunk:
        raise Refusal(Reason.RANGE, f"content has keys from chunk {content.first_chunk} on only", field="content")


def check_call_id(call_id: int) -> None:
    """Refuses: INVALID_FIELD."""
    if not 0 < call_id < 1 << 64:
        raise Refusal(Reason.INVALID_FIELD, "call_id must be 1 to 2**64 - 1", field="call_id")


def check_keys(content: ChunkKeys, limits: CoreLimits) -> None:
    """Refuses: INVALID_FIELD when there are too many or more than the prompt has."""
    if len(content.keys) > limits.keys_per_call:
        text = f"content has {len(content.keys)} chunks; a call may name {limits.keys_per_call}"
        raise Refusal(Reason.INVALID_FIELD, text, field="content")
    if content.first_chunk + len(content.keys) > content.num_tokens // limits.chunk_tokens:
        text = f"content has more keys than {content.num_tokens} tokens have full chunks of {limits.chunk_tokens}"
        raise Refusal(Reason.INVALID_FIELD, text, field="content")


def check_prefix(content: ChunkKeys, limits: CoreLimits) -> None:
    """As ``check_keys``, for calls whose keys begin with the prompt."""
    check_keys(content, limits)
    if content.first_chunk:
        raise Refusal(Reason.INVALID_FIELD, "first_chunk must be 0 here", field="content.hashes.first_chunk")


def lookup_ranks(command: LookupCommand, facts: IdentityFacts) -> tuple[int, ...]:
    """The wanted KV ranks, sorted. Refuses: RANK."""
    world = facts.identity.kv_world_size
    if not command.kv_ranks:
        return tuple(range(world))
    ranks = tuple(sorted(set(command.kv_ranks)))
    if ranks[0] < 0 or ranks[-1] >= world or len(ranks) != len(command.kv_ranks):
        text = f"kv_ranks must be different and below kv_world_size {world}"
        raise Refusal(Reason.RANK, text, field="kv_ranks")
    return ranks


def lookup_kv_tp_size(
    command: LookupCommand, num_ranks: int, identity: SpaceIdentity, registration: Registration | None
) -> int:
    """The engine's kv_tp_size; without a registration the lookup's tp_size, so that an object has one reader. Refuses:
    TP_SIZE_MISMATCH, SPACE_MISMATCH."""
    if not 1 <= command.tp_size <= 128:
        raise Refusal(Reason.TP_SIZE_MISMATCH, f"tp_size {command.tp_size} is not 1 to 128", field="tp_size")
    kv_tp_size = command.tp_size if registration is None else registration.kv_tp_size
    if num_ranks * (command.tp_size // kv_tp_size) > READERS_MOST:
        text = f"{num_ranks} KV ranks with tp_size {command.tp_size} are more than {READERS_MOST} readers"
        raise Refusal(Reason.TP_SIZE_MISMATCH, text, field="tp_size")
    if registration is None:
        return command.tp_size
    if registration.identity != identity:
        pairs = zip(fields(identity), astuple(identity), astuple(registration.identity), strict=True)
        said = ", ".join(f"{at.name} is {own!r} here, {other!r} there" for at, own, other in pairs if own != other)
        text = f"the engine's workers registered another identity: {said}"
        raise Refusal(Reason.SPACE_MISMATCH, text, field="space.space_base")
    if command.tp_size != registration.tp_size:
        text = f"tp_size is {command.tp_size}, the engine's workers registered {registration.tp_size}: send theirs"
        raise Refusal(Reason.TP_SIZE_MISMATCH, text, field="tp_size")
    return registration.kv_tp_size


def explain_forms(own: Sequence[Part], known: Sequence[Part], needs: Sequence[Need]) -> str:
    """Why engines with these parts of a chunk cannot share data, in words."""
    if [part.need for part in own] != [*needs]:
        return "the layers of this model do not need the same chunks here as elsewhere in the same space"
    mine, theirs = ("+".join(f"{part.object_bytes} bytes ({part.order})" for part in parts) for parts in (own, known))
    return f"a chunk of this rank has {mine} here, {theirs} elsewhere in the same space"


def check_ranks(r: Registration, others: Registration | None, same_identity: bool) -> None:
    """Whether a worker's place in its engine makes sense. Refuses: RANK, TP_SIZE_MISMATCH, SPACE_MISMATCH."""
    world = r.identity.kv_world_size
    if not 1 <= r.tp_size <= 128 or not 1 <= r.kv_tp_size <= r.tp_size or r.tp_size % r.kv_tp_size:
        text = f"kv_tp_size {r.kv_tp_size} does not divide tp_size {r.tp_size}"
        raise Refusal(Reason.TP_SIZE_MISMATCH, text, field="kv_tp_size")
    if world % r.kv_tp_size:
        text = f"kv_tp_size {r.kv_tp_size} does not divide kv_world_size {world}"
        raise Refusal(Reason.TP_SIZE_MISMATCH, text, field="kv_tp_size")
    if not 0 <= r.tp_rank < r.tp_size:
        raise Refusal(Reason.RANK, f"tp_rank {r.tp_rank} is not below tp_size {r.tp_size}", field="tp_rank")
    if not 0 <= r.kv_rank < world:
        raise Refusal(Reason.RANK, f"kv_rank {r.kv_rank} is not below kv_world_size {world}", field="kv_rank")
    place = r.tp_rank // (r.tp_size // r.kv_tp_size)
    if r.kv_rank % r.kv_tp_size != place:
        text = f"tp_rank {r.tp_rank} of {r.tp_size} holds KV rank {place} of its stage, not kv_rank {r.kv_rank}"
        raise Refusal(Reason.RANK, text, field="kv_rank")
    if others is None:
        return
    if (r.tp_size, r.kv_tp_size) != (others.tp_size, others.kv_tp_size):
        text = f"the engine's other workers have tp_size {others.tp_size} and kv_tp_size {others.kv_tp_size}"
        raise Refusal(Reason.TP_SIZE_MISMATCH, text, field="tp_size")
    if not same_identity:
        raise Refusal(Reason.SPACE_MISMATCH, "the engine's other workers registered another identity", field="identity")
