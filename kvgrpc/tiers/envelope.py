# SPDX-License-Identifier: Apache-2.0
"""The envelope of objects in tiers: a header that says whose bytes follow, so that nothing else passes for them.

Header, 128 bytes, little-endian: magic (8), version (u32), length of the name (u32), payload bytes (u64), checksum
(16), name (80, padded with zeros), zeros (8). The checksum is BLAKE2b-128 over the header with a zero checksum and
the payload: every bit is covered.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from kvgrpc.core.types import ObjectName
from kvgrpc.tiers.base import FaultReason, TierFault

MAX_NAME_BYTES = 80
_HEADER = struct.Struct("<8sIIQ16s80s8x")
HEADER_BYTES = _HEADER.size
_MAGIC = b"kvgrpcO\n"
_VERSION = 1
_NO_CHECKSUM = bytes(16)


def seal(object: ObjectName, data: Sequence[memoryview]) -> bytes:
    """The header for these bytes, whose lengths add up to ``object.size_bytes``."""
    assert sum(map(len, data)) == object.size_bytes, "an object's bytes do not have its length"
    return _header(object, _checksum(object, data))


def check_header(object: ObjectName, header: bytes | bytearray | memoryview) -> None:
    """Whether this begins the object. Raises TierFault: SHORT, FOREIGN."""
    if len(header) < HEADER_BYTES:
        raise TierFault(FaultReason.SHORT, f"{object.name}: {len(header)} bytes are less than a header")
    magic, version, _, size_bytes, checksum, _ = _HEADER.unpack(header[:HEADER_BYTES])
    if magic != _MAGIC or version != _VERSION:
        raise TierFault(FaultReason.FOREIGN, f"{object.name}: not an object of version {_VERSION}")
    if size_bytes != object.size_bytes:
        sentence = f"{object.name}: an object of {size_bytes} bytes where {object.size_bytes} were expected"
        raise TierFault(FaultReason.FOREIGN, sentence)
    if header[:HEADER_BYTES] != _header(object, checksum):
        raise TierFault(FaultReason.FOREIGN, f"{object.name}: another object's bytes")


def check_payload(object: ObjectName, header: bytes | bytearray | memoryview, data: Sequence[memoryview]) -> None:
    """Whether these are the bytes that were sealed; ``header`` has passed ``check_header``. Raises TierFault:
    CORRUPT.
    """
    if header[:HEADER_BYTES] != seal(object, data):
        raise TierFault(FaultReason.CORRUPT, f"{object.name}: the checksum does not fit the bytes")


def _header(object: ObjectName, checksum: bytes) -> bytes:
    name = object.name.encode()
    assert 1 <= len(name) <= MAX_NAME_BYTES, "an object's name does not fit its header"
    return _HEADER.pack(_MAGIC, _VERSION, len(name), object.size_bytes, checksum, name)


def _checksum(object: ObjectName, data: Sequence[memoryview]) -> bytes:
    state = hashlib.blake2b(_header(object, _NO_CHECKSUM), digest_size=16)
    for part in data:
        state.update(part)
    return state.digest()
