# SPDX-License-Identifier: Apache-2.0
"""Lets calls in by who makes them, and shows each tenant a cache of its own salts, clients and engines.

A tenant's client ids and engine ids are other names inside than another tenant's, so none can take, guess or block
those of another. Salts keep data apart. Everything belongs to the server's event loop.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvgrpc import api
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import ChunkResult, Ended, LookupAnswer, PrefetchStatus, Role, SpaceRef
from kvgrpc.service.access import SEES_ALL, Access, AccessError, Tenant, read_access, token_hash
from kvgrpc.service.calls import Call
from kvgrpc.service.servicer import ClientFor
from kvgrpc.telemetry.log import logger

LOOK_S = 1.0
"""How long a changed file may go unseen."""

BEARER = "bearer "
TENANT: ContextVar[Tenant] = ContextVar("kvgrpc_tenant")
"""Whose call the running coroutine answers."""

SetQuotas = Callable[[dict[str, int | None]], None]
log = logger("service")


class TenantSessions:
    """Which clients of each tenant have a session: their stream is open, or may be taken up again for ``grace_s``."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._streams: dict[str, Counter[str]] = {}
        self._kept_until_s: dict[str, dict[str, float]] = {}

    def begin(self, tenant: Tenant, client_id: str) -> None:
        """A stream of the client opens. Refuses: CLIENT_LIMIT."""
        streams, kept = self._streams.setdefault(tenant.name, Counter()), self._kept_until_s.get(tenant.name, {})
        now_s = time.monotonic()
        for over in [one for one, until_s in kept.items() if until_s <= now_s]:
            del kept[over]
        if client_id not in streams and client_id not in kept and len({*streams, *kept}) >= tenant.clients:
            text = f"tenant {tenant.name} has {tenant.clients} clients attached, its limit"
            raise Refusal(Reason.CLIENT_LIMIT, text, retry_after_ms=1000, resource="clients")
        streams[client_id] += 1

    def end(self, tenant: Tenant, client_id: str) -> None:
        """A stream of the client has ended."""
        streams = self._streams[tenant.name]
        streams[client_id] -= 1
        self._streams[tenant.name] = +streams
        self._kept_until_s.setdefault(tenant.name, {})[client_id] = time.monotonic() + self._grace_s


