# SPDX-License-Identifier: Apache-2.0
"""Field report 28: processes that are forked or spawned after a client was used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.client.fakes import FakeServer, wait_until


@pytest.mark.parametrize("fork_support", [None, "0", "1"])
def test_children_are_refused_at_once_and_the_parent_goes_on(server: FakeServer, fork_support: str | None) -> None:
    server.start()
    environ = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    if fork_support is not None:
        environ["GRPC_ENABLE_FORK_SUPPORT"] = fork_support
    command = [sys.executable, "-m", "tests.client.forking", server.address]
    done = subprocess.run(command, env=environ, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    report = json.loads(done.stdout)
    assert report["codes"] == [0] * 8
    for child in report["children"]:
        assert child["said"] == ["refused"] * 7
        assert child["sockets"] == 0, "the parent's connections are let go"
        assert child["seconds"] < 15
    assert report["parent"] == {"version": "fake", "hit_tokens": 32, "stored": 2, "attached": True}
    assert report["seconds"] < 15
    assert (report["fresh"], report["fresh_codes"]) == ([{"said": ["ok fake"]}], [0]), "a spawned process is its own"


def test_a_forked_child_does_not_keep_its_dead_parents_session(server: FakeServer) -> None:
    cache = server.start()
    command = [sys.executable, "-m", "tests.client.forking", server.address, "die"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            assert parent.wait(10) == -signal.SIGKILL
            assert wait_until(lambda: not cache.streams) < 5
            os.kill(child, 0)  # it still lives
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(("part", "says"), [("pipe", "ended"), ("close", "0 fake")])
def test_a_forked_child_keeps_nothing_of_its_parent(server: FakeServer, part: str, says: str) -> None:
    """Neither other descriptors than it has anyway, nor the connection that it closes."""
    server.start()
    command = [sys.executable, "-m", "tests.client.forking", server.address, part]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, says), done.stderr
