# SPDX-License-Identifier: Apache-2.0
"""What happens in a world, one line a contact with the bookkeeper, for reading a failed seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvgrpc.core.cache import Bookkeeper
from kvgrpc.core.types import MS
from tests.sim.loop import Loop

QUIET = {"next_wake", "counts", "arena_status", "engines", "spaces", "space_seed"}


class Traced:
    """Stands before a bookkeeper and prints calls, answers and orders."""

    def __init__(self, book: Bookkeeper, loop: Loop) -> None:
        self._book = book
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._book, name)
        if name in QUIET or not callable(attribute):
            return attribute
        return self._drain if name == "drain" else self._tell(name, attribute)

    def _tell(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            shown = args[1:] if args and args[0] == self._loop.now else args
            told = ", ".join([*(short(a) for a in shown), *(f"{k}={short(v)}" for k, v in named.items())])
            try:
                answer = act(*args, **named)
            except Exception as error:
                print(f"{self._loop.now / MS:10.3f}  {name}({told}) ! {error}")
                raise
            if name != "tick":
                print(f"{self._loop.now / MS:10.3f}  {name}({told}) = {short(answer)}")
            return answer

        return call

    def _drain(self) -> Any:
        actions = self._book.drain()
        for action in actions:
            print(f"{self._loop.now / MS:10.3f}      -> {short(action)}")
        return actions


def short(value: Any) -> str:
    """A value on one line, with bytes cut short."""
    if isinstance(value, bytes):
        return value.hex()[:8]
    if isinstance(value, (tuple, list)):
        return "[" + " ".join(short(v) for v in value) + "]"
    if hasattr(value, "__dataclass_fields__"):
        parts = (f"{f}={short(getattr(value, f))}" for f in value.__dataclass_fields__)
        return f"{type(value).__name__}({', '.join(parts)})"
    return str(value)
