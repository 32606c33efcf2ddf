# SPDX-License-Identifier: Apache-2.0
"""Checks of single fields, each refusing with the field's name."""

from __future__ import annotations

from kvgrpc.core.errors import Reason, Refusal

DAY_MS = 86_400_000


def invalid(field: str, message: str) -> Refusal:
    """INVALID_FIELD naming ``field``."""
    return Refusal(Reason.INVALID_FIELD, f"{field} {message}", field=field)


def check_text(value: str, field: str, *, least: int = 0, most: int) -> str:
    """Length in UTF-8 bytes within [least, most]."""
    size = len(value.encode())
    if not least <= size <= most:
        raise invalid(field, f"has {size} bytes; allowed are {least} to {most}")
    return value


def check_bytes(value: bytes, field: str, *sizes: int) -> bytes:
    """Length is one of ``sizes``."""
    if len(value) not in sizes:
        allowed = " or ".join(str(size) for size in sizes)
        raise invalid(field, f"has {len(value)} bytes; it must have {allowed}")
    return value


def check_number(value: int, field: str, least: int, most: int) -> int:
    """Value within [least, most]."""
    if not least <= value <= most:
        raise invalid(field, f"is {value}; allowed are {least} to {most}")
    return value
