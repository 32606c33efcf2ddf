# SPDX-License-Identifier: Apache-2.0
"""Copies between the arena and POSIX shared memory of engines.

The engine's memory is mapped once, at registration, and copied by native threads with the interpreter lock released. An
engine may truncate its memory at any time: a fault is caught in the thread that copies, and only that copy fails.
"""

from __future__ import annotations

import os
import resource
import stat
import threading
from collections.abc import Container, Generator, Sequence
from contextlib import ExitStack, contextmanager

from kvgrpc.api import CudaIpcMemory, Layout, SharedMemory
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import Direction, Part, RunSlice, SliceReport
from kvgrpc.transfer import _native
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.base import MEMORY_IO, MEMORY_TRUNCATED
from kvgrpc.transfer.gates import Gates
from kvgrpc.transfer.layout import check_layout, digest
from kvgrpc.transfer.room import PageDebt
from kvgrpc.transfer.words import group_words, slice_words

MAX_NAME_BYTES = 255
POPULATE_S = 1.0
"""Most that a registration spends on the page table; the rest of a very large memory is entered as it is copied."""
OBJECTS_MOST = 16384
"""Shared memory objects of all registrations: each is a mapping, of which Linux gives a process 65,530."""
DESCRIPTORS = 2
"""Of each object, for as long as it is registered; twice as many while it is being mapped."""
_REASONS = ("", MEMORY_TRUNCATED, MEMORY_IO)


class SharedMemoryMover:
    """Maps and copies shared memory objects found under ``shm_root`` that belong to one of ``allowed_uids``.

    ``threads`` share one copy, the calling one included; 0: one a core, at most 4. ``gates`` are for tests; while one
    is set, every run is moved alone.

    Threads: as Mover.
    """

    def __init__(
        self,
        arena: Arena,
        chunk_tokens: int,
        allowed_uids: Container[int],
        shm_root: str = "/dev/shm",  # noqa: S108 -- where shm_open puts its objects, not a temporary file
        gates: Gates | None = None,
        threads: int = 0,
    ) -> None:
        self._copier = _native.HostCopier(arena.view(0, arena.size_bytes), threads)
        self._chunk_tokens = chunk_tokens
        self._allowed_uids = allowed_uids
        self._shm_root = shm_root
        self._gates = gates
        self._mappings: dict[int, list[_native.Mapping]] = {}
        """One for each part of a chunk."""
        self._debt = PageDebt(arena)
        self._quota = ObjectQuota()

    @property
    def mapped(self) -> frozenset[int]:
        """Ids that are mapped."""
        return frozenset(self._mappings)

    def map(self, mapping_id: int, layout: Layout) -> bytes:
        parts = check_layout(layout, self._chunk_tokens).parts(self._chunk_tokens)
        assert mapping_id not in self._mappings, "a mapping id is used twice"
        names = {memory.name for memory in layout.memory if isinstance(memory, SharedMemory)}
        self._quota.take(mapping_id, len(names) * len(parts))
        try:
            return self._map(mapping_id, layout, parts)
        except BaseException:
            self._debt.drop(mapping_id)
            self._quota.drop(mapping_id)
            raise

    def _map(self, mapping_id: int, layout: Layout, parts: Sequence[Part]) -> bytes:
        opened: dict[str, int] = {}
        with ExitStack() as files, _directory(self._shm_root) as root:
            for index, memory in enumerate(layout.memory):
                where = f"memory[{index}]"
                if isinstance(memory, CudaIpcMemory):
                    sentence = (
                        f"this server sees no cards, so also not {memory.device_uuid!r}: share host memory, by its "
                        "POSIX shared memory name"
                    )
                    raise Refusal(Reason.CUDA_UNSUPPORTED, sentence, field=f"{where}.cuda")
                if memory.name not in opened:
                    opened[memory.name] = self._open(root, memory.name, f"{where}.shared.name")
                    files.callback(os.close, opened[memory.name])
                _check_size(opened[memory.name], memory, f"{where}.shared.size_bytes")
            self._debt.take(mapping_id, {fd: size for fd, (_, size) in _windows(layout, opened).items()})
            mappings = _mapped(layout, self._chunk_tokens, parts, opened)
            found = {name: os.fstat(fd) for name, fd in opened.items()}
        for mapping in mappings:
            mapping.populate(POPULATE_S / len(mappings))
        self._mappings[mapping_id] = mappings
        objects = [found[memory.name] for memory in layout.memory if isinstance(memory, SharedMemory)]
        return digest(layout, [(one.st_dev, one.st_ino) for one in objects])

    def copy(self, work: RunSlice) -> SliceReport:
        mapping = self._mappings[work.mapping_id][work.part]
        pace = self._gates.pacer(work) if self._gates is not None else None
        completed, why, torn = self._copier.copy(mapping, slice_words(work), work.direction is Direction.RETRIEVE, pace)
        return SliceReport(completed, _REASONS[why], torn)

    def unmap(self, mapping_id: int) -> None:
        mappings = self._mappings.pop(mapping_id, ())
        self._debt.drop(mapping_id)
        for mapping in mappings:
            mapping.close()
        self._quota.drop(mapping_id)

    def close(self) -> None:
        for mapping_id in tuple(self._mappings):
            self.unmap(mapping_id)
        self._copier.close()

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


