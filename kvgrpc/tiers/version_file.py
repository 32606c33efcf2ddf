# SPDX-License-Identifier: Apache-2.0
"""The file that keeps versions of spaces beside a tier that outlives the server (``kvgrpc.core.versions``).

Servers that share it write only what they changed themselves: the last Clear of a space is the one that counts.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
from xxhash import xxh3_128_hexdigest

from kvgrpc.core.types import NO_VERSIONS, Versions

log = structlog.get_logger(__name__)

FORMAT = 1


class UnreadableVersionsError(Exception):
    """The file is not what was written; the message says why."""


def load(path: Path) -> Versions | None:
    """What was saved last; None when nothing ever was. Raises UnreadableVersionsError, OSError."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        checksum, _, text = raw.partition(b"\n")
        if checksum.decode() != xxh3_128_hexdigest(text):
            raise ValueError("the checksum does not fit")
        told: dict[str, Any] = json.loads(text)
        if told["format"] != FORMAT:
            raise ValueError(f"format {told['format']}, not {FORMAT}")
        return Versions(
            int(told["first"]),
            {bytes.fromhex(base): (int(at), int(version)) for base, (at, version) in told["bases"].items()},
            {
                bytes.fromhex(digest): (bytes.fromhex(base), int(version))
                for digest, (base, version) in told["spaces"].items()
            },
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableVersionsError(f"{path}: {error}") from error


def begin(path: Path) -> Versions:
    """What a server begins with. Where the last state is not to be had, a version that nobody ever used: then nothing
    old is found, but nothing stale either."""
    try:
        versions = load(path)
        if versions is None:
            versions = _unused() if any(path.parent.glob("slot-*")) else NO_VERSIONS
            with _locked(path):
                _write(path, versions)
    except UnreadableVersionsError as error:
        log.error("versions of spaces are lost; nothing older will be found", reason=str(error))
        versions = _unused()
        with _locked(path):
            _write(path, versions)
    except OSError as error:
        log.warning("versions of spaces cannot be read; nothing older will be found", reason=str(error))
        versions = _unused()
    return versions


def new_step() -> int:
    """By which this server process moves versions: no other's."""
    return secrets.randbits(48) | 1


def _unused() -> Versions:
    return Versions(first=secrets.randbits(62) | 1 << 62)


def save(path: Path, before: Versions, after: Versions) -> None:
    """Keeps what has changed, durably; all of it when ``first`` has, since that concerns what nobody names. Raises
    OSError."""
    with _locked(path):
        try:
            there = load(path) or NO_VERSIONS
        except UnreadableVersionsError as error:
            log.error("versions of spaces are lost; nothing older will be found", reason=str(error))
            there = _unused()
        if after.first == before.first:
            bases, spaces = dict(there.bases), dict(there.spaces)
            for base in {base for base, _ in before.bases.items() ^ after.bases.items()}:
                bases.pop(base, None)
                if base in after.bases:
                    bases[base] = after.bases[base]
            for digest in {digest for digest, _ in before.spaces.items() ^ after.spaces.items()}:
                spaces.pop(digest, None)
                if digest in after.spaces:
                    spaces[digest] = after.spaces[digest]
            after = Versions(there.first, bases, spaces)
        _write(path, after)


def put(path: Path, versions: Versions) -> None:
    """Keeps exactly these, durably. Raises OSError."""
    with _locked(path):
        _write(path, versions)


def _write(path: Path, versions: Versions) -> None:
    told = {
        "format": FORMAT,
        "first": versions.first,
        "bases": {base.hex(): at for base, at in versions.bases.items()},
        "spaces": {digest.hex(): (base.hex(), version) for digest, (base, version) in versions.spaces.items()},
    }
    text = json.dumps(told).encode()
    aside = path.with_suffix(".new")
    with aside.open("wb") as file:
        file.write(xxh3_128_hexdigest(text).encode() + b"\n" + text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def _locked(path: Path) -> Generator[None, None, None]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
