# SPDX-License-Identifier: Apache-2.0
"""Versions of spaces in a place that servers share: read, changed, and put back if nobody else did meanwhile.

Servers that share it write only what they changed themselves, as in ``kvgrpc.tiers.version_file``. A place that has
none yet begins at a version that nobody used, since nobody knows what its objects are.
"""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from kvgrpc.core.types import NO_VERSIONS, Versions
from kvgrpc.tiers import version_file

log = structlog.get_logger(__name__)

ATTEMPTS = 20


class VersionPlace(Protocol):
    """Where they are kept. All methods block for some seconds at most, and raise OSError."""

    @property
    def where(self) -> str:
        """For messages."""
        ...

    def load(self) -> tuple[int, bytes]:
        """(what ``swap`` wants to be told, what is kept): (0, b"") when nothing is."""
        ...

    def swap(self, seen: int, text: bytes) -> bool:
        """Keeps the text, durably, unless another server kept one since ``load`` said ``seen``."""
        ...


@dataclass(slots=True)
class KeptVersions:
    """Where versions of spaces outlive the server: in a place that servers share, in a file beside the disk tier, in
    one beside a named arena. The first of them that there is says what is in force.

    Threads: one call at a time, but for ``check_disk``.
    """

    shared: VersionPlace | None
    beside_disk: Path | None
    beside_arena: Path | None
    _began: Versions = NO_VERSIONS
    _now: Versions = NO_VERSIONS
    """What the server began with, and what is in force by now."""
    _old: bool = False
    """The disk's file could not be read yet, and old objects may be found."""
    _folder: os.stat_result | None = None
    """That of the disk's file, when it was read last."""
    _checking: threading.Lock = field(default_factory=threading.Lock)

    @property
    def outlive(self) -> bool:
        return (self.shared, self.beside_disk, self.beside_arena) != (None, None, None)

    def begin(self) -> Versions:
        """What a server begins with."""
        self._began = self._now = self._begin()
        return self._began

    def _begin(self) -> Versions:
        if self.shared is not None or self.beside_disk is None:
            return begin_both(self.shared, self.beside_disk or self.beside_arena)
        left = _beside(self.beside_arena)
        try:
            versions = version_file.begin_there(self.beside_disk, left or NO_VERSIONS)
            self._folder = os.stat(self.beside_disk.parent)
            return versions
        except OSError as error:
            sentence = "those beside the arena are used"
            if left is None:
                sentence = "this server will find nothing older, the next one may"
            log.warning(f"versions of spaces cannot be read; {sentence}", reason=str(error))
        self._old = left is not None
        return left or version_file.unused()

    def check_disk(self) -> None:
        """Before the disk tier is opened, each time: it may be another folder than before. What this server has cleared
        is written there, too. Blocks. Raises OSError: others have cleared in another folder, or in one that was away,
        what this server would find."""
        assert self.beside_disk is not None
        with self._checking:
            if self.shared is not None:  # that says what is in force; the file is there for when it does not
                return version_file.keep(self.beside_disk, self._now)
            folder = os.stat(self.beside_disk.parent)
            other = self._folder is not None and not os.path.samestat(folder, self._folder)
            version_file.begin_there(self.beside_disk, self._now)
            if self._now != self._began:
                version_file.save(self.beside_disk, self._began, self._now)
            if (self._old or other) and not version_file.same(version_file.begin_there(self.beside_disk), self._now):
                sentence = "others have cleared what lies there; it is found again after the next start"
                raise OSError(errno.ESTALE, sentence)
            self._old, self._folder = False, folder

    def save(self, before: Versions, after: Versions) -> None:
        """Keeps what has changed, durably, wherever versions are kept, also if that fails at one place. Raises OSError:
        the first of those."""
        failed: list[OSError] = []
        places = [partial(save_at, self.shared)] if self.shared is not None else []
        if self.beside_disk is not None:
            places.append(partial(self._save_beside, self.beside_disk))
        if self.beside_arena is not None:
            places.append(partial(version_file.save, self.beside_arena))
        for save in places:
            try:
                save(before, after)
            except OSError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _save_beside(self, disk: Path, before: Versions, after: Versions) -> None:
        with self._checking:
            self._now = after
            if version_file.is_new(disk):  # what is not there yet is not cleared by writing here
                raise OSError(errno.ESTALE, f"{disk.parent} is another folder than before")
            version_file.save(disk, before, after)


def begin_both(place: VersionPlace | None, path: Path | None) -> Versions:
    """What a server begins with: what the place says, if there is one, else what the file does, beside the disk tier or
    the arena. A server that goes on with the file's is like one that was not restarted."""
    if place is None:
        assert path is not None
        return version_file.begin(path)
    try:
        versions = begin_at(place)
    except OSError as error:
        kept = _beside(path)
        sentence = "versions of spaces cannot be read; "
        sentence += "nothing older will be found" if kept is None else f"those in {path} are used"
        log.warning(sentence, reason=str(error))
        return version_file.unused() if kept is None else kept
    if path is not None:
        try:
            version_file.keep(path, versions)
        except OSError as error:
            log.warning(f"versions of spaces cannot be kept in {path}", reason=str(error))
    return versions


def _beside(path: Path | None) -> Versions | None:
    try:
        return version_file.load(path) if path is not None else None
    except (OSError, version_file.UnreadableVersionsError):
        return None


def begin_at(place: VersionPlace) -> Versions:
    """What is kept there; begun now if nothing is that can be read. Raises OSError."""
    for _ in range(ATTEMPTS):
        seen, text = place.load()
        if text:
            try:
                return version_file.decode(text, place.where)
            except version_file.UnreadableVersionsError as error:
                log.error("versions of spaces are lost; nothing older will be found", reason=str(error))
        versions = version_file.unused()
        if place.swap(seen, version_file.encode(versions)):
            return versions
    raise OSError(errno.EAGAIN, f"{place.where}: others change the versions all the time")


def save_at(place: VersionPlace, before: Versions, after: Versions) -> None:
    """Keeps what has changed; see ``version_file.save``. Raises OSError."""
    for _ in range(ATTEMPTS):
        seen, text = place.load()
        try:
            there = version_file.decode(text, place.where) if text else version_file.unused()
        except version_file.UnreadableVersionsError as error:
            log.error("versions of spaces are lost; nothing older will be found", reason=str(error))
            there = version_file.unused()
        if place.swap(seen, version_file.encode(version_file.merged(there, before, after))):
            return
    raise OSError(errno.EAGAIN, f"{place.where}: others change the versions all the time")
