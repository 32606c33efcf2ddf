# SPDX-License-Identifier: Apache-2.0
"""`kvgrpc serve` as an operator meets it: what it says, what it refuses, how it ends."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from rich.console import Console

from kvgrpc.api import LookupRequest, Tokens
from kvgrpc.app import server_options
from kvgrpc.cli.serve import as_table
from kvgrpc.client import Client
from kvgrpc.config.settings import load_settings
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import SpaceRef
from tests.served import Served, serving, stop, wait_until


def started(server: Served) -> dict[str, str]:
    lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    return next(line for line in lines if line["event"] == "started")


def refused(*flags: str, folder: Path, **variables: str) -> str:
    """What the server says when it does not start."""
    command = [sys.executable, "-m", "kvgrpc", "serve", "--socket", str(folder / "s"), *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={"PATH": "", **variables}
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_it_says_what_it_chose():
    with serving(
        "--l1-size", "64MiB", "--listen", "127.0.0.1:0", "--max-workers", "3", "--chunk-tokens", "64"
    ) as server:
        said = started(server)
    assert said["L1"].startswith("64 MiB of ")
    assert f"unix:{server.socket}" in said["listens"] and "127.0.0.1:" in said["listens"]
    assert "0600" in said["listens"]
    assert said["chunk"] == "64 tokens"
    assert said["threads"] == "3 for copies, 3 for hashing and tiers"
    assert said["reflection"] == "on"
    assert said["below L1"] == "nothing"


def test_it_says_where_l1_lies_and_what_is_below(tmp_path: Path):
    arena = tmp_path / "made" / "arena"
    tier = ["--disk-path", str(tmp_path / "disk"), "--disk-size", "1GiB"]
    with serving("--l1-size", "16MiB", "--arena-path", str(arena), *tier) as server:
        said = started(server)
    assert said["L1"].endswith(f", in {arena}") and said["below L1"] == "disk"
    assert arena.parent.stat().st_mode & 0o777 == 0o700


def test_an_address_is_whole_in_a_narrow_terminal() -> None:
    address = f"unix:/run/{60 * 'x'}/kvgrpc.sock"
    said = io.StringIO()
    Console(width=40, file=said).print(as_table({"listens": address, "health": "[::1]:50052"}))
    text = said.getvalue()
    assert address in "".join(text.replace("listens", "").split())
    assert "[::1]:50052" in text


def test_no_more_than_one_folder_is_made_for_an_arena(tmp_path: Path):
    flags = ["--l1-size", "16MiB", "--arena-path", f"{tmp_path}/mistyped/kvgrpc/arena"]
    told = f"there is no {tmp_path}/mistyped, and the server makes the last folder only"
    assert told in refused(*flags, folder=tmp_path)
    assert not (tmp_path / "mistyped").exists()


def test_a_variable_that_is_nearly_a_setting_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVGRPC_L1SIZE", "1GiB")
    monkeypatch.setenv("KVGRPC_PORT", "tcp://10.0.0.1:50051")  # as Kubernetes sets it for a Service of this name
    with serving("--l1-size", "16MiB") as server:
        said = server.log
    assert "KVGRPC_L1SIZE is no setting and is ignored; did you mean KVGRPC_L1_SIZE?" in said
    assert "KVGRPC_PORT" not in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_it_serves_and_many_after_it_ended_are_no_error(number: signal.Signals):
    """Whoever sends a second one does not know that it has ended already."""
    with serving("--l1-size", "16MiB") as server:
        server.process.send_signal(number)
        while server.process.poll() is None:
            if '"stopped"' in server.log:
                server.process.send_signal(number)
            time.sleep(0.001)
        assert server.process.returncode == 0, server.log
    with tempfile.TemporaryDirectory(prefix="kvgrpc-") as folder:
        program = (
            "import os, sys, kvgrpc.app\n"
            "from kvgrpc.__main__ import main\n"
            "arena = kvgrpc.app.Arena\n"
            "def early(*args, **more):\n"
            f"    os.kill(os.getpid(), {int(number)})\n"
            "    return arena(*args, **more)\n"
            "kvgrpc.app.Arena = early\n"
            f"sys.argv = ['kvgrpc', 'serve', '--socket', '{folder}/s', '--l1-size', '16MiB']\n"
            "main()\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--allow-uid", "-1"], "must be at least 0, not -1"),
        (["--allow-uid", "me"], "'me' is not a whole number"),
        (["--copy-threads", "2000"], "at most 256"),
        (["--drain-ms", "9" * 20], "must be at most 86400000"),
        (["--page-size", "3"], "at least 512 bytes"),
        (["--quota", "a=1GiB", "--quota", "a=2GiB"], "'a' has two quotas"),
    ],
)
def test_what_cannot_be_meant_is_refused(flags: list[str], says: str, tmp_path: Path):
    assert says in refused(*flags, folder=tmp_path)


def test_huge_pages_are_counted_as_such(tmp_path: Path):
    """More than any machine has reserved."""
    text = refused("--huge-pages", "--l1-size", "1000TiB", folder=tmp_path)
    assert "of reserved huge pages (vm.nr_hugepages) are available" in text


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_socket_path_that_is_taken_leaves_nothing(kind: str, tmp_path: Path):
    (tmp_path / "s").mkdir() if kind == "folder" else (tmp_path / "s").touch()
    assert ("that is a folder" if kind == "folder" else "not a socket") in refused(folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_the_socket_is_this_users_only():
    with serving("--l1-size", "16MiB") as server:
        assert server.socket.stat().st_mode & 0o777 == 0o600
    with serving("--l1-size", "16MiB", "--socket-mode", "0666") as server:
        assert server.socket.stat().st_mode & 0o777 == 0o666


@pytest.mark.parametrize("flag", ["--max-workers", "--max-gpu-workers", "--max-cpu-workers"])
def test_no_workers_are_refused_at_start(flag: str, tmp_path: Path):
    assert f"{flag}: must be at least 1, not 0" in refused(flag, "0", folder=tmp_path)


def test_a_variable_is_refused_as_its_flag_is(tmp_path: Path):
    assert "KVGRPC_MAX_WORKERS (--max-workers): must be at least 1" in refused(folder=tmp_path, KVGRPC_MAX_WORKERS="0")


def test_an_l1_that_does_not_fit_is_refused_with_both_numbers(tmp_path: Path):
    """Field reports 18 and 37, as far as they speak of L1: no start, no bus error later, both numbers."""
    text = refused("--l1-size", "900TiB", folder=tmp_path)
    assert "921600 GiB" in text or "9.216e+05 GiB" in text
    assert "GiB are available" in text


def test_off_the_loopback_is_refused_without_a_word_for_it(tmp_path: Path):
    assert "--insecure" in refused("--listen", "0.0.0.0:0", "--l1-size", "16MiB", folder=tmp_path)


def services(server: Served) -> subprocess.CompletedProcess[str]:
    grpcurl = str(Path(sys.executable).parent / "grpcurl")
    command = [grpcurl, "-plaintext", "-unix", str(server.socket), "list"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_reflection_lists_the_services_or_is_not_there():
    """Field report 68: by flag; locally it is on."""
    with serving("--l1-size", "16MiB") as server:
        assert "kvgrpc.v1.KvCacheService" in services(server).stdout
    with serving("--l1-size", "16MiB", "--no-reflection") as server:
        refused = services(server)
        assert refused.returncode != 0
        assert "does not support the reflection API" in refused.stderr


def test_reflection_is_off_once_a_listener_is_off_the_loopback():
    """Field report 68: a listener off the loopback."""
    assert server_options(load_settings(listen=("127.0.0.1:0",))).reflection
    assert not server_options(load_settings(listen=("0.0.0.0:0",), insecure=True)).reflection


def test_a_port_in_use_is_refused(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"--listen {address}" in refused("--listen", address, "--l1-size", "16MiB", folder=tmp_path)


def test_a_second_server_on_one_path_is_refused():
    """Field report 59: it names the process, and the first server keeps its path."""
    with serving("--l1-size", "16MiB") as server:
        text = refused("--socket", str(server.socket), "--l1-size", "16MiB", folder=server.socket.parent)
        assert f"process {server.process.pid}" in text
        assert server.process.poll() is None


def test_sigterm_ends_it_cleanly():
    with serving("--l1-size", "16MiB") as server:
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.process.poll() is not None, 60)
        assert server.process.returncode == 0, server.log
        assert not server.socket.exists()
        assert "Traceback" not in server.log


def test_after_kill_the_path_is_taken_over():
    """Field report 59: a stale socket blocks nobody."""
    with serving("--l1-size", "16MiB") as server:
        server.process.kill()
        server.process.wait()
        assert server.socket.exists()
        command = [sys.executable, "-m", "kvgrpc", "serve", "--socket", str(server.socket), "--l1-size", "16MiB"]
        with (server.socket.parent / "second").open("wb") as log:
            second = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_until(lambda: '"started"' in (server.socket.parent / "second").read_text(), 60)
        finally:
            second.terminate()
            assert second.wait(60) == 0


def call_unattached(address: str) -> Reason | None:
    request = LookupRequest("engine-0123456789", "r", SpaceRef(b"7" * 16), Tokens(b""))
    with Client(address) as client:
        try:
            client.lookup(request)
        except Refusal as refusal:
            return refusal.reason
    return None


def test_a_log_that_nobody_reads_any_more_fails_no_call(tmp_path: Path):
    """As when journald is restarted, or the disk of the log is full: refusals are written to it."""
    command = [sys.executable, "-m", "kvgrpc", "serve", "--l1-size", "16MiB", "--socket", str(tmp_path / "s")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        while b'"started"' not in process.stderr.readline():
            assert process.poll() is None
        process.stderr.close()
        assert call_unattached(f"unix:{tmp_path / 's'}") is Reason.NOT_ATTACHED
    finally:
        assert stop(process) == 0
    assert not (tmp_path / "s").exists(), "it ended in order"


def test_a_server_that_began_without_standard_files(tmp_path: Path):
    """L1 must not be where libraries write their messages to."""
    command = f"exec {sys.executable} -m kvgrpc serve --l1-size 16MiB --socket {tmp_path / 's'}"
    process = subprocess.Popen(["/bin/sh", "-c", f"{command} <&- >&- 2>&-"])
    try:
        wait_until(lambda: (tmp_path / "s").exists() or process.poll() is not None, 60)
        wait_until(lambda: call_unattached(f"unix:{tmp_path / 's'}") is Reason.NOT_ATTACHED, 60)
        files = [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in range(3)]
        assert files == [os.devnull] * 3
    finally:
        assert stop(process) == 0
