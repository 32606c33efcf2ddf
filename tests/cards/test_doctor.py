# SPDX-License-Identifier: Apache-2.0
"""``kvgrpc doctor`` on the fake card, and where there is none."""

from __future__ import annotations

import subprocess
import sys

from tests.cards import fake


def lines(**environment: str) -> tuple[int, dict[str, str]]:
    """Exit code, and what each line says by what it is about."""
    command = [sys.executable, "-m", "kvgrpc", "doctor"]
    done = subprocess.run(command, env=fake.environment(**environment), capture_output=True, text=True, timeout=100)
    found = {line[4:].strip().split("  ")[0]: line for line in done.stdout.splitlines()}
    assert found, done.stderr
    return done.returncode, found


def test_a_card_that_serves() -> None:
    code, found = lines()
    assert code == 0
    assert found["card 0"].startswith("OK") and "GPU-a0a0a0a0" in found["card 0"]
    for what in ("IPC", "compute mode", "memory", "kernel", "events"):
        assert found[f"card 0 {what}"].startswith("OK"), found
    assert "GB/s" in found["card 0 store"] and "GB/s" in found["card 0 retrieve"]
    assert found["memory"].startswith("OK")


def test_no_card_is_no_failure() -> None:
    code, found = lines(FAKE_CARDS="0")
    assert code == 0
    assert "memlock" in found and "/dev/shm" in found
    assert found["cards"].startswith("WARN")
