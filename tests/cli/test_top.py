# SPDX-License-Identifier: Apache-2.0
"""`kvgrpc top` in a pseudo terminal of 80 by 24, with a real server under traffic."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.text import Text

from kvgrpc.api import ArenaStatus, ServerStatus, TierStatus
from kvgrpc.cli.frame import Look, arena_map, compared, frame
from kvgrpc.cli.screen import Snapshot
from tests.cli.test_commands import run, snapshot
from tests.e2e.harness import BLOCK, CHUNK, local_server, tokens_of
from tests.served import serving, stop, wait_until

WIDTH, HEIGHT = 80, 24
START_S = 60.0
CONTROL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
"""The terminal sends this program the signals of its keys. Not between fork and exec: this process has threads."""
ESCAPES = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")


class Terminal:
    """`kvgrpc top` and what it has written."""

    def __init__(self, process: subprocess.Popen[bytes], master: int, slave: int) -> None:
        self.process, self.master, self._slave = process, master, slave
        self.written = b""

    def read(self) -> bytes:
        while select.select([self.master], [], [], 0)[0]:
            self.written += os.read(self.master, 1 << 16)
        return self.written

    def text(self) -> str:
        return ESCAPES.sub(b"", self.read()).decode(errors="replace")

    def shows(self, words: str, since: int = 0) -> None:
        wait_until(lambda: re.search(words, self.text()[since:]) or self.process.poll() is not None, START_S)
        assert re.search(words, self.text()[since:]), self.text()[-3000:]

    def attributes(self) -> list[object]:
        return termios.tcgetattr(self._slave)

    def ends(self, within_s: float = 30.0) -> int:
        end = time.monotonic() + within_s
        while self.process.poll() is None and time.monotonic() < end:
            self.read()
            time.sleep(0.02)
        return self.process.wait(1)


@contextmanager
def top(address: str, *flags: str) -> Generator[Terminal, None, None]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    command = [
        sys.executable,
        "-c",
        CONTROL,
        "-m",
        "kvgrpc",
        "top",
        "--address",
        address,
        "--interval-ms",
        "100",
        *flags,
    ]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "", "LINES": ""}
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
    )
    try:
        yield Terminal(process, master, slave)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(master)
        os.close(slave)


@pytest.mark.parametrize("key", [b"q", b"\x03", b"TERM"])
def test_it_ends_clean(key: bytes) -> None:
    with serving("--l1-size", "64MiB") as server, top(server.address) as terminal:
        before = terminal.attributes()
        terminal.shows("no engine is attached")
        assert terminal.attributes() != before, "keys come one by one"
        if key == b"TERM":
            terminal.process.send_signal(signal.SIGTERM)
        else:
            os.write(terminal.master, key)
        assert terminal.ends() == 0
        assert terminal.attributes() == before
        written = terminal.read()
        assert b"\x1b[?1049h" in written and written.rindex(b"\x1b[?1049l") > written.rindex(b"\x1b[?1049h")
        assert b"\x1b[?25h" in written[written.rindex(b"\x1b[?25l") :], "the cursor is seen again"
        assert b"Traceback" not in written


def test_a_server_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    with serving("--l1-size", "64MiB") as server, top(server.address) as terminal:
        terminal.shows("serving")
        assert stop(server.process) == 0
        terminal.shows("no answer, asking again: no server")
        since = len(terminal.text())
        command = [sys.executable, "-m", "kvgrpc", "serve", "--socket", str(server.socket), "--l1-size", "32MiB"]
        with (tmp_path / "log").open("wb") as log:
            again = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            terminal.shows(r"of 32 MiB[\s\S]*q ends", since)
        finally:
            stop(again)
        os.write(terminal.master, b"q")
        assert terminal.ends() == 0


async def test_traffic_is_seen(tmp_path: Path) -> None:
    async with local_server(tmp_path) as server:
        engine = await server.engine()
        with top(server.address) as terminal:
            shown = asyncio.create_task(asyncio.to_thread(terminal.shows, r"load +[0-9.]*[1-9][0-9.]* [kMG]B/s"))
            blocks = range(4 * CHUNK // BLOCK)
            number = 0
            while not shown.done():
                number += 1
                prompt = tokens_of(number % 8, 4 * CHUNK)
                await engine.store(prompt, blocks)
                answer = await engine.lookup(prompt)
                await engine.retrieve(answer, blocks)
            await shown
            terminal.shows(r"hit rate +100\.0%")
            os.write(terminal.master, b"q")
            assert await asyncio.to_thread(terminal.ends) == 0


def test_one_frame_needs_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # of a terminal that the frame does not go to
    with serving("--l1-size", "64MiB") as server:
        done = run("top", "--once", "--interval-ms", "100", "--address", server.address)
        assert done.returncode == 0, done.stderr
        assert re.search(r"^lookups .* failed chunks 0\.0/s$", done.stdout, re.MULTILINE)
        assert "of 64 MiB" in done.stdout and "\x1b" not in done.stdout and "q ends" not in done.stdout
        live = run("top", "--address", server.address)
    assert live.returncode == 2 and "--once" in live.stderr


def test_one_frame_without_a_server_says_so(tmp_path: Path) -> None:
    done = run("top", "--once", "--address", f"unix:{tmp_path}/none")
    assert done.returncode == 1
    assert "no server answers" in done.stderr and "Traceback" not in done.stderr


# ---- frames ---------------------------------------------------------------------------------------------------------


def server_of(one: Snapshot, **changes: object) -> Snapshot:
    return replace(one, server=replace(one.server, **changes))


def test_rates_are_what_has_grown() -> None:
    before = server_of(snapshot(), counters={"lookup_tokens": 1000, "hit_tokens": 920, "loaded_bytes": 0, "lookups": 1})
    counters = {"lookup_tokens": 3000, "hit_tokens": 1920, "loaded_bytes": 4_000_000_000, "lookups": 11}
    counters |= {"read_chunks_bytes": 1_000_000_000, "stored_bytes": 10_000_000, "write_chunks_bytes": 4_000_000_000}
    now = server_of(before, counters=counters)
    text = frame(compared("unix:/s", now, before, 2.0), WIDTH, HEIGHT, Text("q ends")).plain
    assert re.search(r"hit rate +50\.0%  since start 64\.0%", text)
    assert re.search(r"load +2\.50 GB/s", text) and re.search(r"store +2\.00 GB/s", text), "streams are in it"
    assert re.search(r"lookups +5\.0/s", text)
    restarted = server_of(now, server_epoch=b"\3" * 16)
    assert re.search(
        r"load +0\.00 kB/s", frame(compared("unix:/s", restarted, before, 2.0), WIDTH, HEIGHT, Text("q ends")).plain
    )


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (200, 60), (20, 3)])
def test_a_frame_fits_its_terminal(width: int, height: int) -> None:
    one = snapshot()
    engines = tuple(replace(one.engines[0], engine=f"{number:016x}", pins=number) for number in range(200))
    tiers = tuple(TierStatus(f"tier{number}", number > 1, 1 << 40, 3, 4, 5) for number in range(6))
    crowd = replace(server_of(one, tiers=tiers), engines=engines)
    lines = frame(compared("unix:/" + "x" * 200, crowd, one, 1.0), width, height, Text("a note")).plain.splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert lines[-1].startswith("a note"[:width])
    if (width, height) == (80, 24):
        text = "\n".join(lines)
        assert "engines more" in text and "2 tiers more" in text and "failing" in text
        assert f"{199:016x}" in text, "those that pin most come first"


def test_the_map_has_a_cell_for_everything_that_is_there() -> None:
    arena = ArenaStatus(1 << 30, (1 << 30) - 100 - (1 << 28), 0, 1 << 28, 99, 0, 1, 0)
    letters = "".join(letter for letter, _ in arena_map(arena, 160))
    assert len(letters) == 160
    assert (letters.count("#"), letters.count("p"), letters.count("s")) == (40, 1, 1)
    assert arena_map(ArenaStatus(0, 0, 0, 0, 0, 0, 0, 0), 10), "before anything is there"


def test_looks_count_only_what_is_comparable() -> None:
    assert Look("", snapshot(), None, 0.0).rate("stores") == 0.0
    assert isinstance(snapshot().server, ServerStatus)
