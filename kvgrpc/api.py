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
from enum import Enum
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
    """Token ids of a prompt as raw unsigned 32-bit little-endian memory (4 bytes a token)."""

    data: bytes | bytearray | memoryview

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
    """One hash a full chunk; ``hashes[0]`` belongs to chunk ``first_chunk``."""

    hashes: Sequence[bytes]
    num_tokens: int
    first_chunk: int = 0


Content = Tokens | Hashes


# ---- memory and layout ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CudaIpcMemory:
    """Device memory by a 64-byte CUDA IPC handle; ``offset_bytes`` lies inside the allocation that it opens."""

    handle: bytes
    device_uuid: str
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Host memory by the name of a POSIX shared memory object (no slash)."""

    name: str
    offset_bytes: int
    size_bytes: int


Memory = CudaIpcMemory | SharedMemory


@dataclass(frozen=True, slots=True)
class Runs:
    """One strided family of runs; see ``Runs`` in proto/kvgrpc/v1/engine.proto for the address formula."""

    memory_index: int
    base_bytes: int
    layers: int
    layer_stride_bytes: int
    planes: int
    plane_stride_bytes: int
    block_stride_bytes: int
    run_bytes: int


class GroupKind(Enum):
    """What a group's layers keep. The values are the protocol's names without their prefix."""

    FULL = "FULL"
    SLIDING_WINDOW = "SLIDING_WINDOW"
    RECURRENT = "RECURRENT"
    CHUNKED_LOCAL = "CHUNKED_LOCAL"


class BlockForm(Enum):
    """Whether the order of bytes inside a block is known."""

    OPAQUE = "OPAQUE"
    TOKEN_MAJOR = "TOKEN_MAJOR"  # noqa: S105 - not a password


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share one block table."""

    block_size: int
    num_blocks: int
    runs: tuple[Runs, ...]
    form: BlockForm
    kind: GroupKind = GroupKind.FULL
    window_tokens: int = 0
    backend: str = ""
    layout: str = ""
    heads: int = 0
    head_dim: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """An engine's KV memory: where it is and how blocks lie in it."""

    memory: tuple[Memory, ...]
    groups: tuple[KvGroup, ...]


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
    """Shares a worker's KV memory. ``identity.stored_form`` may be empty: the server computes it from the layout."""

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
    """The registration as the server sees it."""

    space_base: bytes
    chunk_tokens: int
    registration_epoch: int
    stored_form: str
    object_bytes: int


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """Asks for a prefix. ``kv_ranks`` empty = all of the space."""

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
    """Stores the full chunks inside ``range`` (None = all whole blocks of the content)."""

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

    async def handshake(self, hello: Hello) -> ServerInfo: ...

    def attach(self, engine_id: str, role: Role, session_id: bytes) -> AsyncIterator[AttachEvent]:
        """Opens the session; closing the iterator (``aclose``) breaks the stream."""
        ...

    async def register(self, request: RegisterRequest) -> RegisterAnswer: ...

    async def unregister(self, engine_id: str) -> None: ...

    async def lookup(self, request: LookupRequest) -> LookupAnswer: ...

    async def query(self, engine_id: str, job_id: bytes, wait_ms: int = 0) -> PrefetchStatus: ...

    async def store(self, request: StoreRequest) -> tuple[ChunkResult, ...]: ...

    async def retrieve(self, request: RetrieveRequest) -> tuple[ChunkResult, ...]: ...

    async def free(self, request: FreeRequest) -> int: ...

    async def end_request(self, engine_id: str, request_id: str) -> Ended: ...

    async def fence(self, engine_id: str, call_ids: Sequence[int]) -> None: ...

    def read_chunks(self, request: ReadChunksRequest) -> AsyncIterator[ReadChunksAnswer]:
        """Closing the iterator (``aclose``) ends the stream."""
        ...

    async def write_chunks(
        self, request: WriteChunksRequest, parts: AsyncIterator[ChunkPart]
    ) -> tuple[ChunkResult, ...]: ...

    def watch(self, request: WatchRequest) -> AsyncIterator[WatchEvent]:
        """Closing the iterator (``aclose``) ends the stream."""
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

    async def get_status(self) -> ServerStatus: ...

    async def list_engines(self) -> tuple[EngineStatus, ...]: ...

    async def list_spaces(self) -> tuple[SpaceStatus, ...]: ...

    async def clear(self, target: ClearTarget) -> Cleared: ...

    async def bump_generation(self, *, model: str = "", space_base: bytes = b"") -> Cleared: ...

    async def pin(self, space: SpaceRef, content: Content, ttl_ms: int) -> Held: ...

    async def warm(self, space: SpaceRef, content: Content, wait_ms: int) -> Warmed: ...

    async def inspect(self, space: SpaceRef, content: Content) -> Inspection: ...

    def record_trace(self) -> AsyncIterator[TracedCalls]:
        """Begins with the first ``anext``; closing the iterator (``aclose``) ends it."""
        ...

    async def unpin(self, pin_id: bytes) -> int: ...

    async def set_quota(self, cache_salt: str, size_bytes: int | None) -> Quota: ...

    async def get_quota(self, cache_salt: str) -> Quota: ...

    async def set_write_policy(self, model: str, policy: WritePolicy | None) -> WritePolicy: ...

    async def drain_engine(self, engine: str, wait_ms: int = 0) -> bool: ...
