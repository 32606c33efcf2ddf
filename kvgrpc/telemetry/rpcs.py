# SPDX-License-Identifier: Apache-2.0
"""Calls by method and status, counted by the guard as plain numbers (names as in gRFC A66 when they are shown).

Used on the event loop only, but read from any thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

from kvgrpc.runtime.figures import Spread

M = TypeVar("M")
OK = "OK"


class StatusFigures:
    """Calls of one method that ended in one status: seconds, and bytes received and sent."""

    __slots__ = ("received", "seconds", "sent")

    def __init__(self) -> None:
        self.seconds = Spread()
        self.received = Spread(())
        self.sent = Spread(())


class MethodFigures:
    """Calls of one method."""

    __slots__ = ("started", "statuses")

    def __init__(self) -> None:
        self.started = 0
        self.statuses = {OK: StatusFigures()}

    def ended(self, status: str, seconds: float, received_bytes: int) -> None:
        figures = self.statuses.get(status)
        if figures is None:
            figures = self.statuses[status] = StatusFigures()
        figures.seconds.add(seconds)
        figures.received.add(received_bytes)
        if status != OK:
            figures.sent.add(0)

    def counted(self, serialize: Callable[[M], bytes]) -> Callable[[M], bytes]:
        """The serializer of answers, which only successful calls have."""
        add = self.statuses[OK].sent.add

        def serialize_and_count(answer: M) -> bytes:
            data = serialize(answer)
            add(len(data))
            return data

        return serialize_and_count


class RpcFigures:
    """Calls of all methods, by full path, and refusals by reason."""

    def __init__(self, methods: Iterable[str]) -> None:
        self.methods = {method: MethodFigures() for method in methods}
        self.refusals: Counter[str] = Counter()
