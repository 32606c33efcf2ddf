# SPDX-License-Identifier: Apache-2.0
"""Calls by method and status, counted by the guard as plain numbers (names as in gRFC A66 when they are shown).

Used on the event loop only, but read from any thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from kvgrpc.runtime.figures import SECONDS, Spread

M = TypeVar("M")
OK = "OK"
FEW_SECONDS = (1.0,)
"""Bounds for operators' calls, which are few, and for streams, which last as they like: each bound of each method is a
series."""
STREAMS = ("/Attach", "/Watch", "/ReadChunks", "/WriteChunks")


class StatusFigures:
    """Calls of one method that ended in one status: seconds, and bytes received and sent."""

    __slots__ = ("received", "seconds", "sent")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.seconds = Spread(bounds)
        self.received = Spread(())
        self.sent = Spread(())


class MethodFigures:
    """Calls of one method."""

    __slots__ = ("_bounds", "started", "statuses")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.started = 0
        self.statuses = {OK: StatusFigures(bounds)}

    def ended(self, status: str, seconds: float, received_bytes: int) -> None:
        figures = self.statuses.get(status)
        if figures is None:
            figures = self.statuses[status] = StatusFigures(self._bounds)
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

    def __init__(self, methods: Collection[str]) -> None:
        few = {method for method in methods if "AdminService" in method or method.endswith(STREAMS)}
        self.methods = {method: MethodFigures(FEW_SECONDS if method in few else SECONDS) for method in methods}
        self.refusals: Counter[str] = Counter()
