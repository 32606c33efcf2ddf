# SPDX-License-Identifier: Apache-2.0
"""What the server knows of a method before it runs, and of a call while it runs."""

from __future__ import annotations

import secrets
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

CLIENT_ID_KEY = "kvgrpc-client-id"
REQUEST_ID_KEY = "kvgrpc-request-id"
TRACEPARENT_KEY = "traceparent"
AUTHORIZATION_KEY = "authorization"
NAME_MOST = 64
MIB = 1 << 20
UNLIMITED = 1 << 62
"""Only the server's own limit holds."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How calls of one method are treated.

    ``needs_client``: the client id is required. ``copies``: gets the longer default deadline. ``exempt``: has no
    default deadline. ``while_draining``: is answered while the server drains, because it only gives back or reads.
    ``holds_drain``: the drain waits for it. ``limited``: counts towards the limit of running calls, and is refused
    there. ``most_bytes``: its messages are no longer, whatever the server's limit: many small things in one message
    cost far more to read than its bytes.
    """

    needs_client: bool = True
    copies: bool = False
    exempt: bool = False
    while_draining: bool = False
    holds_drain: bool = True
    limited: bool = True
    most_bytes: int = MIB


_OPERATOR = Rule(needs_client=False, limited=False)
_OPERATOR_READS = Rule(needs_client=False, limited=False, while_draining=True, holds_drain=False)

CACHE_SERVICE = "kvgrpc.v1.KvCacheService"
ENGINE_SERVICE = "kvgrpc.v1.EngineService"
ADMIN_SERVICE = "kvgrpc.v1.AdminService"
SERVICES = (CACHE_SERVICE, ENGINE_SERVICE, ADMIN_SERVICE)

RULES: dict[str, Rule] = {
    f"/{CACHE_SERVICE}/Lookup": Rule(most_bytes=UNLIMITED),
    f"/{CACHE_SERVICE}/QueryPrefetchStatus": Rule(while_draining=True, holds_drain=False),
    f"/{CACHE_SERVICE}/Store": Rule(copies=True, most_bytes=UNLIMITED),
    f"/{CACHE_SERVICE}/Retrieve": Rule(copies=True, most_bytes=UNLIMITED),
    f"/{CACHE_SERVICE}/FreeLookupLocks": Rule(while_draining=True),
    f"/{CACHE_SERVICE}/EndRequest": Rule(while_draining=True),
    f"/{CACHE_SERVICE}/Fence": Rule(copies=True, while_draining=True),
    f"/{CACHE_SERVICE}/ReadChunks": Rule(copies=True),
    f"/{CACHE_SERVICE}/WriteChunks": Rule(copies=True, most_bytes=UNLIMITED),
    f"/{CACHE_SERVICE}/Watch": Rule(needs_client=False, exempt=True, holds_drain=False, limited=False),
    f"/{ENGINE_SERVICE}/Handshake": Rule(needs_client=False),
    f"/{ENGINE_SERVICE}/Attach": Rule(exempt=True, holds_drain=False, limited=False),
    f"/{ENGINE_SERVICE}/RegisterKvCache": Rule(copies=True, most_bytes=4 * MIB),
    f"/{ENGINE_SERVICE}/UnregisterKvCache": Rule(copies=True, while_draining=True),
    f"/{ADMIN_SERVICE}/GetStatus": _OPERATOR_READS,
    f"/{ADMIN_SERVICE}/ListEngines": _OPERATOR_READS,
    f"/{ADMIN_SERVICE}/ListSpaces": _OPERATOR_READS,
    f"/{ADMIN_SERVICE}/Clear": _OPERATOR,
    f"/{ADMIN_SERVICE}/BumpGeneration": _OPERATOR,
    f"/{ADMIN_SERVICE}/Pin": Rule(needs_client=False, most_bytes=UNLIMITED),
    f"/{ADMIN_SERVICE}/Warm": Rule(needs_client=False, copies=True, most_bytes=UNLIMITED, holds_drain=False),
    f"/{ADMIN_SERVICE}/Inspect": Rule(needs_client=False, copies=True, most_bytes=UNLIMITED, holds_drain=False),
    f"/{ADMIN_SERVICE}/RecordTrace": Rule(needs_client=False, exempt=True, holds_drain=False, limited=False),
    f"/{ADMIN_SERVICE}/Unpin": _OPERATOR,
    f"/{ADMIN_SERVICE}/SetQuota": _OPERATOR,
    f"/{ADMIN_SERVICE}/GetQuota": _OPERATOR_READS,
    f"/{ADMIN_SERVICE}/SetWritePolicy": _OPERATOR,
    f"/{ADMIN_SERVICE}/DrainEngine": Rule(needs_client=False, limited=False, copies=True, holds_drain=False),
}


def is_name(value: str) -> bool:
    """1 to 64 printable ASCII characters without spaces."""
    return 0 < len(value) <= NAME_MOST and value.isascii() and value.isprintable() and " " not in value


@dataclass(frozen=True, slots=True)
class Call:
    """One call. ``client_id``, ``traceparent`` and ``authorization`` are the peer's, unchecked; ``request_id`` is the
    peer's if well formed, else made here."""

    method: str
    rule: Rule
    client_id: str
    request_id: str
    traceparent: str = ""
    authorization: str = field(default="", repr=False)


def read_call(method: str, rule: Rule, metadata: Iterable[tuple[str, str | bytes]]) -> Call:
    client_id = request_id = traceparent = authorization = ""
    for key, value in metadata:
        if key == CLIENT_ID_KEY:
            client_id = value if isinstance(value, str) else ""
        elif key == REQUEST_ID_KEY:
            request_id = value if isinstance(value, str) and is_name(value) else ""
        elif key == TRACEPARENT_KEY:
            traceparent = value if isinstance(value, str) else ""
        elif key == AUTHORIZATION_KEY:
            authorization = value if isinstance(value, str) else ""
    return Call(method, rule, client_id, request_id or secrets.token_hex(8), traceparent, authorization)


CURRENT: ContextVar[Call] = ContextVar("kvgrpc_call")
"""The call that the running coroutine answers."""
