# SPDX-License-Identifier: Apache-2.0
"""Plain data that the core takes and gives. No behaviour beyond arithmetic on its own fields.

Units: times are integer nanoseconds of one monotonic clock (``*_ns``), sizes are bytes (``*_bytes``), positions are
tokens from the start of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from kvgrpc.core.actions import *  # noqa: F403 - the words of the outbox belong to those of requests and answers
from kvgrpc.core.geometry import *  # noqa: F403 - and those of layouts
from kvgrpc.core.geometry import Geometry
from kvgrpc.core.limits import *  # noqa: F403 - and those of settings


@dataclass(frozen=True, slots=True)
class SpaceIdentity:
    """What an engine says once about its KV data. Equal identities (and LoRA, and salt) share data; unequal never.

    ``revision``: the version of the weights. ``kv_dtype``: of the cache, as "bfloat16". ``kv_world_size``: how many KV
    ranks together hold one chunk. ``hash_algorithm``: OWN_HASH_ALGORITHM where the server hashes token ids, else the
    engine's own name for the hashes that it sends. ``stored_form``: what ``stored_form(groups)`` computes.
    """

    model: str
    revision: str
    kv_dtype: str
    kv_world_size: int
    hash_algorithm: str
    stored_form: str


@dataclass(frozen=True, slots=True)
class SpaceRef:
    """Names a space in a request: the identity's digest, the LoRA adapter, the tenant's salt."""

    space_base: bytes
    lora: str = ""
    cache_salt: str = ""


class Priority(IntEnum):
    """Eviction class: all LOW chunks go before any NORMAL one, those before any HIGH one."""

    LOW = 0
    NORMAL = 1
    HIGH = 2


class WritePolicy(Enum):
    """When a space's objects are copied to lower tiers."""

    THROUGH = "through"
    EVICTION = "eviction"
    SECOND_USE = "second-use"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Policy:
    """What one request wants beyond the default. ``retention_ns``: keep its chunks at least so long (nanoseconds, a day
    at most), as far as the server's ``--hold-share`` allows; ``priority``: evict them before or after others."""

    no_store: bool = False
    no_lookup: bool = False
    retention_ns: int = 0
    priority: Priority = Priority.NORMAL


DEFAULT_POLICY = Policy()


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """Keys of consecutive full chunks from ``first_chunk`` on. ``num_tokens`` is the prompt's length."""

    keys: Sequence[bytes]
    num_tokens: int
    first_chunk: int = 0


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens ``start`` up to, and without, ``end``, counted from the prompt's first one; both are multiples of the
    block size."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Reader:
    """Who may read an object once under a lease: the worker that registered as ``tp_rank``, of object ``kv_rank``."""

    kv_rank: int
    tp_rank: int


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions of spaces that are to outlive the server: where unknown identities begin, (generation, version) of
    identities by base, (base, version) of spaces by digest. What is not named here begins as what it belongs to."""

    first: int = 0
    bases: Mapping[bytes, tuple[int, int]] = field(default_factory=dict[bytes, tuple[int, int]])
    spaces: Mapping[bytes, tuple[bytes, int]] = field(default_factory=dict[bytes, tuple[bytes, int]])


NO_VERSIONS = Versions()


# ---- sessions -------------------------------------------------------------------------------------------------------


class Role(Enum):
    """What a client does in its engine."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class Registration:
    """A worker's shared memory, as far as the core is concerned.

    ``mapping_id`` names it to whoever mapped it. ``layout_digest`` stands for the whole layout and the memory objects
    behind it: two registrations are the same when all but their ``mapping_id`` is equal.
    """

    engine_id: str
    identity: SpaceIdentity
    kv_rank: int
    tp_rank: int
    tp_size: int
    kv_tp_size: int
    geometry: Geometry
    memory_bytes: int
    mapping_id: int
    layout_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Registered:
    """Answer to a registration. ``changed`` is False when the same one was there (the new mapping is not used)."""

    space_base: bytes
    registration_epoch: int
    object_bytes: int
    changed: bool


