# SPDX-License-Identifier: Apache-2.0
"""Who may do what: the file of tenants. docs/security.md says how it is written.

Tokens are there as hashes only. They are made of 256 random bits (`kvgrpc token`), so a plain SHA-256 is enough, and
looking its value up tells nothing of a token by its time.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvgrpc.config.values import parse_size
from kvgrpc.service.calls import ADMIN_SERVICE, CACHE_SERVICE, ENGINE_SERVICE, RULES

HASH_PREFIX = "sha256:"
_READS = ("GetStatus", "ListEngines", "ListSpaces", "Inspect")
SEES_ALL = f"/{ADMIN_SERVICE}/ListSpaces"
"""Who may call this may watch every salt."""
_WATCH = f"/{CACHE_SERVICE}/Watch"

ROLES: dict[str, frozenset[str]] = {
    "engine": frozenset(path for path in RULES if path.startswith((f"/{CACHE_SERVICE}/", f"/{ENGINE_SERVICE}/"))),
    "viewer": frozenset((*(f"/{ADMIN_SERVICE}/{name}" for name in _READS), _WATCH)),
    "admin": frozenset((*(path for path in RULES if path.startswith(f"/{ADMIN_SERVICE}/")), _WATCH)),
}
"""What a word in ``may`` allows; any single method can be named as ``KvCacheService/Lookup``, too."""


class AccessError(Exception):
    """The file cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Somebody with a token, a certificate, or the Unix socket."""

    name: str
    methods: frozenset[str]
    quotas: Mapping[str, int | None]
    """Every salt that it may name; the most bytes under it, None = no quota."""
    clients: int


@dataclass(frozen=True, slots=True)
class Access:
    """Everybody who may call. ``socket`` is who calls over the Unix socket without a token."""

    by_token: Mapping[str, Tenant]
    by_certificate: Mapping[str, Tenant]
    socket: Tenant | None

    def quotas(self) -> dict[str, int | None]:
        """Of all salts."""
        tenants = [*self.by_token.values(), *self.by_certificate.values(), *([self.socket] if self.socket else [])]
        return {salt: size_bytes for tenant in tenants for salt, size_bytes in tenant.quotas.items()}


def _checked_hash(text: str) -> str:
    if not re.fullmatch(f"{HASH_PREFIX}[0-9a-f]{{64}}", text):
        raise ValueError(f"not what kvgrpc token prints for this file: {HASH_PREFIX} and 64 digits")
    return text


_Quota = Annotated[int, BeforeValidator(parse_size), Field(gt=0, lt=1 << 63)] | None
_Hash = Annotated[str, AfterValidator(_checked_hash)]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,32}$")]
_Text = Annotated[str, Field(min_length=1)]


class _TenantForm(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tokens: list[_Hash] = []
    certificates: list[_Text] = []
    salts: dict[str, _Quota] = {}
    may: list[str] = ["engine"]
    clients: Annotated[int, Field(gt=0)] = 256


class _FileForm(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tenants: dict[_Name, _TenantForm]
    socket: str = ""


def token_hash(token: str) -> str:
    """What stands for a token in the file."""
    return HASH_PREFIX + hashlib.sha256(token.encode()).hexdigest()


def read_access(path: Path) -> Access:
    """AccessError says what is wrong with the file, and never shows what is in it."""
    try:
        form = _FileForm.model_validate(json.loads(path.read_bytes()))
    except OSError as error:
        raise AccessError(f"--access {path}: {error.strerror}") from None
    except RecursionError:
        raise AccessError(f"--access {path}: it is nested too deeply") from None
    except ValueError as error:
        raise AccessError(f"--access {path}: {_problem(error)}") from None
    try:
        return _access(form)
    except ValueError as error:
        raise AccessError(f"--access {path}: {error}") from None


_SENTENCES = {
    "model_type": "must be an object, as {...}",
    "dict_type": "must be an object, as {...}",
    "list_type": "must be a list, as [...]",
    "string_type": "must be a text",
    "missing": "is missing",
    "extra_forbidden": "is no field of this file",
}


def _problem(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        first: Any = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        if first["type"] in _SENTENCES:
            return f"{place or 'all of it'} {_SENTENCES[first['type']]}"
        return f"{place}: {str(first['msg']).removeprefix('Value error, ')}"
    place = f" from line {error.lineno}, column {error.colno} on" if isinstance(error, json.JSONDecodeError) else ""
    return f"it is no JSON{place}"


def _access(form: _FileForm) -> Access:
    by_token: dict[str, Tenant] = {}
    by_certificate: dict[str, Tenant] = {}
    tenants: dict[str, Tenant] = {}
    quotas: dict[str, int | None] = {}
    for name, one in form.tenants.items():
        methods = frozenset(path for word in one.may for path in _methods(name, word))
        tenant = tenants[name] = Tenant(name, methods, dict(one.salts), one.clients)
        for proofs, owned, kind in ((by_token, one.tokens, "token"), (by_certificate, one.certificates, "certificate")):
            for proof in owned:
                if proof in proofs:
                    raise ValueError(f"tenants {proofs[proof].name} and {name} have one {kind}")
                proofs[proof] = tenant
        for salt, size_bytes in one.salts.items():
            if quotas.setdefault(salt, size_bytes) != size_bytes:
                raise ValueError(f"tenant {name} has another quota for a salt that it shares; a salt has one quota")
    if form.socket and form.socket not in tenants:
        raise ValueError(f"socket names {form.socket}, which is no tenant")
    return Access(by_token, by_certificate, tenants.get(form.socket))


def _methods(tenant: str, word: str) -> frozenset[str]:
    path = f"/kvgrpc.v1.{word}"
    if word in ROLES:
        return ROLES[word]
    if path not in RULES:
        raise ValueError(f"tenant {tenant} may {word!r}, which is neither {', '.join(ROLES)} nor Service/Method")
    return frozenset((path,))
