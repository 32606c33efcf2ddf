# SPDX-License-Identifier: Apache-2.0
"""Server, `kvgrpc status` and clients meet at a default socket, and none of them trusts another user's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.served import stop, wait_until

STRANGER = 47_114
ASK = (
    "from kvgrpc.client.default import default_address as d; from kvgrpc.client import Client; Client(d()).get_status()"
)


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A run-time folder of this user; socket paths must stay short."""
    with tempfile.TemporaryDirectory(prefix="kvr") as folder:
        yield Path(folder)


def environment(runtime: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVGRPC_")}
    return {**kept, "XDG_RUNTIME_DIR": str(runtime)}


def run(runtime: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment(runtime), capture_output=True, text=True, timeout=60, check=False)


def test_server_status_and_clients_meet_without_an_address(runtime: Path) -> None:
    command = [sys.executable, "-m", "kvgrpc", "serve", "--l1-size", "16MiB"]
    with (runtime / "log").open("wb") as log:
        server = subprocess.Popen(command, env=environment(runtime), stdout=log, stderr=log)
    try:
        wait_until(lambda: '"started"' in (runtime / "log").read_text() or server.poll() is not None, 30)
        assert (runtime / "kvgrpc/kvgrpc.sock").is_socket(), (runtime / "log").read_text()
        done = run(runtime, "-m", "kvgrpc", "status")
        assert "of 16 MiB" in done.stdout, done.stderr
        done = run(runtime, "-c", ASK)
        assert done.returncode == 0, done.stderr
    finally:
        assert stop(server) == 0


def make_foreign(runtime: Path, part: str) -> tuple[Path, str]:
    """A socket that somebody else serves: what is wrong and what is to be said of it. Only root can give away."""
    folder = runtime / "kvgrpc"
    if os.geteuid() != 0 or part == "link":
        (runtime / "theirs").mkdir()
        folder.symlink_to("theirs")
        return folder, f"symbolic link, made by user {os.geteuid()}"
    folder.mkdir()
    wrong = folder if part == "folder" else folder / "kvgrpc.sock"
    return wrong, f"belongs to user {STRANGER}"


@pytest.mark.parametrize("part", ["folder", "socket", "link"])
def test_another_users_socket_is_refused_and_never_connected_to(runtime: Path, part: str) -> None:
    wrong, said = make_foreign(runtime, part)
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(runtime / "kvgrpc/kvgrpc.sock"))
        theirs.listen()
        theirs.setblocking(False)
        if "belongs" in said:
            os.chown(wrong, STRANGER, STRANGER)
        for command in (("status",), ("serve", "--l1-size", "16MiB")):
            done = run(runtime, "-m", "kvgrpc", *command)
            assert done.returncode == 1
            assert f"{wrong} " in done.stderr and said in done.stderr
            assert "Traceback" not in done.stderr
        done = run(runtime, "-c", ASK)
        assert f"UntrustedSocketError: {wrong} " in done.stderr and said in done.stderr
        with pytest.raises(BlockingIOError):
            theirs.accept()
        assert (runtime / "kvgrpc/kvgrpc.sock").exists(), "nothing of theirs was touched"
