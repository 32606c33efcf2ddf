# SPDX-License-Identifier: Apache-2.0
"""What cards have in common, on the fake driver: pinning, sharing of allocations, failures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvgrpc.api import CudaIpcMemory, Layout, SharedMemory
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import Direction, Piece, RunSlice, SliceReport
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.base import CARD_FAILED
from kvgrpc.transfer.cards import Cards, canonical_uuid, nvidia_devices
from kvgrpc.transfer.cuda import CopyMode, CudaMover
from kvgrpc.transfer.memory import MemoryMover
from kvgrpc.transfer.routed import RoutedMover
from tests.cards import fake
from tests.kvdata import GQA, LAYERS_ONE_TENSOR, Image
from tests.served import wait_until

MIB = 1 << 20
CHUNK = 32


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    fake.driver()
    monkeypatch.delenv("FAKE_CARDS", raising=False)
    arena = Arena(MIB)
    yield arena
    arena.close()


@pytest.fixture
def cards(arena: Arena) -> Iterator[Cards]:
    cards = Cards(arena)
    yield cards
    cards.close()


@pytest.fixture
def memory() -> Iterator[fake.CardMemory]:
    memory = fake.CardMemory(MIB)
    yield memory
    memory.free()


def layout_in(memory: fake.CardMemory) -> Layout:
    return memory.layout(Image(GQA, LAYERS_ONE_TENSOR, 16, 8, buffer=memory.buffer).layout())


def work(mapping_id: int, direction: Direction = Direction.STORE) -> RunSlice:
    size = GQA.token_bytes * CHUNK
    return RunSlice(1, "c", mapping_id, 1, direction, (Piece(0, ((0, size),), (0, size), (0,), ((3, 5),)),))


def refused(mover: CudaMover | RoutedMover, layout: Layout) -> Refusal:
    with pytest.raises(Refusal) as found:
        mover.map(7, layout)
    return found.value


def losing(program: str, tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process that makes the file that it is given when a card is to fail: what a driver has lost stays lost."""
    file = str(tmp_path / "fail")
    return subprocess.run(
        [sys.executable, "-c", program, file, *arguments],
        env=fake.environment(FAKE_FAIL_FILE=file, **environment),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_parts_are_told_when_they_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arena grows for the core only as far as cards can reach it, and serves engines on cards from its first part
    on."""
    fake.driver()
    monkeypatch.setattr("kvgrpc.transfer.arena.PART_BYTES", MIB)
    arena = Arena(8 * MIB, first_bytes=MIB)
    cards = Cards(arena, MIB)
    told: list[int] = []
    pinned: list[tuple[int, int]] = []

    def pin(begin: int, end: int) -> bool:
        assert all(size <= begin for size in told)
        pinned.append((begin, end))
        return cards.pin(begin, end)

    arena.fill(told.append, pin)
    wait_until(lambda: told and told[-1] == 8 * MIB, 10)
    assert told == [part * MIB for part in range(2, 9)]
    assert pinned == [(part * MIB, (part + 1) * MIB) for part in range(8)]
    cards.close()
    arena.close()


def test_an_arena_that_cannot_be_pinned_serves_engines_in_host_memory(
    arena: Arena, memory: fake.CardMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NO_PIN", "1")
    cards = Cards(arena)
    assert cards.pin(0, MIB)
    refusal = refused(CudaMover(cards, CHUNK), layout_in(memory))
    assert refusal.reason is Reason.CUDA_UNSUPPORTED
    assert "cannot be pinned" in refusal.message
    cards.close()


def test_a_server_whose_only_card_cannot_be_opened_says_so_at_once(
    arena: Arena, memory: fake.CardMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layout_in(memory)
    monkeypatch.setenv("FAKE_TAKEN_CARD", "0")
    cards = Cards(arena)
    assert cards.pin(0, MIB)
    refusal = refused(CudaMover(cards, CHUNK), layout)
    assert refusal.reason is Reason.CUDA_UNSUPPORTED and "CUDA_ERROR_DEVICE_UNAVAILABLE" in refusal.message
    cards.close()


@pytest.mark.parametrize("taken", [0, 1])
def test_a_card_that_cannot_be_opened_leaves_the_others(
    arena: Arena, memory: fake.CardMemory, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    """Found by review: one that another process had for itself, or had filled, kept the server from all of them."""
    monkeypatch.setenv("FAKE_CARDS", "2")
    monkeypatch.setenv("FAKE_TAKEN_CARD", str(taken))
    cards = Cards(arena)
    cards.pin_all()
    mover = CudaMover(cards, CHUNK)
    layout = layout_in(memory)
    (piece,) = layout.memory
    assert isinstance(piece, CudaIpcMemory)
    uuids = [piece.device_uuid.replace("a0", digits) for digits in ("a0", "a1")]
    mover.map(1, replace(layout, memory=(replace(piece, device_uuid=uuids[1 - taken]),)))
    assert mover.copy(work(1)) == SliceReport(1)
    refusal = refused(mover, replace(layout, memory=(replace(piece, device_uuid=uuids[taken]),)))
    assert refusal.reason is Reason.CUDA_UNSUPPORTED and "CUDA_ERROR_DEVICE_UNAVAILABLE" in refusal.message
    mover.unmap(1)
    cards.close()


def test_an_allocation_is_opened_once_and_closed_with_its_last_user(cards: Cards, memory: fake.CardMemory) -> None:
    """The fake driver refuses to open a handle twice."""
    cards.pin_all()
    mover = CudaMover(cards, CHUNK)
    layout = layout_in(memory)
    first, second = mover.map(1, layout), mover.map(2, layout)
    assert first == second
    mover.unmap(1)
    assert mover.copy(work(2)) == SliceReport(1)
    mover.unmap(2)
    mover.unmap(2)
    assert not cards.opened[0].memory
    assert mover.map(3, layout) != first
    mover.unmap(3)


def test_what_lies_outside_is_refused_before_anything_is_copied(cards: Cards, memory: fake.CardMemory) -> None:
    cards.pin_all()
    mover = CudaMover(cards, CHUNK)
    layout = layout_in(memory)
    piece = layout.memory[0]
    assert isinstance(piece, CudaIpcMemory)
    for wrong, reason in (
        (replace(piece, offset_bytes=MIB), Reason.MEMORY),
        (replace(piece, size_bytes=2 * MIB), Reason.MEMORY),
        (replace(piece, size_bytes=16), Reason.LAYOUT),
        (replace(piece, handle=bytes(64)), Reason.MEMORY),
        (replace(piece, device_uuid="GPU-00000000-0000-0000-0000-000000000000"), Reason.CUDA_UNSUPPORTED),
    ):
        assert refused(mover, replace(layout, memory=(wrong,))).reason is reason
    assert not cards.opened[0].memory


def test_memory_of_two_kinds_is_refused(arena: Arena, cards: Cards, memory: fake.CardMemory) -> None:
    cards.pin_all()
    mover = RoutedMover(MemoryMover(arena, CHUNK), CudaMover(cards, CHUNK))
    layout = layout_in(memory)
    mixed = replace(layout, memory=(*layout.memory, SharedMemory("x", 0, 16)))
    assert refused(mover, mixed).reason is Reason.MEMORY


def test_a_card_that_fails_fails_by_name(
    arena: Arena, memory: fake.CardMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = losing(FAILING, tmp_path)
    assert done.stdout.splitlines()[-2:] == [
        f"SliceReport(completed=0, reason='{CARD_FAILED}', torn=0)",
        CARD_FAILED,
    ], done


@pytest.mark.parametrize("act", ["mover.map(2, other)", "mover.when_ready(1, late.handle, print)"])
def test_a_card_that_was_lost_at_rest_is_seen_by_whoever_comes_next(tmp_path: Path, act: str) -> None:
    """Found by review: no copy had failed yet, so the engine was told that its handle was no good."""
    program = FAILING.partition("mover.copy(work(1))\nprint")[0] + LOST.format(act)
    done = losing(program, tmp_path)
    assert done.stdout.splitlines()[-2:] == [CARD_FAILED, CARD_FAILED], done


@pytest.mark.parametrize("failed", [0, 1])
def test_a_card_that_fails_takes_nothing_from_the_other(tmp_path: Path, failed: int) -> None:
    """It copies, engines come to it, and L1 goes on growing: found by review, parts were pinned by the first card, and
    the rest of L1 was given up when that was lost."""
    done = losing(BESIDE, tmp_path, str(failed), FAKE_FAIL_CARD=str(failed), FAKE_CARDS="2")
    assert done.stdout.splitlines()[-1:] == ["True"], done


BESIDE = """
import sys
from pathlib import Path
from tests.cards import fake
from tests.cards.test_cards import *
arena = Arena(2 * MIB)
arena.ready_bytes = MIB
cards = Cards(arena, MIB)
assert cards.pin(0, MIB)
mover, lost, layouts = CudaMover(cards, CHUNK), int(sys.argv[2]), []
for number in range(2):
    layout = layout_in(fake.CardMemory(MIB))
    uuid = layout.memory[0].device_uuid.replace("a0", f"a{number}")
    layouts.append(replace(layout, memory=(replace(layout.memory[0], device_uuid=uuid),)))
    mover.map(number, layouts[number])
Path(sys.argv[1]).touch()
assert mover.copy(work(lost)).reason == CARD_FAILED
assert mover.copy(work(1 - lost)) == SliceReport(1)
assert refused(mover, layouts[lost]).reason is Reason.CARD_FAILED
mover.map(3, layouts[1 - lost])
assert mover.copy(work(3)) == SliceReport(1)
print(cards.pin(MIB, 2 * MIB), flush=True)
fake.leave()
"""


def test_a_server_that_lost_its_only_card_gives_all_of_l1_to_host_memory(tmp_path: Path) -> None:
    done = losing(ALONE, tmp_path)
    assert done.stdout.splitlines()[-1:] == ["True True"], done


ALONE = """
import sys
from pathlib import Path
from tests.cards import fake
from tests.cards.test_cards import *
arena = Arena(3 * MIB)
arena.ready_bytes = MIB
cards = Cards(arena, MIB)
assert cards.pin(0, MIB)
Path(sys.argv[1]).touch()
print(cards.pin(MIB, 2 * MIB), cards.pin(2 * MIB, 3 * MIB), flush=True)
fake.leave()
"""
LOST = """
try:
    {}
except Refusal as refusal:
    print(refusal.reason.value)
print(refused(mover, layout).reason.value, flush=True)
fake.leave()
"""
FAILING = """
import sys
from pathlib import Path
from tests.cards import fake
from tests.cards.test_cards import *
arena = Arena(MIB)
cards = Cards(arena)
cards.pin_all()
mover = CudaMover(cards, CHUNK)
memory = fake.CardMemory(MIB)
layout = layout_in(memory)
mover.map(1, layout)
other, late = layout_in(fake.CardMemory(MIB)), fake.LateWrites()
assert mover.copy(work(1)) == SliceReport(1)
Path(sys.argv[1]).touch()
mover.copy(work(1))
print(mover.copy(work(1, Direction.RETRIEVE)))
print(refused(mover, layout).reason.value, flush=True)
fake.leave()
"""


def test_cards_are_known_by_their_uuid() -> None:
    one = "GPU-a8552ed2-3e23-e49f-875b-44598f976f63"
    assert canonical_uuid(one) == canonical_uuid(one.upper().replace("GPU", "GPU")) == one[4:].replace("-", "")
    assert canonical_uuid("MIG-" + one[4:]) == canonical_uuid(one)


def test_device_files_are_counted(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / name).touch()
    assert nvidia_devices(tmp_path) == 2
    assert nvidia_devices(tmp_path / "none") == 0


def test_a_mode_that_needs_a_kernel_says_what_is_missing(
    cards: Cards, memory: fake.CardMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """auto goes on without it."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    cards.pin_all()
    refusal = refused(CudaMover(cards, CHUNK, CopyMode.STAGED), layout_in(memory))
    assert refusal.reason is Reason.CUDA_UNSUPPORTED and "kvgrpc[cuda13]" in refusal.message
    mover = CudaMover(cards, CHUNK)
    mover.map(1, layout_in(memory))
    assert mover.copy(work(1)) == SliceReport(1)
    mover.unmap(1)
