# SPDX-License-Identifier: Apache-2.0
"""The cache's interface: what one client can ask (CacheApi) and what an operator can ask (AdminApi).

The driver implements both in process, the client implements both over gRPC, decorators wrap either; one conformance
suite runs against all of them. Refusals are raised as ``kvgrpc.core.errors.Refusal``; a miss is an answer.
All methods are coroutines of one event loop; nothing here may be called from another thread.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvgrpc.core.inspection import InspectedChunk as InspectedChunk  # part of Inspection, as is Keeper
from kvgrpc.core.inspection import Keeper as Keeper
from kvgrpc.core.keys import OWN_HASH_ALGORITHM as OWN_HASH_ALGORITHM
from kvgrpc.core.types import (
    DEFAULT_POLICY,
    ChunkResult,
    Cleared,
    Ended,
    EngineStatus,
    FreeCommand,
    Held,
    LookupAnswer,
    ObjectForm,
    Policy,
    PrefetchStatus,
    Quota,
    RetrieveCommand,
    Role,
    SpaceIdentity,
    SpaceRef,
    SpaceStatus,
    TokenRange,
    Warmed,
    WritePolicy,
)
from kvgrpc.core.types import ArenaStatus as ArenaStatus  # part of ServerStatus
from kvgrpc.core.types import ClientStatus as ClientStatus  # part of EngineStatus
from kvgrpc.layouts import BlockForm as BlockForm  # part of KvGroup, as is GroupKind
from kvgrpc.layouts import CudaIpcMemory as CudaIpcMemory  # part of Layout, as are the next three
from kvgrpc.layouts import GroupKind as GroupKind
from kvgrpc.layouts import KvGroup as KvGroup
from kvgrpc.layouts import Layout
from kvgrpc.layouts import Memory as Memory
from kvgrpc.layouts import Runs as Runs
from kvgrpc.layouts import SharedMemory as SharedMemory
from kvgrpc.operators import CallKind as CallKind  # part of TracedCall
from kvgrpc.operators import ExecutorStatus as ExecutorStatus  # part of ServerStatus, as are the next two
from kvgrpc.operators import Inspection, ServerStatus, TracedCalls
from kvgrpc.operators import RestartStatus as RestartStatus
from kvgrpc.operators import TierStatus as TierStatus
from kvgrpc.operators import TracedCall as TracedCall  # part of TracedCalls
from kvgrpc.streams import ChunkPart as ChunkPart
from kvgrpc.streams import ReadChunksAnswer as ReadChunksAnswer
from kvgrpc.streams import ReadChunksRequest as ReadChunksRequest
from kvgrpc.streams import WatchEvent as WatchEvent
from kvgrpc.streams import WatchKind as WatchKind
from kvgrpc.streams import WatchRequest as WatchRequest

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0


# ---- content --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of a prompt, from its first token on, as raw unsigned 32-bit little-endian memory (4 bytes a token).
    Raises TypeError for memory of other items than bytes or such ids, as of 64-bit integers."""

    data: bytes | bytearray | memoryview

    def __post_init__(self) -> None:
        view = memoryview(self.data)
        if view.format == "I" and sys.byteorder == "little":
            object.__setattr__(self, "data", view.cast("B"))
        elif view.itemsize != 1:
            text = f"tokens are items of {view.itemsize} bytes, of format {view.format!r}"
            raise TypeError(f"{text}; send unsigned 32-bit ones, as Tokens.from_ids makes them")

    @classmethod
    def from_ids(cls, ids: Iterable[int]) -> Tokens:
        """Of a list or any other iterable of ids from 0 to 2**32 - 1 (OverflowError)."""
        packed = array("I", ids)
        if sys.byteorder == "big":
            packed.byteswap()
        return cls(packed.tobytes())

    @property
    def num_tokens(self) -> int:
        return len(self.data) // 4


@dataclass(frozen=True, slots=True)
class Hashes:
    """One hash of 16 to 64 bytes for each full chunk, chained by the engine: it stands for the chunk and all before it.
    ``hashes[0]`` belongs to chunk ``first_chunk``, which is 0 but in a Store; ``num_tokens`` is the prompt's length."""

    hashes: Sequence[bytes]
    num_tokens: int
    first_chunk: int = 0


Content = Tokens | Hashes


