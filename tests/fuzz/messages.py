# SPDX-License-Identifier: Apache-2.0
"""Spoils messages: values at the edges of every field, and bytes that are no message any more. A seed repeats it."""

from __future__ import annotations

from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

TEXTS = (
    "",
    "\0",
    " ",
    "x" * 65,
    "x" * 70_000,
    "../../etc/passwd",
    "/dev/zero",
    "psm_\n",
    "é" * 40,
    "%s%n{0}",
    "cos\nsystem",
)
SIZES = (0, 1, 15, 16, 17, 31, 32, 33, 64, 4096, 1 << 20)
REPEATS = (0, 1, 2, 100, 20_000)

_INTS = {
    Field.CPPTYPE_INT32: (0, 1, -1, 2**31 - 1, -(2**31)),
    Field.CPPTYPE_INT64: (0, 1, -1, 2**63 - 1, -(2**63)),
    Field.CPPTYPE_UINT32: (0, 1, 2, 255, 2**16, 2**31, 2**32 - 1),
    Field.CPPTYPE_UINT64: (0, 1, 2, 255, 2**32, 2**63, 2**64 - 1),
    Field.CPPTYPE_ENUM: (0, 1, 2, 3, 99, -1, 2**31 - 1),
}


def _value(field: Any, chance: Random) -> Any:
    kind = field.cpp_type
    if kind in _INTS:
        return chance.choice(_INTS[kind])
    if kind == Field.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if kind in (Field.CPPTYPE_DOUBLE, Field.CPPTYPE_FLOAT):
        return chance.choice((0.0, -1.0, 1e308, float("nan"), float("inf")))
    if field.type == Field.TYPE_BYTES:
        return chance.randbytes(chance.choice(SIZES))
    return chance.choice(TEXTS)


def spoil(message: Message, chance: Random) -> None:
    """Changes one field, somewhere."""
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    field = chance.choice(fields)
    if field.is_repeated:
        values = getattr(message, field.name)
        if field.message_type is not None:
            _spoil_list(values, chance)
        elif values and chance.random() < 0.5:
            values[chance.randrange(len(values))] = _value(field, chance)
        else:
            value, count = _value(field, chance), chance.choice(REPEATS)
            if isinstance(value, str | bytes):
                count = min(count, (2 << 20) // (len(value) + 1))
            del values[:]
            values.extend([value] * count)
    elif field.message_type is not None:
        if chance.random() < 0.2:
            message.ClearField(field.name)
        else:
            inner = getattr(message, field.name)
            inner.SetInParent()
            spoil(inner, chance)
    else:
        setattr(message, field.name, _value(field, chance))


def _spoil_list(values: Any, chance: Random) -> None:
    turn = chance.random()
    if values and turn < 0.7:
        spoil(values[chance.randrange(len(values))], chance)
    elif values and turn < 0.85:
        values.extend([values[0]] * chance.choice((1, 100)))
    elif turn < 0.95:
        del values[:]
    else:
        values.add()


def spoiled(message: Message, chance: Random) -> bytes:
    """The message with up to four fields changed; one time in four its bytes are damaged, too, or are any bytes."""
    changed = type(message)()
    changed.CopyFrom(message)
    for _ in range(chance.randrange(1, 5)):
        spoil(changed, chance)
    data = changed.SerializeToString()
    turn = chance.random()
    if turn < 0.06:
        return chance.randbytes(chance.choice(SIZES[:-1]))
    if turn < 0.25 and data:
        damaged = bytearray(data[: 1 << 16])
        for _ in range(chance.randrange(1, 8)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        return bytes(damaged[: chance.randrange(len(damaged) + 1)] if turn < 0.15 else damaged)
    return data


def metadata(client_id: str, chance: Random) -> tuple[tuple[str, str | bytes], ...]:
    """Mostly the client's own name, so that messages reach what they are for."""
    hostile = ("", "x" * 65, "a b", "../..", "x" * 4000, "~")
    own = client_id if chance.random() < 0.9 else chance.choice(hostile)
    more: list[tuple[str, str | bytes]] = [
        ("kvgrpc-request-id", chance.choice(hostile)),
        ("traceparent", chance.choice(("00-" + "0" * 32 + "-" + "0" * 16 + "-01", "00-", "x" * 2000, ""))),
        ("authorization", chance.choice(("Bearer ", "Bearer x", "Basic eDp4", "x" * 3000))),
        ("kvgrpc-client-id-bin", chance.randbytes(40)),
    ]
    return (("kvgrpc-client-id", own), *(one for one in more if chance.random() < 0.15))
