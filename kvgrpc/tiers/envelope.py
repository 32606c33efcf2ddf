# SPDX-License-Identifier: Apache-2.0
"""The envelope of objects in tiers: a header that says whose bytes follow, so that nothing else passes for them.

Header, 4,096 bytes, so that the payload of a file begins where direct reads can; little-endian: magic (8), version
(u32), length of the name (u32), payload bytes (u64), checksum (16), name (80, padded with zeros), length of a text
(u32), the text: what the name stands for (space, key, KV rank, layout), in JSON, for people and tools; zeros. The
checksum is XXH3-128 over the header with a zero checksum and the payload: every bit is covered. It is against
accidents; who may write to a tier can write anything.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from xxhash import xxh3_128

from kvgrpc.core.types import ObjectName
from kvgrpc.tiers.base import FaultReason, OtherLength, TierFault

MAX_NAME_BYTES = 80
HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sIIQ16s80sI")
_CHECKSUM_AT = 24
_MAGIC = b"kvgrpcO\n"
_VERSION = 2
_NO_CHECKSUM = bytes(16)
_ABOUT_MOST = HEADER_BYTES - _HEADER.size

Bytes = bytes | bytearray | memoryview


class Sealing:
    """Makes the header of an object whose payload passes by in parts."""

    def __init__(self, object: ObjectName) -> None:
        self._header = _header(object)
        self._state = xxh3_128(self._header)

    def update(self, part: memoryview) -> None:
        """The next bytes."""
        self._state.update(part)

    def header(self) -> bytes:
        """The header, after all bytes."""
        at = _CHECKSUM_AT
        return self._header[:at] + self._state.digest() + self._header[at + 16 :]


class Opening:
    """Checks an object whose payload passes by in parts. Raises TierFault: SHORT, FOREIGN."""

    def __init__(self, object: ObjectName, header: Bytes) -> None:
        self._name = object.name
        if len(header) < HEADER_BYTES:
            raise TierFault(FaultReason.SHORT, f"{object.name}: {len(header)} bytes are less than a header")
        magic, version, length, size_bytes, self._checksum, name, _ = _HEADER.unpack_from(header)
        if magic != _MAGIC or version != _VERSION:
            raise TierFault(FaultReason.FOREIGN, f"{object.name}: not an object of version {_VERSION}")
        if name[:length] != object.name.encode():
            raise TierFault(FaultReason.FOREIGN, f"{object.name}: another object's bytes")
        if size_bytes != object.size_bytes:
            sentence = f"{object.name}: an object of {size_bytes} bytes where {object.size_bytes} were expected"
            raise OtherLength(sentence)
        at = _CHECKSUM_AT
        self._state = xxh3_128(b"".join((header[:at], _NO_CHECKSUM, header[at + 16 : HEADER_BYTES])))

    def update(self, part: memoryview) -> None:
        """The next bytes."""
        self._state.update(part)

    def check(self) -> None:
        """Whether all of these are the bytes that were sealed. Raises TierFault: CORRUPT."""
        if self._state.digest() != self._checksum:
            raise TierFault(FaultReason.CORRUPT, f"{self._name}: the checksum does not fit the bytes")


def seal(object: ObjectName, data: Sequence[memoryview]) -> bytes:
    """The header for these bytes, whose lengths add up to ``object.size_bytes``."""
    assert sum(map(len, data)) == object.size_bytes, "an object's bytes do not have its length"
    sealing = Sealing(object)
    for part in data:
        sealing.update(part)
    return sealing.header()


def check_header(object: ObjectName, header: Bytes) -> None:
    """Whether this begins the object. Raises TierFault: SHORT, FOREIGN."""
    Opening(object, header)


def check_payload(object: ObjectName, header: Bytes, data: Sequence[memoryview]) -> None:
    """Whether these are the bytes that were sealed. Raises TierFault: SHORT, FOREIGN, CORRUPT."""
    opening = Opening(object, header)
    for part in data:
        opening.update(part)
    opening.check()


def about_of(header: Bytes) -> str:
    """The text of a header that passed; for tools."""
    length = _HEADER.unpack_from(header)[6]
    return bytes(header[_HEADER.size : _HEADER.size + length]).decode(errors="replace")


def _header(object: ObjectName) -> bytes:
    name, about = object.name.encode(), object.about.encode()
    assert 1 <= len(name) <= MAX_NAME_BYTES, "an object's name does not fit its header"
    about = about if len(about) <= _ABOUT_MOST else b""
    fields = _HEADER.pack(_MAGIC, _VERSION, len(name), object.size_bytes, _NO_CHECKSUM, name, len(about))
    return (fields + about).ljust(HEADER_BYTES, b"\0")
