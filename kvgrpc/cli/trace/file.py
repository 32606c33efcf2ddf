# SPDX-License-Identifier: Apache-2.0
"""Files of recorded calls: JSON lines, gzipped or not.

Each line is a call: ``op`` ("lookup" or "store"), ``timestamp`` (ms), ``input_length`` (tokens), ``hash_ids`` (a number
for each chunk), ``space``, ``prefix_chunks`` and ``chunk_bytes`` as in TracedCall. Lines without ``op`` are a lookup
and a store of all of it; so published traces that have only ``hash_ids`` are read, too. Lines without ``hash_ids`` are
notes. What a file says is checked before it is used.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, cast

from kvgrpc import api

LINE_CHARS_MOST = 8 << 20
CHUNKS_MOST = 1 << 18


class TraceError(Exception):
    """The file cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One line. ``kind`` None: a lookup and a store of all chunks."""

    kind: api.CallKind | None
    space: int
    chunks: Sequence[int]
    prefix_chunks: int = 0
    chunk_bytes: int = 0


def read_trace(path: Path) -> Iterator[Recorded]:
    """The calls in order. TraceError."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            source = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if packed else raw
            with TextIOWrapper(source, encoding="utf-8") as lines:
                number = 0
                while line := lines.readline(LINE_CHARS_MOST + 1):
                    number += 1
                    if len(line) > LINE_CHARS_MOST:
                        raise TraceError(f"line {number} is longer than {LINE_CHARS_MOST} characters")
                    recorded = _recorded(line, number)
                    if recorded is not None:
                        yield recorded
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise TraceError(f"{path}: {(isinstance(error, OSError) and error.strerror) or error}") from None


def _recorded(line: str, number: int) -> Recorded | None:
    try:
        fields: Any = json.loads(line)
        if not isinstance(fields, dict):
            raise ValueError("it is no object")
        fields = cast("dict[str, Any]", fields)
        if "hash_ids" not in fields:
            return None
        op = fields.get("op")
        chunks = fields["hash_ids"]
        numbers = [fields.get(name, 0) for name in ("space", "prefix_chunks", "chunk_bytes")]
        if not all(type(one) is int and 0 <= one < 1 << 64 for one in (*chunks, *numbers)) or len(chunks) > CHUNKS_MOST:
            raise ValueError("a number is none, or there are too many")
        kind = None if op is None else api.CallKind(op)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise TraceError(f"line {number} is no recorded call: {error}") from None
    space, prefix_chunks, chunk_bytes = numbers
    return Recorded(kind, space, chunks, min(prefix_chunks, len(chunks)), chunk_bytes)


class TraceWriter:
    """A new file, for its owner only, of about ``most_bytes`` at most. FileExistsError for one that is there."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        self._packed = gzip.GzipFile(fileobj=self._file, mode="wb", compresslevel=5, filename="", mtime=0)
        self._most_bytes = most_bytes
        self.calls = self.dropped = 0
        self.begun = False

    def write(self, some: api.TracedCalls) -> bool:
        """False when the file is full."""
        if not self.begun:
            self.begun = True
            self._line({"kvgrpc_trace": 1, "chunk_tokens": some.chunk_tokens})
        if some.dropped:
            self.dropped += some.dropped
            self._line({"dropped": some.dropped})
        for call in some.calls:
            if self._file.tell() >= self._most_bytes:
                return False
            self.calls += 1
            self._line(
                {
                    "op": call.kind.value,
                    "timestamp": call.at_ms,
                    "space": call.space,
                    "input_length": call.num_tokens,
                    "prefix_chunks": call.prefix_chunks,
                    "chunk_bytes": call.chunk_bytes,
                    "hash_ids": list(call.chunks),
                }
            )
        return True

    def _line(self, fields: dict[str, Any]) -> None:
        self._packed.write(json.dumps(fields, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        self._packed.close()
        self._file.close()
