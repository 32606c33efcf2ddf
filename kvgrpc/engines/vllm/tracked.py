# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's half remembers of a request, and of blocks that are being saved."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvgrpc.engines.vllm.metadata import Load
from kvgrpc.engines.vllm.options import Wish
from kvgrpc.engines.vllm.ports import Request
from kvgrpc.engines.vllm.servers import Asked, Found


@dataclass(slots=True, eq=False)
class Tracked:
    """One request."""

    request: Request
    wish: Wish
    lora: str
    cacheable: bool
    attempt: int = 0
    spent: bool = False
    """The round has ended: the next question begins another one."""
    asked: Asked | None = None
    result: Found | None = None
    offer: tuple[int, int] = (0, 0)
    """(first token, tokens) of the last answer."""
    load: Load | None = None
    """Asked of the workers, not received yet."""
    load_failed: bool = False
    """Nothing is loaded for it again: else it could fail for ever."""
    chunk_tokens: int = 0
    """That ``stored`` counts in."""
    stored: int = 0
    """Chunks that the server has, or was asked to store."""
    ends: set[int] = field(default_factory=set[int])
    """Where steps of this round ended with a chunk behind those, in tokens, for models with states. vLLM plans the next
    step before it knows what this one samples, so a chunk's key may be known when its step is no longer the last."""


@dataclass(slots=True)
class Held:
    """Blocks of a save, and how many workers still have to let go of them. ``findable``: up to which token the save can
    be found once they have, as far as known. ``chunk``: tokens of a chunk of it."""

    blocks: tuple[int, ...]
    workers: int
    request: Request
    start: int
    findable: int
    chunk: int
