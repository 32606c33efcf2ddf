# SPDX-License-Identifier: Apache-2.0
"""The Python example, run as a user runs it; twice, since its data then is there already."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.served import serving

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/python_client.py"


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_another_process_reads_what_one_stored() -> None:
    with serving("--l1-size", "64MiB") as server:
        for done in (run(server.address), run(KVGRPC_SOCKET=str(server.socket))):
            assert done.returncode == 0, done.stdout + done.stderr
            assert "hit_tokens=512" in done.stdout
            assert "the bytes are the stored ones" in done.stdout


def test_without_a_server_or_a_good_address_nothing_is_left_behind(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").glob("kvgrpc-example-*"))
    done = run(f"unix:{tmp_path}/s")
    assert done.returncode != 0
    assert "no session with" in done.stderr
    assert "write grpc://host:port" in run("nonsense").stderr
    assert set(Path("/dev/shm").glob("kvgrpc-example-*")) <= before
