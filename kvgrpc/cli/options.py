# SPDX-License-Identifier: Apache-2.0
"""Every setting of ``kvgrpc.config`` as an option of a command: one table for flags, variables and their help."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar, get_args

import click
from pydantic.fields import FieldInfo

from kvgrpc.config.settings import Settings
from kvgrpc.config.values import format_size

C = TypeVar("C", bound=Callable[..., Any])

_REPEATED = {"listen", "allow_uid", "quota", "write_policy_of"}


def settings_options(command: C) -> C:
    """Adds an option for each setting; its value stays text (None = not given), so that settings parse it once."""
    for name, field in reversed(Settings.model_fields.items()):
        command = _option(name, field)(command)
    return command


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _option(name: str, field: FieldInfo) -> Callable[[C], C]:
    text = f"{field.description}{_default(name, field.default)}"
    if bool in (field.annotation, *get_args(field.annotation)):
        return click.option(f"{flag(name)}/--no-{flag(name)[2:]}", name, default=None, help=text)
    if name in _REPEATED:
        return click.option(flag(name), name, multiple=True, metavar=_metavar(name), help=text + " (may be repeated)")
    return click.option(flag(name), name, default=None, metavar=_metavar(name), help=text)


def _metavar(name: str) -> str:
    words = {"listen": "HOST:PORT", "quota": "SALT=SIZE", "allow_uid": "UID", "socket": "PATH", "socket_mode": "MODE"}
    words |= {"arena_path": "PATH", "socket_group": "GROUP", "metrics_listen": "[HOST:]PORT", "otlp_endpoint": "URL"}
    words |= {"tls_cert": "FILE", "tls_key": "FILE", "tls_client_ca": "FILE", "access": "FILE"}
    words |= {"health_listen": "[HOST:]PORT"}
    words |= {"disk_path": "PATH", "object_store_url": "URL", "valkey_url": "URL", "valkey_ca": "FILE"}
    words |= {"mooncake_master": "HOST:PORT", "mooncake_protocol": "tcp|rdma", "versions_url": "URL"}
    words |= {"write_policy": "POLICY", "write_policy_of": "MODEL=POLICY"}
    if name in words:
        return words[name]
    last = name.rsplit("_", 1)[-1]
    return {"ms": "MS", "size": "SIZE", "share": "SHARE", "us": "US"}.get(last, "VALUE")


def _default(name: str, default: object) -> str:
    if name == "socket_mode" and isinstance(default, int):
        return f"; default: {default:04o}"
    if name.endswith("_size") and isinstance(default, int):
        return f"; default: {format_size(default)}"
    if isinstance(default, Enum):
        return f"; default: {default.value}"
    if isinstance(default, int | float | str) and not isinstance(default, bool) and default != "":
        return f"; default: {default}"
    return ""
