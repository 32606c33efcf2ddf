# SPDX-License-Identifier: Apache-2.0
"""What workers count for vLLM's metrics."""

from __future__ import annotations

from dataclasses import replace

from kvgrpc.core.types import ChunkOutcome, ChunkResult
from kvgrpc.engines.vllm.metadata import Load, Save, Step
from kvgrpc.engines.vllm.stats import COUNTS, TIMES, Data, merge, summary
from kvgrpc.engines.vllm.worker import Worker
from tests.engines.fakes import CHUNK, ONE, FakeCopier

SAVE = Save(1, 0, 4 * CHUNK, (tuple(range(8)),), hashes=(b"h" * 36,) * 4)


def counted(*outcomes: ChunkOutcome) -> Data:
    copier = FakeCopier()
    worker = Worker(copier, ONE, writes=True)
    worker.load([Load("r", (b"job",), 0, 3 * CHUNK, (tuple(range(6)),))])
    worker.save([SAVE])
    worker.begin(Step())
    copier.futures[0].set_result((ChunkResult(0, 2, ChunkOutcome.LOADED), ChunkResult(2, 1, ChunkOutcome.FAILED)))
    copier.futures[1].set_result(tuple(ChunkResult(at, 1, outcome) for at, outcome in enumerate(outcomes)))
    worker.poll()
    report = worker.take_report()
    assert report is not None
    assert report.ended == {1: 1}
    data = worker.take_stats()
    assert worker.take_stats() == {}
    return {**data, "findable": report.findable[1]}


def test_tokens_and_times():
    data = counted(*(ChunkOutcome.STORED,) * 4)
    assert [len(data.pop(name)) for name in TIMES] == [1, 1]  # pyright: ignore[reportArgumentType]
    assert data == {
        "loaded_tokens": 2 * CHUNK,
        "load_failed_tokens": CHUNK,
        "stored_tokens": 4 * CHUNK,
        "findable": 4 * CHUNK,
    }
    assert set(data) - {"findable"} <= set(COUNTS)


def test_what_is_there_already_has_not_failed_and_what_lies_behind_a_gap_cannot_be_found():
    data = counted(ChunkOutcome.RESIDENT, ChunkOutcome.STORED, ChunkOutcome.REFUSED, ChunkOutcome.STORED)
    assert (data["stored_tokens"], data["store_failed_tokens"]) == (2 * CHUNK, CHUNK)
    assert data["findable"] == 2 * CHUNK
    busy = counted(ChunkOutcome.BEING_WRITTEN, *(ChunkOutcome.STORED,) * 3)
    assert (busy.get("store_failed_tokens"), busy["findable"]) == (None, 0)


def test_workers_are_summed_and_said_in_one_line():
    data: Data = {"loaded_tokens": 3, "load_seconds": [0.1]}
    merge(data, {"loaded_tokens": 4, "stored_tokens": 1, "load_seconds": [0.2, 0.4]})
    assert data == {"loaded_tokens": 7, "stored_tokens": 1, "load_seconds": [0.1, 0.2, 0.4]}
    assert summary(data) == {
        "loaded tokens": 7,
        "stored tokens": 1,
        "loads": 3,
        "load p50 (ms)": 200.0,
        "load worst (ms)": 400.0,
    }
    assert summary({}) == {}


def test_a_save_that_was_for_nobody_says_nothing_of_what_can_be_found():
    worker = Worker(FakeCopier(), ONE, writes=False)
    worker.save([replace(SAVE)])
    worker.begin(Step())
    report = worker.take_report()
    assert report is not None
    assert (report.ended, report.findable) == ({1: 1}, {})
