# SPDX-License-Identifier: Apache-2.0
"""Files of other servers, living and dead, and files that are nobody's: arenas, sockets, locks."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hostile.engine import PER_CHUNK
from tests.hostile.stand import Stand, refusal_of, stand, until
from tests.served import stand_still, stop

CHUNKS = 8
BLOCKS = list(range(0, 2 * CHUNKS * PER_CHUNK, 2))
STORED = [("STORED", "")] * CHUNKS


def store(server: Stand, prompt: int) -> None:
    engine = server.engine()
    engine.do("store", "s", prompt, CHUNKS, BLOCKS)
    assert engine.do("ended", "s") == STORED
    assert engine.do("load", prompt, CHUNKS, BLOCKS) == CHUNKS


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def started(server: Stand) -> subprocess.Popen[bytes]:
    """The same server again, when it listens."""
    process = subprocess.Popen(server.served.process.args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server.stack.callback(stop, process)

    def listens() -> bool:
        assert process.poll() is None, "it did not start"
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(server.served.socket)) == 0

    until(listens, 30, "the next server")
    return process


def test_an_arena_in_use(tmp_path: Path) -> None:
    """Another server is refused by name, whatever size it asks for; no byte of the file changes, nobody notices."""
    arena = tmp_path / "arena"
    with stand("--arena-path", str(arena), l1="16MiB") as server:
        engine = server.engine()
        engine.do("store", "s", 1, CHUNKS, BLOCKS)
        assert engine.do("ended", "s") == STORED
        before, counts = digest(arena), server.counts()
        for size in ("16MiB", "1MiB"):
            said = refusal_of("--arena-path", str(arena), "--l1-size", size, folder=tmp_path)
            assert f"the arena {arena} is in use by another server" in said
        assert digest(arena) == before
        assert server.counts() == counts
        assert engine.do("load", 1, CHUNKS, BLOCKS) == CHUNKS
        store(server, 2)
        server.assert_well()


def test_an_arena_of_a_dead_server(tmp_path: Path) -> None:
    """It is taken over; what is found of it, and what is stored now, is right."""
    arena = tmp_path / "arena"
    with stand("--arena-path", str(arena), l1="16MiB") as server:
        store(server, 1)
        server.served.process.kill()
        server.served.process.wait()
        assert arena.exists()
        second = started(server)
        engine = server.engine()
        assert engine.do("load", 1, CHUNKS, BLOCKS) in (0, CHUNKS)
        store(server, 2)
        assert stop(second) == 0
    assert arena.exists()


PRECIOUS = b"precious" * 1000


@pytest.mark.parametrize("make", ["file", "link", "folder", "pipe", "device"])
def test_an_arena_that_is_something_else(tmp_path: Path, make: str) -> None:
    """Refused by name, and left as it is."""
    path, target = tmp_path / "arena", tmp_path / "target"
    target.write_bytes(PRECIOUS)
    match make:
        case "file":
            os.link(target, path)
        case "link":
            path.symlink_to(target)
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case _:
            path = Path("/dev/null")
    before = path.lstat()
    said = refusal_of("--arena-path", str(path), "--l1-size", "16MiB", folder=tmp_path)
    assert str(path) in said and ("arena" in said)
    after = path.lstat()
    assert (after.st_ino, after.st_mode, after.st_size) == (before.st_ino, before.st_mode, before.st_size)
    assert target.read_bytes() == PRECIOUS


LOCKS: dict[str, Callable[[], bytes]] = {
    "dead": lambda: b"999999999\n",
    "alive": lambda: b"%d\n" % os.getpid(),
    "garbage": lambda: b"\xff\0" * 100,
    "empty": lambda: b"",
}


@pytest.mark.parametrize("kind", LOCKS)
def test_socket_and_lock_of_a_dead_server(kind: str) -> None:
    """A server that was killed blocks nobody, whatever its lock file says; engines come back by themselves."""
    with stand() as server:
        engine = server.engine()
        server.served.process.kill()
        server.served.process.wait()
        assert server.served.socket.exists()
        Path(f"{server.served.socket}.lock").write_bytes(LOCKS[kind]())
        until(lambda: engine.do("lost"), 30, "the end of its session")
        second = started(server)
        until(lambda: engine.do("attached"), 30, "the engine's session")
        engine.do("store", "s", 1, CHUNKS, BLOCKS)
        assert engine.do("ended", "s") == STORED
        assert engine.do("load", 1, CHUNKS, BLOCKS) == CHUNKS
        assert stop(second) == 0
        assert not server.served.socket.exists()


@pytest.mark.parametrize("removed", [(), (".lock",), ("",)], ids=["as it is", "without its lock", "without its socket"])
def test_socket_of_a_living_server(removed: tuple[str, ...], tmp_path: Path) -> None:
    """Another server is refused, also when somebody removed a file of it; its engines notice nothing."""
    with stand() as server:
        engine, path = server.engine(), server.served.socket
        assert server.counts()["clients"] == 2
        for ending in removed:
            os.unlink(f"{path}{ending}")
        engine.tell("traffic", 1000)
        said = refusal_of("--socket", str(path), "--l1-size", "16MiB", folder=tmp_path)
        until(
            lambda: server.operator.get_status().counters.get("stored_chunks", 0) >= 40, 30, "ten rounds of the engine"
        )
        assert f"--socket {path}: another " in said
        if removed != (".lock",):
            assert f"process {server.served.process.pid}" in said
        rounds, longest_s = engine.stop_traffic()
        assert rounds > 5 and longest_s < 4
        assert engine.do("attached") and server.counts()["clients"] == 2
        server.assert_well()


def test_socket_of_a_server_that_stands_still(tmp_path: Path) -> None:
    """It is not dead: its path is not taken."""
    with stand() as server:
        engine = server.engine()
        stand_still(server.served.process.pid)
        said = refusal_of("--socket", str(server.served.socket), "--l1-size", "16MiB", folder=tmp_path)
        server.served.process.send_signal(signal.SIGCONT)
        assert f"process {server.served.process.pid}" in said
        engine.do("store", "s", 1, CHUNKS, BLOCKS)
        assert engine.do("ended", "s") == STORED
        server.assert_well()


def test_a_socket_path_that_is_something_else(tmp_path: Path) -> None:
    """A file, a folder, another program's socket: refused by name and left as it is."""
    file, folder, listener = tmp_path / "file", tmp_path / "folder", tmp_path / "listener"
    file.write_bytes(PRECIOUS)
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(listener))
        other.listen()
        for path in (file, folder, listener):
            said = refusal_of("--socket", str(path), "--l1-size", "16MiB", folder=tmp_path)
            assert f"--socket {path}: " in said
        with socket.socket(socket.AF_UNIX) as probe:
            assert probe.connect_ex(str(listener)) == 0
    assert file.read_bytes() == PRECIOUS and folder.is_dir()


def test_two_servers_that_start_together(tmp_path: Path) -> None:
    """Of many that want one socket and one arena exactly one serves; the others say why not. The arena stays for the
    next server."""
    words = ["--socket", str(tmp_path / "s"), "--arena-path", str(tmp_path / "arena"), "--l1-size", "16MiB"]
    command = [sys.executable, "-m", "kvgrpc", "serve", *words]
    servers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(3)]
    until(lambda: sum(server.poll() is None for server in servers) == 1, 60)
    winner = next(server for server in servers if server.poll() is None)
    until(lambda: (tmp_path / "s").exists(), 60)
    assert stop(winner) == 0
    for server in servers:
        said = server.communicate()[0].decode()
        if server is not winner:
            assert server.returncode == 1 and "another server" in said and "Traceback" not in said, said
    assert not (tmp_path / "s").exists() and (tmp_path / "arena").exists()
