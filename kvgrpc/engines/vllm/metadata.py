# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the workers at each step, and what they tell it: plain data, since it travels between
processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvgrpc.core.types import DEFAULT_POLICY, Policy

REST_S = 0.001
"""Most that each half waits in a step that computes nothing. Asking again and again instead would keep the
interpreter's lock from the threads that bring what is asked for."""

BlockIds = tuple[tuple[int, ...], ...]
"""Of each KV group."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load tokens ``start`` to ``end`` of a looked-up prefix into ``blocks``, of which the first of each group holds
    ``start``; NULL_BLOCK where the request has none. Without blocks nothing is loaded, but the worker reports the
    request as received, since vLLM waits for that. ``job_ids``: the name that each server gave the lookup."""

    request_id: str
    job_ids: tuple[bytes, ...]
    start: int
    end: int
    blocks: BlockIds


@dataclass(frozen=True, slots=True)
class Save:
    """Store the chunks from token ``start`` to ``end`` out of ``blocks``, as in Load.

    The content is either ``hashes``, one a chunk from ``first_chunk`` on, or ``tokens`` (u32 little-endian) from the
    prompt's begin to ``end``.
    """

    save_id: int
    start: int
    end: int
    blocks: BlockIds
    hashes: tuple[bytes, ...] = ()
    first_chunk: int = 0
    tokens: bytes = b""
    lora: str = ""
    cache_salt: str = ""
    policy: Policy = DEFAULT_POLICY


@dataclass(slots=True)
class Step:
    """What one step asks of every worker. ``resets`` counts the cache's resets: what was saved before the last one and
    is not sent yet must not be sent. ``idle``: nothing is computed in it."""

    resets: int = 0
    idle: bool = False
    loads: list[Load] = field(default_factory=list[Load])
    saves: list[Save] = field(default_factory=list[Save])


@dataclass(slots=True)
class Report:
    """What workers finished. ``ended`` counts, for each save, the workers that have let go of its blocks; ``findable``
    is the token up to which its chunks can now be found, the least of those that have a say."""

    ended: dict[int, int] = field(default_factory=dict[int, int])
    findable: dict[int, int] = field(default_factory=dict[int, int])
    saved_tokens: int = 0
    loaded_tokens: int = 0
    failed_tokens: int = 0
    unusable: bool = False
    """A worker cannot share its memory: nothing will ever be stored or loaded there."""

    def __bool__(self) -> bool:
        counted = self.saved_tokens or self.loaded_tokens or self.failed_tokens
        return bool(self.ended or counted or self.unusable)

    def add(self, other: Report) -> None:
        for save_id, count in other.ended.items():
            self.ended[save_id] = self.ended.get(save_id, 0) + count
        for save_id, end in other.findable.items():
            self.findable[save_id] = min(end, self.findable.get(save_id, end))
        self.saved_tokens += other.saved_tokens
        self.loaded_tokens += other.loaded_tokens
        self.failed_tokens += other.failed_tokens
        self.unusable = self.unusable or other.unusable
