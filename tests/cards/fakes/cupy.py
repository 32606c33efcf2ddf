# SPDX-License-Identifier: Apache-2.0
"""What the server uses of CuPy, for the fake driver, whose only kernel is known to it."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace


class RawModule:
    def __init__(self, code: str) -> None:
        self.code = code

    def get_function(self, name: str) -> SimpleNamespace:
        assert name in self.code
        return SimpleNamespace(kernel=SimpleNamespace(ptr=1))


cuda = SimpleNamespace(Device=nullcontext, compiler=SimpleNamespace(CompileException=RuntimeError))