class Admission:
    """Knows who calls. ``set_quotas`` is told the quotas of all salts, now and whenever the file has changed;
    ``grace_s``: how long a broken session may be taken up again."""

    def __init__(self, path: Path, set_quotas: SetQuotas, grace_s: float) -> None:
        self._path = path
        self._set_quotas = set_quotas
        self._access: Access = read_access(path)
        self._seen = self._look()
        self._next_look_s = 0.0
        self._sessions = TenantSessions(grace_s)
        set_quotas(self._access.quotas())

    def check_quotas(self, flags: Mapping[str, int]) -> None:
        """AccessError for a salt that has one quota by --quota and another in the file, which would be the one."""
        for salt, size_bytes in self._access.quotas().items():
            if flags.get(salt, size_bytes) != size_bytes:
                text = f"it says another quota for the salt {salt!r} than --quota does; say it there alone"
                raise AccessError(f"--access {self._path}: {text}")

    def _look(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _read_again(self) -> None:
        seen = self._look()
        if seen == self._seen:
            return
        self._seen = seen
        before = self._access.quotas()
        try:
            self._access = read_access(self._path)
        except AccessError as error:
            log.error("the file of tenants was not taken, the one before stays", problem=str(error))
            return
        self._set_quotas({**dict.fromkeys(before), **self._access.quotas()})
        log.info("the file of tenants was read again")

    def admit(self, call: Call, context: Any) -> None:
        """Finds the tenant and lets the call in, or raises UNAUTHENTICATED or NOT_ALLOWED. Also for each message of a
        stream, which ends where its tenant may use other salts than when it began."""
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_S
            self._read_again()
        tenant = self._tenant(call, context)
        if call.method not in tenant.methods:
            text = f"tenant {tenant.name} may not call {call.method.removeprefix('/kvgrpc.v1.')}"
            raise Refusal(Reason.NOT_ALLOWED, text)
        began = TENANT.get(tenant)
        if (began.name, began.quotas.keys()) != (tenant.name, tenant.quotas.keys()):
            raise Refusal(Reason.NOT_ALLOWED, f"the salts of tenant {began.name} have changed: begin the stream anew")
        TENANT.set(tenant)

    def _tenant(self, call: Call, context: Any) -> Tenant:
        access = self._access
        if call.authorization:
            found = None
            if call.authorization[: len(BEARER)].lower() == BEARER:
                found = access.by_token.get(token_hash(call.authorization[len(BEARER) :].strip()))
            if found is None:  # and no other proof is tried: whoever sends a token means it
                raise Refusal(Reason.UNAUTHENTICATED, "the token is not known here", field="authorization")
            return found
        for name in _names(context.auth_context()) if access.by_certificate else ():
            if name in access.by_certificate:
                return access.by_certificate[name]
        if access.socket is not None and context.peer().startswith("unix:"):
            return access.socket
        text = "send a token (metadata authorization: Bearer TOKEN), or use a certificate that a tenant has"
        raise Refusal(Reason.UNAUTHENTICATED, text, field="authorization")

    def bound(self, client_for: ClientFor) -> ClientFor:
        """The cache as the calling tenant's clients see it."""

        def client(client_id: str) -> api.CacheApi:
            tenant = TENANT.get()
            cache = client_for(inside(tenant, client_id) if client_id else "")
            return TenantCache(cache, tenant, client_id, self._sessions)

        return client


def _names(auth: dict[str, list[bytes]]) -> list[str]:
    """Names in the peer's certificate, which gRPC has checked against the CA."""
    keys = ("x509_subject_alternative_name", "x509_common_name")
    return [name.decode(errors="replace") for key in keys for name in auth.get(key, ())]


def inside(tenant: Tenant, name: str) -> str:
    """A tenant's name for a client or engine, as the cache knows it; its names have no slash."""
    return f"{tenant.name}/{name}"


class TenantCache:
    """CacheApi of one tenant's client."""

    def __init__(self, cache: api.CacheApi, tenant: Tenant, client_id: str, sessions: TenantSessions) -> None:
        self._cache = cache
        self._tenant = tenant
        self._client_id = client_id
        self._sessions = sessions

    def _own(self, engine_id: str) -> str:
        return inside(self._tenant, engine_id)

    def _check(self, space: SpaceRef) -> None:
        if space.cache_salt not in self._tenant.quotas:
            which = "this salt" if space.cache_salt else "the empty salt"
            text = f"tenant {self._tenant.name} may not use {which}; the file of tenants lists those that it may"
            raise Refusal(Reason.NOT_ALLOWED, text, field="space.cache_salt")

    async def handshake(self, hello: api.Hello) -> api.ServerInfo:
        return await self._cache.handshake(hello)

    async def attach(self, engine_id: str, role: Role, session_id: bytes) -> AsyncIterator[api.AttachEvent]:
        self._sessions.begin(self._tenant, self._client_id)
        events: Any = self._cache.attach(self._own(engine_id), role, session_id)
        try:
            async for event in events:
                yield event
        finally:
            self._sessions.end(self._tenant, self._client_id)
            await events.aclose()

    async def register(self, request: api.RegisterRequest) -> api.RegisterAnswer:
        return await self._cache.register(replace(request, engine_id=self._own(request.engine_id)))

    async def unregister(self, engine_id: str) -> None:
        await self._cache.unregister(self._own(engine_id))

    async def lookup(self, request: api.LookupRequest) -> LookupAnswer:
        self._check(request.space)
        return await self._cache.lookup(replace(request, engine_id=self._own(request.engine_id)))

    async def query(self, engine_id: str, job_id: bytes, wait_ms: int = 0) -> PrefetchStatus:
        return await self._cache.query(self._own(engine_id), job_id, wait_ms)

    async def store(self, request: api.StoreRequest) -> tuple[ChunkResult, ...]:
        self._check(request.space)
        return await self._cache.store(replace(request, engine_id=self._own(request.engine_id)))

    async def retrieve(self, request: api.RetrieveRequest) -> tuple[ChunkResult, ...]:
        return await self._cache.retrieve(replace(request, engine_id=self._own(request.engine_id)))

    async def free(self, request: api.FreeRequest) -> int:
        return await self._cache.free(replace(request, engine_id=self._own(request.engine_id)))

    async def end_request(self, engine_id: str, request_id: str) -> Ended:
        return await self._cache.end_request(self._own(engine_id), request_id)

    async def fence(self, engine_id: str, call_ids: Sequence[int]) -> None:
        await self._cache.fence(self._own(engine_id), call_ids)

    def read_chunks(self, request: api.ReadChunksRequest) -> AsyncIterator[api.ReadChunksAnswer]:
        return self._cache.read_chunks(replace(request, engine_id=self._own(request.engine_id)))

    async def write_chunks(
        self, request: api.WriteChunksRequest, parts: AsyncIterator[api.ChunkPart]
    ) -> tuple[ChunkResult, ...]:
        self._check(request.space)
        return await self._cache.write_chunks(replace(request, engine_id=self._own(request.engine_id)), parts)

    def watch(self, request: api.WatchRequest) -> AsyncIterator[api.WatchEvent]:
        tenant, salts = self._tenant, request.cache_salts
        if SEES_ALL not in tenant.methods:
            for salt in salts or ():
                self._check(SpaceRef(b"", cache_salt=salt))
            request = replace(request, cache_salts=frozenset(tenant.quotas) if salts is None else salts)
        return self._cache.watch(request)
