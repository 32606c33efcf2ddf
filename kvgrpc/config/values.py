# SPDX-License-Identifier: Apache-2.0
"""How settings are written: sizes, lists, modes, quotas, addresses. Parsers raise ``ValueError`` with a plain sentence.

A parser takes what a flag or a variable holds; a value that is no text passes through, to be checked by its type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import ip_address
from typing import cast
from urllib.parse import urlsplit

from kvgrpc.core.types import MIB

GIB = 1 << 30

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": MIB,
    "gib": GIB,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_STORES = ("s3", "gs", "az", "file")
_KEY_STORES = ("valkey", "valkeys", "redis", "rediss")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b|b)?\s*", re.IGNORECASE)


def parse_size(value: object) -> object:
    """``"4GiB"``, ``"512 MiB"``, ``"1.5GB"`` or a number of bytes -> bytes."""
    if not isinstance(value, str):
        return value
    found = _SIZE.fullmatch(value)
    if found is None:
        raise ValueError(f"{value!r} is not a size; write a number and a unit, for example 4GiB or 512MiB")
    size = float(found[1]) * _UNITS[(found[2] or "").lower()]
    if size >= 1 << 63:
        raise ValueError(f"{value[:32]!r} is more than any machine has")
    return int(size)


def format_size(size_bytes: int) -> str:
    """Bytes for people: the largest binary unit that leaves at least 1."""
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", 1 << 10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.4g} {unit}"
    return f"{size_bytes} B"


def split_list(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def parse_mode(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not re.fullmatch("0?[0-7]{1,3}", value):
        raise ValueError(f"{value!r} is not an octal file mode, for example 0660")
    return int(value, 8)


def parse_quotas(value: object) -> object:
    """``("tenant-a=2GiB", ...)`` -> ``{"tenant-a": bytes}``. The last ``=`` divides, so that a salt may hold one."""
    parts = split_list(value)
    if not isinstance(parts, tuple | list):
        return value
    quotas: dict[str, object] = {}
    for part in cast(Iterable[object], parts):
        salt, separator, size = str(part).rpartition("=")
        if not separator:
            raise ValueError(f"{part!r} is not SALT=SIZE")
        if salt in quotas:
            raise ValueError(f"{salt!r} has two quotas")
        quotas[salt] = parse_size(size)
    return quotas


def parse_policies(value: object) -> object:
    """``("llama=second-use", ...)`` -> ``{"llama": "second-use"}``. The last ``=`` divides."""
    parts = split_list(value)
    if not isinstance(parts, tuple | list):
        return value
    policies: dict[str, str] = {}
    for part in cast(Iterable[object], parts):
        model, separator, policy = str(part).rpartition("=")
        if not separator or not model:
            raise ValueError(f"{part!r} is not MODEL=POLICY")
        policies[model] = policy
    return policies


def parse_own_address(value: object) -> object:
    """``"9464"`` or ``"HOST:PORT"`` -> ``"HOST:PORT"``: without a host, of the loopback."""
    if not isinstance(value, str):
        return value
    whole = f"127.0.0.1:{value}" if value.isdecimal() else value
    try:
        split_address(whole)
    except ValueError:
        raise ValueError(f"{value!r} is not PORT or HOST:PORT, for example 9464 or 0.0.0.0:9464") from None
    return whole


def parse_addresses(value: object) -> object:
    """Addresses to listen on; port 0 chooses one."""
    parts = split_list(value)
    given = cast(Iterable[object], parts) if isinstance(parts, tuple | list) else ()
    for part in given:
        split_address(str(part))
    return cast(object, parts)


def parse_collector(value: object) -> object:
    """The base address of a collector, as http://HOST:PORT."""
    if isinstance(value, str) and value and not (re.fullmatch(r"https?://[^/\s]+(/\S*)?", value) and _has_port(value)):
        raise ValueError(f"{value!r} is not the address of a collector, for example http://127.0.0.1:4318")
    return value


def parse_store_url(value: object) -> object:
    """The place of an object store; who may use it is said elsewhere."""
    if not isinstance(value, str):
        return value
    parts = urlsplit(value)
    if parts.scheme not in _STORES or not (parts.netloc or parts.path.strip("/")):
        raise ValueError("not the URL of an object store, for example s3://bucket/prefix or file:///srv/objects")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("keys do not belong into the URL, where others see them; give them in the environment")
    if parts.scheme == "file" and parts.netloc:
        raise ValueError("a file URL has three slashes, for example file:///srv/objects")
    return value.rstrip("/")


def parse_valkey_url(value: object) -> object:
    """SCHEME://HOST[:PORT][/DATABASE]; who may use it is said elsewhere."""
    if not isinstance(value, str):
        return value
    parts = urlsplit(value)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("passwords do not belong into the URL, where others see them; give VALKEY_PASSWORD")
    well = parts.scheme in _KEY_STORES and parts.hostname and re.fullmatch(r"(/\d*)?", parts.path) and _has_port(value)
    if not well:
        raise ValueError(f"{value!r} is not the URL of a Valkey server, for example valkey://127.0.0.1:6379")
    return value.rstrip("/")


def _has_port(url: str) -> bool:
    """Whether the URL's port is one, or left out."""
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


def parse_versions_url(value: object) -> object:
    """Of a Valkey server or of an object store."""
    kept_by_keys = isinstance(value, str) and urlsplit(value).scheme in _KEY_STORES
    return parse_valkey_url(value) if kept_by_keys else parse_store_url(value)


def parse_peer(value: object) -> object:
    """The address of somebody else."""
    if isinstance(value, str) and not split_address(value)[1]:
        raise ValueError(f"{value!r}: nobody is at port 0")
    return value


def split_address(address: str) -> tuple[str, int]:
    """``HOST:PORT`` or ``[V6]:PORT``; ValueError says what is wrong."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT, for example 127.0.0.1:50051")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Only names that cannot mean another interface: a host name other than localhost may resolve to anything."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
