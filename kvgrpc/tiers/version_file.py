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
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed
from xxhash import xxh3_128_hexdigest

from kvgrpc.core.types import NO_VERSIONS, Versions
from kvgrpc.core.versions import version_of

log = structlog.get_logger(__name__)

FORMAT = 1
LOCK_S = 4.0
"""How long another server may keep the file to itself: one that stands still must not stop this one."""


class UnreadableVersionsError(Exception):
    """The file is not what was written; the message says why."""


def load(path: Path) -> Versions | None:
    """What was saved last; None when nothing ever was. Raises UnreadableVersionsError, OSError."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            raw = file.read()
    except FileNotFoundError:
        return None
    return decode(raw, str(path))


def _without_waiting(name: str, flags: int) -> int:
    """Also for what is no file: a pipe would never be opened."""
    return os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def decode(raw: bytes, where: str) -> Versions:
    """Raises UnreadableVersionsError."""
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
        raise UnreadableVersionsError(f"{where}: {error}") from error


def encode(versions: Versions) -> bytes:
    """What ``decode`` takes."""
    told = {
        "format": FORMAT,
        "first": versions.first,
        "bases": {base.hex(): at for base, at in versions.bases.items()},
        "spaces": {digest.hex(): (base.hex(), version) for digest, (base, version) in versions.spaces.items()},
    }
    text = json.dumps(told).encode()
    return xxh3_128_hexdigest(text).encode() + b"\n" + text


def merged(there: Versions, before: Versions, after: Versions) -> Versions:
    """What is there, with what one server changed; all of that when ``first`` has changed, since that concerns what
    nobody names. An identity's change is one of its spaces, also of those that only others know."""
    if after.first != before.first:
        return after
    moved = {base for base, _ in before.bases.items() ^ after.bases.items()}
    bases = dict(there.bases)
    spaces = {digest: at for digest, at in there.spaces.items() if at[0] not in moved or digest in after.spaces}
    for base in moved:
        bases.pop(base, None)
        if base in after.bases:
            bases[base] = after.bases[base]
    for digest in {digest for digest, _ in before.spaces.items() ^ after.spaces.items()}:
        spaces.pop(digest, None)
        if digest in after.spaces:
            spaces[digest] = after.spaces[digest]
    return Versions(there.first, bases, spaces)


def begin(path: Path) -> Versions:
    """What a server begins with. Where the last state is not to be had, a version that nobody ever used: then nothing
    old is found, but nothing stale either."""
    try:
        return begin_there(path)
    except OSError as error:
        log.warning("versions of spaces cannot be read; nothing older will be found", reason=str(error))
        return unused()


def begin_there(path: Path, new: Versions = NO_VERSIONS) -> Versions:
    """What lies there; where that is lost, a version that nobody ever used, and ``new`` where nothing ever was. Raises
    OSError."""
    versions, lost = _last(path)
    if versions is None:
        with _locked(path):
            versions, lost = _last(path)  # another server may have been quicker
            if versions is None:
                versions = unused() if lost else new
                _write(path, versions)
    return versions


def _last(path: Path) -> tuple[Versions | None, bool]:
    """What was saved last, or whether something was."""
    try:
        return load(path), any(path.parent.glob("slot-*"))
    except UnreadableVersionsError as error:
        log.error("versions of spaces are lost; nothing older will be found", reason=str(error))
        return None, True


def is_new(path: Path) -> bool:
    """Whether neither versions nor objects were ever kept there. Raises OSError when the folder is away."""
    return not os.path.lexists(path) and not any(entry.startswith("slot-") for entry in os.listdir(path.parent))


def same(one: Versions, other: Versions) -> bool:
    """Whether every space has one version in both."""
    spaces = [(base, digest) for both in (one, other) for digest, (base, _) in both.spaces.items()]
    names = [*spaces, *((base, b"") for base in {*one.bases, *other.bases})]
    return one.first == other.first and all(version_of(one, *name) == version_of(other, *name) for name in names)


def new_step() -> int:
    """By which this server process moves versions: no other's."""
    return secrets.randbits(48) | 1


def unused() -> Versions:
    """A version that nobody used."""
    return Versions(first=secrets.randbits(62) | 1 << 62)


def keep(path: Path, versions: Versions) -> None:
    """In place of whatever is there. Raises OSError."""
    with _locked(path):
        _write(path, versions)


def save(path: Path, before: Versions, after: Versions) -> None:
    """Keeps what has changed, durably. A file that has gone is lost like one that cannot be read: what else was in it,
    nobody knows. Raises OSError."""
    with _locked(path):
        try:
            there, reason = load(path), f"{path} has gone"
        except UnreadableVersionsError as error:
            there, reason = None, str(error)
        if there is None:
            log.error("versions of spaces are lost; nothing older will be found", reason=reason)
            there = unused()
        _write(path, merged(there, before, after))


def _write(path: Path, versions: Versions) -> None:
    aside = path.with_suffix(".new")
    with open(aside, "wb", opener=_without_waiting) as file:
        file.write(encode(versions))
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
    """The folder is not made: one that is not mounted is away, not new. Raises OSError, BlockingIOError where another
    server does not let go."""
    fd = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        for attempt in Retrying(
            retry=retry_if_exception_type(BlockingIOError),
            stop=stop_after_delay(LOCK_S),
            wait=wait_fixed(0.01),
            reraise=True,
        ):
            with attempt:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)
