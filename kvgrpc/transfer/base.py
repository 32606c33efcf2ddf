# SPDX-License-Identifier: Apache-2.0
"""What a mover is: the hands that copy runs of bytes between an engine's memory and the arena.

A mover decides nothing. It is told a slice, copies its pieces in order, stops at the first failure and reports.
Revocation lies between slices and is the core's.

Threads: ``map``, ``copy`` and ``unmap`` block and are called on the affinity thread of the mapping's client, never on
the event loop. One mapping is used by one thread at a time; different mappings are used by different threads at once.
``close`` is called when no other call runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from kvgrpc.api import Layout
from kvgrpc.core.errors import Refusal
from kvgrpc.core.types import RunSlice, SliceReport

# Reasons of a SliceReport that stopped early.
MEMORY_TRUNCATED = "MEMORY_TRUNCATED"
"""The engine's memory is shorter than it was at registration."""
MEMORY_IO = "MEMORY_IO"
"""The operating system refused to read or write the engine's memory."""
CARD_FAILED = "CARD_FAILED"
"""The card or its driver failed; the server's log says how."""

EVENTS_OF_CARDS = "ready_event is for memory on a card; leave it empty and send the call when the bytes are ready"


class Flight(Protocol):
    """A slice that was launched."""

    def wait(self) -> SliceReport:
        """Once. Blocks until nothing touches the slice's blocks or extents any more; what became of it."""
        ...


class Mover(Protocol):
    """Copies between mapped engine memory and the arena that it was built with."""

    def map(self, mapping_id: int, layout: Layout) -> bytes:
        """Opens and checks the memory of ``layout`` under a fresh id.

        Answers 16 bytes that stand for the layout and the memory objects behind it (Registration.layout_digest): equal
        to those of another mapping that is still open only if both are the same, whatever a name means by now.
        Raises Refusal: LAYOUT, MEMORY, MEMORY_OWNER, CUDA_UNSUPPORTED, CARD_FAILED; then nothing stays open.
        """
        ...

    def copy(self, work: RunSlice) -> SliceReport:
        """Copies the pieces in order, stops at the first failure: blocks of later pieces are untouched; their extents,
        in a store, may hold anything.

        Never raises for what the engine or the operating system does. ``torn`` is exact: 1 only if bytes of the failing
        piece had begun to move. When it returns, nothing touches the slice's blocks or extents any more. Where copies
        run by themselves nobody knows how far they came: ``torn`` counts all pieces then.
        """
        ...

    def unmap(self, mapping_id: int) -> None:
        """Closes the memory; no slice of it is running. Harmless for an id that is not mapped."""
        ...

    def close(self) -> None:
        """Unmaps everything."""
        ...


@runtime_checkable
class LaunchingMover(Mover, Protocol):
    """A mover whose copies run by themselves once they are launched.

    Threads: ``launch`` on the affinity thread of the mapping's client, ``wait`` on another one.
    """

    def launches(self, mapping_id: int) -> bool:
        """Whether slices of this mapping run by themselves; else ``launch`` copies. Threads: any."""
        ...

    def launch(self, work: RunSlice) -> Flight | SliceReport:
        """The first half of ``copy``, the flight's ``wait`` the second. Slices of one mapping and direction are copied
        in the order of their launch; what fails while it is copied leaves those behind it uncopied. A report, if the
        slice has ended already: copied, or refused."""
        ...


@runtime_checkable
class WaitingMover(Mover, Protocol):
    """A mover that can wait for an engine's event.

    Threads: ``when_ready`` on the affinity thread of the mapping's client, what it answers and ``done`` on any.
    """

    def when_ready(self, mapping_id: int, event: bytes, done: Callable[[Refusal | None], None]) -> Callable[[], None]:
        """Opens the event, or takes the one that is open, and calls ``done`` once: when all has ended that was launched
        before its latest record, or with why nobody will know. Unmapping calls it with CALL_REVOKED. Calling what is
        answered takes the wait back; harmless afterwards. Refuses: READY_EVENT_UNSUPPORTED, CARD_FAILED."""
        ...
