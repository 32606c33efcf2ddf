# SPDX-License-Identifier: Apache-2.0
"""The main job: `kvgrpc demo` succeeds, and fails as soon as one stored byte is damaged."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.served import serving

pytestmark = pytest.mark.timeout(300)


def run_demo(*flags: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """From another folder, as an installed command would be."""
    command = [sys.executable, "-m", "kvgrpc", "demo", *flags]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)


def test_the_demo_succeeds_and_says_how_fast_it_was(tmp_path: Path):
    done = run_demo(folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout
    assert len(re.findall(r"^ok ", done.stdout, re.MULTILINE)) == 9
    assert re.search(r"hit +2048 of 2112 tokens", done.stdout)
    assert re.search(r"first token +\d+\.\d+ s with the cache, \d+\.\d+ s without", done.stdout)
    assert len(re.findall(r"GB/s", done.stdout)) == 2


# float32, little-endian: byte 0 has the last bit of the mantissa, byte 2 the last bit of the exponent.
@pytest.mark.parametrize(("byte", "bits", "shows_in_logits"), [(0, 1, False), (2, 0x80, True)])
def test_one_damaged_byte_fails_the_demo(byte: int, bits: int, shows_in_logits: bool, tmp_path: Path):
    with serving(str(byte), str(bits), module="tests.demo.damaging_server") as server:
        done = run_demo("--address", server.address, "--prompt-tokens", "560", folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    failed = re.findall(r"^FAILED (.*)$", done.stdout, re.MULTILINE)
    assert any("retrieved bytes" in text for text in failed)
    if shows_in_logits:
        assert any("bit for bit" in text for text in failed)


def test_without_a_server_it_says_so(tmp_path: Path):
    done = run_demo("--address", f"unix:{tmp_path}/none", folder=tmp_path)
    assert done.returncode == 1
    assert "did not answer" in done.stderr
    assert "Traceback" not in done.stderr
