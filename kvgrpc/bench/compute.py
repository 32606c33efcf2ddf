# SPDX-License-Identifier: Apache-2.0
"""An engine that computes: ``python -m kvgrpc.bench.compute``. Needs torch.

For each line "KIND SECONDS" it runs kernels for that long and prints how many rounds it did in a second. ``large``: a
product of two matrices of 8192 x 8192 bf16. ``small``: the products of one token of 8 requests with the weights of a
layer, one after the other, as in decoding.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from kvgrpc.bench.processes import say

LAUNCHED = 20
"""Rounds between two looks at the clock."""


def rounds_of(kind: str) -> Callable[[], object]:
    torch: Any = import_module("torch")
    make: Any = torch.randn
    if kind == "large":
        a, b = (make((8192, 8192), device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return lambda: a @ b
    x = make((8, 4096), device="cuda", dtype=torch.bfloat16)
    up, down = (make(shape, device="cuda", dtype=torch.bfloat16) for shape in ((4096, 14336), (14336, 4096)))

    def layers() -> object:
        y = x
        for _ in range(8):
            y = torch.nn.functional.silu(y @ up) @ down
            y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6)
        return y

    return layers


def main() -> None:
    torch: Any = import_module("torch")
    known: dict[str, Callable[[], object]] = {}
    say("ready")
    for line in sys.stdin:
        kind, seconds = line.split()
        if kind not in known:
            known[kind] = rounds_of(kind)
        act = known[kind]
        act()
        torch.cuda.synchronize()
        done, began = 0, time.perf_counter()
        while time.perf_counter() - began < float(seconds):
            for _ in range(LAUNCHED):
                act()
            torch.cuda.synchronize()
            done += LAUNCHED
        say(str(done / (time.perf_counter() - began)))


if __name__ == "__main__":
    main()
