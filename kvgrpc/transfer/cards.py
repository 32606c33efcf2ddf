# SPDX-License-Identifier: Apache-2.0
"""The cards of this machine: opened once, in the background, and the arena pinned for them part by part."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.transfer import _native
from kvgrpc.transfer.arena import PART_BYTES, Arena
from kvgrpc.transfer.kernels import load_kernel

log = structlog.get_logger(__name__)

WAIT_S = 60.0
"""Most that a registration waits for a server that has just started to open its cards."""


@dataclass(slots=True)
class OpenMemory:
    """An allocation of another process that is open here. ``serial`` is used once."""

    pointer: int
    size_bytes: int
    serial: int
    users: int = 0


@dataclass(slots=True)
class OpenCard:
    """A card in use."""

    uuid: str
    name: str
    ordinal: int
    native: _native.Card
    copier: _native.DeviceCopier
    memory: dict[bytes, OpenMemory] = field(default_factory=dict[bytes, OpenMemory])
    failure: str = ""
    has_kernel: bool = False


def nvidia_devices(folder: Path = Path("/dev")) -> int:
    """How many cards this process may open, by their device files; nothing of CUDA is loaded for it."""
    return sum(1 for path in folder.glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdecimal())


def canonical_uuid(text: str) -> str:
    """32 hex digits of a card's UUID, however it is written ("GPU-...", "MIG-...")."""
    return text.rpartition("GPU-")[2].rpartition("MIG-")[2].replace("-", "").lower()


def _lost(card: OpenCard) -> Refusal:
    return Refusal(Reason.CARD_FAILED, f"card {card.uuid} has failed: {card.failure}", resource=card.uuid)


