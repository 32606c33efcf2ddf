# SPDX-License-Identifier: Apache-2.0
"""The core makes no cycles that outlive a session: the collector looks at what is old once an hour."""

from __future__ import annotations

import gc

import pytest

from kvgrpc.core import types as t
from kvgrpc.core.calls import Call
from kvgrpc.core.jobs import Job
from kvgrpc.core.sessions import Client
from tests.core.desk import OBJECT, Desk


def alive() -> int:
    return sum(isinstance(one, Client | Call | Job) for one in gc.get_objects())


@pytest.mark.parametrize("dies", ["idle", "in the middle of a copy"])
def test_nothing_of_a_dead_process_waits_for_the_collector(dies: str):
    """Half an hour of engines that die kept 96 MiB before."""
    gc.collect()
    gc.disable()
    try:
        before = alive()
        desk = Desk(auto=False, limits=t.CoreLimits(slice_bytes=2 * OBJECT))
        e = desk.engine()
        e.store("a", 4, call_id=1)
        desk.run_copies()
        e.retrieve(e.lookup("a", 4), call_id=2)
        e.store("b", 2, call_id=3)
        e.fence(4)
        if dies == "idle":
            desk.run_copies()
        assert alive() > before
        for client_id in list(desk.book.sessions.clients):
            e.die(client_id)
        desk.pass_time(t.CoreLimits().reattach_grace_ns)
        desk.settle()
        desk.run_copies()
        assert (desk.book.sessions.engines, alive()) == ({}, before)
    finally:
        gc.enable()
