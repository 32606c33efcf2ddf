# SPDX-License-Identifier: Apache-2.0
"""The index beside an arena: records of its objects, for the next server.

A file of frames. A frame: length of its content (u32), kind (u32), the content, and XXH3-128 (16 bytes) over arena id,
serial, the frame's number (u64 each), kind and content; all little-endian. So no frame of another arena or run, of
another place in the file, or with any bit changed passes. Kinds, in this order:

    1 HEAD    first, once; JSON: format, arena (hex id), serial, arena_bytes, page_bytes, chunk_tokens
    2 FORM    JSON: a ``kvgrpc.core.records.Form``, its parts as {window, aligned, size_bytes, order}; the n-th one is
              form n, from 0. In format 1, still read, it has order and size_bytes of the only part itself
    3 OBJECT  form (u32), priority (u8), length of the key (u8), count of extents (u16), checksum (16), key, extents
              (offset and length, u64 each)
    4 END     last, when the server ended in order; count of objects (u64)

While a server runs, frames are appended. So a file may end within a frame, where a kill met an append: what comes
before it counts. Anything else that does not fit makes the whole file useless. A file is written aside and renamed.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from xxhash import xxh3_128_digest

from kvgrpc.core.records import Form, Record
from kvgrpc.core.types import Need, PartForm, Priority, SpaceIdentity
from kvgrpc.transfer.layout import MAX_NEEDS

FORMAT, FORMATS = 2, (1, 2)
HEAD, FORM, OBJECT, END = 1, 2, 3, 4
FRAME_MOST = 1 << 20
INDEX_MOST = 1 << 30
WORLD_MOST = 1024
"""As the protocol has it."""
EXTENTS_MOST = 65_000
"""Of an object in a frame; one that lies in more places is not recorded."""
_FRAME = struct.Struct("<II")
_OBJECT = struct.Struct("<IBBH16s")
_COUNT = struct.Struct("<Q")
_CHECKSUM_BYTES = 16


class IndexDamagedError(Exception):
    """The file is not what a server wrote for this arena; the message says why."""


@dataclass(frozen=True, slots=True)
class Head:
    """Which arena, and which of its indices. ``arena`` is 16 bytes; ``serial`` grows with each file."""

    arena: bytes
    serial: int
    arena_bytes: int
    page_bytes: int
    chunk_tokens: int


def index_path(arena: Path) -> Path:
    return arena.with_name(arena.name + ".index")


def _sealed(head: Head, number: int, kind: int, content: bytes) -> bytes:
    return xxh3_128_digest(
        b"".join((head.arena, _COUNT.pack(head.serial), _COUNT.pack(number), _FRAME.pack(len(content), kind), content))
    )


# ---- writing --------------------------------------------------------------------------------------------------------


class IndexFile:
    """A new index: ``append``, ``publish``, then more ``append``, at last ``end``. Blocks; one thread at a time. Raises
    OSError."""

    def __init__(self, path: Path, head: Head) -> None:
        self._path = path
        self._aside = path.with_name(path.name + ".new")
        self._head = head
        self._number = 0
        self._forms: dict[Form, int] = {}
        self.objects = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._fd = os.open(self._aside, flags, 0o600)
        told = {"format": FORMAT, **asdict(head), "arena": head.arena.hex()}
        try:
            self._write([self._frame(HEAD, json.dumps(told).encode())])
        except OSError:  # it is full, and this will be tried again and again
            self.close()
            raise

    def _frame(self, kind: int, content: bytes) -> bytes:
        frame = _FRAME.pack(len(content), kind) + content + _sealed(self._head, self._number, kind, content)
        self._number += 1
        return frame

    def _frames(self, records: Iterable[Record]) -> Iterator[bytes]:
        for record in records:
            if len(record.extents) > EXTENTS_MOST:
                continue
            form = self._forms.get(record.form)
            if form is None:
                form = self._forms[record.form] = len(self._forms)
                yield self._frame(FORM, json.dumps(_told(record.form)).encode())
            fields = _OBJECT.pack(form, record.priority, len(record.key), len(record.extents), record.checksum)
            extents = struct.pack(f"<{2 * len(record.extents)}Q", *(at for extent in record.extents for at in extent))
            self.objects += 1
            yield self._frame(OBJECT, fields + record.key + extents)

    def append(self, records: Iterable[Record]) -> None:
        """More records, durably once the file is published."""
        self._write(self._frames(records))
        os.fdatasync(self._fd)

    def _write(self, frames: Iterable[bytes]) -> None:
        left = memoryview(b"".join(frames))
        while left:
            left = left[os.write(self._fd, left) :]

    def publish(self) -> None:
        """From now on this is the arena's index."""
        os.fsync(self._fd)
        self._aside.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def end(self) -> None:
        """All records are there, and nothing in the arena will change."""
        self._write([self._frame(END, _COUNT.pack(self.objects))])
        os.fsync(self._fd)

    def close(self) -> None:
        """Lets go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _told(form: Form) -> dict[str, Any]:
    parts = [
        {"window": need.window, "aligned": need.aligned, "size_bytes": size_bytes, "order": order}
        for need, size_bytes, order in form.parts
    ]
    return {**form._asdict(), "identity": asdict(form.identity), "parts": parts}


# ---- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """``whole``: the server that wrote it ended in order."""

    head: Head
    records: Sequence[Record]
    whole: bool


def _open_plain(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def read_index(path: Path, arena: bytes) -> Found:
    """What the index says that lies beside this arena. Raises IndexDamagedError, OSError."""
    with open(path, "rb", opener=_open_plain) as file:
        if os.fstat(file.fileno()).st_size > INDEX_MOST:
            raise IndexDamagedError(f"the index has more than {INDEX_MOST} bytes")
        try:
            return _read(file, arena)
        except (ValueError, KeyError, TypeError, IndexError, struct.error) as error:
            raise IndexDamagedError(f"the index is damaged: {error}") from error


def is_index(path: Path) -> bool:
    """Whether the file begins as an index, of whatever arena."""
    try:
        with open(path, "rb", opener=_open_plain) as file:
            kind, content = next(_frames(file, None))
            return kind == HEAD and "arena" in json.loads(content)
    except (OSError, ValueError, TypeError, StopIteration):
        return False


def _read(file: BinaryIO, arena: bytes) -> Found:
    told = next(_frames(file, None), None)
    if told is None or told[0] != HEAD:
        raise ValueError("it does not begin as one")
    head = _head(told[1])
    if head.arena != arena:
        raise IndexDamagedError("the index belongs to another arena")
    file.seek(0)
    forms: list[Form] = []
    records: list[Record] = []
    for number, (kind, content) in enumerate(_frames(file, head)):
        if kind == FORM:
            forms.append(_form(content))
        elif kind == OBJECT:
            records.append(_record(content, forms))
        elif kind == END:
            if _COUNT.unpack(content)[0] != len(records) or file.read(1):
                raise ValueError("it does not end where it says")
            return Found(head, records, True)
        elif kind != HEAD or number:
            raise ValueError(f"frame {number} is of kind {kind}")
    return Found(head, records, False)


def _frames(file: BinaryIO, head: Head | None) -> Iterator[tuple[int, bytes]]:
    """Kind and content of frames, up to one that the file does not have all of; without ``head``, unchecked."""
    number = 0
    while len(begin := file.read(_FRAME.size)) == _FRAME.size:
        length, kind = _FRAME.unpack(begin)
        if length > FRAME_MOST:
            raise ValueError(f"frame {number} of {length} bytes")
        content, checksum = file.read(length), file.read(_CHECKSUM_BYTES)
        if len(checksum) < _CHECKSUM_BYTES:
            return
        if head is not None and checksum != _sealed(head, number, kind, content):
            raise ValueError(f"the checksum of frame {number} does not fit")
        yield kind, content
        number += 1


def _head(content: bytes) -> Head:
    told: dict[str, Any] = json.loads(content)
    if told["format"] not in FORMATS:
        raise IndexDamagedError(f"the index has format {told['format']}, not {FORMAT}")
    sizes = {name: _number(told[name], 1 << 62) for name in ("serial", "arena_bytes", "page_bytes", "chunk_tokens")}
    return Head(arena=bytes.fromhex(told["arena"]), **sizes)


def _number(value: object, most: int) -> int:
    if not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{value!r} is no number up to {most}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _form(content: bytes) -> Form:
    told: dict[str, Any] = json.loads(content)
    said: dict[str, Any] = told["identity"]
    names = ("model", "revision", "kv_dtype", "hash_algorithm", "stored_form")
    world = _number(said["kv_world_size"], WORLD_MOST)
    identity = SpaceIdentity(kv_world_size=world, **{name: _text(said[name]) for name in names})
    if not isinstance(told["version"], int):
        raise ValueError("a version that is no number")
    lora, salt = _text(told["lora"]), _text(told["cache_salt"])
    several = "parts" in told
    parts = tuple(map(_part, told["parts"] if several else (told,)))
    if not 1 <= len(parts) <= MAX_NEEDS:
        raise ValueError(f"chunks in {len(parts)} parts")
    part = _number(told["part"], len(parts) - 1) if several else 0
    return Form(identity, lora, salt, told["version"], _number(told["kv_rank"], world - 1), parts, part)


def _part(told: dict[str, Any]) -> PartForm:
    size_bytes, window, aligned = (
        _number(told["size_bytes"], 1 << 62),
        told.get("window", 0),
        told.get("aligned", False),
    )
    if not size_bytes or not isinstance(aligned, bool):
        raise ValueError("objects of no bytes, or of no known need")
    return PartForm(Need(_number(window, (1 << 32) - 1), aligned), size_bytes, _text(told["order"]))


def _record(content: bytes, forms: Sequence[Form]) -> Record:
    form, priority, length, count, checksum = _OBJECT.unpack_from(content)
    key = content[_OBJECT.size : _OBJECT.size + length]
    numbers = struct.unpack_from(f"<{2 * count}Q", content, _OBJECT.size + length)
    if not count or not length or len(content) != _OBJECT.size + length + 16 * count:
        raise ValueError("an object that is not as long as it says")
    extents = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    return Record(forms[form], key, Priority(priority), extents, checksum)