class Cards:
    """Opens every card that the driver shows, pins the arena for them, and keeps what engines have shared on them.

    ``pin`` is for the thread that fills the arena: before its first call nothing of CUDA is loaded. ``card`` waits
    until the bytes that were there at the start are pinned. A process may open a handle once, so allocations that
    several registrations share are counted here.

    Threads: ``pin`` by one; all else by any.
    """

    def __init__(self, arena: Arena, part_bytes: int = PART_BYTES) -> None:
        self._arena = arena
        self._part_bytes = part_bytes
        self._needed_bytes = arena.ready_bytes
        self._pinned_bytes = 0
        self._cards: dict[str, OpenCard] = {}
        self._unopened: dict[str, str] = {}
        """Why others of the driver's cards cannot be used."""
        self._trouble = ""
        self._opened = False
        self._closed = False
        self._changed = threading.Condition()
        self._serial = 0

    # ---- pinning ----------------------------------------------------------------------------------------------------

    def pin(self, begin: int, end: int) -> bool:
        """Pins bytes [begin, end) of the arena, which follow those pinned before; False when that part cannot be used
        by cards that are in use."""
        with self._changed:
            if self._closed:
                return False
            if not self._opened:
                self._trouble, self._opened = self._open(), True
            if self._sound() and not self._trouble:
                try:
                    self._pin(begin, end)
                    self._pinned_bytes = end
                except RuntimeError as error:
                    self._trouble = f"the arena cannot be pinned: {error}"
                    log.error("cards cannot use all of the arena", pinned_bytes=begin, reason=str(error))
            self._changed.notify_all()
            unused = not self._sound() or self._pinned_bytes < self._needed_bytes
            return unused or self._pinned_bytes >= end

    def _pin(self, begin: int, end: int) -> None:
        """For all cards, by one that answers. Raises RuntimeError."""
        card, *others = self._sound()
        try:
            with self._arena.view(begin, end - begin) as part:
                card.native.pin(part)
        except RuntimeError:
            if self.lost(card) is None or not others:
                raise
            self._pin(begin, end)

    def _sound(self) -> list[OpenCard]:
        """Cards that have not failed."""
        return [card for card in self._cards.values() if not card.failure]

    def pin_all(self) -> None:
        """Pins what is there, for an arena that nobody fills."""
        for begin in range(0, self._arena.ready_bytes, self._part_bytes):
            self.pin(begin, min(begin + self._part_bytes, self._arena.ready_bytes))

    @property
    def opened(self) -> tuple[OpenCard, ...]:
        """The cards that could be opened."""
        return tuple(self._cards.values())

    def _open(self) -> str:
        try:
            found = _native.cards()
        except RuntimeError as error:
            return str(error)
        for ordinal, uuid, name, bus_id in found:
            try:
                native = _native.Card(ordinal)
            except RuntimeError as error:  # another process has it for itself, or has filled it
                self._unopened[canonical_uuid(uuid)] = str(error)
                log.error("a card cannot be used until the server is started again", uuid=uuid, reason=str(error))
                continue
            copier = _native.DeviceCopier(native, self._arena.view(0, self._arena.size_bytes), self._part_bytes)
            self._cards[canonical_uuid(uuid)] = OpenCard(uuid, name, ordinal, native, copier)
            log.info("card", uuid=uuid, name=name, bus_id=bus_id)
        none = next(iter(self._unopened.values()), "the driver shows no card to it")
        return "" if self._cards else none

    def _is_ready(self) -> bool:
        return self._closed or bool(self._trouble) or (self._opened and self._pinned_bytes >= self._needed_bytes)

    # ---- use --------------------------------------------------------------------------------------------------------

    def card(self, uuid: str, where: str) -> OpenCard:
        """Raises Refusal: CUDA_UNSUPPORTED (no such card here, or none at all), CARD_FAILED."""
        with self._changed:
            ready = self._changed.wait_for(self._is_ready, WAIT_S)
            card = self._cards.get(canonical_uuid(uuid))
            trouble = self._trouble if ready else f"its cards were not open after {WAIT_S:.0f} s"
            if not card or (self._pinned_bytes < self._needed_bytes):
                seen = ", ".join(one.uuid for one in self._cards.values())
                trouble = self._unopened.get(canonical_uuid(uuid), trouble)
                sentence = f"this server cannot use {uuid!r}: {trouble or f'it sees {seen} only'}"
                raise Refusal(Reason.CUDA_UNSUPPORTED, sentence, field=where)
            if card.failure:
                raise _lost(card)
            return card

    def open(self, card: OpenCard, handle: bytes) -> OpenMemory:
        """The allocation behind a handle; ``release`` it once for each time. Raises RuntimeError with the driver's
        words, ValueError for what is no handle."""
        with self._changed:
            memory = card.memory.get(handle)
            if memory is None:
                pointer, size = card.native.open(handle)
                self._serial += 1
                memory = card.memory[handle] = OpenMemory(pointer, size, self._serial)
            memory.users += 1
            return memory

    def release(self, card: OpenCard, handle: bytes) -> None:
        """The other end of ``open``."""
        with self._changed:
            memory = card.memory[handle]
            memory.users -= 1
            if not memory.users:
                del card.memory[handle]
                self._attempt(card, card.native.close, memory.pointer)

    def load_kernel(self, card: OpenCard) -> None:
        """Makes the copier able to stage. Raises RuntimeError when the kernel cannot be had here."""
        with self._changed:
            if not card.has_kernel:
                card.copier.load(load_kernel(card.ordinal))
                card.has_kernel = True

    def failed(self, card: OpenCard, error: str) -> None:
        """A copy failed; the card may have, too."""
        log.error("a copy on a card failed", uuid=card.uuid, reason=error)
        self.lost(card)

    @staticmethod
    def lost(card: OpenCard) -> Refusal | None:
        """After anything failed on the card: what to say when it answers nothing else either."""
        try:
            card.native.memory()
        except RuntimeError as lost:
            if not card.failure:
                log.error("the card is lost until the server is started again", uuid=card.uuid, reason=str(lost))
            card.failure = card.failure or str(lost)
        return _lost(card) if card.failure else None

    @staticmethod
    def _attempt(card: OpenCard, act: Callable[[int], None], pointer: int) -> None:
        try:
            act(pointer)
        except RuntimeError as error:  # nothing can be done about it, and nothing else depends on it
            log.error("memory of a card could not be closed", uuid=card.uuid, reason=str(error))

    def close(self) -> None:
        """Ends the use of all cards; nothing is open on them any more."""
        with self._changed:
            self._closed = True
            sound = self._sound()
            for card in self._cards.values():
                card.copier.close()
            for begin in range(0, self._pinned_bytes, self._part_bytes) if sound else ():
                with self._arena.view(begin, min(self._part_bytes, self._pinned_bytes - begin)) as part:
                    try:
                        sound[0].native.unpin(part)
                    except RuntimeError as error:
                        log.error("memory could not be unpinned", reason=str(error))
                        break
            self._pinned_bytes = 0
            self._cards.clear()
            self._changed.notify_all()
