# SPDX-License-Identifier: Apache-2.0
"""Words of the calls that are streams: what is asked and told. A part of the cache's interface (``kvgrpc.api``)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvgrpc.core.types import ChunkResult, Reader, TokenRange


@dataclass(frozen=True, slots=True)
class WatchRequest:
    """What to watch: spaces of ``space_base`` (empty: all) under ``cache_salts`` (None: all that may be seen)."""

    space_base: bytes = b""
    cache_salts: frozenset[str] | None = None
    snapshot: bool = False


class WatchKind(Enum):
    """What a message of Watch says. The values are the protocol's names without their prefix."""

    STARTED = "STARTED"
    STORED = "STORED"
    REMOVED = "REMOVED"
    CLEARED = "CLEARED"
    SYNCED = "SYNCED"
    LOST = "LOST"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One message of Watch; ``space`` is the digest of the space."""

    sequence: int
    kind: WatchKind
    server_epoch: bytes = b""
    chunk_tokens: int = 0
    space: bytes = b""
    space_base: bytes = b""
    lora: str = ""
    salt_fingerprint: str = ""
    tier: str = ""
    keys: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadChunksRequest:
    """Which chunks' objects to read, under a job; ``range`` is aligned to chunks. ``by_groups``: who asks knows that a
    chunk may have several objects; without it, models of which a group is not FULL are refused."""

    engine_id: str
    job_id: bytes
    reader: Reader
    range: TokenRange
    by_groups: bool = False


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Bytes of an object from ``offset`` on; ``object_bytes`` is its length, ``checksum`` the CRC-32 of ``data``.
    The first part of what is read says in which ``order`` the object's runs are. ``groups`` (bits) are those that the
    object holds, 0 if it holds all."""

    chunk: int
    offset: int
    object_bytes: int
    checksum: int
    data: bytes
    order: str = ""
    groups: int = 0


ReadChunksAnswer = ChunkPart | tuple[ChunkResult, ...]
"""The results come last."""
