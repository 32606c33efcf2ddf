# SPDX-License-Identifier: Apache-2.0
"""The main job: `kvgrpc demo` succeeds, and fails as soon as one stored byte is damaged."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from rich.console import Console

from kvgrpc.cli.demo.command import a_server, wait_for_socket
from tests.served import serving

pytestmark = pytest.mark.timeout(300)


def run_demo(*flags: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """From another folder, as an installed command would be."""
    command = [sys.executable, "-m", "kvgrpc", "demo", *flags]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )


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


def test_a_server_whose_chunks_do_not_fit_is_told_in_a_sentence(tmp_path: Path):
    with serving("--l1-size", "64MiB", "--chunk-tokens", "100") as server:
        done = run_demo("--address", server.address, folder=tmp_path)
    assert done.returncode == 1
    assert "Error: no session with" in done.stderr and "block_size 16 must divide chunk_tokens 100" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_that_ends_at_once_is_told_apart_with_its_reason(tmp_path: Path):
    done = run_demo(folder=tmp_path, KVGRPC_L1_SIZE="900TiB")
    assert done.returncode == 1
    assert "the server did not start: it ended with exit status 1; its log ends with:" in done.stderr
    assert "GiB are available" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_that_does_not_listen_in_time_is_told_apart(tmp_path: Path):
    (tmp_path / "log").write_text("".join(f"line {number}\n" for number in range(100)))
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    with subprocess.Popen(command) as process:
        try:
            with pytest.raises(click.ClickException) as caught:
                wait_for_socket(process, tmp_path / "s", tmp_path / "log", timeout_s=0.2)
        finally:
            process.kill()
    said = caught.value.message.splitlines()
    assert said[0] == (
        f"the server did not start: process {process.pid} runs, but did not listen within 0.2 s; its log ends with:"
    )
    assert said[1:] == [f"  line {number}" for number in range(80, 100)]


def lose_the_server(said: Console) -> None:
    with a_server(None, said):
        server = re.search(r"process (\d+)", said.export_text())
        assert server is not None
        os.kill(int(server[1]), signal.SIGKILL)
        os.waitid(os.P_PID, int(server[1]), os.WEXITED | os.WNOWAIT)
        raise click.ClickException("the first engine failed with exit code 1")


def test_a_server_that_goes_away_in_the_middle_is_named_as_the_reason():
    with pytest.raises(click.ClickException) as caught:
        lose_the_server(Console(file=io.StringIO(), record=True, width=200))
    assert "the server went away during the demo: it was ended by SIGKILL" in caught.value.message
