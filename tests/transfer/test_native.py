# SPDX-License-Identifier: Apache-2.0
"""The native copier against the pure-Python mover, and that it is the one that the source says."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvgrpc.api import BlockForm, KvGroup, Layout, Runs, SharedMemory
from kvgrpc.core.types import Direction, Piece, RunSlice, SliceReport
from kvgrpc.transfer import _native
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.layout import check_layout
from kvgrpc.transfer.memory import MemoryMover
from kvgrpc.transfer.shm import SharedMemoryMover
from tests.transfer.pages import ME, RETRIEVE, STORE, layout, slice_of

CSRC = Path(__file__).resolve().parents[2] / "csrc"
CHUNK = 16
ARENA_BYTES = 1 << 20


def test_extension_is_built_from_this_source() -> None:
    """An old extension behind new source would be tested without anybody noticing: run make setup."""
    sources = sorted(path for path in CSRC.iterdir() if path.suffix in (".cpp", ".hpp", ".cu"))
    digests = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in sources)
    assert hashlib.sha256(digests.encode()).hexdigest() == _native.SOURCE_DIGEST


def test_bus_errors_outside_of_copies_still_reach_faulthandler(tmp_path: Path) -> None:
    """The server's own bugs stay as visible as before, whichever handler came first."""
    program = (
        "import faulthandler, mmap, os, sys\n"
        "from kvgrpc.transfer.arena import Arena\n"
        "from kvgrpc.transfer.shm import SharedMemoryMover\n"
        "from tests.transfer.pages import PAGE, STORE, layout, slice_of\n"
        "if sys.argv[2] == 'first': faulthandler.enable()\n"
        "mover = SharedMemoryMover(Arena(1 << 20), 64, {os.getuid()}, sys.argv[1])\n"
        "mover.map(1, layout('good'))\n"
        "assert mover.copy(slice_of(STORE, (0,))).completed == 1\n"
        "if sys.argv[2] == 'last': faulthandler.enable()\n"
        "assert mover.copy(slice_of(STORE, (0,))).completed == 1\n"
        "with open(sys.argv[1] + '/good', 'r+b') as file:\n"
        "    memory = mmap.mmap(file.fileno(), 4 * PAGE)\n"
        "os.truncate(sys.argv[1] + '/good', 0)\n"
        "print(mover.copy(slice_of(STORE, (0,))).reason, flush=True)\n"
        "memory[0]\n"
    )
    for order in ("first", "last"):
        (tmp_path / "good").write_bytes(bytes(1 << 20))
        command = [sys.executable, "-c", program, str(tmp_path), order]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (-7, "MEMORY_TRUNCATED\n")
        assert "Bus error" in done.stderr


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Up to three entries over up to two pieces of memory of one object, with gaps of all kinds."""
    block_size = draw(st.sampled_from([1, 4, 16]))
    num_blocks = draw(st.integers(1, 9))
    at, pieces, entries = draw(st.integers(0, 70)), [], []
    for index in range(draw(st.integers(1, 2))):
        base, here = draw(st.integers(0, 9)), []
        for _ in range(draw(st.integers(1, 2))):
            run_bytes = draw(st.one_of(st.integers(1, 40), st.integers(1, 700)))
            block_stride = run_bytes + draw(st.sampled_from([0, 0, 3]))
            planes, layers = draw(st.integers(1, 2)), draw(st.integers(1, 3))
            plane_stride = block_stride * num_blocks + draw(st.integers(0, 5))
            layer_stride = plane_stride * planes
            here.append(Runs(index, base, layers, layer_stride, planes, plane_stride, block_stride, run_bytes))
            base += layer_stride * layers
        pieces.append(SharedMemory("kv", at, base))
        at += base + draw(st.integers(0, 50))
        entries += here
    return Layout(tuple(pieces), (KvGroup(block_size, num_blocks, tuple(entries), BlockForm.OPAQUE),))


@st.composite
def slices(draw: st.DrawFn, wanted: Layout, direction: Direction) -> RunSlice:
    group = wanted.groups[0]
    object_bytes = check_layout(wanted, CHUNK).object_bytes(CHUNK)
    count, place, pieces = draw(st.integers(1, 3)), draw(st.integers(0, 9)), []
    ids = list(draw(st.permutations(range(group.num_blocks))))
    for number in range(count):
        sizes, left = [], object_bytes
        while left:
            sizes.append(draw(st.integers(1, left)) if len(sizes) < 5 else left)
            left -= sizes[-1]
        extents = []
        for size in sizes:
            extents.append((place, size))
            place += size + draw(st.sampled_from([0, 0, 11]))
        if draw(st.booleans()):
            extents = list(draw(st.permutations(extents)))
        blocks = CHUNK // group.block_size
        first = draw(st.integers(0, blocks - 1))
        if draw(st.integers(0, 5)):
            mine, ids = ids[: blocks - first], ids[blocks - first :]
        else:
            mine = draw(st.lists(st.integers(0, group.num_blocks - 1), max_size=blocks - first))
        low = draw(st.sampled_from([0, 0, object_bytes // 3]))
        high = draw(st.sampled_from([object_bytes, object_bytes, max(low, object_bytes // 2)]))
        pieces.append(Piece(number, tuple(extents), (low, high), (first,), (tuple(mine),)))
    return RunSlice(1, "client", 1, 1, direction, tuple(pieces))


@pytest.mark.parametrize("direction", [STORE, RETRIEVE])
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data(), threads=st.integers(1, 4), streaming=st.booleans(), seed=st.integers(0, 2**32))
def test_native_copies_are_those_of_the_reference(
    direction: Direction, data: st.DataObject, threads: int, streaming: bool, seed: int
) -> None:
    wanted = data.draw(layouts())
    work = data.draw(slices(wanted, direction))
    size_bytes = max(memory.offset_bytes + memory.size_bytes for memory in wanted.memory) + 7
    chance = random.Random(seed)
    memory, arena_bytes = chance.randbytes(size_bytes), chance.randbytes(ARENA_BYTES)
    assert max(offset + size for piece in work.pieces for offset, size in piece.extents) <= ARENA_BYTES

    ours, theirs = Arena(ARENA_BYTES), Arena(ARENA_BYTES)
    for arena in (ours, theirs):
        arena.view(0, ARENA_BYTES)[:] = arena_bytes
    reference = MemoryMover(theirs, CHUNK)
    expected = bytearray(memory)
    reference.add_memory("kv", expected)
    reference.map(1, wanted)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        (Path(folder) / "kv").write_bytes(memory)
        eager = partial(_native.HostCopier, bytes_a_hand=1, stream_bytes=1 if streaming else 1 << 40)
        patch.setattr(_native, "HostCopier", eager)
        mover = SharedMemoryMover(ours, CHUNK, {ME}, folder, threads=threads)
        mover.map(1, wanted)
        assert mover.copy(work) == reference.copy(work) == SliceReport(len(work.pieces))
        assert (Path(folder) / "kv").read_bytes() == expected
        mover.close()
    assert bytes(ours.view(0, ARENA_BYTES)) == bytes(theirs.view(0, ARENA_BYTES))
    reference.close()
    ours.close()
    theirs.close()


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_the_team_is_as_large_as_asked(arena: Arena, tmp_path: Path, threads: int) -> None:
    (tmp_path / "good").write_bytes(b"\x21" * (1 << 20))
    copier = _native.HostCopier(arena.view(0, arena.size_bytes), threads)
    assert copier.threads == threads
    copier.close()
    mover = SharedMemoryMover(arena, 64, {ME}, str(tmp_path), threads=threads)
    mover.map(1, layout("good"))
    assert mover.copy(slice_of(STORE, (0, 2))) == SliceReport(1)
    mover.close()
