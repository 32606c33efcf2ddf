# SPDX-License-Identifier: Apache-2.0
"""``kvgrpc doctor`` on the fake card, and where there is none."""

from __future__ import annotations

import ast
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
    assert found["cards"].startswith("OK")


def test_handles_of_events_are_looked_at() -> None:
    """Found by review: the server takes them, and the doctor said that they are not used."""
    _, found = lines()
    assert "an event of another process opens" in found["card 0 events"]
    assert "/dev/shm" in found["card 0 events"]


def test_a_card_that_another_process_has_is_told_with_its_mode_and_in_words() -> None:
    """Found by review: "cuDevicePrimaryCtxRetain answered 46" was all."""
    code, found = lines(FAKE_TAKEN_CARD="0")
    assert code == 1
    assert found["card 0 compute mode"].startswith("OK")
    assert found["card 0 context"].startswith("FAIL") and "CUDA_ERROR_DEVICE_UNAVAILABLE" in found["card 0 context"]


def test_cards_that_are_hidden_are_no_missing_driver() -> None:
    """Found by review: a driver that shows none says CUDA_ERROR_NO_DEVICE, and the doctor asked for its library."""
    program = (
        "from kvgrpc.cli import checks; checks.nvidia_devices = lambda: 2\n"
        "print([(one.verdict.value, one.what, one.text) for one in checks.card_findings()])"
    )
    for environment, verdict, said in (
        (fake.environment(FAKE_CARDS="0"), "WARN", "CUDA_VISIBLE_DEVICES"),
        ({**fake.environment(), "LD_LIBRARY_PATH": ""}, "FAIL", "install the driver's libcuda"),
    ):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
        ((found, _, text),) = ast.literal_eval(done.stdout)
        assert (found, said in text) == (verdict, True), text
