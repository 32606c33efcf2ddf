# SPDX-License-Identifier: Apache-2.0
"""The Python example, run as a user runs it; twice, since its data then is there already."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.served import serving

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/python_client.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_another_process_reads_what_one_stored() -> None:
    with serving("--l1-size", "64MiB") as server:
        for _ in range(2):
            done = run(server.address)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "hit_tokens=512" in done.stdout
            assert "the bytes are the stored ones" in done.stdout


def test_without_an_address_or_a_server(tmp_path: Path) -> None:
    assert "usage" in run().stderr
    done = run(f"unix:{tmp_path}/s")
    assert done.returncode != 0
    assert "no session with" in done.stderr
