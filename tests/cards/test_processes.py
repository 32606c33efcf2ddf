# SPDX-License-Identifier: Apache-2.0
"""A server with (fake) cards and engines that are processes: what it serves, and what it lets go of."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cards.churn import churn
from tests.cards.engines import EngineProcess, engine_process
from tests.cards.fake import environment
from tests.kvdata import BLOCKS_OUTERMOST_OPAQUE, LAYERS_OUTERMOST, MHA, MLA
from tests.served import Served, serving, wait_until

FLAGS = ("--log-format", "json", "--l1-size", "64MiB", "--chunk-tokens", "64")


@pytest.fixture(params=["auto", "dma", "staged", "direct"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    with serving("--copy-mode", request.param, *FLAGS, module="tests.cards.serve") as served:
        yield served


def started(engine: EngineProcess, served: Served, engine_id: str, **more: object) -> EngineProcess:
    assert engine.start(served.address, engine_id, **more) == ""
    return engine


def test_bytes_come_back_in_another_process(server: Served) -> None:
    """Other blocks of another process, and nothing else is touched."""
    engine_id = secrets.token_hex(16)
    with engine_process("fake") as one, engine_process("fake") as two:
        ids, others = [5, 3, 17, 0, 9, 12, 8, 1], [30, 2, 21, 22, 23, 4, 7, 11]
        for engine in (one, two):
            engine.make(MHA, LAYERS_OUTERMOST, 16, 40, lead=4160, tail=13)
        started(one, server, engine_id)
        one.write(ids)
        assert one.store(0, 128, ids) == ["stored"] * 2
        started(two, server, secrets.token_hex(16))
        job_id, hit = two.lookup(0, 128)
        assert hit == 128
        assert two.retrieve(job_id, 128, others) == ["loaded"] * 2
        assert two.wrong_tokens(others) == []
        assert two.untouched(others)
        assert one.stop() and two.stop()
    wait_until(lambda: status(server)["clients"] == 0, 10)
    assert "failed" not in server.log
    assert open_files(server) == 0


def test_a_killed_engine_is_let_go_of_and_its_name_serves_again(server: Served) -> None:
    """Idle, in a store, in a retrieve; the next process under the same client id stores and finds at once."""
    name, ids, gone = "worker-0", list(range(32)), list[float]()
    for act in ("idle", "store", "retrieve"):
        with engine_process("fake") as engine:
            engine.make(MLA, BLOCKS_OUTERMOST_OPAQUE, 16, 64)
            started(engine, server, secrets.token_hex(16), name=name)
            engine.write(ids)
            assert set(engine.store(1000, 512, ids)) <= {"stored", "resident"}
            job_id, hit = engine.lookup(1000, 512)
            assert hit == 512
            assert engine.retrieve(job_id, 512, list(range(32, 64))) == ["loaded"] * 8
            assert engine.wrong_tokens(list(range(32, 64))) == []
            if act == "store":
                engine.begin_store(secrets.randbelow(1 << 30), 512, ids)
            elif act == "retrieve":
                job_id, _ = engine.lookup(1000, 512)
                engine.begin_retrieve(job_id, 512, ids)
            engine.kill()
            killed = time.monotonic()
            wait_until(lambda: open_files(server) == 0, 30)
            gone.append(time.monotonic() - killed)
    assert min(gone) < 1.5, gone  # the machine may have other work


def test_ranks_of_one_engine_on_one_card(server: Served) -> None:
    """GQA: an object a rank, a hit needs them all. MLA: one writes, all read."""
    ids = list(range(8))
    for kv, kv_tp_size in ((MHA, 2), (MLA, 1)):
        engine_id = secrets.token_hex(16)
        with engine_process("fake") as one, engine_process("fake") as two:
            for rank, engine in enumerate((one, two)):
                engine.make(kv, LAYERS_OUTERMOST, 16, 40)
                started(engine, server, engine_id, ranks=(rank if kv_tp_size == 2 else 0, rank, 2, kv_tp_size))
                engine.write(ids, 64 * rank)
            assert one.store(5000, 128, ids) == ["stored"] * 2
            if kv_tp_size == 2:
                assert one.lookup(5000, 128)[1] == 0
                assert two.store(5000, 128, ids) == ["stored"] * 2
            job_id, hit = one.lookup(5000, 128)
            assert hit == 128
            for rank, engine in enumerate((one, two)):
                assert engine.retrieve(job_id, 128, list(range(20, 28))) == ["loaded"] * 2
                assert engine.wrong_tokens(list(range(20, 28)), 64 * rank if kv_tp_size == 2 else 0) == []
            assert one.stop() and two.stop()


def test_engines_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 6, on a small scale: whatever others do, each is answered, and what it loads is right."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    seen = churn("fake", 4, clients=3)
    assert not seen.wrong
    assert seen.counts["loaded chunks"] and seen.longest_s < 30


def test_a_server_loads_nothing_of_python_for_cards_that_copies_do_not_need() -> None:
    """Neither torch nor CuPy, not even where a card was opened."""
    program = (
        "import json, sys, tests.cards.serve, kvgrpc.app, kvgrpc.transfer.cuda, kvgrpc.service.server\n"
        "print(json.dumps([name for name in ('torch', 'cupy', 'cuda', 'numpy') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert json.loads(done.stdout) == []


def status(server: Served) -> dict[str, int]:
    command = [sys.executable, "-m", "kvgrpc", "status", "--json", "--address", server.address]
    found = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    return found if "clients" in found else found["server"]


def open_files(server: Served) -> int:
    """Allocations of engines that the server has mapped: files of the fake driver that belong to other processes."""
    own = f"kvgrpc-fake-{server.process.pid}-"
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    return sum(1 for line in maps.splitlines() if "kvgrpc-fake-" in line and own not in line)
