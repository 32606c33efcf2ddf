# SPDX-License-Identifier: Apache-2.0
"""`kvgrpc healthcheck`: what a probe learns from its exit code."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest

from kvgrpc.service.health import Health
from tests.served import serving, stand_still


def ask(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVGRPC_")}
    command = [sys.executable, "-m", "kvgrpc", "healthcheck", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={**kept, **variables})


def test_a_server_that_serves():
    with serving("--l1-size", "16MiB", "--listen", "127.0.0.1:0") as server:
        tcp = server.log.split("127.0.0.1:", 1)[1].split('"')[0]
        for done in (
            ask("--address", server.address),
            ask("liveness", "--address", f"127.0.0.1:{tcp}"),
            ask("kvgrpc.v1.KvCacheService", KVGRPC_SOCKET=str(server.socket)),
            ask("readiness", KVGRPC_ADDRESS=f"127.0.0.1:{tcp}", KVGRPC_SOCKET="/nowhere/s"),
        ):
            assert (done.returncode, done.stdout) == (0, "SERVING\n"), done.stderr


def test_a_name_that_the_server_does_not_have():
    with serving("--l1-size", "16MiB") as server:
        done = ask("rediness", "--address", server.address)
    assert done.returncode == 2
    assert "'rediness' is not a name of this server" in done.stderr


def test_no_server(tmp_path: Path):
    done = ask("--address", f"unix:{tmp_path}/none")
    assert done.returncode == 3
    assert f"no answer from unix:{tmp_path}/none" in done.stderr and "Traceback" not in done.stderr


def test_a_server_that_stands_still_costs_the_time_that_was_given():
    with serving("--l1-size", "16MiB") as server:
        stand_still(server.process.pid)
        try:
            begin = time.monotonic()
            done = ask("--address", server.address, "--timeout-ms", "300")
            took_s = time.monotonic() - begin
        finally:
            server.process.send_signal(signal.SIGCONT)
    assert done.returncode == 3 and "DEADLINE_EXCEEDED" in done.stderr
    assert took_s < 25, "a start of the program and 300 ms"


def test_a_port_that_takes_connections_and_says_nothing():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        done = ask("--address", f"127.0.0.1:{mute.getsockname()[1]}", "--timeout-ms", "300")
    assert done.returncode == 3 and "If it has TLS, name its CA with --ca-file" in done.stderr


@pytest.mark.parametrize("arguments", [("--address", "nonsense"), ("--timeout-ms", "0"), ("a", "b")])
def test_a_wrong_question(arguments: tuple[str, ...]):
    done = ask(*arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr


async def test_a_server_that_drains(tmp_path: Path):
    health = Health(())
    health.begin_drain()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((health.handlers(),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    ready, alive = await asyncio.gather(
        *(asyncio.to_thread(ask, name, "--address", address) for name in ("readiness", "liveness"))
    )
    await server.stop(None)
    assert (ready.returncode, alive.returncode) == (1, 0)
    assert "readiness: NOT_SERVING" in ready.stderr