class ObjectQuota:
    """Shared memory objects that are mapped, all registrations together, so that engines leave descriptors for
    connections and mappings for the server.

    Threads: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[int, int] = {}

    def take(self, mapping_id: int, count: int) -> None:
        """Refuses: MEMORY."""
        most = min(OBJECTS_MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // (2 * DESCRIPTORS))
        with self._lock:
            taken = sum(self._taken.values())
            if taken + count > most:
                sentence = f"{count} objects of shared memory beside {taken} others; the server maps at most {most}"
                raise Refusal(Reason.MEMORY, sentence, field="memory")
            self._taken[mapping_id] = count

    def drop(self, mapping_id: int) -> None:
        with self._lock:
            self._taken.pop(mapping_id, None)


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


def _check_size(fd: int, memory: SharedMemory, where: str) -> None:
    size, end = os.fstat(fd).st_size, memory.offset_bytes + memory.size_bytes
    if end > size:
        sentence = f"shared memory {memory.name!r} has {size} bytes; offset_bytes + size_bytes is {end}"
        raise Refusal(Reason.MEMORY, sentence, field=where)


def _windows(layout: Layout, opened: dict[str, int]) -> dict[int, tuple[int, int]]:
    """(first byte, bytes) that the layout uses of each object, by descriptor, in the order of opening."""
    pieces = [memory for memory in layout.memory if isinstance(memory, SharedMemory)]
    windows: dict[int, tuple[int, int]] = {}
    for name, fd in opened.items():
        mine = [memory for memory in pieces if memory.name == name]
        begin = min(memory.offset_bytes for memory in mine)
        windows[fd] = (begin, max(memory.offset_bytes + memory.size_bytes for memory in mine) - begin)
    return windows


def _mapped(layout: Layout, chunk_tokens: int, parts: Sequence[Part], opened: dict[str, int]) -> list[_native.Mapping]:
    """Maps of each object what the layout uses, once for each part of a chunk."""
    pieces = [memory for memory in layout.memory if isinstance(memory, SharedMemory)]
    numbers = {name: number for number, name in enumerate(opened)}
    files = [(fd, begin, size) for fd, (begin, size) in _windows(layout, opened).items()]
    windows = [(numbers[memory.name], memory.offset_bytes, memory.size_bytes) for memory in pieces]
    try:
        return [_native.Mapping(files, windows, group_words(layout, chunk_tokens, part)) for part in parts]
    except OSError as error:
        sentence = f"shared memory cannot be mapped for reading and writing: {error.strerror}"
        raise Refusal(Reason.MEMORY, sentence, field="memory") from error
