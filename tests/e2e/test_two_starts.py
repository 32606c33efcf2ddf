# SPDX-License-Identifier: Apache-2.0
"""Two servers that start at once on one named arena: one has it, the other says why it has not, and nothing is lost."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.arena_server import ArenaServer
from tests.e2e.disk_server import CHUNK, CHUNKS, engine
from tests.served import stop, wait_until


def start(server: ArenaServer, socket: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "kvgrpc", "serve", "--socket", str(socket), "--chunk-tokens", str(CHUNK)]
    with log.open("wb") as file:
        return subprocess.Popen([*command, "--l1-size", "64MiB", *server.flags], stdout=file, stderr=file)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("killed", [False, True], ids=["ended", "killed"])
def test_one_of_them_has_the_arena(tmp_path: Path, killed: bool) -> None:
    with contextlib.closing(ArenaServer(tmp_path)) as server:
        server.start()
        with engine(server.address) as one:
            assert one.store(1) == ["STORED"] * CHUNKS
            server.wait_recorded(CHUNKS)
            if killed:
                server.kill()
            else:
                assert server.terminate() == 0
            racing = [(start(server, tmp_path / name, log := tmp_path / f"{name}.log"), log) for name in ("a", "b")]
            try:
                wait_until(lambda: any(process.poll() is not None for process, _ in racing), 60)
                (winner, winners), (loser, losers) = sorted(racing, key=lambda one: one[0].poll() is not None)
                assert loser.returncode == 1, losers.read_text()
                assert losers.read_text() == f"Error: the arena {server.arena} is in use by another server\n"
                wait_until(lambda: "arena checked" in winners.read_text(), 60)
                winner.send_signal(signal.SIGTERM)
                assert winner.wait(60) == 0, winners.read_text()
            finally:
                for process, _ in racing:
                    stop(process)
            server.start()
            one.wait_back()
            assert server.wait_checked().restored_objects == CHUNKS
            assert one.load(1) == CHUNKS
