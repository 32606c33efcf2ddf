# SPDX-License-Identifier: Apache-2.0
"""`kvgrpc trace`: what is recorded, what is not, and that replays say what happened."""

from __future__ import annotations

import asyncio
import gzip
import json
import signal
import socket
import sys
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

from kvgrpc import api
from kvgrpc.cli.root import main
from kvgrpc.cli.trace.file import Recorded, TraceError, TraceWriter, read_trace
from kvgrpc.cli.trace.replay import CoreOrder, default_sizes, replay, survey
from kvgrpc.client import Client
from kvgrpc.core.types import TokenRange
from tests.e2e.harness import BLOCK, CHUNK, LocalServer, local_server, tokens_of, until
from tests.served import serving

LOOKUP, STORE = api.CallKind.LOOKUP, api.CallKind.STORE


async def recording(address: str, file: Path, *flags: str) -> asyncio.subprocess.Process:
    """`kvgrpc trace record`, which has begun."""
    command = (sys.executable, "-m", "kvgrpc", "trace", "record", str(file), "--address", address, *flags)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    assert process.stderr is not None
    assert b"recording" in await asyncio.wait_for(process.stderr.readline(), 60)
    return process


async def traffic(server: LocalServer, rounds: int) -> int:
    """An engine that looks up, computes and stores prompts, some of them again; chunks that it found."""
    engine, chance, found = await server.engine(), Random(3), 0
    for _ in range(rounds):
        prompt = tokens_of(chance.randrange(12), chance.randrange(1, 5) * CHUNK + 3)
        hits = await engine.hits(prompt)
        found += hits
        whole = prompt.num_tokens // CHUNK
        if hits < whole:
            blocks = range(hits * CHUNK // BLOCK, whole * CHUNK // BLOCK)
            tokens = api.Tokens(prompt.data)
            await engine.store(tokens, blocks, range=TokenRange(hits * CHUNK, whole * CHUNK))
    return found


async def recorded(folder: Path, file: Path) -> tuple[int, int]:
    """Chunks that lookups found while the file was written, and bytes of the server's L1."""
    async with local_server(folder, l1_bytes=1 << 20) as server:
        process = await recording(server.address, file)
        found = await traffic(server, 60)
        recordings = server.driver.recordings
        await until(lambda: not any(one.filled.is_set() for one in recordings._running), what="all is sent")
        process.send_signal(signal.SIGINT)
        out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    assert b"calls" in out and b"ended" in out
    assert server.book.counters["evicted_chunks"] == 0, "all of it fits"
    return found, server.book.arena_status().total_bytes


async def test_what_was_recorded_is_what_the_core_finds_at_the_same_size(tmp_path: Path) -> None:
    """In one of three rounds: what is on its way when a recording ends is not in its file."""
    number = 0
    while True:
        file = tmp_path / f"trace-{number}.gz"
        found, total_bytes = await recorded(tmp_path, file)
        facts = survey(read_trace(file))
        number += 1
        if facts.lookups == 60 or number == 3:
            break
    assert (facts.lookups, facts.recorded_hits) == (60, found)
    assert file.stat().st_mode & 0o777 == 0o600
    small, same = replay(read_trace(file), facts, [4 * facts.chunk_bytes[0], total_bytes])
    assert same.hit_chunks == found > small.hit_chunks > 0
    assert small.evicted_chunks > 0
    text = gzip.decompress(file.read_bytes()).decode()
    assert "test-model" not in text and "engine-" not in text and "request-" not in text


async def test_a_full_file_ends_the_recording_whole(tmp_path: Path) -> None:
    file = tmp_path / "trace.gz"
    async with local_server(tmp_path) as server:
        process = await recording(server.address, file, "--most-size", "1KiB")
        ended = asyncio.create_task(process.communicate())
        for _ in range(2000):
            if ended.done():
                break
            await traffic(server, 40)
        out, _ = await asyncio.wait_for(ended, 60)
    assert b"it is full" in out
    assert len(list(read_trace(file))) > 10


async def test_a_server_that_drains_ends_the_recording(tmp_path: Path) -> None:
    file = tmp_path / "trace.gz"
    with serving("--l1-size", "64MiB") as server:
        process = await recording(server.address, file)
        server.process.send_signal(signal.SIGTERM)
        out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert b"the server has ended the recording" in out
    assert process.returncode == 0
    assert list(read_trace(file)) == []


def test_the_time_is_kept_and_no_file_is_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "trace.gz"
    with serving("--l1-size", "64MiB") as server:
        arguments = ["trace", "record", str(file), "--address", server.address, "--seconds", "2"]
        done = CliRunner().invoke(main, arguments)
        assert (done.exit_code, "the time is over" in done.output) == (0, True), done.output
        assert list(read_trace(file)) == []
        assert "name another file" in CliRunner().invoke(main, arguments).output
    done = CliRunner().invoke(main, ["trace", "replay", str(file)])
    assert (done.exit_code, "has no lookups" in done.output) == (1, True), done.output


def test_without_a_server_no_file_is_left(tmp_path: Path) -> None:
    file = tmp_path / "trace.gz"
    done = CliRunner().invoke(main, ["trace", "record", str(file), "--address", f"unix:{tmp_path}/none"])
    assert (done.exit_code, "no server answers" in done.output) == (1, True), done.output
    assert not file.exists()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{tmp_path}/silent")
        silent.listen()
        arguments = ["trace", "record", str(file), "--address", f"unix:{tmp_path}/silent", "--seconds", "0.2"]
        done = CliRunner().invoke(main, arguments)
    assert (done.exit_code, "did not answer before the end" in done.output) == (1, True), done.output
    assert not file.exists()
    assert f"{file}: No such file or directory\n" in CliRunner().invoke(main, ["trace", "replay", str(file)]).output


def test_a_slow_reader_loses_calls_and_the_file_says_how_many(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", 1 << 20)
    call = api.TracedCall(STORE, 7, 2, 33, [1, 2**64 - 1], 1, 4096)
    assert writer.write(api.TracedCalls((), 0, 16)) and writer.write(api.TracedCalls((call,), 5, 16))
    writer.close()
    assert (writer.calls, writer.dropped) == (1, 5)
    assert list(read_trace(tmp_path / "t")) == [Recorded(STORE, 2, [1, 2**64 - 1], 1, 4096)]
    lines = gzip.decompress((tmp_path / "t").read_bytes()).decode().splitlines()
    assert json.loads(lines[1]) == {"dropped": 5}


def test_a_recorded_hit_that_a_smaller_cache_misses_is_stored_there() -> None:
    calls = [
        Recorded(LOOKUP, 0, [1, 2], 0, 0),
        Recorded(STORE, 0, [1, 2], 0, 10),
        Recorded(LOOKUP, 0, [3, 4], 0, 10),
        Recorded(STORE, 0, [3, 4], 0, 10),
        Recorded(LOOKUP, 0, [1, 2], 2, 10),
        Recorded(LOOKUP, 0, [1, 2], 2, 10),
    ]
    facts = survey(calls)
    assert (facts.working_set_bytes, facts.recorded_hits, facts.asked_chunks) == (40, 4, 8)
    small, large = replay(calls, facts, [20, 40])
    assert (small.hit_chunks, large.hit_chunks, large.hit_rate) == (2, 4, 0.5)


def test_heads_stay_longer_than_tails() -> None:
    order = CoreOrder(30)
    order.use([1, 2, 3], 10)
    order.use([4], 10)
    assert order.found([1, 2, 3]) == 2
    assert default_sizes(1000) == [8, 16, 32, 64, 128, 256, 512, 1024]


@pytest.mark.timeout(180)
def test_a_live_server_finds_what_the_core_says_and_keeps_nothing(tmp_path: Path) -> None:
    chance, size = Random(1), 64 << 10
    lines = [{"hash_ids": [prompt * 10 + at for at in range(1 + prompt % 4)]} for prompt in (0, 1, 2, 3, 1, 3, 2)]
    lines += [{"hash_ids": [prompt * 100 + at for at in range(3)]} for prompt in chance.choices(range(40), k=60)]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with serving("--l1-size", "4MiB", "--page-size", "64KiB", "--chunk-tokens", "16") as server:
        arguments = ["trace", "replay", str(file), "--chunk-size", "64KiB", "--json"]
        done = CliRunner().invoke(main, [*arguments, "--live", "--address", server.address])
        assert done.exit_code == 0, done.output
        (live,) = json.loads(done.output)["curve"]
        with Client(server.address) as client:
            assert client.get_status().chunks == 0
    png = tmp_path / "curve.png"
    done = CliRunner().invoke(main, [*arguments, "--size", "4MiB", "--size", "1MiB", "--png", str(png)])
    small, same = json.loads(done.output)["curve"]
    assert (live["size_bytes"], same["size_bytes"]) == (4 << 20, 4 << 20)
    assert same["evicted_chunks"] > 0 and live["evicted_chunks"] > 0
    assert live["hit_rate"] == pytest.approx(same["hit_rate"], abs=0.02)
    assert small["hit_rate"] < same["hit_rate"]
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert size * same["hit_chunks"]


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[1]",
        '{"hash_ids": 3}',
        '{"hash_ids": [-1]}',
        '{"hash_ids": [1.5]}',
        '{"hash_ids": [true]}',
        '{"hash_ids": [1], "op": "x"}',
        '{"hash_ids": [1], "chunk_bytes": "many"}',
        "[" * 100_000,
    ],
)
def test_what_is_no_trace_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_text(line + "\n")
    with pytest.raises(TraceError, match="line 1 is no recorded call"):
        list(read_trace(tmp_path / "t"))
    done = CliRunner().invoke(main, ["trace", "replay", str(tmp_path / "t")])
    assert done.exit_code == 1 and "line 1" in done.output


def test_a_file_that_was_cut_off_or_damaged_and_a_size_that_is_missing(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"hash_ids": [1, 2]}\n' * 1000)
    (tmp_path / "t").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match="ended before"):
        list(read_trace(tmp_path / "t"))
    (tmp_path / "t").write_bytes(whole[:12] + b"\xff" + whole[13:])
    with pytest.raises(TraceError, match="while decompressing"):
        list(read_trace(tmp_path / "t"))
    (tmp_path / "u").write_bytes(whole)
    assert "--chunk-size" in CliRunner().invoke(main, ["trace", "replay", str(tmp_path / "u")]).output
