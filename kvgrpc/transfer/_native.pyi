# SPDX-License-Identifier: Apache-2.0
"""Native copies; built from csrc/. Sizes and positions are bytes."""

from collections.abc import Callable, Sequence

from typing_extensions import Buffer

SOURCE_DIGEST: str
"""sha256 over the hex sha256 of each file of csrc/, in the order of their names: what this was built from."""

class Mapping:
    """Files of an engine, mapped shared, and the paging in them; every address is checked here once.

    ``files`` are (descriptor, offset, length); the descriptors may be closed afterwards. ``windows`` are (file, offset
    in the file, size). ``groups`` are (blocks in a chunk, blocks of the engine, entries), an entry (window, base,
    layers, layer stride, planes, plane stride, block stride, run length).

    Raises ValueError when something lies outside of what holds it, OSError when the system does not map.
    Threads: any; ``close`` when no other call runs.
    """

    def __init__(
        self,
        files: Sequence[tuple[int, int, int]],
        windows: Sequence[tuple[int, int, int]],
        groups: Sequence[tuple[int, int, Sequence[tuple[int, int, int, int, int, int, int, int]]]],
    ) -> None: ...
    def populate(self, most_s: float) -> None:
        """Enters pages that are there into the page table, so that the first copies are no slower; allocates none."""

    def close(self) -> None:
        """Unmaps the files. Harmless when closed."""

class HostCopier:
    """Copies between mappings and ``arena`` with a team of ``threads`` (0: the cores, at most 4; the caller counts).

    Slices of at least ``stream_bytes`` (0: half the last-level cache) pass the caches by. A thread joins in for each
    ``bytes_a_hand`` of a slice.

    Threads: ``copy`` by any number at once. ``close`` when no other call runs; it lets go of the arena.
    """

    def __init__(self, arena: Buffer, threads: int = 0, stream_bytes: int = 0, bytes_a_hand: int = 1048576) -> None: ...
    def copy(
        self, mapping: Mapping, words: Buffer, retrieve: bool, pace: Callable[[], None] | None = None
    ) -> tuple[int, int, bool]:
        """Copies a slice with the interpreter lock released: (completed pieces, why it stopped, torn).

        ``words`` are 64-bit numbers: pieces; for each: extents, (offset, length) of each; low, high; for each group:
        first block, ids, each id. Why it stopped: 0 it did not, 1 a file is shorter than it was, 2 memory that the
        system could not give. With ``pace`` the caller moves one run at a time, in order, each after a call of it.

        Raises ValueError, before anything has moved, unless all lies inside the arena and the mapping.
        """

    def close(self) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def stream_bytes(self) -> int: ...

def touch(memory: Buffer) -> bool:
    """Takes the pages of ``memory`` into use as a first write would, without changing a byte, with the interpreter lock
    released. False when the system cannot.
    """

# ---- cards ----------------------------------------------------------------------------------------------------------
# What the driver refuses is a RuntimeError with the call and the driver's words; so is a driver that is not there.

PAGED_COPY_SOURCE: str
"""csrc/paged_copy.cu."""
PAGED_COPY_NAME: str

def cards() -> list[tuple[int, str, str, str]]:
    """(ordinal, UUID as "GPU-...", name, bus id) of each card that the driver shows to this process."""

def export_memory(pointer: int) -> tuple[bytes, str, int, int]:
    """(CUDA IPC handle, UUID of its card, offset in the allocation, bytes of the allocation) of memory of this process.

    Raises ValueError with a sentence that says why it cannot be shared.
    """

def current_context() -> int:
    """The CUDA context of the calling thread; 0: it has none, or there is no driver."""

def use_context(context: int) -> None:
    """Makes one that was answered current for the calling thread."""

class Card:
    """A card's primary context, retained. Threads: any."""

    def __init__(self, ordinal: int) -> None: ...
    def open(self, handle: bytes) -> tuple[int, int]:
        """(address, bytes) of the allocation behind another process's handle. A process opens a handle once."""

    def close(self, pointer: int) -> None: ...
    def pin(self, memory: Buffer) -> None:
        """Locks host memory for all cards of the process."""

    def unpin(self, memory: Buffer) -> None: ...
    def memory(self) -> tuple[int, int]:
        """(free, all) bytes."""

class IpcEvent:
    """An event of another process, open on the card for as long as this lives. Raises RuntimeError, ValueError unless
    the handle has 64 bytes."""

    def __init__(self, card: Card, handle: bytes) -> None: ...

class EventPoll:
    """Finds out when events are over; nothing on a card waits for them.

    Threads: ``wait`` by one, all else by any.
    """

    def __init__(self) -> None: ...
    def add(self, key: int, event: IpcEvent) -> None: ...
    def drop(self, key: int) -> None:
        """Harmless for a key that is not there."""

    def wait(self) -> list[tuple[int, str]]:
        """With the interpreter lock released, until events are over: (key, what the driver said if it failed), each
        once. Nothing after ``close``."""

    def close(self) -> None: ...

class DeviceMapping:
    """Open memory of a card, and the paging in it of each part of a chunk; every address is checked here once. Not its
    opener: close the memory after this has gone.

    ``regions`` are (address, bytes); ``windows`` and the groups of a part as for Mapping. ``mode``: 0 copy engines,
    1 a kernel and a ring on the card, 2 a kernel that reaches into the arena.
    """

    def __init__(
        self,
        card: Card,
        regions: Sequence[tuple[int, int]],
        windows: Sequence[tuple[int, int, int]],
        parts: Sequence[Sequence[tuple[int, int, Sequence[tuple[int, int, int, int, int, int, int, int]]]]],
        mode: int,
    ) -> None: ...

class Flight:
    """A slice that was launched. ``failed``: the driver refused it, and all of it that was launched has ended."""

    failed: bool

    def wait(self) -> tuple[int, int, bool, str]:
        """With the interpreter lock released: (completed pieces, why it stopped as HostCopier.copy says, torn, what the
        driver said). Then nothing touches the slice's memory any more."""

class DeviceCopier:
    """Copies between mappings of one card and ``arena``, which is pinned in parts of ``part_bytes``.

    Each direction has a ring of ``steps`` times ``step_bytes`` on the card, taken at the first staged copy.

    Threads: ``launch`` by any number at once. ``close`` when no other call runs and every flight has been waited for.
    """

    def __init__(
        self, card: Card, arena: Buffer, part_bytes: int, step_bytes: int = 16777216, steps: int = 4
    ) -> None: ...
    def load(self, function: int, staged_blocks: int = 32, direct_blocks: int = 8) -> None:
        """The kernel, loaded into the card's primary context, and its thread blocks."""

    def launch(self, mapping: DeviceMapping, part: int, words: Buffer, retrieve: bool) -> Flight:
        """Starts a slice of one part; ``words`` as HostCopier.copy takes them. Slices of one mapping and
        direction are copied in the order of their launch. Raises ValueError, before anything has moved, unless all lies
        inside the arena and the mapping."""

    def close(self) -> None: ...
