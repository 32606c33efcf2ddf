# SPDX-License-Identifier: Apache-2.0
"""Copies between the arena and memory of NVIDIA cards that engines share by CUDA IPC handles.

A handle opens the whole allocation; the layout's offsets lie in it. Addresses are checked at registration, once; what a
slice names is checked before anything of it is launched. Launching and waiting release the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import structlog

from kvgrpc.api import CudaIpcMemory, Layout, Runs
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import Direction, Part, RunSlice, SliceReport
from kvgrpc.transfer import _native
from kvgrpc.transfer.base import CARD_FAILED
from kvgrpc.transfer.cards import Cards, OpenCard, OpenMemory
from kvgrpc.transfer.layout import check_layout, digest
from kvgrpc.transfer.ready import OpenEvents, ReadyEvents
from kvgrpc.transfer.words import group_words, slice_words

log = structlog.get_logger(__name__)

SHORT_RUN_BYTES, SHORT_ROW_BYTES = 32 << 10, 16 << 10
"""Below it one copy a run costs the copy engines more than the bytes do; the second holds for runs that lie at equal
distances, of which one copy moves many: docs/gpu.md has the figures."""
LEAST_ROWS, MOST_PITCH_BYTES = 4, (1 << 31) - 1
"""What such a copy needs, as in csrc/grid.cpp."""


class CopyMode(Enum):
    """How bytes move; see docs/gpu.md."""

    AUTO = "auto"
    DMA = "dma"
    STAGED = "staged"
    DIRECT = "direct"


_NATIVE_MODES = {CopyMode.DMA: 0, CopyMode.STAGED: 1, CopyMode.DIRECT: 2}


@dataclass(frozen=True, slots=True)
class _Mapped:
    card: OpenCard
    native: _native.DeviceMapping
    handles: tuple[bytes, ...]
    events: OpenEvents


@dataclass(frozen=True, slots=True)
class CudaFlight:
    """A slice that was launched on a card: ``wait`` for it exactly once."""

    cards: Cards
    card: OpenCard
    native: _native.Flight
    pieces: int

    def wait(self) -> SliceReport:
        """Blocks with the interpreter lock released; then nothing touches the slice's memory any more."""
        completed, why, torn, error = self.native.wait()
        if not why:
            return SliceReport(completed)
        self.cards.failed(self.card, error)
        return SliceReport(completed, CARD_FAILED, self.pieces if torn else 0)


