# SPDX-License-Identifier: Apache-2.0
"""Events of engines on cards, and who waits for them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.transfer import _native
from kvgrpc.transfer.cards import OpenCard

EVENTS_MOST = 64
"""Events of one registration that stay open; the one that was named longest ago makes room."""

Done = Callable[[Refusal | None], None]
Lost = Callable[[OpenCard], Refusal | None]


@dataclass(slots=True)
class OpenEvents:
    """Of one registration: open events by handle, the last one named last, and the waits that run."""

    card: OpenCard
    events: dict[bytes, _native.IpcEvent] = field(default_factory=dict[bytes, _native.IpcEvent])
    waits: set[int] = field(default_factory=set[int])

    def open(self, handle: bytes, lost: Lost) -> _native.IpcEvent:
        """Refuses: READY_EVENT_UNSUPPORTED, CARD_FAILED."""
        event = self.events.pop(handle, None)
        if event is None:
            try:
                event = _native.IpcEvent(self.card.native, handle)
            except (RuntimeError, ValueError) as error:
                sentence = (
                    f"the CUDA IPC event handle cannot be opened on {self.card.uuid}: {error}. It must come from an "
                    "event of the engine's own process that lives and was made for other processes, and engine and "
                    "server must share /dev/shm; else send the call when the bytes are ready, without an event"
                )
                unusable = Refusal(Reason.READY_EVENT_UNSUPPORTED, sentence, field="ready_event")
                raise lost(self.card) or unusable from error
            if len(self.events) >= EVENTS_MOST:
                del self.events[next(iter(self.events))]
        self.events[handle] = event
        return event


class ReadyEvents:
    """One thread waits for the events of all engines, from the first one on.

    ``lost`` is Cards.lost, asked when a card's driver refuses an event. Threads: any; calls about one registration come
    from one thread at a time. ``done`` is called on any.
    """

    def __init__(self, lost: Lost) -> None:
        self._lost = lost
        self._poll = _native.EventPoll()
        self._thread: threading.Thread | None = None
        self._waits: dict[int, tuple[OpenEvents, Done]] = {}
        self._next = itertools.count(1).__next__
        self._lock = threading.Lock()

    def wait(self, events: OpenEvents, handle: bytes, done: Done) -> Callable[[], None]:
        """``done`` is called once, unless what is answered is called before: that takes the wait back. Refuses:
        READY_EVENT_UNSUPPORTED, CARD_FAILED."""
        event, key = events.open(handle, self._lost), self._next()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvgrpc-events", daemon=True)
                self._thread.start()
        self._waits[key] = events, done
        events.waits.add(key)
        self._poll.add(key, event)
        return lambda: self._drop(key)

    def end(self, events: OpenEvents) -> None:
        """Closes the events of a registration; whoever waits for one is told CALL_REVOKED."""
        for key in tuple(events.waits):
            self._poll.drop(key)
            text = "the memory of its blocks was unregistered while the call waited for its event"
            self._tell(key, Refusal(Reason.CALL_REVOKED, text, field="ready_event"))
        events.events.clear()

    def close(self) -> None:
        """Everything has been ended before."""
        self._poll.close()
        if self._thread is not None:
            self._thread.join()

    def _drop(self, key: int) -> None:
        self._poll.drop(key)
        events, _ = self._waits.pop(key, (None, None))
        if events is not None:
            events.waits.discard(key)

    def _tell(self, key: int, refusal: Refusal | None) -> None:
        events, done = self._waits.pop(key, (None, None))
        if events is not None and done is not None:
            events.waits.discard(key)
            done(refusal)

    def _run(self) -> None:
        while over := self._poll.wait():
            for key, error in over:
                self._tell(key, self._refusal(key, error) if error else None)

    def _refusal(self, key: int, error: str) -> Refusal:
        events, _ = self._waits.get(key, (None, None))
        if events is None:
            return Refusal(Reason.CARD_FAILED, error)
        text = f"nobody can say whether the event is over: {error}"
        return self._lost(events.card) or Refusal(Reason.READY_EVENT_UNSUPPORTED, text, field="ready_event")
