# SPDX-License-Identifier: Apache-2.0
"""Copies alone, without server or calls: what a layout costs against the same threads copying one contiguous stretch.

``python -m benchmarks.host_copy [REPETITIONS]``. Engine memory and arena are touched before anything is measured; every
repetition takes all cases in turn, so that what else the machine does hits them alike. Ratios are taken within one.
"""

from __future__ import annotations

import os
import random
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import click

from kvgrpc.api import BlockForm, KvGroup, Layout, Runs, SharedMemory
from kvgrpc.cli.demo import shared
from kvgrpc.core.types import Direction, Piece, RunSlice, SliceReport
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.shm import SharedMemoryMover

MIB = 1 << 20
CALL_BYTES = 128 * MIB
SLICE_BYTES = 64 * MIB
BLOCK, CHUNK = 16, 256


@dataclass(frozen=True)
class Case:
    """Engine memory of ``num_blocks`` blocks, layer by layer, plane by plane; a call is 128 MiB of shuffled blocks."""

    name: str
    layers: int
    planes: int
    run_bytes: int
    page_bytes: int = 0
    block_size: int = BLOCK

    @property
    def object_bytes(self) -> int:
        return self.layers * self.planes * self.run_bytes * (CHUNK // self.block_size)

    @property
    def num_blocks(self) -> int:
        return 2 * CALL_BYTES // (self.layers * self.planes * self.run_bytes)

    def layout(self, name: str) -> Layout:
        plane = self.run_bytes * self.num_blocks
        runs = Runs(0, 0, self.layers, plane * self.planes, self.planes, plane, self.run_bytes, self.run_bytes)
        group = KvGroup(self.block_size, self.num_blocks, (runs,), BlockForm.OPAQUE)
        return Layout((SharedMemory(name, 0, 2 * CALL_BYTES),), (group,))

    def slices(self, mapping_id: int) -> list[RunSlice]:
        chance, blocks = random.Random(1), CHUNK // self.block_size
        ids = list(range(self.num_blocks))
        if self.object_bytes < SLICE_BYTES:
            chance.shuffle(ids)
        page = self.page_bytes or self.object_bytes
        places = list(range(0, CALL_BYTES, page))
        if self.page_bytes:
            chance.shuffle(places)
        pieces: list[Piece] = []
        for chunk in range(CALL_BYTES // self.object_bytes):
            mine = places[chunk * self.object_bytes // page : (chunk + 1) * self.object_bytes // page]
            extents = tuple((place, page) for place in mine)
            named = (tuple(ids[chunk * blocks : (chunk + 1) * blocks]),)
            pieces.append(Piece(chunk, extents, (0, self.object_bytes), (0,), named))
        step = max(SLICE_BYTES // self.object_bytes, 1)
        parts = [tuple(pieces[at : at + step]) for at in range(0, len(pieces), step)]
        return [RunSlice(1, "bench", mapping_id, 1, Direction.STORE, part) for part in parts]


WHOLE = Case("one contiguous stretch", 1, 1, SLICE_BYTES, block_size=CHUNK)
CASES = (
    WHOLE,
    Case("32 layers, runs of 32 KiB", 32, 2, 32 << 10),
    Case("32 layers, runs of 32 KiB, arena in pages of 256 KiB", 32, 2, 32 << 10, 256 << 10),
    Case("2 layers, runs of 4 KiB", 2, 2, 4 << 10),
    Case("2 layers, runs of 16 KiB", 2, 2, 16 << 10),
)


def seconds(mover: SharedMemoryMover, slices: Sequence[RunSlice], direction: Direction) -> float:
    work = [replace(one, direction=direction) for one in slices]
    began = time.perf_counter()
    for one in work:
        assert mover.copy(one) == SliceReport(len(one.pieces))
    return time.perf_counter() - began


def main(repetitions: int, threads: int) -> None:
    arena, name = Arena(CALL_BYTES), f"kvgrpc-bench-{secrets.token_hex(8)}"
    arena.view(0, CALL_BYTES)[:] = b"\x01" * CALL_BYTES
    memory = shared.create(name, 2 * CALL_BYTES)
    memory[:] = b"\x02" * (2 * CALL_BYTES)
    mover = SharedMemoryMover(arena, CHUNK, {os.getuid()}, threads=threads)
    slices: list[list[RunSlice]] = []
    for number, case in enumerate(CASES):
        mover.map(number, case.layout(name))
        slices.append(case.slices(number))
    for direction in Direction:
        took: list[list[float]] = [[] for _ in CASES]
        for _ in range(repetitions + 1):
            for number, work in enumerate(slices):
                took[number].append(seconds(mover, work, direction))
        click.echo(f"{direction.value}: GB/s and ratio to the first, median (least to most), 128 MiB in two slices")
        for case, times in zip(CASES, took, strict=True):
            rates = sorted(CALL_BYTES / one / 1e9 for one in times[1:])
            ratios = sorted(whole / one for whole, one in zip(took[0][1:], times[1:], strict=True))
            click.echo(
                f"  {case.name:54} {median(rates):6.2f} ({rates[0]:5.2f} to {rates[-1]:5.2f})"
                f" {median(ratios):6.2f} ({ratios[0]:4.2f} to {ratios[-1]:4.2f})"
            )
    mover.close()
    shared.unlink(name)
    memory.close()
    arena.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