class CudaMover:
    """A mover for layouts whose memory lies on one card.

    ``launch`` and the flight's ``wait`` are the two halves of ``copy``: slices of one mapping and direction that are
    launched before earlier ones have ended are copied behind them, in order.

    Threads: as Mover; ``launch`` and ``wait`` may be called by different ones.
    """

    def __init__(self, cards: Cards, chunk_tokens: int, mode: CopyMode = CopyMode.AUTO) -> None:
        self._cards = cards
        self._chunk_tokens = chunk_tokens
        self._mode = mode
        self._mappings: dict[int, _Mapped] = {}
        self._ready = ReadyEvents(cards.lost)

    @property
    def mapped(self) -> frozenset[int]:
        """Ids that are mapped."""
        return frozenset(self._mappings)

    def map(self, mapping_id: int, layout: Layout) -> bytes:
        parts = check_layout(layout, self._chunk_tokens).parts(self._chunk_tokens)
        assert mapping_id not in self._mappings, "a mapping id is used twice"
        pieces = [memory for memory in layout.memory if isinstance(memory, CudaIpcMemory)]
        card = self._cards.card(pieces[0].device_uuid, "memory[0].cuda")
        opened: dict[bytes, OpenMemory] = {}
        try:
            for index, memory in enumerate(pieces):
                self._open(card, memory, opened, f"memory[{index}].cuda")
            native = self._map(card, layout, parts, opened)
        except BaseException:
            for handle in opened:
                self._cards.release(card, handle)
            raise
        self._mappings[mapping_id] = _Mapped(card, native, tuple(opened), OpenEvents(card))
        return digest(layout, [opened[memory.handle].serial for memory in pieces])

    def launches(self, mapping_id: int) -> bool:
        return True

    def launch(self, work: RunSlice) -> CudaFlight | SliceReport:
        """Starts the slice; its report at once when its card has failed."""
        mapped = self._mappings[work.mapping_id]
        if mapped.card.failure:
            return SliceReport(0, CARD_FAILED)
        retrieve = work.direction is Direction.RETRIEVE
        native = mapped.card.copier.launch(mapped.native, work.part, slice_words(work), retrieve)
        flight = CudaFlight(self._cards, mapped.card, native, len(work.pieces))
        return flight.wait() if native.failed else flight

    def copy(self, work: RunSlice) -> SliceReport:
        flight = self.launch(work)
        return flight if isinstance(flight, SliceReport) else flight.wait()

    def when_ready(self, mapping_id: int, event: bytes, done: Callable[[Refusal | None], None]) -> Callable[[], None]:
        mapped = self._mappings.get(mapping_id)
        if mapped is None:
            raise Refusal(Reason.NOT_REGISTERED, "the client's memory was unregistered", field="ready_event")
        return self._ready.wait(mapped.events, event, done)

    def unmap(self, mapping_id: int) -> None:
        mapped = self._mappings.pop(mapping_id, None)
        if mapped is None:
            return
        card, handles = mapped.card, mapped.handles
        self._ready.end(mapped.events)
        del mapped  # its streams go before its memory
        for handle in handles:
            self._cards.release(card, handle)

    def close(self) -> None:
        for mapping_id in tuple(self._mappings):
            self.unmap(mapping_id)
        self._ready.close()
        self._cards.close()

    def _open(self, card: OpenCard, memory: CudaIpcMemory, opened: dict[bytes, OpenMemory], where: str) -> None:
        if self._cards.card(memory.device_uuid, where) is not card:
            sentence = f"memory of {memory.device_uuid!r} beside that of {card.uuid}: register each card's by itself"
            raise Refusal(Reason.MEMORY, sentence, field=f"{where}.device_uuid")
        if memory.handle not in opened:
            try:
                opened[memory.handle] = self._cards.open(card, memory.handle)
            except (RuntimeError, ValueError) as error:
                sentence = (
                    f"the CUDA IPC handle cannot be opened on {card.uuid}: {error}. It must come from another process "
                    "that lives, and from cudaMalloc: the virtual-memory allocator (expandable segments, sleep mode), "
                    "memory pools and managed memory have none"
                )
                raise self._cards.lost(card) or Refusal(Reason.MEMORY, sentence, field=f"{where}.handle") from error
        size, end = opened[memory.handle].size_bytes, memory.offset_bytes + memory.size_bytes
        if end > size:
            sentence = f"the allocation has {size} bytes; offset_bytes + size_bytes is {end}"
            raise Refusal(Reason.MEMORY, sentence, field=f"{where}.size_bytes")

    def _map(
        self, card: OpenCard, layout: Layout, parts: Sequence[Part], opened: dict[bytes, OpenMemory]
    ) -> _native.DeviceMapping:
        pieces = [memory for memory in layout.memory if isinstance(memory, CudaIpcMemory)]
        numbers = {handle: number for number, handle in enumerate(opened)}
        regions = [(memory.pointer, memory.size_bytes) for memory in opened.values()]
        windows = [(numbers[memory.handle], memory.offset_bytes, memory.size_bytes) for memory in pieces]
        mode = _NATIVE_MODES[self._choose(card, layout)]
        try:
            groups = [group_words(layout, self._chunk_tokens, part) for part in parts]
            return _native.DeviceMapping(card.native, regions, windows, groups, mode)
        except RuntimeError as error:
            self._cards.failed(card, str(error))
            raise Refusal(Reason.CARD_FAILED, f"card {card.uuid}: {error}", resource=card.uuid) from error

    def _choose(self, card: OpenCard, layout: Layout) -> CopyMode:
        mode = self._mode
        if mode is CopyMode.AUTO:
            short = any(_is_short(runs) for group in layout.groups for runs in group.runs)
            mode = CopyMode.STAGED if short else CopyMode.DMA
        if mode is CopyMode.DMA:
            return mode
        try:
            self._cards.load_kernel(card)
        except RuntimeError as error:
            if self._mode is not CopyMode.AUTO:
                raise Refusal(Reason.CUDA_UNSUPPORTED, f"--copy-mode {self._mode.value}: {error}") from error
            log.warning("short runs are copied by copy engines, which is slow", uuid=card.uuid, reason=str(error))
            return CopyMode.DMA
        return mode


def _is_short(runs: Runs) -> bool:
    planes = runs.planes > 1
    rows, pitch = runs.layers * runs.planes, runs.plane_stride_bytes if planes else runs.layer_stride_bytes
    if planes and runs.layers > 1 and runs.layer_stride_bytes != runs.planes * runs.plane_stride_bytes:
        rows = runs.planes
    in_rows = rows >= LEAST_ROWS and runs.run_bytes <= pitch <= MOST_PITCH_BYTES
    return runs.run_bytes < (SHORT_ROW_BYTES if in_rows else SHORT_RUN_BYTES)
