# SPDX-License-Identifier: Apache-2.0
"""Packed forms: token ids as raw memory, without a Python loop and without copies.

``TokenIds.ids`` is a packed ``repeated fixed32``: on the wire it is one length-delimited field whose payload is the ids
as little-endian memory, inside the fields ``Content.tokens`` and ``content`` of a request. So the ids of a prompt can
be put behind a serialised request, and be cut out of one, by their tags and lengths alone. (Protobuf's own messages
copy them five times on their way, and reading ``ids`` one by one takes 6 to 25 ms for 128K tokens.)
"""

from __future__ import annotations

from kvgrpc.v1 import common_pb2

SPLIT_BYTES = 4096
"""Shorter messages are left to protobuf: that is faster."""
_TAG = 0x0A  # field 1, length-delimited: Content.tokens and TokenIds.ids
_VARINT_BYTES = 5  # of a tag or a length
_NUMBER_BYTES = 10  # of any other number
_FIELDS_MOST = 256
"""Looking at one takes a microsecond of the event loop; clients of ours send less than half as many."""


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(raw: bytes, at: int, most: int = _VARINT_BYTES) -> tuple[int, int]:
    """(value, first byte behind it). Raises IndexError where the message ends, or the number has more bytes."""
    value = shift = 0
    for place in range(at, at + most):
        byte = raw[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place + 1
        shift += 7
    raise IndexError


def encode_token_ids(data: bytes | bytearray | memoryview) -> common_pb2.TokenIds:
    """TokenIds from raw u32le memory; ``len(data)`` must be a multiple of 4."""
    if not data:
        return common_pb2.TokenIds()
    return common_pb2.TokenIds.FromString(b"".join(_ids_field(data)))


def decode_token_ids(message: common_pb2.TokenIds) -> memoryview:
    """Raw u32le memory of TokenIds. Unknown fields of newer clients are ignored."""
    if not message.ids:
        return memoryview(b"")
    raw = message.SerializeToString()
    assert raw[0] == _TAG, "protobuf serialises known fields first, in order, and this one packed"
    length, at = _read_varint(raw, 1)
    return memoryview(raw)[at : at + length]


def _ids_field(data: bytes | bytearray | memoryview) -> tuple[bytes, bytes | bytearray | memoryview]:
    if len(data) % 4:
        raise ValueError("token memory must be 4 bytes a token")
    return bytes((_TAG,)) + _varint(len(data)), data


def join_token_ids(message: bytes, field: int, data: bytes | bytearray | memoryview) -> bytes:
    """A serialised message without ``field``, and that field behind it: Content of the tokens in ``data`` (u32le)."""
    head, _ = _ids_field(data)
    tokens = bytes((_TAG,)) + _varint(len(head) + len(data))
    content = bytes((field << 3 | 2,)) + _varint(len(tokens) + len(head) + len(data))
    return b"".join((message, content, tokens, head, data))


def split_token_ids(raw: bytes, field: int) -> tuple[bytes, memoryview] | None:
    """(the message with no tokens in the Content of ``field``, raw u32le memory of its tokens).

    None for a message that is short, broken, of very many fields, or where Content is not there exactly once with
    nothing but packed ids in it: protobuf reads those. What is left of the message has not been checked.
    """
    if len(raw) < SPLIT_BYTES:
        return None
    try:
        begin, inner, end = _only_field(raw, field)
        ids = _whole_field(raw, _whole_field(raw, inner, end), end)
    except (IndexError, ValueError):
        return None
    if (end - ids) % 4:
        return None
    empty = bytes((field << 3 | 2, 2, _TAG, 0))
    return raw[:begin] + empty + raw[end:], memoryview(raw)[ids:end]


def _whole_field(raw: bytes, at: int, end: int) -> int:
    """Where the payload of field 1 begins, which fills raw[at:end]. Raises ValueError for anything else."""
    length, inner = _read_varint(raw, at + 1)
    if raw[at] != _TAG or inner + length != end:
        raise ValueError
    return inner


def _only_field(raw: bytes, field: int) -> tuple[int, int, int]:
    """(begin, begin of the payload, end) of a length-delimited field. Raises IndexError or ValueError if it is not
    there exactly once, or the message is broken."""
    found: tuple[int, int, int] | None = None
    at = 0
    for _ in range(_FIELDS_MOST):
        if at >= len(raw):
            break
        begin = at
        tag, at = _read_varint(raw, at)
        length = 0
        if tag & 7 == 2:
            length, at = _read_varint(raw, at)
        elif tag & 7 == 0:
            _, at = _read_varint(raw, at, _NUMBER_BYTES)
        else:  # none of our requests has other types
            raise ValueError
        if tag >> 3 == field:
            if found is not None or tag & 7 != 2:
                raise ValueError
            found = begin, at, at + length
        at += length
    if found is None or at != len(raw):
        raise ValueError
    return found