# ---- requests and answers -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """A client's introduction."""

    protocol_major: int = PROTOCOL_MAJOR
    protocol_minor: int = PROTOCOL_MINOR
    client_version: str = ""
    identity: SpaceIdentity | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that the server keeps; fields as in the protocol."""

    keys_per_call: int
    jobs_per_engine: int
    message_bytes: int
    clients: int
    calls_per_client: int
    lease_ms: int
    record_ms: int
    reattach_grace_ms: int
    pin_bytes: int
    hold_bytes: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server's introduction. ``server_epoch`` changes at every start; ``space_base`` is empty without an identity."""

    protocol_major: int
    protocol_minor: int
    server_version: str
    server_epoch: bytes
    chunk_tokens: int
    hash_algorithm: str
    limits: Limits
    host_id: str
    space_base: bytes


@dataclass(frozen=True, slots=True)
class AttachEvent:
    """What the server says on an Attach stream: first the session is open, later perhaps ``draining``."""

    draining: bool
    server_epoch: bytes = b""
    resumed: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RegisterRequest:
    """Shares a worker's KV memory. ``identity.stored_form`` may be empty: the server computes it from the layout.

    ``tp_rank`` is the worker's of ``tp_size``; ``kv_rank``, which of the ``identity.kv_world_size`` objects of a chunk
    it stores and reads; ``kv_tp_size``, how many different ones a tensor-parallel group has: ``tp_size``, or fewer
    where ranks hold the same (1 with MLA). ParallelStrategy computes them. ``host_id``: empty means this host."""

    engine_id: str
    identity: SpaceIdentity
    kv_rank: int
    tp_rank: int
    tp_size: int
    kv_tp_size: int
    layout: Layout
    host_id: str = ""


@dataclass(frozen=True, slots=True)
class RegisterAnswer:
    """The registration as the server sees it. ``object_bytes``: of one chunk of this rank. ``registration_epoch`` grows
    with every registration of this client that changed something."""

    space_base: bytes
    chunk_tokens: int
    registration_epoch: int
    stored_form: str
    object_bytes: int


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """Asks for a prefix. ``tp_size`` and identity are those of the engine's workers. ``kv_ranks``: those that this
    server holds for the engine; empty = all. Another ``attempt`` of a request is answered afresh."""

    engine_id: str
    request_id: str
    space: SpaceRef
    content: Content
    tp_size: int = 1
    attempt: int = 0
    kv_ranks: tuple[int, ...] = ()
    prefetch_wait_ms: int = 0
    policy: Policy = DEFAULT_POLICY


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """Stores the full chunks inside ``range`` (None = all whole blocks of the content). ``blocks[g][0]`` is the block
    of ``range.start`` in KV group g. ``call_id``: not 0, never used before in this session."""

    engine_id: str
    call_id: int
    space: SpaceRef
    content: Content
    blocks: tuple[Sequence[int], ...]
    range: TokenRange | None = None
    ready_event: bytes = b""
    policy: Policy = DEFAULT_POLICY


@dataclass(frozen=True, slots=True)
class WriteChunksRequest:
    """What is stored by a stream of parts: the chunks of ``range`` (None = all of the content), each of
    ``object_bytes``, whose runs are in ``order``; of a model of which a group is not FULL the ``objects`` say so."""

    engine_id: str
    space: SpaceRef
    content: Content
    object_bytes: int = 0
    order: str = ""
    kv_rank: int = 0
    range: TokenRange | None = None
    policy: Policy = DEFAULT_POLICY
    objects: tuple[ObjectForm, ...] = ()


RetrieveRequest = RetrieveCommand
FreeRequest = FreeCommand


