# SPDX-License-Identifier: Apache-2.0
"""A server that nobody wants figures of pays nothing at its start, and its calls almost nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvgrpc.api import Hello
from kvgrpc.telemetry.scrape import SCRAPES_MOST, ScrapeEndpoint
from tests.cli.test_serve import refused
from tests.telemetry.watched import watched


def loaded(*flags: str) -> str:
    """Modules of OpenTelemetry and its exporters in a server that has started."""
    program = (
        "import sys, kvgrpc.app as app\n"
        "from kvgrpc.cli import serve\n"
        "def announce(choices):\n"
        "    print(sorted(m for m in sys.modules if m in ('opentelemetry.sdk', 'prometheus_client', 'requests')))\n"
        "    import os, signal; os.kill(os.getpid(), signal.SIGTERM)\n"
        "serve.announce = announce\n"
        "from kvgrpc.__main__ import main\n"
        f"sys.argv = ['kvgrpc', 'serve', '--l1-size', '8MiB', '--log-level', 'error', *{flags!r}]\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_only_what_is_wanted_is_loaded():
    with tempfile.TemporaryDirectory(prefix="kvgrpc-") as folder:
        place = ("--socket", f"{folder}/s")
        assert loaded(*place) == "[]"
        assert loaded(*place, "--metrics-listen", "0") == "['opentelemetry.sdk', 'prometheus_client']"


def test_an_address_that_is_taken_is_said():
    with socket.create_server(("127.0.0.1", 0)) as taken, tempfile.TemporaryDirectory(prefix="kvgrpc-") as folder:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = refused("--l1-size", "8MiB", "--metrics-listen", address, folder=Path(folder))
    assert f"--metrics-listen {address}: Address already in use" in said


def test_scrapes_that_no_thread_could_be_started_for_take_no_place(monkeypatch: pytest.MonkeyPatch):
    endpoint = ScrapeEndpoint(CollectorRegistry(), "127.0.0.1", 0)

    def scraped() -> bytes:
        with socket.create_connection(("127.0.0.1", endpoint.port), timeout=10) as peer:
            peer.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                return peer.recv(100)
            return b""

    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    try:
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", refuse)
            assert [scraped() for _ in range(SCRAPES_MOST + 1)] == [b""] * (SCRAPES_MOST + 1)
        assert b"200 OK" in scraped()
    finally:
        endpoint.close()


async def test_scrapers_that_send_nothing_keep_no_call_waiting():
    """Silent connections to the scrape endpoint take its few places, and nothing else."""
    async with watched() as server:
        host, port = server.metrics.removeprefix("http://").removesuffix("/metrics").split(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(SCRAPES_MOST * 4)]
        admin = await server.admin()
        await admin.handshake(Hello())
        assert (await admin.get_status()).clients == 0
        for _, writer in silent:
            writer.close()
        while True:  # until the places are free again
            try:
                assert server.scrape()["kvgrpc_draining", ()] == 0
                return
            except OSError:
                await asyncio.sleep(0.05)
