# SPDX-License-Identifier: Apache-2.0
"""The channel to a server on this node: message size, keepalive, reconnects and retries."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import grpc.aio

from kvgrpc.client.address import Address
from kvgrpc.client.credentials import Credentials, default_credentials

MIB = 1 << 20

_RETRIED = {
    "kvgrpc.v1.EngineService": ("Handshake",),
    "kvgrpc.v1.KvCacheService": ("Lookup", "QueryPrefetchStatus", "FreeLookupLocks", "EndRequest", "Fence"),
    "kvgrpc.v1.AdminService": ("GetStatus", "ListEngines", "ListSpaces", "Inspect"),
}
"""Calls whose repetition changes nothing. Store and Retrieve are not among them: after a lost connection their blocks
need a decision that only the caller can take. Clear and its like answer counts that a repetition would falsify."""


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """How to reach a server. Times are seconds.

    ``call_s`` and ``copy_s`` are the deadlines of calls, and of Register, Unregister, Store, Retrieve and Fence.
    ``credentials`` None: those that variables name (``default_credentials``).
    ``retries`` lets gRPC repeat calls that change nothing when the server cannot be reached, for some 200 ms at most.
    """

    call_s: float = 5.0
    copy_s: float = 30.0
    retries: bool = True
    message_bytes: int = 16 * MIB
    reconnect_first_s: float = 0.05
    reconnect_longest_s: float = 0.8
    connect_s: float = 1.0
    keepalive_s: float = 60.0
    keepalive_timeout_s: float = 5.0
    credentials: Credentials | None = None

    def shown(self) -> Credentials:
        """What is shown and trusted."""
        return default_credentials() if self.credentials is None else self.credentials


def channel_arguments(address: Address, options: ChannelOptions) -> list[tuple[str, Any]]:
    """gRPC's channel arguments.

    A node-local server that restarts must be found again within two seconds, so the back-off stays under a second.
    Every client has its own connection. Keepalive only on TCP, where a peer can vanish without a word, and only beside
    calls: more would make a server close the connection (too_many_pings). Its time limit is also TCP_USER_TIMEOUT.
    """
    arguments: list[tuple[str, Any]] = [
        ("grpc.max_send_message_length", options.message_bytes),
        ("grpc.max_receive_message_length", options.message_bytes),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", int(options.reconnect_first_s * 1000)),
        ("grpc.min_reconnect_backoff_ms", int(options.connect_s * 1000)),
        ("grpc.max_reconnect_backoff_ms", int(options.reconnect_longest_s * 1000)),
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.enable_retries", int(options.retries)),
    ]
    if options.retries:
        arguments.append(("grpc.service_config", json.dumps(_service_config())))
    if not address.is_unix:
        arguments += [
            ("grpc.keepalive_time_ms", int(options.keepalive_s * 1000)),
            ("grpc.keepalive_timeout_ms", int(options.keepalive_timeout_s * 1000)),
            ("grpc.keepalive_permit_without_calls", 0),
        ]
    return arguments


def _service_config() -> dict[str, Any]:
    names = [{"service": service, "method": method} for service, methods in _RETRIED.items() for method in methods]
    policy = {
        "maxAttempts": 3,
        "initialBackoff": "0.05s",
        "maxBackoff": "0.2s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    return {"methodConfig": [{"name": names, "retryPolicy": policy}]}


def open_channel(address: Address, options: ChannelOptions) -> grpc.aio.Channel:
    """A channel for the current event loop; it connects at its first call. ValueError for a file that is not there."""
    arguments, shown = channel_arguments(address, options), options.shown()
    if not shown.uses_tls(address):
        return grpc.aio.insecure_channel(address.target, options=arguments)
    if shown.server_name:
        arguments.append(("grpc.ssl_target_name_override", shown.server_name))
    return grpc.aio.secure_channel(address.target, shown.channel_credentials(), options=arguments)
