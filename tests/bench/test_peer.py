# SPDX-License-Identifier: Apache-2.0
"""The comparison with the peer, with a made-up side: what takes turns, what is counted, and that errors are seen."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import peer_side
from benchmarks.peer_clients import BLOCK, CHUNK, Ids, Shape
from benchmarks.peer_lmcache import LENGTHS, Bench, Client, ask, in_turns, running
from benchmarks.peer_side import Work
from kvgrpc.bench.processes import BenchError
from kvgrpc.bench.results import Report, parse

SHAPE = Shape(2, 1, 8, 1 + 2 * peer_side.COPIED_TOKENS // BLOCK)


class Fake:
    """A server and its client in this process. Steer it: ``lag`` lookups miss what is there, ``spoil`` a word."""

    lag = 0
    spoil = False

    def __init__(self, address: str) -> None:
        self.stored: dict[Ids, Any] = {}
        self.locked: set[str] = set()
        self.looked: dict[str, Ids] = {}

    def register(self, mode: str, shape: Shape) -> None:
        words = BLOCK * shape.heads * shape.dim * 2 // 8
        self.planes = [np.zeros((2, shape.num_blocks, words), np.int64) for _ in range(shape.layers)]
        self.missing = 0

    def prepare(self, ids: Ids) -> Ids:
        return ids

    def lookup(self, name: str, prompt: Ids) -> int:
        self.missing -= 1
        chunks = len(prompt) // CHUNK * CHUNK
        found = any(ids[:chunks] == prompt[:chunks] for ids in self.stored) and self.missing < 0
        if found:
            self.locked.add(name)
            self.looked[name] = prompt
        return chunks if found else 0

    def free(self, name: str, ids: Ids) -> None:
        self.locked.remove(name)

    def end(self, name: str) -> None:
        self.locked.discard(name)

    def store(self, name: str, ids: Ids, blocks: Sequence[int]) -> bool:
        self.stored[ids] = [plane[:, blocks].copy() for plane in self.planes]
        self.missing = self.lag
        return True

    def retrieve(self, name: str, ids: Ids, blocks: Sequence[int]) -> bool:
        for plane, content in zip(self.planes, self.stored[self.looked[name]], strict=True):
            plane[:, blocks] = content
        if self.spoil:
            self.planes[1][1, blocks[0], 0] ^= 1
        return True

    def clear(self) -> None:
        self.stored.clear()

    @staticmethod
    def versions() -> dict[str, str]:
        return {"peer fake": "1"}


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    monkeypatch.setitem(peer_side.SHAPES, "copies", SHAPE)
    monkeypatch.setattr(Fake, "lag", 0)
    monkeypatch.setattr(Fake, "spoil", False)
    made = Work(Fake)  # pyright: ignore[reportArgumentType]
    made.open("", "", "copies", 1)
    return made


def test_good_copies_are_neither_wrong_nor_unseen(work: Work) -> None:
    found = work.copies(2)
    assert (found["wrong"], found["unseen"], len(found["store"]), len(found["retrieve"])) == (0, 0, 2, 2)
    assert not work._engine.locked


def test_one_wrong_bit_is_a_wrong_copy(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fake, "spoil", True)
    assert work.copies(2)["wrong"] == 2


def test_a_store_that_is_found_late_is_counted(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fake, "lag", 3)
    assert work.copies(2)["unseen"] == 2


def test_lookups_hit_what_is_kept_and_miss_the_rest(work: Work) -> None:
    work.open("", "", "small", 1)
    work.keep()
    for hit in (True, False):
        rates = work.lookups(1024, hit, 0.01)
        assert rates["rate"] >= rates["ended"] > 0
    assert not work._engine.locked
    work._engine.clear()
    with pytest.raises(AssertionError, match="0 of 1024 tokens hit"):
        work.lookups(1024, True, 0.01)


def test_sides_take_turns_forwards_and_backwards() -> None:
    order: list[str] = []
    in_turns({name: lambda name=name: order.append(name) for name in "ab"}, 4)
    assert "".join(order) == "abbaabba"


def fake_client(tmp_path: Path, program: str) -> Any:
    return running([sys.executable, "-c", f"import json, sys\n{program}"], tmp_path / "log", talks=True)


def test_clients_work_at_the_same_time(tmp_path: Path) -> None:
    """The first one answers only when the second one has its order."""
    (tmp_path / "other").mkdir()
    met = tmp_path / "met"
    first = (
        f"import pathlib, time\nsys.stdin.readline()\nwhile not pathlib.Path({str(met)!r}).exists(): time.sleep(0.01)"
    )
    second = f"import pathlib\nsys.stdin.readline()\npathlib.Path({str(met)!r}).touch()"
    with (
        fake_client(tmp_path, f"{first}\nprint(1)") as one,
        fake_client(tmp_path / "other", f"{second}\nprint(2)") as two,
    ):
        assert ask([Client(one, tmp_path / "log"), Client(two, tmp_path / "log")], "meet") == [1, 2]


def test_a_client_that_ends_says_why(tmp_path: Path) -> None:
    with fake_client(tmp_path, "sys.exit('out of memory')") as process:
        with pytest.raises(BenchError, match="out of memory"):
            ask([Client(process, tmp_path / "log")], "lookups", tokens=1)


class Canned:
    """A client with an answer."""

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def send(self, do: str, **order: object) -> None:
        assert do == "lookups" and order["tokens"] in LENGTHS.values()

    def receive(self) -> dict[str, float]:
        return {"rate": self._rate, "ended": self._rate / 2}


def test_figures_of_lookups(tmp_path: Path) -> None:
    """Rates of clients add up; ratios have their goals; the result is a valid one."""
    bench = Bench(tmp_path, 2, 0.0, lambda text: None)
    rates = {"kvgrpc": 30.0, "zmq": 10.0, "grpc": 2.0}
    clients: Any = {name: [Canned(rate)] * 4 for name, rate in rates.items()}
    for length in LENGTHS:
        bench._lookups(clients, length, True, 4)
    found = {one.name: one for one in bench.figures}
    assert found["lookups/32K hit, 4 clients, kvgrpc"].value == 120
    ratios = [found[f"lookups/{length} hit, 4 clients, ratio to zmq"] for length in LENGTHS]
    assert [(one.value, one.goal, one.met) for one in ratios] == [
        (3.0, ">= 2", True),
        (3.0, None, None),
        (3.0, ">= 4", False),
        (3.0, ">= 4", False),
    ]
    assert found["lookups/128K hit, 4 clients, ratio to grpc"].met
    report = Report("peer", tuple(bench.figures))
    assert [one.name for one in parse(report.to_json()).figures] == list(found)
    assert json.loads(report.to_json())["kind"] == "peer"
