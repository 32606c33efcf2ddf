# SPDX-License-Identifier: Apache-2.0
"""A kubelet in a process of its own: ``python -m tests.e2e.heartbeat ADDRESS`` calls Health.Check every 100 ms with a
limit of 3 s, until its standard input ends; then it says how that went.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

PERIOD_S = 0.1
LIMIT_S = 3.0


@dataclass(frozen=True)
class Beats:
    """Seconds of each call, and of the longest time without an answer."""

    times: list[float]
    failures: int
    longest_gap_s: float

    def at(self, share: float) -> float:
        return sorted(self.times)[min(int(len(self.times) * share), len(self.times) - 1)]


class Heartbeat:
    """The calling process, as seen by a test."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Returns after the first answer."""
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.e2e.heartbeat", self._address, stdin=pipe, stdout=pipe
        )
        assert self._process.stdout is not None
        assert await self._process.stdout.readline() == b"beating\n"

    async def stop(self) -> Beats:
        assert self._process is not None
        out, _ = await self._process.communicate(b"")
        return Beats(**json.loads(out))


def main(address: str) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    stub: Any = health_pb2_grpc.HealthStub(grpc.insecure_channel(address))
    request = health_pb2.HealthCheckRequest()
    stub.Check(request, timeout=10)
    print("beating", flush=True)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    times: list[float] = []
    failures, longest_gap_s, answered = 0, 0.0, time.monotonic()
    while not ended.wait(PERIOD_S):
        started = time.monotonic()
        try:
            ok = stub.Check(request, timeout=LIMIT_S).status == health_pb2.HealthCheckResponse.SERVING
        except grpc.RpcError:
            ok = False
        now = time.monotonic()
        times.append(now - started)
        failures += not ok
        if ok:
            longest_gap_s, answered = max(longest_gap_s, now - answered), now
    print(json.dumps({"times": times, "failures": failures, "longest_gap_s": longest_gap_s}))


if __name__ == "__main__":
    main(*sys.argv[1:])
