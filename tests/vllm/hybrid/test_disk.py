# SPDX-License-Identifier: Apache-2.0
"""The model of test_windows.py over a server whose L1 holds two of its prompts, and whose disk has them all: hits are
read from there, full attention and the last windows, also by the next server.

Run by itself, since a process has one engine: pytest tests/vllm/hybrid/test_disk.py.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.served import wait_until
from tests.vllm.bench import Bench, prompt
from tests.vllm.processes import Server

PROMPTS = [prompt(seed, 500) for seed in (71, 73, 79, 83, 89, 97)]
HIT = 448
CHUNKS = HIT // 64
STORED = 2 * (CHUNKS + 1)
"""Objects of a prompt and its answer, 532 tokens: full attention and windows of every chunk."""
NEEDED = CHUNKS + 2
"""Objects of a hit: the window of 96 tokens at its end lies in two chunks."""
QUIET = {"kvgrpc.no_store": True}


@pytest.fixture(scope="session")
def served() -> Iterator[Server]:
    """An object of full attention has 32 KiB, one of windows 160."""
    with tempfile.TemporaryDirectory(prefix="kvgrpc-") as folder:
        (Path(folder) / "disk").mkdir()
        sizes = ("--chunk-tokens", "64", "--l1-size", "3MiB", "--page-size", "32KiB")
        disk = ("--disk-path", f"{folder}/disk", "--disk-size", "1GiB", "--prefetch-wait-ms", "30000")
        server = Server(Path(folder), *sizes, *disk)
        try:
            server.start()
            yield server
        finally:
            server.end()


class Counted:
    """What the server has counted since."""

    def __init__(self, served: Server) -> None:
        self._served, self._before = served, served.status().counters

    def of(self, name: str) -> int:
        return self._served.count(name) - self._before.get(name, 0)


def written(served: Server) -> None:
    """Nothing is on its way to the disk any more."""

    def quiet() -> bool:
        (tier,) = served.status().tiers
        return not tier.writes_in_flight and not tier.writes_queued

    wait_until(quiet, 30)


def stored(bench: Bench, served: Server) -> list[tuple[int, ...]]:
    """Puts all prompts on the disk, one after the other; what each is answered with."""
    cold = bench.cold(*PROMPTS)
    written(served)
    for each in PROMPTS:
        counted = Counted(served)
        (said,) = bench.say(each)
        assert said.cached == 0
        written(served)
        assert counted.of("stored_chunks") == counted.of("written_objects") == STORED
    bench.forget()
    return cold


def follow(bench: Bench, served: Server) -> None:
    """The server was killed: starts the next one, and waits until the engine has found it."""
    served.start()
    scheduler, worker = bench.scheduler(), bench.worker()
    wait_until(lambda: served.status().clients == 2, 30)
    wait_until(lambda: scheduler._servers.attached and worker._client.attached, 30)


def test_what_memory_has_no_room_for_comes_back_from_the_disk(bench: Bench, served: Server):
    cold = stored(bench, served)
    assert served.count("evicted_chunks") > 0
    counted = Counted(served)
    for each, words in zip(PROMPTS, cold, strict=True):
        (said,) = bench.say(each, params=QUIET)
        assert (said.tokens, said.cached) == (words, HIT)
    assert counted.of("loaded_chunks") == NEEDED * len(PROMPTS)
    assert counted.of("prefetched_objects") >= NEEDED * (len(PROMPTS) - 2)
    assert counted.of("failed_chunks") == counted.of("written_objects") == 0


def test_the_next_server_has_them_from_the_disk(bench: Bench, served: Server):
    """Exactly what each hit needs is read, and in no memory of before; a prefix has the windows of its own end."""
    shorter = PROMPTS[0][:300] + prompt(101, 40)
    (words,) = bench.cold(shorter)
    cold = stored(bench, served)
    served.signal(signal.SIGKILL)
    follow(bench, served)
    counted = Counted(served)
    for each, answer in zip(PROMPTS, cold, strict=True):
        (said,) = bench.say(each, params=QUIET)
        assert (said.tokens, said.cached) == (answer, HIT)
    assert counted.of("prefetched_objects") == counted.of("loaded_chunks") == NEEDED * len(PROMPTS)
    (said,) = bench.say(shorter, params=QUIET)
    assert (said.tokens, said.cached) == (words, 256)
    assert counted.of("loaded_chunks") == NEEDED * len(PROMPTS) + 4 + 2


def test_all_groups_come_back_byte_for_byte(bench: Bench, served: Server):
    """In all layers, in other blocks, over memory that holds something else."""
    kept = bench.blocks_at_the_end()
    try:
        (first,) = bench.say(PROMPTS[0], tokens=1)
        written(served)
        served.signal(signal.SIGKILL)
        follow(bench, served)
        bench.forget()
        for tensor in bench.layers().values():
            tensor.view(torch.uint8).fill_(0xA5)
        (again,) = bench.say(PROMPTS[0], tokens=1, params=QUIET)
    finally:
        del bench.scheduler().finished
    assert (first.cached, again.cached, again.tokens) == (0, HIT, first.tokens)
    (before, computed), (after, loaded) = kept.values()
    groups = bench.engine.core.scheduler.kv_cache_config.kv_cache_groups
    named = [[at for at in range(HIT // 32) if ids[at]] for ids in before]
    assert sorted(map(len, named)) == [2] * 5 + [HIT // 32]
    for group, places, one, other in zip(groups, named, before, after, strict=True):
        assert not {one[at] for at in places} & {other[at] for at in places}
        for layer in group.layer_names:
            assert torch.equal(computed[layer][places].view(torch.uint8), loaded[layer][places].view(torch.uint8))


def test_a_file_with_another_bit_is_no_hit(bench: Bench, served: Server):
    """Every file of the disk: the prompt is computed again, and nobody says anything else."""
    (cold,) = bench.cold(PROMPTS[0])
    bench.say(PROMPTS[0])
    written(served)
    served.signal(signal.SIGKILL)
    for file in served.socket.parent.glob("disk/slot-*/??/*"):
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
    follow(bench, served)
    bench.forget()
    (said,) = bench.say(PROMPTS[0], params=QUIET)
    assert (said.tokens, said.cached) == (cold, 0)
