# SPDX-License-Identifier: Apache-2.0
"""Recorded lookups and stores, without their contents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class CallKind(Enum):
    """What a recorded call was."""

    LOOKUP = "lookup"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A lookup or store without its contents; fields as in the protocol. ``chunks`` are unsigned 64-bit numbers."""

    kind: CallKind
    at_ms: int
    space: int
    num_tokens: int
    chunks: Sequence[int]
    prefix_chunks: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class TracedCalls:
    """Calls in order; ``dropped`` are missing before them."""

    calls: tuple[TracedCall, ...]
    dropped: int
    chunk_tokens: int
