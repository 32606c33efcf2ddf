# SPDX-License-Identifier: Apache-2.0
"""Watcher: what changed can be taken at any time, and what was missed is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvgrpc import api
from kvgrpc.api import WatchKind
from kvgrpc.client import ClearTarget, Client, Watcher, WatchEvent, WatchRequest
from kvgrpc.client import watcher as module
from tests.examples.engine import IDENTITY, stored
from tests.served import serving, stop, wait_until


def collected(watcher: Watcher) -> tuple[list[WatchEvent], Callable[[WatchKind], bool]]:
    events: list[WatchEvent] = []

    def has(kind: WatchKind) -> bool:
        events.extend(watcher.take())
        return any(event.kind is kind for event in events)

    return events, has


def test_it_tells_what_changed_and_that_the_server_went():
    with serving("--l1-size", "64MiB") as server:
        watcher = Watcher(server.address, WatchRequest(snapshot=True))
        events, has = collected(watcher)
        try:
            watcher.start()
            wait_until(lambda: has(WatchKind.SYNCED), 30)
            with stored(server.address), Client(server.address) as client:
                base = client.handshake(api.Hello(identity=IDENTITY)).space_base

                def told() -> int:
                    """Keys of the two chunks."""
                    has(WatchKind.STORED)
                    return sum(len(event.keys) for event in events if event.space_base == base)

                wait_until(lambda: told() >= 2, 30)
                assert told() == 2
                client.clear(ClearTarget(all=True))
                wait_until(lambda: has(WatchKind.CLEARED), 30)
            assert not has(WatchKind.LOST) and watcher.problem is None
            stop(server.process)
            wait_until(lambda: has(WatchKind.LOST), 30)
            assert events[-1].kind is WatchKind.LOST
        finally:
            watcher.close()
            watcher.close()
        with pytest.raises(RuntimeError):
            watcher.take()


def test_who_does_not_take_keeps_a_bounded_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "KEYS_WAITING", 4)
    watcher = Watcher("unix:/nowhere")
    try:
        for at in range(7):
            watcher._keep(WatchEvent(at, WatchKind.STORED, keys=(b"k",)))
        assert [event.kind for event in watcher.take()] == [WatchKind.LOST, WatchKind.STORED, WatchKind.STORED]
        assert watcher.take() == []
    finally:
        watcher.close()
