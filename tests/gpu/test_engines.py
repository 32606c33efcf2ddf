# SPDX-License-Identifier: Apache-2.0
"""A server and engines that are processes, on a real card."""

from __future__ import annotations

import secrets
import subprocess
import time
from collections.abc import Iterator

import pytest

from kvgrpc.core.errors import Reason
from tests.cards.churn import churn
from tests.cards.engines import engine_process
from tests.cards.pool import round_trip
from tests.gpu import kernels
from tests.kvdata import BLOCKS_OUTERMOST_OPAQUE, GQA, LAYERS_OUTERMOST, MLA, Kv
from tests.served import Served, serving, wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

FLAGS = ("--log-format", "json", "--l1-size", "1GiB", "--chunk-tokens", "64")


@pytest.fixture(scope="module", params=["dma", "staged", "direct"])
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving("--copy-mode", request.param, *FLAGS) as served:
        yield served
        print(served.log)


def used_mib() -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, check=True, capture_output=True, text=True).stdout)


def test_a_killed_engine_is_let_go_of_and_its_name_serves_again(server: Served) -> None:
    """Idle, in a store, in a retrieve: within a second its memory is free, and the next process under its client id
    stores and finds at once."""
    kv, ids = Kv(32, 2, 8, 128), list(range(512))
    with engine_process("cuda") as engine:  # so that the server has what it keeps
        engine.make(MLA, BLOCKS_OUTERMOST_OPAQUE, 16, 64)
        assert engine.start(server.address, secrets.token_hex(16)) == ""
        assert engine.store(1, 64, [0, 1, 2, 3]) == ["stored"]
        assert engine.retrieve(engine.lookup(1, 64)[0], 64, [8, 9, 10, 11]) == ["loaded"]
    time.sleep(0.5)
    before = used_mib()
    for act in ("idle", "store", "retrieve"):
        with engine_process("cuda") as engine:
            engine.make(kv, BLOCKS_OUTERMOST_OPAQUE, 16, 512)
            assert engine.start(server.address, secrets.token_hex(16), name="worker-0") == ""
            assert set(engine.store(5000, 1024, ids[:64])) <= {"stored", "resident"}
            job_id, hit = engine.lookup(5000, 1024)
            assert hit == 1024
            assert engine.retrieve(job_id, 1024, ids[64:128]) == ["loaded"] * 16
            assert used_mib() > before + 900
            if act == "store":
                engine.begin_store(secrets.randbelow(1 << 30), 3072, ids[:192])
            elif act == "retrieve":
                job_id, _ = engine.lookup(5000, 1024)
                engine.begin_retrieve(job_id, 1024, ids[64:128])
            killed = time.monotonic()
            engine.kill()
            wait_until(lambda: used_mib() <= before + 64, 3)
            print(f"{act}: free after {time.monotonic() - killed:.2f} s")
            assert time.monotonic() - killed < 1.5  # nvidia-smi itself takes a while


def test_ranks_of_one_engine_on_one_card(server: Served) -> None:
    """GQA: an object a rank, a hit needs them all. MLA: one writes, all four read."""
    ids, others = list(range(8)), list(range(20, 28))
    for kv, tp_size, kv_tp_size in ((GQA, 4, 4), (MLA, 4, 1)):
        engine_id = secrets.token_hex(16)
        with engine_process("cuda") as a, engine_process("cuda") as b, engine_process("cuda") as c:
            with engine_process("cuda") as d:
                engines = (a, b, c, d)
                first = secrets.randbelow(1 << 20)
                for rank, engine in enumerate(engines):
                    engine.make(kv, LAYERS_OUTERMOST, 16, 40)
                    kv_rank = rank if kv_tp_size > 1 else 0
                    assert engine.start(server.address, engine_id, ranks=(kv_rank, rank, tp_size, kv_tp_size)) == ""
                    engine.write(ids, 64 * kv_rank)
                for engine in engines[:kv_tp_size]:
                    assert a.lookup(first, 128)[1] == 0
                    assert engine.store(first, 128, ids) == ["stored"] * 2
                job_id, hit = a.lookup(first, 128)
                assert hit == 128
                for rank, engine in enumerate(engines):
                    assert engine.retrieve(job_id, 128, others) == ["loaded"] * 2
                    assert engine.wrong_tokens(others, 64 * rank if kv_tp_size > 1 else 0) == []
                for engine in engines:
                    assert engine.stop()


@pytest.mark.parametrize("page", [512, 64 << 10])
def test_what_all_groups_need_comes_back_in_another_process(server: Served, page: int) -> None:
    """Windows, states and full attention in one pool of pages, into other blocks, and nothing else is touched."""
    round_trip("cuda", server.address, page)


@pytest.mark.parametrize("who", ["client", "server"])
def test_kernels_before_a_store_and_after_a_retrieve(server: Served, who: str) -> None:
    """A thousand rounds with fresh data: what a kernel wrote that was launched just before, every other time behind
    slow ones, is what is stored, and a kernel that is launched right after reads what was loaded. The client waits for
    an event a round, or the server for one by its handle, which is recorded anew."""
    assert kernels.rounds(server.address, 1000, who) == []


def test_events_that_cannot_be_opened_are_refused_by_name(server: Served) -> None:
    """Nothing is copied then, and the next store is served."""
    refused = [Reason.READY_EVENT_UNSUPPORTED.value, "0"]
    assert kernels.handles(server.address) == [*refused * 3, "STORED", str(kernels.CHUNK)]


def test_engines_come_and_go() -> None:
    """Report 6: eight of them; nobody waits for long, and what is loaded is right. For five minutes by hand."""
    seen = churn("cuda", 15)
    print(dict(seen.counts), f"longest {seen.longest_s:.2f} s")
    assert not seen.wrong
    assert seen.counts["loaded chunks"] > 100 and seen.longest_s < 10


def test_memory_that_has_no_handle_is_refused_by_name() -> None:
    assert "virtual-memory allocator" in kernels.refused("expandable")
    assert "managed" in kernels.refused("managed")
    assert "memory pool" in kernels.refused("pool")
