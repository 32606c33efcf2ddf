# SPDX-License-Identifier: Apache-2.0
"""A registration for servers that never look at the memory, and prompts."""

from __future__ import annotations

from array import array

from kvgrpc import api
from tests.client.fakes import ENGINE, IDENTITY


def register_request() -> api.RegisterRequest:
    runs = api.Runs(0, 0, 1, 0, 1, 0, 64, 64)
    group = api.KvGroup(4, 100, (runs,), api.BlockForm.OPAQUE, backend="TEST", layout="X")
    layout = api.Layout((api.SharedMemory("nothing", 0, 6400),), (group,))
    return api.RegisterRequest(ENGINE, IDENTITY, 0, 0, 1, 1, layout)


def tokens(count: int, first: int = 0) -> api.Tokens:
    return api.Tokens(array("I", range(first, first + count)).tobytes())
