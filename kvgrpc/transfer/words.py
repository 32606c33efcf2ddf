# SPDX-License-Identifier: Apache-2.0
"""Layouts and slices as the native copiers take them."""

from __future__ import annotations

from array import array

from kvgrpc.api import Layout
from kvgrpc.core.types import Part, RunSlice

EntryWords = tuple[int, int, int, int, int, int, int, int]


def group_words(layout: Layout, chunk_tokens: int, part: Part | None = None) -> list[tuple[int, int, list[EntryWords]]]:
    """The groups of a layout, or of one part of it, as _native.Mapping says."""
    places = range(len(layout.groups)) if part is None else part.groups
    groups = [layout.groups[at] for at in places]
    counts = [chunk_tokens // group.block_size for group in groups] if part is None else part.blocks
    return [
        (
            blocks,
            group.num_blocks,
            [
                (
                    runs.memory_index,
                    runs.base_bytes,
                    runs.layers,
                    runs.layer_stride_bytes,
                    runs.planes,
                    runs.plane_stride_bytes,
                    runs.block_stride_bytes,
                    runs.run_bytes,
                )
                for runs in group.runs
            ],
        )
        for group, blocks in zip(groups, counts, strict=True)
    ]


def slice_words(work: RunSlice) -> array[int]:
    """The slice, as HostCopier.copy takes it."""
    words = [len(work.pieces)]
    for piece in work.pieces:
        words.append(len(piece.extents))
        for extent in piece.extents:
            words += extent
        words += piece.span
        for first_block, block_ids in zip(piece.first_block, piece.block_ids, strict=True):
            words += (first_block, len(block_ids))
            words += block_ids
    return array("q", words)
