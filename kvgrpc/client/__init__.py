# SPDX-License-Identifier: Apache-2.0
"""All that a Python program needs of kvgrpc: the clients, and the words of their calls. docs/python.md is the manual.

SchedulerClient and WorkerClient are for engines; AioClient and Client are the bare protocol, also for operators.

Names are loaded when they are first asked for, so that ``import kvgrpc.client`` costs next to nothing. Import it before
gRPC (fork.py says why).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgrpc.api import (
        OWN_HASH_ALGORITHM,
        AttachEvent,
        BlockForm,
        ClearTarget,
        Content,
        CudaIpcMemory,
        ExecutorStatus,
        FreeRequest,
        GroupKind,
        Hashes,
        Hello,
        KvGroup,
        Layout,
        Limits,
        LookupRequest,
        Memory,
        RegisterAnswer,
        RegisterRequest,
        RetrieveRequest,
        Runs,
        ServerInfo,
        ServerStatus,
        SharedMemory,
        StoreRequest,
        TierStatus,
        Tokens,
        WriteChunksRequest,
    )
    from kvgrpc.breaker import BreakerSettings
    from kvgrpc.client.address import Address, parse_address
    from kvgrpc.client.aio import AioClient
    from kvgrpc.client.channel import ChannelOptions
    from kvgrpc.client.copies import CopyFuture, Ready
    from kvgrpc.client.credentials import Credentials, default_credentials
    from kvgrpc.client.default import default_address
    from kvgrpc.client.device import KvForm, NotShareableError, kv_groups, kv_layout, register_kv_caches
    from kvgrpc.client.fork import ForkedProcessError
    from kvgrpc.client.lookups import LookupBounds, LookupResult
    from kvgrpc.client.parallel import ParallelStrategy
    from kvgrpc.client.scheduler import SchedulerClient, SchedulerOptions
    from kvgrpc.client.sync import Client
    from kvgrpc.client.watcher import Watcher
    from kvgrpc.client.worker import WorkerClient, WorkerOptions
    from kvgrpc.config.places import UntrustedSocketError
    from kvgrpc.core.errors import Reason, Refusal
    from kvgrpc.core.inspection import InspectedChunk, Keeper
    from kvgrpc.core.types import (
        NULL_BLOCK,
        ArenaStatus,
        ChunkOutcome,
        ChunkResult,
        Cleared,
        ClientStatus,
        Ended,
        EngineStatus,
        Held,
        LookupAnswer,
        ObjectForm,
        Policy,
        PrefetchStatus,
        Priority,
        Quota,
        Reader,
        Role,
        SpaceIdentity,
        SpaceRef,
        SpaceStatus,
        TokenRange,
        Warmed,
        WritePolicy,
    )
    from kvgrpc.operators import CallKind, Inspection, RestartStatus, TracedCall, TracedCalls
    from kvgrpc.streams import ChunkPart, ReadChunksRequest, WatchEvent, WatchKind, WatchRequest
    from kvgrpc.transfer.layout import object_forms, object_order, stored_form

import_module(f"{__name__}.fork")  # for its effect, which must come before gRPC

_NAMES = {
    "kvgrpc.api": (
        "AttachEvent BlockForm ClearTarget Content CudaIpcMemory ExecutorStatus FreeRequest GroupKind Hashes Hello "
        "KvGroup Layout Limits LookupRequest Memory OWN_HASH_ALGORITHM RegisterAnswer RegisterRequest "
        "RetrieveRequest Runs ServerInfo ServerStatus SharedMemory StoreRequest TierStatus Tokens WriteChunksRequest"
    ),
    "kvgrpc.client.address": "Address parse_address",
    "kvgrpc.client.aio": "AioClient",
    "kvgrpc.breaker": "BreakerSettings",
    "kvgrpc.client.channel": "ChannelOptions",
    "kvgrpc.client.copies": "CopyFuture Ready",
    "kvgrpc.client.credentials": "Credentials default_credentials",
    "kvgrpc.client.default": "default_address",
    "kvgrpc.client.device": "KvForm NotShareableError kv_groups kv_layout register_kv_caches",
    "kvgrpc.client.fork": "ForkedProcessError",
    "kvgrpc.client.lookups": "LookupBounds LookupResult",
    "kvgrpc.client.parallel": "ParallelStrategy",
    "kvgrpc.client.scheduler": "SchedulerClient SchedulerOptions",
    "kvgrpc.client.sync": "Client",
    "kvgrpc.client.watcher": "Watcher",
    "kvgrpc.client.worker": "WorkerClient WorkerOptions",
    "kvgrpc.config.places": "UntrustedSocketError",
    "kvgrpc.core.errors": "Reason Refusal",
    "kvgrpc.core.inspection": "InspectedChunk Keeper",
    "kvgrpc.core.types": (
        "ArenaStatus ChunkOutcome ChunkResult Cleared ClientStatus Ended EngineStatus Held LookupAnswer NULL_BLOCK "
        "ObjectForm Policy PrefetchStatus Priority Quota Reader Role SpaceIdentity SpaceRef SpaceStatus TokenRange "
        "Warmed WritePolicy"
    ),
    "kvgrpc.operators": "CallKind Inspection RestartStatus TracedCall TracedCalls",
    "kvgrpc.streams": "ChunkPart ReadChunksRequest WatchEvent WatchKind WatchRequest",
    "kvgrpc.transfer.layout": "object_forms object_order stored_form",
}
_PLACES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "NULL_BLOCK",
    "OWN_HASH_ALGORITHM",
    "Address",
    "AioClient",
    "ArenaStatus",
    "AttachEvent",
    "BlockForm",
    "BreakerSettings",
    "CallKind",
    "ChannelOptions",
    "ChunkOutcome",
    "ChunkPart",
    "ChunkResult",
    "ClearTarget",
    "Cleared",
    "Client",
    "ClientStatus",
    "Content",
    "CopyFuture",
    "Credentials",
    "CudaIpcMemory",
    "Ended",
    "EngineStatus",
    "ExecutorStatus",
    "ForkedProcessError",
    "FreeRequest",
    "GroupKind",
    "Hashes",
    "Held",
    "Hello",
    "InspectedChunk",
    "Inspection",
    "Keeper",
    "KvForm",
    "KvGroup",
    "Layout",
    "Limits",
    "LookupAnswer",
    "LookupBounds",
    "LookupRequest",
    "LookupResult",
    "Memory",
    "NotShareableError",
    "ObjectForm",
    "ParallelStrategy",
    "Policy",
    "PrefetchStatus",
    "Priority",
    "Quota",
    "ReadChunksRequest",
    "Reader",
    "Ready",
    "Reason",
    "Refusal",
    "RegisterAnswer",
    "RegisterRequest",
    "RestartStatus",
    "RetrieveRequest",
    "Role",
    "Runs",
    "SchedulerClient",
    "SchedulerOptions",
    "ServerInfo",
    "ServerStatus",
    "SharedMemory",
    "SpaceIdentity",
    "SpaceRef",
    "SpaceStatus",
    "StoreRequest",
    "TierStatus",
    "TokenRange",
    "Tokens",
    "TracedCall",
    "TracedCalls",
    "UntrustedSocketError",
    "Warmed",
    "WatchEvent",
    "WatchKind",
    "WatchRequest",
    "Watcher",
    "WorkerClient",
    "WorkerOptions",
    "WriteChunksRequest",
    "WritePolicy",
    "default_address",
    "default_credentials",
    "kv_groups",
    "kv_layout",
    "object_forms",
    "object_order",
    "parse_address",
    "register_kv_caches",
    "stored_form",
]


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
