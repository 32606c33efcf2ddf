# SPDX-License-Identifier: Apache-2.0
"""Stores that name an event of their engine: a server with a (fake) card waits for it, and for nothing longer."""

from __future__ import annotations

import ctypes
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvgrpc.api import Layout, RegisterRequest, SharedMemory
from kvgrpc.client import OWN_HASH_ALGORITHM, SpaceIdentity, WorkerClient
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import ChunkOutcome
from kvgrpc.transfer import ready
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.cards import Cards
from kvgrpc.transfer.ready import OpenEvents, ReadyEvents
from tests.cards import fake
from tests.cards.engines import EngineProcess, engine_process, prompt
from tests.cards.test_processes import FLAGS, open_files, status
from tests.kvdata import LAYERS_OUTERMOST, MHA
from tests.ports import free_port
from tests.served import Served, serving, stop, wait_until

IDS = (5, 3, 17, 0, 9, 12, 8, 1)
TOKENS, LONG_S = 128, 20.0
LAYOUT = Layout((SharedMemory("none", 0, 1),), ())


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in fake.environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def server(cards: None) -> Iterator[Served]:
    with serving(*FLAGS, module="tests.cards.serve") as served:
        yield served


def started(engine: EngineProcess, served: Served) -> EngineProcess:
    engine.make(MHA, LAYERS_OUTERMOST, 16, 40, lead=4160, tail=13)
    assert engine.start(served.address, secrets.token_hex(16)) == ""
    return engine


def loaded(engine: EngineProcess, first: int, others: Sequence[int], first_token: int = 0) -> list[int]:
    """Tokens that came back wrong."""
    job_id, hit = engine.lookup(first, TOKENS)
    assert hit == TOKENS
    assert engine.retrieve(job_id, TOKENS, others) == ["loaded"] * 2
    return engine.wrong_tokens(others, first_token)


def store_waits(engine: EngineProcess, gate: Path) -> None:
    """A Store of bytes that are written once the file ``gate`` is there."""
    engine.begin_store_behind(1, TOKENS, IDS, engine.write_late(IDS, 0, str(gate)))
    assert engine.stored(0.3) is None


def test_bytes_that_are_written_late_are_the_bytes_stored(server: Served, tmp_path: Path) -> None:
    """One event, recorded anew each round and opened once. Others are served meanwhile, the waiting engine too."""
    with engine_process("fake") as one, engine_process("fake") as two:
        started(one, server)
        started(two, server)
        two.write(list(IDS), 50_000)
        others = [30, 2, 21, 22, 23, 4, 7, 11]
        handles: set[bytes] = set()
        for number in range(3):
            gate, first = tmp_path / f"gate{number}", 1000 * number
            handle = one.write_late(IDS, first, str(gate))
            handles.add(handle)
            one.begin_store_behind(first, TOKENS, IDS, handle)
            assert one.stored(0.3) is None
            assert two.lookup(first, TOKENS)[1] == 0
            assert two.store(50_000 + first, TOKENS, list(IDS)) == ["stored"] * 2
            assert loaded(one, 50_000 + first, others, 50_000) == []
            gate.touch()
            assert one.stored() == ["stored"] * 2
            assert loaded(two, first, others, first) == []
        assert len(handles) == 1
        assert one.stop() and two.stop()
    wait_until(lambda: status(server)["clients"] == 0, LONG_S)
    assert open_files(server) == 0


@pytest.mark.parametrize("seen", ["metrics", "traces"])
def test_a_server_that_is_watched_waits_as_well(cards: None, tmp_path: Path, seen: str) -> None:
    """Found by review: metrics or traces stand between driver and cards, and every such Store was refused."""
    flags = ("--metrics-listen", f"127.0.0.1:{free_port()}")
    if seen == "traces":
        flags = ("--otlp-endpoint", f"http://127.0.0.1:{free_port()}", "--trace-share", "1")
    with serving(*FLAGS, *flags, module="tests.cards.serve") as served, engine_process("fake") as engine:
        started(engine, served)
        store_waits(engine, tmp_path / "gate")
        (tmp_path / "gate").touch()
        assert engine.stored() == ["stored"] * 2
        assert loaded(engine, 1, [30, 2, 21, 22, 23, 4, 7, 11]) == []
        assert engine.stop()


def test_an_engine_that_dies_before_its_event_is_let_go_of(server: Served, tmp_path: Path) -> None:
    with engine_process("fake") as engine:
        started(engine, server)
        store_waits(engine, tmp_path / "never")
        assert open_files(server) >= 2
        engine.kill()
        wait_until(lambda: open_files(server) == 0, LONG_S)


