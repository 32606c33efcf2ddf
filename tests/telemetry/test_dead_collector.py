# SPDX-License-Identifier: Apache-2.0
"""Field report 57: a collector that is down, or takes a connection and never answers, slows nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from kvgrpc.telemetry.running import STOP_S
from tests.e2e.harness import CHUNK, tokens_of
from tests.served import stop
from tests.telemetry.watched import Watched, watched

LOOKUPS = 4000
"""More spans than may wait."""


@contextlib.contextmanager
def address_of(kind: str) -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if kind == "silent":
            listener.listen(16)  # the kernel takes connections, and nobody reads
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def traffic(server: Watched) -> float:
    """Seconds of the longest batch."""
    engine = await server.engine()
    prompt, longest_s = tokens_of(1, CHUNK), 0.0
    for _ in range(LOOKUPS // 100):
        begin = time.monotonic()
        await asyncio.gather(*(engine.lookup(prompt) for _ in range(100)))
        longest_s = max(longest_s, time.monotonic() - begin)
    await engine.stop()
    return longest_s


def seconds_to_stop(server: Watched) -> float:
    begin = time.monotonic()
    assert stop(server.served.process) == 0
    return time.monotonic() - begin


@pytest.mark.parametrize("kind", ["refused", "silent"])
async def test_calls_go_on_and_the_end_waits_two_seconds_at_most(kind: str):
    async with watched() as server:
        usual_s, usual_stop_s = await traffic(server), seconds_to_stop(server)
    with address_of(kind) as address:
        async with watched("--otlp-endpoint", address, "--trace-share", "1", "--otlp-interval-ms", "200") as server:
            longest_s = await traffic(server)
            dropped = server.scrape()["kvgrpc_telemetry_spans_total", (("result", "dropped"),)]
            stop_s = seconds_to_stop(server)
    assert longest_s < max(2, 4 * usual_s), "a batch of lookups waited for the collector"
    assert dropped > 0
    assert stop_s < STOP_S + max(1, 3 * usual_stop_s)  # the machine's own noise
