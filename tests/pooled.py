# SPDX-License-Identifier: Apache-2.0
"""Blocks of groups that share one pool of pages, and position-coded bytes in them. Block 0 is nobody's."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvgrpc.api import KvGroup
from kvgrpc.core.types import NULL_BLOCK

Bytes = NDArray[np.uint8]
Ids = list[list[int]]


def coded(number: int, layer: int, place: int, length: int, prompt: int = 0) -> Bytes:
    """What the block of group ``number`` at this place of a prompt holds in one layer."""
    at = np.arange(length, dtype=np.uint64)
    seed = number * 0x85EBCA77 + layer * 0xC2B2AE3D + place * 0x27D4EB2F + (prompt + 1) * 0x165667B1
    return (((at * 0x9E3779B1 + seed) & 0xFFFFFFFF) >> 13).astype(np.uint8)


def take(rng: random.Random, groups: Sequence[KvGroup], tokens: int, lack_below: Sequence[int]) -> Ids:
    """Different blocks for every group, null blocks below these tokens."""
    count = groups[0].num_blocks
    free = rng.sample(range(1, count), count - 1)
    return [
        [NULL_BLOCK if (at + 1) * one.block_size <= below else free.pop() for at in range(tokens // one.block_size)]
        for one, below in zip(groups, lack_below, strict=True)
    ]


def put(pages: Bytes, groups: Sequence[KvGroup], ids: Ids, first: Sequence[int], prompt: int) -> None:
    """Position-coded data from these tokens on, into ``pages`` [layers, blocks, bytes]."""
    for number, (one, blocks, start) in enumerate(zip(groups, ids, first, strict=True)):
        length = one.runs[0].run_bytes
        for place, block in enumerate(blocks):
            if block != NULL_BLOCK and (place + 1) * one.block_size > start:
                for layer in range(len(pages)):
                    pages[layer, block, :length] = coded(number, layer, place, length, prompt)