# ---- requests -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LookupCommand:
    """A lookup with its keys already made. ``job_id`` is 16 random bytes, used only if a new job is recorded."""

    engine_id: str
    request_id: str
    attempt: int
    space: SpaceRef
    content: ChunkKeys
    tp_size: int
    job_id: bytes
    kv_ranks: tuple[int, ...] = ()
    prefetch_wait_ns: int = 0
    policy: Policy = DEFAULT_POLICY
    fingerprint: int = 0
    """Of space, content and ranks: a repeat must ask for the same."""


@dataclass(frozen=True, slots=True)
class StoreCommand:
    """A store with its keys already made. ``blocks[g]`` are the block ids of group g covering ``range``. ``cleared``: a
    Clear or a new generation came after the call and before its keys were made, so that nothing of it may be found."""

    engine_id: str
    call_id: int
    space: SpaceRef
    content: ChunkKeys
    range: TokenRange
    blocks: tuple[Sequence[int], ...]
    policy: Policy = DEFAULT_POLICY
    cleared: bool = False


@dataclass(frozen=True, slots=True)
class RetrieveCommand:
    """A retrieve under a job. ``blocks[g][0]`` is the block of ``range.start``."""

    engine_id: str
    call_id: int
    job_id: bytes
    range: TokenRange
    blocks: tuple[Sequence[int], ...]


@dataclass(frozen=True, slots=True)
class FreeCommand:
    """Gives pins back: all chunks (``range`` None) or those wholly inside; all readers (empty) or those named."""

    engine_id: str
    job_id: bytes
    tp_size: int
    range: TokenRange | None = None
    readers: tuple[Reader, ...] = ()


# ---- answers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefetchStatus:
    """State of a lookup. While not ``done`` the other fields are unset. ``limited_by``: why the hit is shorter than it
    might have been: "", PREFETCH_TIMEOUT, PREFETCH_LIMIT or PREFETCH_FAILED."""

    done: bool
    hit_tokens: int = 0
    pinned: bool = False
    hit_chunks_by_tier: dict[str, int] = field(default_factory=dict[str, int])
    limited_by: str = ""


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """``job_id`` is empty when the answer is final with no hit."""

    job_id: bytes
    status: PrefetchStatus


@dataclass(frozen=True, slots=True)
class Cleared:
    """Effect of Clear or BumpGeneration: how many chunks cannot be found any more; of those,
    ``still_pinned_chunks`` wait for a pin or a copy to give their memory back."""

    removed_chunks: int
    still_pinned_chunks: int
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """Effect of EndRequest."""

    ended_jobs: int
    released_pins: int


@dataclass(frozen=True, slots=True)
class Held:
    """Effect of Pin. ``pin_id`` is empty when nothing of the prefix is in L1."""

    pin_id: bytes
    pinned_tokens: int


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant may hold (None: as much as there is room for), and what it holds."""

    size_bytes: int | None
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Warmed:
    """Effect of Warm: what is in L1 now, and why not more."""

    resident_tokens: int
    limited_by: str = ""


# ---- snapshots -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Counts:
    """How many of what there are: complete chunks that can be found, spaces with data, engines with a live client,
    attached clients, job records, pins (one a chunk, KV rank and reader), calls that have not answered."""

    chunks: int
    spaces: int
    engines: int
    clients: int
    jobs: int
    pins: int
    calls_in_flight: int


@dataclass(frozen=True, slots=True)
class ArenaStatus:
    """Bytes by slot state; they add up to ``total_bytes``. ``held_bytes`` is a part of ready and pinned."""

    total_bytes: int
    free_bytes: int
    writing_bytes: int
    ready_bytes: int
    pinned_bytes: int
    doomed_bytes: int
    settling_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """One client of an engine. ``thread`` is filled in by whoever runs its copies."""

    client_id: str
    role: Role
    attached: bool
    registered: bool
    kv_rank: int
    tp_rank: int
    memory_bytes: int
    calls_in_flight: int
    thread: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine, named by its fingerprint."""

    engine: str
    clients: tuple[ClientStatus, ...]
    jobs: int
    pins: int
    draining: bool


@dataclass(frozen=True, slots=True)
class SpaceStatus:
    """One space; the salt only as a fingerprint."""

    space_base: bytes
    identity: SpaceIdentity
    lora: str
    salt_fingerprint: str
    generation: int
    chunks: int
    bytes: int
    pinned_chunks: int
    write_policy: WritePolicy | None = None
    """In force; None where a server does not say it."""
