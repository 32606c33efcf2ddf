# SPDX-License-Identifier: Apache-2.0
"""Layouts that every mover must carry: all orders, runs of 512 bytes to 4 MiB, tails that end nowhere in particular."""

from __future__ import annotations

from dataclasses import dataclass

from tests.kvdata import (
    BLOCKS_BEFORE_PLANES,
    BLOCKS_OUTERMOST,
    BLOCKS_OUTERMOST_OPAQUE,
    HEADS_FIRST_OPAQUE,
    LAYERS_ONE_TENSOR,
    LAYERS_OUTERMOST,
    MLA,
    Arrangement,
    Kv,
)


@dataclass(frozen=True)
class Case:
    """An engine's memory; ``page_bytes`` 0: objects in one piece."""

    name: str
    kv: Kv
    arrangement: Arrangement
    block_size: int = 16
    chunk_tokens: int = 64
    page_bytes: int = 0
    lead: int = 4160
    tail: int = 13


SMALL = Kv(layers=3, planes=2, heads=4, head_dim=8)
CASES = (
    *(Case(f"{order}", SMALL, order) for order in (LAYERS_OUTERMOST, LAYERS_ONE_TENSOR, BLOCKS_BEFORE_PLANES)),
    *(Case(f"{order}", SMALL, order) for order in (BLOCKS_OUTERMOST, BLOCKS_OUTERMOST_OPAQUE, HEADS_FIRST_OPAQUE)),
    Case("mla", MLA, LAYERS_OUTERMOST),
    Case("odd", Kv(2, 2, 3, 5, itemsize=1), LAYERS_OUTERMOST, block_size=3, chunk_tokens=48, page_bytes=1000, lead=7),
    Case("512 B", Kv(4, 2, 1, 16), LAYERS_ONE_TENSOR, page_bytes=4096),
    Case("8 KiB", Kv(8, 2, 2, 128), LAYERS_OUTERMOST, page_bytes=256 << 10, lead=0, tail=0),
    Case("64 KiB", Kv(4, 2, 8, 128), HEADS_FIRST_OPAQUE, lead=0, tail=0),
    Case("4 MiB", Kv(64, 2, 8, 128), BLOCKS_OUTERMOST_OPAQUE, chunk_tokens=32, page_bytes=256 << 10, lead=512, tail=0),
)
QUICK = tuple(case for case in CASES if case.name not in ("64 KiB", "4 MiB"))
