# SPDX-License-Identifier: Apache-2.0
"""Clients of a server: plain ones (AioClient, Client), and what an engine's scheduler and workers use.

Names are loaded when they are first asked for, so that ``import kvgrpc.client`` costs next to nothing. Import it before
gRPC (fork.py says why).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgrpc.client.address import Address, parse_address
    from kvgrpc.client.aio import AioClient
    from kvgrpc.client.breaker import BreakerSettings
    from kvgrpc.client.channel import ChannelOptions
    from kvgrpc.client.copies import CopyFuture
    from kvgrpc.client.fork import ForkedProcessError
    from kvgrpc.client.lookups import LookupBounds, LookupResult
    from kvgrpc.client.parallel import ParallelStrategy
    from kvgrpc.client.scheduler import SchedulerClient, SchedulerOptions
    from kvgrpc.client.sync import Client
    from kvgrpc.client.worker import WorkerClient, WorkerOptions

import_module(f"{__name__}.fork")  # for its effect, which must come before gRPC

_PLACES = {
    "Address": "address",
    "AioClient": "aio",
    "BreakerSettings": "breaker",
    "ChannelOptions": "channel",
    "Client": "sync",
    "CopyFuture": "copies",
    "ForkedProcessError": "fork",
    "LookupBounds": "lookups",
    "LookupResult": "lookups",
    "ParallelStrategy": "parallel",
    "SchedulerClient": "scheduler",
    "SchedulerOptions": "scheduler",
    "WorkerClient": "worker",
    "WorkerOptions": "worker",
    "parse_address": "address",
}

__all__ = [
    "Address",
    "AioClient",
    "BreakerSettings",
    "ChannelOptions",
    "Client",
    "CopyFuture",
    "ForkedProcessError",
    "LookupBounds",
    "LookupResult",
    "ParallelStrategy",
    "SchedulerClient",
    "SchedulerOptions",
    "WorkerClient",
    "WorkerOptions",
    "parse_address",
]


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
