# SPDX-License-Identifier: Apache-2.0
"""Stores that wait for an event of their engine before the bookkeeper hears of them.

Such a call has begun nothing: no slot, no thread and no stream waits with it. A Fence, the end of its registration or
of its RPC ends the wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from kvgrpc.api import StoreRequest
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.transfer.base import EVENTS_OF_CARDS, WaitingMover

if TYPE_CHECKING:
    from kvgrpc.runtime.driver import Driver

WAITS_MOST = 256
"""Calls of a client that may wait for events at a time."""

Answer = asyncio.Future[Refusal | None]


class ReadyWaits:
    """Threads: the driver's."""

    def __init__(self, driver: Driver, post: Callable[..., None]) -> None:
        self._driver = driver
        self._post = post
        self._waits: dict[str, list[tuple[int, Answer]]] = {}

    async def wait(self, client_id: str, request: StoreRequest) -> None:
        """Returns when the event is over, or the call was fenced: the bookkeeper refuses it then. Refuses:
        READY_EVENT_UNSUPPORTED, CARD_FAILED, CALL_LIMIT, CALL_REVOKED."""
        driver, mover = self._driver, self._driver.hands.mover
        mapping_id = driver.current.get(client_id)
        if mapping_id is None:
            return  # the bookkeeper says so
        if not isinstance(mover, WaitingMover):
            raise Refusal(Reason.READY_EVENT_UNSUPPORTED, EVENTS_OF_CARDS, field="ready_event")
        waits = self._waits.setdefault(client_id, [])
        if len(waits) >= WAITS_MOST:
            text = f"{len(waits)} calls of this client wait for events"
            raise Refusal(Reason.CALL_LIMIT, text, retry_after_ms=1000, resource="calls")
        answer: Answer = asyncio.get_running_loop().create_future()
        waits.append(own := (request.call_id, answer))
        submit = driver.hands.affinity.submit

        def done(refusal: Refusal | None) -> None:
            self._post(_answer, answer, refusal)

        begun = submit(client_id, mover.when_ready, mapping_id, request.ready_event, done)
        begins = asyncio.wrap_future(begun)
        begins.add_done_callback(lambda found: found.cancelled() or found.exception())  # if nobody is left to tell
        try:
            await asyncio.shield(begins)
            refusal = await answer
        finally:
            begun.add_done_callback(_stop)  # now, or when it has begun
            waits.remove(own)
            if not waits and self._waits.get(client_id) is waits:
                del self._waits[client_id]
        if refusal is not None:
            raise refusal

    def fence(self, client_id: str, call_ids: Sequence[int]) -> None:
        """These calls, which the bookkeeper now refuses, wait no longer."""
        fenced = set(call_ids)
        for call_id, answer in self._waits.get(client_id, ()):
            if call_id in fenced:
                _answer(answer, None)


def _answer(answer: Answer, refusal: Refusal | None) -> None:
    if not answer.done():
        answer.set_result(refusal)


def _stop(begun: Future[Callable[[], None]]) -> None:
    if begun.exception() is None:
        begun.result()()
