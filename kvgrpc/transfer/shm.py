# SPDX-License-Identifier: Apache-2.0
"""Copies between the arena and POSIX shared memory of engines.

The engine's memory is read and written through its file (preadv, pwritev), never mapped: an engine that truncates it
causes a short copy, not a signal, and the interpreter lock is released while bytes move.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Container, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from kvgrpc.api import CudaIpcMemory, Layout, SharedMemory
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import Direction, Piece, RunSlice, SliceReport
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.base import MEMORY_IO, MEMORY_TRUNCATED
from kvgrpc.transfer.gates import Gates
from kvgrpc.transfer.layout import check_layout, digest
from kvgrpc.transfer.runs import Run, piece_runs

MAX_NAME_BYTES = 255
_VECTOR = os.sysconf("SC_IOV_MAX")


class _Window(NamedTuple):
    """A piece of memory inside an open file: it starts at ``offset``, and the file must not become shorter than
    ``end``.
    """

    fd: int
    offset: int
    end: int


@dataclass(frozen=True, slots=True)
class _Mapping:
    layout: Layout
    windows: tuple[_Window, ...]
    files: ExitStack


class _Batch(NamedTuple):
    """``length`` contiguous bytes of the engine's memory and the places in the arena that they belong to, as
    (position, length).
    """

    memory_index: int
    offset: int
    length: int
    places: list[tuple[int, int]]


class SharedMemoryMover:
    """Maps and copies shared memory objects found under ``shm_root`` that belong to one of ``allowed_uids``.

    ``gates`` are for tests; with them every run is moved by a call of its own.

    Threads: as Mover.
    """

    def __init__(
        self,
        arena: Arena,
        chunk_tokens: int,
        allowed_uids: Container[int],
        shm_root: str = "/dev/shm",  # noqa: S108 -- where shm_open puts its objects, not a temporary file
        gates: Gates | None = None,
    ) -> None:
        self._arena = arena
        self._chunk_tokens = chunk_tokens
        self._allowed_uids = allowed_uids
        self._shm_root = shm_root
        self._gates = gates
        self._mappings: dict[int, _Mapping] = {}

    @property
    def mapped(self) -> frozenset[int]:
        """Ids that are mapped."""
        return frozenset(self._mappings)

    def map(self, mapping_id: int, layout: Layout) -> bytes:
        check_layout(layout, self._chunk_tokens)
        assert mapping_id not in self._mappings, "a mapping id is used twice"
        windows: list[_Window] = []
        opened: dict[str, int] = {}
        with ExitStack() as files, _directory(self._shm_root) as root:
            for index, memory in enumerate(layout.memory):
                where = f"memory[{index}]"
                if isinstance(memory, CudaIpcMemory):
                    sentence = (
                        f"CUDA memory (of {memory.device_uuid!r}) is not supported yet, and this server sees no cards: "
                        "share host memory, by its POSIX shared memory name"
                    )
                    raise Refusal(Reason.CUDA_UNSUPPORTED, sentence, field=f"{where}.cuda")
                if memory.name not in opened:
                    opened[memory.name] = self._open(root, memory.name, f"{where}.shared.name")
                    files.callback(os.close, opened[memory.name])
                windows.append(_window(opened[memory.name], memory, f"{where}.shared.size_bytes"))
            self._mappings[mapping_id] = _Mapping(layout, tuple(windows), files.pop_all())
        found = [os.fstat(window.fd) for window in windows]
        return digest(layout, [(stat_result.st_dev, stat_result.st_ino) for stat_result in found])

    def copy(self, work: RunSlice) -> SliceReport:
        mapping = self._mappings[work.mapping_id]
        for done, piece in enumerate(work.pieces):
            moved, reason = self._copy_piece(mapping, work, piece)
            if reason:
                return SliceReport(done, reason, moved > 0)
        return SliceReport(len(work.pieces))

    def unmap(self, mapping_id: int) -> None:
        mapping = self._mappings.pop(mapping_id, None)
        if mapping is not None:
            mapping.files.close()

    def close(self) -> None:
        for mapping_id in tuple(self._mappings):
            self.unmap(mapping_id)

    def _open(self, root: int, name: str, where: str) -> int:
        """Looks at the object before it opens it, so that a device or a pipe is never opened, and opens only what it
        has looked at.
        """
        _check_name(name, where)
        try:
            seen = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
            try:
                found = os.fstat(seen)
                self._check_file(found, name, where)
                fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=root)
            finally:
                os.close(seen)
        except OSError as error:
            sentence = f"shared memory {name!r} cannot be opened for reading and writing: {error.strerror}"
            raise Refusal(Reason.MEMORY, sentence, field=where) from error
        if os.path.samestat(found, os.fstat(fd)):
            return fd
        os.close(fd)
        raise Refusal(Reason.MEMORY, f"shared memory {name!r} was replaced while it was opened", field=where)

    def _check_file(self, found: os.stat_result, name: str, where: str) -> None:
        if not stat.S_ISREG(found.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a regular file"
            raise Refusal(Reason.MEMORY, f"shared memory {name!r} is {kind}; name the object itself", field=where)
        if found.st_uid not in self._allowed_uids:
            sentence = f"shared memory {name!r} belongs to user {found.st_uid}, who is not allowed (see --allow-uid)"
            raise Refusal(Reason.MEMORY_OWNER, sentence, field=where)

    def _copy_piece(self, mapping: _Mapping, work: RunSlice, piece: Piece) -> tuple[int, str]:
        """Bytes moved, and why it stopped ("" = it did not)."""
        gates = self._gates
        runs = piece_runs(mapping.layout, self._chunk_tokens, piece)
        batches = _batches(runs, _VECTOR) if gates is None else gates.pace(work, _batches(runs, 1))
        write = work.direction is Direction.RETRIEVE
        moved, touched = 0, set[int]()
        for batch in batches:
            count, reason = self._move(mapping.windows[batch.memory_index], write, batch)
            moved += count
            if reason:
                return moved, reason
            touched.add(batch.memory_index)
        if write and any(_truncated(mapping.windows[index]) for index in touched):
            return moved, MEMORY_TRUNCATED
        return moved, ""

    def _move(self, window: _Window, write: bool, batch: _Batch) -> tuple[int, str]:
        view, moved, at = self._arena.view, 0, window.offset + batch.offset
        places = [view(position, length) for position, length in batch.places]
        try:
            while moved < batch.length:
                # Writing would make a truncated file longer again, so its size is looked at first.
                if write and _truncated(window):
                    return moved, MEMORY_TRUNCATED
                count = (os.pwritev if write else os.preadv)(window.fd, places, at + moved)
                if not count:
                    return moved, MEMORY_TRUNCATED
                moved += count
                if moved < batch.length:
                    places = _rest(places, count)
        except OSError:
            return moved, MEMORY_IO
        return moved, ""


@contextmanager
def _directory(path: str) -> Generator[int, None, None]:
    try:
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        sentence = f"this server has no shared memory directory {path}: {error.strerror}"
        raise Refusal(Reason.MEMORY, sentence, field="memory") from error
    try:
        yield fd
    finally:
        os.close(fd)


def _check_name(name: str, where: str) -> None:
    if not 1 <= len(name.encode(errors="replace")) <= MAX_NAME_BYTES:
        raise Refusal(Reason.MEMORY, f"the name of shared memory must have 1 to {MAX_NAME_BYTES} bytes", field=where)
    if "/" in name or "\0" in name or name in (".", ".."):
        sentence = f"{name!r} is no name of shared memory: send the name that shm_open takes, without its leading slash"
        raise Refusal(Reason.MEMORY, sentence, field=where)


def _window(fd: int, memory: SharedMemory, where: str) -> _Window:
    size, end = os.fstat(fd).st_size, memory.offset_bytes + memory.size_bytes
    if end > size:
        sentence = f"shared memory {memory.name!r} has {size} bytes; offset_bytes + size_bytes is {end}"
        raise Refusal(Reason.MEMORY, sentence, field=where)
    return _Window(fd, memory.offset_bytes, end)


def _truncated(window: _Window) -> bool:
    """Whether the file is shorter than it was. By lseek, which costs a third of fstat; nobody uses the position."""
    return os.lseek(window.fd, 0, os.SEEK_END) < window.end


def _batches(runs: Iterable[Run], vector: int) -> Iterator[_Batch]:
    """Runs that are neighbours in the engine's memory go by one call, wherever they belong in the arena."""
    places: list[tuple[int, int]] = []
    memory_index = start = end = -1
    for index, offset, position, length in _by_address(list(runs)):
        if offset == end and index == memory_index and len(places) < vector:
            places.append((position, length))
            end += length
            continue
        if places:
            yield _Batch(memory_index, start, end - start, places)
        memory_index, start, end, places = index, offset, offset + length, [(position, length)]
    if places:
        yield _Batch(memory_index, start, end - start, places)


def _by_address(runs: list[Run]) -> list[Run]:
    """In the order of the engine's memory; but when blocks are named twice, in the object's order, so that the last
    one wins.
    """
    ordered = sorted(runs)
    for one, next_one in pairwise(ordered):
        if one.offset + one.length > next_one.offset and one.memory_index == next_one.memory_index:
            return runs
    return ordered


def _rest(places: list[memoryview], done: int) -> list[memoryview]:
    """What is left of ``places`` after ``done`` bytes."""
    for index, place in enumerate(places):
        if done < len(place):
            return [place[done:], *places[index + 1 :]]
        done -= len(place)
    return []