class CacheApi(Protocol):
    """One client's view of the cache. The proto's service comments are the manual; names map one to one."""

    async def handshake(self, hello: Hello) -> ServerInfo:
        """Agrees on the protocol's version, and names ``hello.identity`` (``space_base``). Needs no session."""
        ...

    def attach(self, engine_id: str, role: Role, session_id: bytes) -> AsyncIterator[AttachEvent]:
        """Opens the session; closing the iterator (``aclose``) breaks the stream."""
        ...

    async def register(self, request: RegisterRequest) -> RegisterAnswer:
        """Shares the memory of an attached worker; replaces what it shared before."""
        ...

    async def unregister(self, engine_id: str) -> None:
        """Takes the memory back when running copies have ended. Harmless when nothing is registered."""
        ...

    async def lookup(self, request: LookupRequest) -> LookupAnswer:
        """Finds and pins the longest prefix; never waits: while ``status.done`` is False, ``query``."""
        ...

    async def query(self, engine_id: str, job_id: bytes, wait_ms: int = 0) -> PrefetchStatus:
        """How far a lookup is; with ``wait_ms`` waits for its end at most so long."""
        ...

    async def store(self, request: StoreRequest) -> tuple[ChunkResult, ...]:
        """Copies whole chunks out of the worker's blocks; any later lookup finds what is STORED or RESIDENT."""
        ...

    async def retrieve(self, request: RetrieveRequest) -> tuple[ChunkResult, ...]:
        """Copies a range of what a lookup found into the worker's blocks; only what is LOADED may be used."""
        ...

    async def free(self, request: FreeRequest) -> int:
        """Gives pins of a lookup back; how many (one a chunk, KV rank and reader). Repeating changes nothing."""
        ...

    async def end_request(self, engine_id: str, request_id: str) -> Ended:
        """Ends every lookup of a request, with its pins. Harmless when repeated or unknown."""
        ...

    async def fence(self, engine_id: str, call_ids: Sequence[int]) -> None:
        """Revokes stores and retrieves of this client; when it answers, their blocks are free."""
        ...

    def read_chunks(self, request: ReadChunksRequest) -> AsyncIterator[ReadChunksAnswer]:
        """Chunks of a lookup as bytes. Closing the iterator (``aclose``) ends the stream."""
        ...

    async def write_chunks(
        self, request: WriteChunksRequest, parts: AsyncIterator[ChunkPart]
    ) -> tuple[ChunkResult, ...]:
        """Stores chunks that come as bytes."""
        ...

    def watch(self, request: WatchRequest) -> AsyncIterator[WatchEvent]:
        """Tells what can be found in L1, and what not any more. Closing the iterator (``aclose``) ends the stream."""
        ...


# ---- operators ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClearTarget:
    """What to forget: exactly one of the fields is set."""

    space: SpaceRef | None = None
    model: str | None = None
    cache_salt: str | None = None
    all: bool = False


class AdminApi(Protocol):
    """The operator's view."""

    async def get_status(self) -> ServerStatus:
        """The server at a glance: L1, tiers, counters."""
        ...

    async def list_engines(self) -> tuple[EngineStatus, ...]:
        """Engines with a client that is attached, and their clients."""
        ...

    async def list_spaces(self) -> tuple[SpaceStatus, ...]:
        """Spaces that have data in L1."""
        ...

    async def clear(self, target: ClearTarget) -> Cleared:
        """Forgets: nothing that was stored before the answer is found again, in any tier."""
        ...

    async def bump_generation(self, *, model: str = "", space_base: bytes = b"") -> Cleared:
        """Says that the weights of a model, or of one identity, are new: what was stored is not found any more."""
        ...

    async def pin(self, space: SpaceRef, content: Content, ttl_ms: int) -> Held:
        """Keeps what is there of a prefix in L1 for ``ttl_ms``."""
        ...

    async def warm(self, space: SpaceRef, content: Content, wait_ms: int) -> Warmed:
        """Reads a prefix from lower tiers into L1, within ``wait_ms``."""
        ...

    async def inspect(self, space: SpaceRef, content: Content) -> Inspection:
        """Where the chunks of a prompt are, and who keeps them. Changes nothing."""
        ...

    def record_trace(self) -> AsyncIterator[TracedCalls]:
        """Lookups and stores as they come, without their contents. Begins with the first ``anext``; closing the
        iterator (``aclose``) ends it."""
        ...

    async def unpin(self, pin_id: bytes) -> int:
        """Ends a ``pin``; how many chunks it held."""
        ...

    async def set_quota(self, cache_salt: str, size_bytes: int | None) -> Quota:
        """Bounds what a tenant may hold (None: no bound)."""
        ...

    async def get_quota(self, cache_salt: str) -> Quota:
        """What a tenant may hold, and holds."""
        ...

    async def set_write_policy(self, model: str, policy: WritePolicy | None) -> WritePolicy:
        """When what is stored for a model (empty: for any without a policy of its own) goes to lower tiers; None: no
        policy of its own. Answers what is in force."""
        ...

    async def drain_engine(self, engine: str, wait_ms: int = 0) -> bool:
        """Takes an engine (its id or fingerprint) out: what it begins is refused. True when, within ``wait_ms``, none
        of its copies runs any more and all its pins are gone."""
        ...
