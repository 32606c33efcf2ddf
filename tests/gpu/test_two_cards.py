# SPDX-License-Identifier: Apache-2.0
"""One server, an engine whose two ranks have a card each. Run where there are two: `make gpu` sees to it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from kvgrpc.transfer import _native
from kvgrpc.transfer.cards import nvidia_devices
from tests.cards.engines import engine_process
from tests.gpu import kernels
from tests.kvdata import BLOCKS_OUTERMOST_OPAQUE, GQA, LAYERS_OUTERMOST, MLA
from tests.served import Served, serving

pytestmark = [pytest.mark.gpus, pytest.mark.timeout(90)]


@pytest.fixture(scope="module", params=["dma", "staged", "direct"])
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    flags = ("--log-format", "json", "--l1-size", "1GiB", "--chunk-tokens", "64")
    with serving("--copy-mode", request.param, *flags) as served:
        yield served


def test_the_server_sees_two_cards(server: Served) -> None:
    assert len({uuid for _, uuid, _, _ in _native.cards()}) >= 2
    assert f'"cards": "{nvidia_devices()}"' in server.log


@pytest.mark.parametrize("kv_tp_size", [2, 1], ids=["an object a rank", "one object"])
def test_two_ranks_on_two_cards(server: Served, kv_tp_size: int) -> None:
    """GQA: each rank stores its own, a hit needs both. MLA: the first stores, both read."""
    kv = GQA if kv_tp_size == 2 else MLA
    ids, others = list(range(8)), list(range(20, 28))
    engine_id, first = secrets.token_hex(16), secrets.randbelow(1 << 20)
    with engine_process("cuda:0") as one, engine_process("cuda:1") as two:
        uuids: set[str] = set()
        for rank, engine in enumerate((one, two)):
            for arrangement in (BLOCKS_OUTERMOST_OPAQUE, LAYERS_OUTERMOST):
                layout = engine.make(kv, arrangement, 16, 40)
            uuids.add(layout.memory[0].device_uuid)
            kv_rank = rank if kv_tp_size == 2 else 0
            assert engine.start(server.address, engine_id, ranks=(kv_rank, rank, 2, kv_tp_size)) == ""
            engine.write(ids, 64 * kv_rank)
        assert len(uuids) == 2
        for engine in (one, two)[:kv_tp_size]:
            assert one.lookup(first, 128)[1] == 0
            assert engine.store(first, 128, ids) == ["stored"] * 2
        job_id, hit = one.lookup(first, 128)
        assert hit == 128
        for engine in (one, two):
            engine.begin("retrieve", job_id, 128, others)
        for rank, engine in enumerate((one, two)):
            assert engine.end() == ["loaded"] * 2
            assert engine.wrong_tokens(others, 64 * rank if kv_tp_size == 2 else 0) == []
            assert engine.untouched([*ids, *others])
        assert one.stop() and two.stop()


def test_an_engine_has_a_context_on_its_own_card_only(server: Served) -> None:
    """The thread that waits for its events has no card of its own."""
    assert kernels.contexts(server.address) == [False, True]
