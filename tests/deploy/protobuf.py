# SPDX-License-Identifier: Apache-2.0
"""The Secrets of helm's releases, which it sends to an API server as protobuf."""

from __future__ import annotations

import base64
from typing import Any

PROTOBUF = b"k8s\0"
"""How such a body begins."""


def _fields(raw: bytes) -> dict[int, list[Any]]:
    """A protobuf message without its schema: values by field number."""
    found: dict[int, list[Any]] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = raw[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(raw):
        number, kind = divmod(varint(), 8)
        value: Any = varint()
        if kind == 2:
            value, at = raw[at : at + value], at + value
        found.setdefault(number, []).append(value)
    return found


def secret(raw: bytes) -> dict[str, Any]:
    """A body that is a Secret: metadata 1 (name 1, labels 11), data 2, type 3, inside the envelope's 2."""
    fields = _fields(_fields(raw[len(PROTOBUF) :])[2][0])
    metadata = _fields(fields[1][0])
    labels = [_fields(pair) for pair in metadata.get(11, [])]
    data = [_fields(pair) for pair in fields.get(2, [])]
    return {
        "metadata": {
            "name": metadata[1][0].decode(),
            "labels": {pair[1][0].decode(): pair[2][0].decode() for pair in labels},
        },
        "data": {pair[1][0].decode(): base64.b64encode(pair[2][0]).decode() for pair in data},
        "type": fields[3][0].decode(),
    }
