# SPDX-License-Identifier: Apache-2.0
"""The example of an engine with two workers: with a server, without one, and with one that is killed meanwhile."""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.served import serving, wait_until

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/python_engine.py"
HIT = "512 of 608 tokens loaded"


@contextmanager
def nothing_is_left() -> Iterator[None]:
    before = set(Path("/dev/shm").glob("kvgrpc-example-*"))
    yield
    wait_until(lambda: set(Path("/dev/shm").glob("kvgrpc-example-*")) <= before, 10)


def run(address: str) -> list[str]:
    with nothing_is_left():
        command = [sys.executable, str(EXAMPLE), address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.strip() for line in done.stdout.splitlines()]


def test_it_loads_what_it_stored_and_right_bytes_only() -> None:
    with serving("--l1-size", "64MiB") as server:
        said = run(server.address)
    assert [line for line in said if HIT in line] == [f"{name}-{turn}: {HIT}" for turn in (1, 2) for name in "ac"]


def test_it_computes_everything_without_a_server(tmp_path: Path) -> None:
    said = run(f"unix:{tmp_path}/none")
    assert len(said) == 6 and all(": 0 of 608 tokens loaded SERVER_UNREACHABLE" in line for line in said)


def test_it_outlives_a_server_and_uses_the_next_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    turns = itertools.count()
    with nothing_is_left(), serving("--l1-size", "64MiB") as server:
        engine = importlib.import_module(EXAMPLE.stem).Engine(server.address)

        def plays_until(text: str) -> bool:
            return any(text in capsys.readouterr().out for _ in range(2000) if not engine.play(next(turns)))

        try:
            assert plays_until(HIT)
            server.process.kill()
            server.process.wait()
            assert plays_until("0 of 608 tokens loaded SERVER_UNREACHABLE")
            with serving("--l1-size", "64MiB", "--socket", str(server.socket)):
                assert plays_until(HIT)
        finally:
            engine.close()
