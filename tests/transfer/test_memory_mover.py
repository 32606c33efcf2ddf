# SPDX-License-Identifier: Apache-2.0
"""The shipped fake mover does what it is told, and reports it as a real one would."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest

from kvgrpc.api import BlockForm, CudaIpcMemory, KvGroup, Layout, Runs, SharedMemory
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import Direction, Piece, RunSlice, SliceReport
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.base import Mover
from kvgrpc.transfer.gates import Gate
from kvgrpc.transfer.memory import MemoryMover

GROUP = KvGroup(16, 4, (Runs(0, 0, 1, 0, 1, 0, 8, 8),), BlockForm.OPAQUE)
LAYOUT = Layout((SharedMemory("kv", 0, 32),), (GROUP,))


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(4096)
    arena.view(0, 64)[:] = bytes(range(64))
    yield arena
    arena.close()


@pytest.fixture
def memory() -> bytearray:
    return bytearray(b"\xa5" * 32)


@pytest.fixture
def mover(arena: Arena, memory: bytearray) -> Iterator[MemoryMover]:
    mover = MemoryMover(arena, 64)
    mover.add_memory("kv", memory)
    mover.map(1, LAYOUT)
    yield mover
    mover.close()


def retrieve(*chunks: tuple[int, ...], client_id: str = "client") -> RunSlice:
    pieces = tuple(Piece(i, ((32 * i, 32),), (0, 32), (0,), (ids,)) for i, ids in enumerate(chunks))
    return RunSlice(1, client_id, 1, 1, Direction.RETRIEVE, pieces)


def test_it_is_a_mover(mover: MemoryMover) -> None:
    as_mover: Mover = mover
    assert as_mover.copy(retrieve((3, 1))) == SliceReport(1)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout((SharedMemory("absent", 0, 32),), (GROUP,)), Reason.MEMORY),
        (Layout((SharedMemory("kv", 1, 32),), (GROUP,)), Reason.MEMORY),
        (Layout((SharedMemory("kv", 0, 31),), (GROUP,)), Reason.LAYOUT),
        (Layout((CudaIpcMemory(bytes(64), "GPU-0", 0, 32),), (GROUP,)), Reason.CUDA_UNSUPPORTED),
    ],
)
def test_it_refuses_as_a_real_one(mover: MemoryMover, layout: Layout, reason: Reason) -> None:
    with pytest.raises(Refusal) as caught:
        mover.map(2, layout)
    assert caught.value.reason is reason
    assert mover.mapped == {1}


def test_failure_before_a_piece_leaves_its_blocks_alone(mover: MemoryMover, memory: bytearray) -> None:
    mover.fail_next(piece=1, reason="BROKEN")
    assert mover.copy(retrieve((3,), (1, 0))) == SliceReport(1, "BROKEN", False)
    assert memory == b"\xa5" * 24 + bytes(range(8))
    assert mover.copy(retrieve((3,), (1, 0))) == SliceReport(2)


def test_failure_inside_a_piece_is_torn(mover: MemoryMover, memory: bytearray) -> None:
    mover.fail_next(piece=0, after_runs=1)
    assert mover.copy(retrieve((3, 1))) == SliceReport(0, "MEMORY_IO", True)
    assert memory == b"\xa5" * 24 + bytes(range(8))


def test_failure_after_the_last_run_is_torn_too(mover: MemoryMover) -> None:
    mover.fail_next(piece=0, after_runs=9)
    assert mover.copy(retrieve((3, 1))) == SliceReport(0, "MEMORY_IO", True)


def test_shuffled_runs_stay_inside_their_piece(mover: MemoryMover, memory: bytearray) -> None:
    mover.shuffle = random.Random(3)
    mover.fail_next(piece=1)
    mover.copy(retrieve((0, 2), (1, 3)))
    assert memory[0:8] + memory[16:24] == bytes(range(16))
    assert memory[8:16] + memory[24:32] == b"\xa5" * 16


def test_delay_is_slept_once_a_slice(mover: MemoryMover) -> None:
    mover.delay_s = 0.05
    started = time.monotonic()
    mover.copy(retrieve((3, 1), (2, 0)))
    assert 0.05 <= time.monotonic() - started < 10


def test_it_records_what_it_was_asked_for(mover: MemoryMover) -> None:
    first, second = retrieve((0,)), retrieve((1,), (2,))
    mover.copy(first)
    mover.copy(second)
    assert mover.slices == [first, second]


def in_thread(mover: MemoryMover, work: RunSlice, reports: list[SliceReport]) -> threading.Thread:
    thread = threading.Thread(target=lambda: reports.append(mover.copy(work)))
    thread.start()
    return thread


def finish(gate: Gate, thread: threading.Thread) -> None:
    gate.release()
    thread.join(10)
    assert not thread.is_alive()


def test_a_gate_holds_a_copy_between_two_runs(mover: MemoryMover, memory: bytearray) -> None:
    reports: list[SliceReport] = []
    gate = mover.hold(after_runs=1)
    assert not gate.wait_reached(0)
    thread = in_thread(mover, retrieve((3, 1, 0)), reports)
    assert gate.wait_reached(10)
    assert gate.held is not None
    assert gate.held.client_id == "client"
    assert memory == b"\xa5" * 24 + bytes(range(8))
    assert reports == []
    finish(gate, thread)
    assert reports == [SliceReport(1)]
    assert memory[:8] == bytes(range(16, 24))
    assert mover.copy(retrieve((0,))) == SliceReport(1)  # it holds once


def test_a_gate_may_mean_one_direction_or_one_client(mover: MemoryMover) -> None:
    reports: list[SliceReport] = []
    gate = mover.hold(after_runs=1, direction=Direction.STORE)
    assert mover.copy(retrieve((3, 1), (2, 0))) == SliceReport(2)
    gate = mover.hold(after_runs=1, client_id="other")
    assert mover.copy(retrieve((3, 1), (2, 0))) == SliceReport(2)
    thread = in_thread(mover, retrieve((3, 1), client_id="other"), reports)
    assert gate.wait_reached(10)
    assert mover.copy(retrieve((0,))) == SliceReport(1)  # others pass while it holds
    finish(gate, thread)


def test_unmap_is_harmless_twice(mover: MemoryMover, memory: bytearray) -> None:
    mover.unmap(1)
    mover.unmap(1)
    assert mover.mapped == frozenset()
    memory.extend(b"free to grow: no view is left")


def test_digest_tells_other_memory_under_the_same_name(mover: MemoryMover) -> None:
    same = mover.map(2, LAYOUT)
    assert mover.map(3, LAYOUT) == same
    mover.add_memory("kv", bytearray(32))
    assert mover.map(4, LAYOUT) != same