def test_a_server_ends_whatever_it_waits_for(server: Served, tmp_path: Path) -> None:
    with engine_process("fake") as engine:
        started(engine, server)
        store_waits(engine, tmp_path / "never")
        assert stop(server.process) == 0
        assert "Traceback" not in server.log


def test_a_store_that_is_taken_back_waits_no_longer(server: Served, tmp_path: Path) -> None:
    """Its blocks are free then: they are not read when the event comes."""
    with engine_process("fake") as engine:
        started(engine, server)
        store_waits(engine, tmp_path / "gate")
        engine.take_back()
        assert engine.stored() == [Reason.CALL_REVOKED.value] * 2
        (tmp_path / "gate").touch()
        wait_until(lambda: engine.wrong_tokens(IDS) == [], LONG_S)
        assert engine.lookup(1, TOKENS)[1] == 0
        assert engine.store(1, TOKENS, list(IDS)) == ["stored"] * 2


def test_unregistering_does_not_wait_for_events(server: Served, tmp_path: Path) -> None:
    with engine_process("fake") as engine:
        started(engine, server)
        store_waits(engine, tmp_path / "never")
        began = time.monotonic()
        engine.stop()
        wait_until(lambda: open_files(server) == 0, LONG_S)
        assert time.monotonic() - began < LONG_S


def test_events_that_cannot_be_opened_are_refused_by_name(server: Served) -> None:
    """Nothing is copied, and the next call is served."""
    with engine_process("fake") as engine:
        layout = engine.make(MHA, LAYERS_OUTERMOST, 16, 40)
        assert engine.start(server.address, secrets.token_hex(16)) == ""
        engine.write(list(IDS))
        gone = f"event kvgrpc-fake-{engine.process.pid}-999".encode().ljust(64, b"\0")
        for handle, reason in (
            (b"x" * 64, Reason.READY_EVENT_UNSUPPORTED),
            (bytes(64), Reason.READY_EVENT_UNSUPPORTED),
            (layout.memory[0].handle, Reason.READY_EVENT_UNSUPPORTED),
            (gone, Reason.READY_EVENT_UNSUPPORTED),
            (b"x" * 63, Reason.INVALID_FIELD),
        ):
            engine.begin_store_behind(1, TOKENS, IDS, handle)
            assert engine.stored() == [reason.value] * 2
        assert engine.lookup(1, TOKENS)[1] == 0
        assert engine.store(1, TOKENS, list(IDS)) == ["stored"] * 2
        assert engine.stop()


def test_a_registration_keeps_so_many_events_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was named longest ago makes room; each is opened once until then."""
    monkeypatch.setattr(ready, "EVENTS_MOST", 2)
    arena = Arena(1 << 20)
    fake.driver()
    cards = Cards(arena)
    cards.pin_all()
    events, waiting = OpenEvents(cards.opened[0]), ReadyEvents(cards.lost)
    one, two, three = (fake.LateWrites().handle for _ in range(3))
    before = fake.driver().fakeEvents()
    told: list[Refusal | None] = []
    for handle in (one, two, one, three, one, two):
        waiting.wait(events, handle, told.append)
    wait_until(lambda: len(told) == 6, LONG_S)
    assert told == [None] * 6 and not events.waits
    assert fake.driver().fakeEvents() - before == 4  # the second one twice
    waiting.end(events)
    waiting.close()
    cards.close()
    arena.close()


class Mark:
    """An event that is over, and notes which context whoever waits for it has."""

    context: int | None = None

    def synchronize(self) -> None:
        found = ctypes.c_void_p()
        fake.driver().cuCtxGetCurrent(ctypes.byref(found))
        self.context = found.value


def test_a_client_waits_in_the_context_of_its_caller(tmp_path: Path) -> None:
    """Found by review: its thread had none, and CUDA's runtime then opens the first card for it, some hundred MiB in
    each process of an engine whose own card is another one."""
    request = RegisterRequest("0" * 32, SpaceIdentity("m", "", "", 1, OWN_HASH_ALGORITHM, ""), 0, 0, 1, 1, LAYOUT)
    client, mark = WorkerClient(f"unix:{tmp_path}/none", request), Mark()
    assert not client.start(0.01)
    for context in (3, None, 2):
        fake.driver().cuCtxSetCurrent(ctypes.c_void_p(context))
        try:
            results = client.store(prompt(0, TOKENS), [IDS], ready=mark).result(LONG_S)
        finally:
            fake.driver().cuCtxSetCurrent(None)
        assert {one.outcome for one in results} == {ChunkOutcome.FAILED}
        assert context is None or mark.context == context
    client.close()
