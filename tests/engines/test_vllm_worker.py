# SPDX-License-Identifier: Apache-2.0
"""The worker's half of the vLLM connector: which blocks it calls loaded, and when it lets go of others."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from kvgrpc.api import Hashes
from kvgrpc.core.types import ChunkOutcome, ChunkResult, TokenRange
from kvgrpc.engines.vllm.metadata import REST_S, Load, Save, Step
from kvgrpc.engines.vllm.worker import Worker
from tests.engines.fakes import CHUNK, ONE, FakeCopier

LOADED, FAILED, TORN, MISSING, STORED = (
    ChunkOutcome.LOADED,
    ChunkOutcome.FAILED,
    ChunkOutcome.TORN,
    ChunkOutcome.MISSING,
    ChunkOutcome.STORED,
)
LOAD = Load("r", (b"job",), 0, 96, ((1, 2, 3, 4, 5, 6),))
SAVE = Save(7, 32, 64, ((3, 4),), hashes=(b"h" * 36,), first_chunk=1)


def worker() -> tuple[Worker, FakeCopier]:
    copier = FakeCopier()
    return Worker(copier, ONE, writes=True), copier


@pytest.mark.parametrize(
    ("results", "invalid"),
    [
        ([(0, 3, LOADED)], set()),
        ([(0, 1, LOADED), (1, 2, LOADED)], set()),
        ([(0, 3, FAILED)], {1, 2, 3, 4, 5, 6}),
        ([(0, 1, LOADED), (1, 2, MISSING)], {3, 4, 5, 6}),
        ([(0, 2, LOADED), (2, 1, TORN)], {5, 6}),
        ([(0, 1, LOADED), (1, 1, FAILED), (2, 1, LOADED)], {3, 4, 5, 6}),
        ([(0, 1, LOADED), (2, 1, LOADED)], {3, 4, 5, 6}),
        ([(0, 2, LOADED)], {5, 6}),
        ([], {1, 2, 3, 4, 5, 6}),
    ],
)
def test_what_is_not_known_to_be_loaded_has_failed(results: list[tuple[int, int, ChunkOutcome]], invalid: set[int]):
    w, copier = worker()
    w.load([LOAD])
    assert (w.poll(), w.take_invalid()) == (set(), set())
    copier.futures[0].set_result(tuple(ChunkResult(*each, "") for each in results))
    assert w.poll() == {"r"}
    assert w.take_invalid() == invalid
    assert (w.poll(), w.take_invalid(), w.busy) == (set(), set(), False)


def test_a_range_that_begins_inside_a_chunk():
    w, copier = worker()
    w.load([replace(LOAD, start=48, blocks=((4, 5, 6),))])
    assert copier.retrieves == [(b"job", TokenRange(48, 96), [[4, 5, 6]])]
    copier.futures[0].set_result((ChunkResult(1, 1, LOADED, ""), ChunkResult(2, 1, FAILED, "why")))
    w.poll()
    assert w.take_invalid() == {5, 6}


def test_results_of_a_server_with_other_chunks_are_not_believed():
    w, copier = worker()
    w.load([LOAD])
    assert copier.registration is not None
    copier.registration = replace(copier.registration, space_base=b"c" * 16, chunk_tokens=2 * CHUNK)
    copier.futures[0].set_result((ChunkResult(0, 3, LOADED, ""),))
    assert w.poll() == {"r"}
    assert w.take_invalid() == set(LOAD.blocks[0])


def test_a_call_that_cannot_be_sent_is_a_failed_load():
    w, copier = worker()
    w.load([LOAD])
    copier.futures[0].set_exception(TypeError("no"))
    assert (w.poll(), w.take_invalid()) == ({"r"}, set(LOAD.blocks[0]))


def test_a_load_of_nothing_is_received_at_once():
    w, copier = worker()
    w.load([Load("gone", (), 0, 0, ())])
    assert (w.poll(), w.take_invalid(), copier.retrieves) == ({"gone"}, set(), [])


def test_a_worker_without_memory_fails_loads_and_ends_saves():
    w = Worker(None, ONE, writes=True)
    w.load([LOAD])
    w.save([SAVE])
    w.begin(Step())
    assert (w.poll(), w.take_invalid()) == ({"r"}, set(LOAD.blocks[0]))
    report = w.take_report()
    assert report is not None
    assert (report.ended, report.unusable) == ({7: 1}, True)


def test_saves_are_sent_at_the_next_step_and_end_with_their_future():
    w, copier = worker()
    w.begin(Step())
    w.save([SAVE])
    assert copier.stores == []
    w.begin(Step())
    assert copier.stores == [(Hashes((b"h" * 36,), 64, 1), [[3, 4]], TokenRange(32, 64))]
    w.poll()
    assert (w.take_report(), w.busy) == (None, True)
    copier.futures[0].set_result((ChunkResult(1, 1, STORED, ""),))
    w.poll()
    report = w.take_report()
    assert report is not None
    assert (report.ended, report.saved_tokens, w.busy) == ({7: 1}, CHUNK, False)


def test_a_reset_drops_what_is_not_sent():
    w, copier = worker()
    w.save([SAVE])
    w.begin(Step(resets=1))
    report = w.take_report()
    assert report is not None
    assert (report.ended, copier.stores) == ({7: 1}, [])


def test_a_worker_that_does_not_write_ends_saves_at_once():
    copier = FakeCopier()
    w = Worker(copier, ONE, writes=False)
    w.save([SAVE])
    w.begin(Step())
    report = w.take_report()
    assert report is not None
    assert (report.ended, copier.stores) == ({7: 1}, [])


def test_each_worker_loads_from_the_server_of_its_node():
    copier = FakeCopier()
    w = Worker(copier, ONE, writes=True, server=1)
    w.load([replace(LOAD, job_ids=(b"first", b"second"))])
    assert [job_id for job_id, _, _ in copier.retrieves] == [b"second"]


def test_a_rest_ends_with_the_copy_that_it_waits_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvgrpc.engines.vllm.worker.REST_S", 100)
    w, copier = worker()
    began = time.monotonic()
    w.rest()  # for nothing
    w.load([LOAD])
    later = threading.Timer(0.05, copier.futures[0].set_result, [(ChunkResult(0, 3, LOADED, ""),)])
    later.start()
    w.rest()
    assert w.poll() == {"r"}
    later.join()
    w.save([SAVE])
    w.begin(Step())
    copier.futures[1].set_result((ChunkResult(1, 1, STORED, ""),))
    w.rest()  # for what has ended
    w.load([replace(LOAD, request_id="nothing", blocks=())])
    w.load([replace(LOAD, request_id="other")])
    w.rest()  # while something is to be told
    assert w.poll() == {"nothing"}
    assert time.monotonic() - began < 50


def test_a_rest_is_short():
    w, _ = worker()
    w.load([LOAD])
    times: list[float] = []
    for _ in range(5):
        began = time.monotonic()
        w.rest()
        times.append(time.monotonic() - began)
    assert REST_S / 2 < min(times) < 10 * REST_S


class Event:
    """Of a card."""

    def synchronize(self) -> None: ...


def test_copies_of_a_cards_blocks_wait_for_what_the_card_was_given_before():
    """A load for who had the blocks before, a store for what computes them: not for what comes later."""
    marks: list[Event] = []

    def mark() -> Event:
        marks.append(Event())
        return marks[-1]

    copier = FakeCopier()
    w = Worker(copier, ONE, writes=True, mark=mark)
    w.load([LOAD])
    w.save([SAVE])
    assert len(marks) == 2
    w.begin(Step())
    w.load([])
    w.save([])
    assert copier.ready == marks
