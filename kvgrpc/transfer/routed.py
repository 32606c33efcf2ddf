# SPDX-License-Identifier: Apache-2.0
"""One mover for engines on the CPU and on cards: each mapping goes to the mover of its kind of memory."""

from __future__ import annotations

from collections.abc import Callable

from kvgrpc.api import CudaIpcMemory, Layout
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import RunSlice, SliceReport
from kvgrpc.transfer.base import EVENTS_OF_CARDS, Flight, LaunchingMover, Mover, WaitingMover


class RoutedMover:
    """``host`` has what lies in host memory, ``cards`` what lies on cards.

    Threads: as Mover.
    """

    def __init__(self, host: Mover, cards: Mover) -> None:
        self._host = host
        self._cards = cards
        self._movers: dict[int, Mover] = {}

    def map(self, mapping_id: int, layout: Layout) -> bytes:
        on_card = [isinstance(memory, CudaIpcMemory) for memory in layout.memory]
        if any(on_card) and not all(on_card):
            sentence = "memory of a card and of the host in one registration: register each by itself"
            raise Refusal(Reason.MEMORY, sentence, field=f"memory[{on_card.index(not on_card[0])}]")
        mover = self._cards if any(on_card) else self._host
        answer = mover.map(mapping_id, layout)
        self._movers[mapping_id] = mover
        return answer

    def copy(self, work: RunSlice) -> SliceReport:
        return self._movers[work.mapping_id].copy(work)

    def launches(self, mapping_id: int) -> bool:
        mover = self._movers.get(mapping_id)
        return isinstance(mover, LaunchingMover) and mover.launches(mapping_id)

    def launch(self, work: RunSlice) -> Flight | SliceReport:
        mover = self._movers[work.mapping_id]
        return mover.launch(work) if isinstance(mover, LaunchingMover) else mover.copy(work)

    def when_ready(self, mapping_id: int, event: bytes, done: Callable[[Refusal | None], None]) -> Callable[[], None]:
        mover = self._movers.get(mapping_id, self._cards)
        if isinstance(mover, WaitingMover):
            return mover.when_ready(mapping_id, event, done)
        raise Refusal(Reason.READY_EVENT_UNSUPPORTED, EVENTS_OF_CARDS, field="ready_event")

    def unmap(self, mapping_id: int) -> None:
        mover = self._movers.pop(mapping_id, None)
        if mover is not None:
            mover.unmap(mapping_id)

    def close(self) -> None:
        self._cards.close()
        self._host.close()
        self._movers.clear()
