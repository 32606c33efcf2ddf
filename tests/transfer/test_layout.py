# SPDX-License-Identifier: Apache-2.0
"""Layouts that do not fit are refused by name, with the field at fault."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace
from typing import Any

import pytest

from kvgrpc.api import BlockForm, CudaIpcMemory, GroupKind, KvGroup, Layout, Runs, SharedMemory
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import ALL, Geometry, GroupGeometry, Need
from kvgrpc.transfer.layout import (
    MAX_FORM_BYTES,
    MAX_MEMORY_PIECES,
    MAX_ORDER_BYTES,
    MAX_PLANES_IN_ALL,
    check_layout,
    memory_bytes,
    object_order,
    stored_form,
)
from tests.kvdata import ARRANGEMENTS, BLOCKS_OUTERMOST, LAYERS_OUTERMOST, MHA, MLA, Image

CHUNK = 64
RUNS = Runs(0, 0, 2, 4096, 2, 2048, 128, 128)
GROUP = KvGroup(16, 16, (RUNS,), BlockForm.OPAQUE, backend="FLASH_ATTN", layout="LBNHC")
GOOD = Layout((SharedMemory("kv", 0, 8192),), (GROUP,))
TOKEN_MAJOR = replace(GROUP, form=BlockForm.TOKEN_MAJOR, heads=2, head_dim=2)


def with_runs(**change: Any) -> Layout:
    return replace(GOOD, groups=(replace(GROUP, runs=(replace(RUNS, **change),)),))


def with_group(group: KvGroup = GROUP, **change: Any) -> Layout:
    return replace(GOOD, groups=(replace(group, **change),))


def with_memory(*memory: SharedMemory) -> Layout:
    return replace(GOOD, memory=memory)


def with_orders(count: int) -> Layout:
    """Runs of two sizes in turns, which no order can say in short."""
    runs = (replace(RUNS, layers=1, planes=1, run_bytes=1 + at % 2) for at in range(count))
    return with_group(block_size=1, runs=tuple(runs))


def refused(layout: Layout) -> Refusal:
    with pytest.raises(Refusal) as caught:
        check_layout(layout, CHUNK)
    return caught.value


def test_geometry_of_a_good_layout() -> None:
    assert check_layout(GOOD, CHUNK) == Geometry((GroupGeometry(16, 16, 512, order="2x2x128"),))
    assert memory_bytes(GOOD) == 8192


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=str)
def test_every_arrangement_is_a_good_layout(arrangement: object) -> None:
    assert arrangement in ARRANGEMENTS
    for kv in (MHA, MLA):
        image = Image(kv, arrangement, 16, 5, lead=32)  # type: ignore[arg-type]
        assert check_layout(image.layout(), CHUNK).object_bytes(CHUNK) == kv.token_bytes * CHUNK


def test_stored_form_names_what_the_bytes_mean() -> None:
    assert stored_form((GROUP,)) == "opaque:FLASH_ATTN:LBNHC:16"
    assert stored_form((TOKEN_MAJOR,)) == "token-major:2:2:2"
    assert stored_form((GROUP, TOKEN_MAJOR)) == "opaque:FLASH_ATTN:LBNHC:16+token-major:2:2:2"


def test_stored_form_does_not_depend_on_what_differs_between_ranks_and_engines() -> None:
    one = Image(MHA, LAYERS_OUTERMOST, 16, 5).layout().groups
    other = Image(replace(MHA, layers=5), BLOCKS_OUTERMOST, 32, 9).layout().groups
    assert stored_form(one) == stored_form(other)


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        (replace(GOOD, groups=()), "groups"),
        (replace(GOOD, memory=()), "memory"),
        (with_memory(*[SharedMemory("kv", 0, 8192)] * (MAX_MEMORY_PIECES + 1)), "memory"),
        (with_memory(SharedMemory("kv", 0, 0)), "memory[0].size_bytes"),
        (with_memory(SharedMemory("kv", 0, 2**63)), "memory[0].size_bytes"),
        (with_memory(SharedMemory("kv", -1, 8192)), "memory[0].offset_bytes"),
        (with_memory(SharedMemory("kv", 2**63 - 8192, 8192)), "memory[0].offset_bytes"),
        (with_memory(SharedMemory("kv", 0, 8191)), "groups[0].runs[0]"),
        (with_group(block_size=0), "groups[0].block_size"),
        (with_group(block_size=-16), "groups[0].block_size"),
        (with_group(block_size=24), "groups[0].block_size"),
        (with_group(block_size=128), "groups[0].block_size"),
        (with_group(num_blocks=0), "groups[0].num_blocks"),
        (with_group(num_blocks=17), "groups[0].runs[0]"),
        (with_group(num_blocks=2**32), "groups[0].num_blocks"),
        (with_group(runs=()), "groups[0].runs"),
        (with_group(backend="A:B"), "groups[0].backend"),
        (with_group(layout="A+B"), "groups[0].layout"),
        (with_group(layout="A B"), "groups[0].layout"),
        (with_group(backend="x" * 65), "groups[0].backend"),
        (with_group(backend="é"), "groups[0].backend"),
        (with_runs(memory_index=1), "groups[0].runs[0].memory_index"),
        (with_runs(memory_index=-1), "groups[0].runs[0].memory_index"),
        (with_runs(base_bytes=1), "groups[0].runs[0]"),
        (with_runs(base_bytes=-1), "groups[0].runs[0].base_bytes"),
        (with_runs(base_bytes=2**64), "groups[0].runs[0].base_bytes"),
        (with_runs(layers=0), "groups[0].runs[0].layers"),
        (with_runs(layers=3), "groups[0].runs[0]"),
        (with_runs(planes=0), "groups[0].runs[0].planes"),
        (with_runs(layers=2**16, planes=2**16), "groups[0].runs"),
        (with_group(runs=(replace(RUNS, layers=1, planes=1),) * (MAX_PLANES_IN_ALL + 1)), "groups[0].runs"),
        (replace(GOOD, groups=(with_runs(layers=MAX_PLANES_IN_ALL // 2).groups[0], GROUP)), "groups[1].runs"),
        (replace(GOOD, groups=(GROUP,) * 64), "groups"),  # 1,727 bytes of stored form
        (with_orders(MAX_ORDER_BYTES // len("1x1x1,") + 1), "groups"),
        (with_runs(run_bytes=0), "groups[0].runs[0].run_bytes"),
        (with_runs(run_bytes=129), "groups[0].runs[0].block_stride_bytes"),
        (with_runs(block_stride_bytes=0), "groups[0].runs[0].block_stride_bytes"),
        (with_runs(block_stride_bytes=136), "groups[0].runs[0]"),
        (with_runs(layer_stride_bytes=2**63 - 1), "groups[0].runs[0]"),
        (with_runs(layer_stride_bytes=2**63), "groups[0].runs[0].layer_stride_bytes"),
        (with_runs(layer_stride_bytes=-4096), "groups[0].runs[0].layer_stride_bytes"),
        (with_runs(plane_stride_bytes=-1), "groups[0].runs[0].plane_stride_bytes"),
        (with_runs(layer_stride_bytes=0), "groups[0].runs[0]"),
        (with_runs(plane_stride_bytes=127), "groups[0].runs[0]"),
        (with_runs(plane_stride_bytes=1920), "groups[0].runs[0]"),
        (with_runs(layer_stride_bytes=2048), "groups[0].runs[0]"),
        (with_group(TOKEN_MAJOR, heads=0), "groups[0].heads"),
        (with_group(TOKEN_MAJOR, head_dim=0), "groups[0].head_dim"),
        (with_group(TOKEN_MAJOR, runs=(replace(RUNS, run_bytes=120),)), "groups[0].runs[0].run_bytes"),
        (with_group(TOKEN_MAJOR, runs=(RUNS, replace(RUNS, planes=1))), "groups[0].runs[1].planes"),
    ],
)
def test_layout_that_does_not_fit_is_refused(layout: Layout, field: str) -> None:
    refusal = refused(layout)
    assert (refusal.reason, refusal.field) == (Reason.LAYOUT, field)


def test_a_layout_beyond_its_memory_names_both_numbers() -> None:
    message = refused(with_memory(SharedMemory("kv", 0, 8191))).message
    assert "8192" in message
    assert "8191" in message


NEEDS = [
    (GroupKind.FULL, 0, ALL, ""),
    (GroupKind.SLIDING_WINDOW, 24, Need(24), "sliding-window:24:"),
    (GroupKind.CHUNKED_LOCAL, 32, Need(32, aligned=True), "chunked-local:32:"),
    (GroupKind.RECURRENT, 0, Need(16), "recurrent:"),
]


@pytest.mark.parametrize(("kind", "window", "need", "form"), NEEDS)
def test_kinds_of_groups(kind: GroupKind, window: int, need: Need, form: str) -> None:
    """What a hit needs of them is a part of the identity."""
    group = replace(GROUP, kind=kind, window_tokens=window)
    both = replace(GOOD, groups=(GROUP, group))
    assert [one.need for one in check_layout(both, CHUNK).groups] == [ALL, need]
    assert stored_form(both.groups) == f"{stored_form([GROUP])}+{form}{stored_form([GROUP])}"


@pytest.mark.parametrize("kind", [GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL])
def test_a_window_has_a_length(kind: GroupKind) -> None:
    assert refused(with_group(kind=kind)).field == "groups[0].window_tokens"


def test_groups_have_a_bound() -> None:
    assert refused(replace(GOOD, groups=(GROUP,) * 65)).field == "groups"
    windows = [replace(GROUP, kind=GroupKind.SLIDING_WINDOW, window_tokens=at) for at in range(1, 10)]
    check_layout(replace(GOOD, groups=tuple(windows[:8])), CHUNK)
    assert "8 different" in refused(replace(GOOD, groups=tuple(windows))).message


def test_device_memory_has_the_same_bounds() -> None:
    layout = Layout((CudaIpcMemory(bytes(64), "GPU-0", 0, 8191),), (GROUP,))
    assert refused(layout).field == "groups[0].runs[0]"


def test_strides_of_a_single_layer_or_plane_do_not_matter() -> None:
    assert check_layout(with_runs(layers=1, layer_stride_bytes=0), CHUNK).groups[0].block_bytes == 256
    assert check_layout(with_runs(planes=1, plane_stride_bytes=2**62), CHUNK).groups[0].block_bytes == 256


def test_overlap_is_found_exactly() -> None:
    """Against sets of bytes, over random small layouts; as many good ones as bad ones must have been met."""
    chance = random.Random(4)
    met = {False: 0, True: 0}
    for _ in range(3000):
        run_bytes = chance.randint(1, 6)
        layers, planes, blocks = (chance.randint(1, 4) for _ in range(3))
        strides = [chance.randint(0, 40) for _ in range(2)]
        runs = Runs(0, 0, layers, strides[0], planes, strides[1], chance.randint(run_bytes, 24), run_bytes)
        taken = [
            layer * strides[0] + plane * strides[1] + block * runs.block_stride_bytes + byte
            for layer, plane, block, byte in itertools.product(
                range(layers), range(planes), range(blocks), range(run_bytes)
            )
        ]
        overlap = len(set(taken)) < len(taken)
        met[overlap] += 1
        group = replace(GROUP, block_size=1, num_blocks=blocks, runs=(runs,))
        layout = Layout((SharedMemory("kv", 0, max(taken) + 1),), (group,))
        if overlap:
            assert "share bytes" in refused(layout).message
        else:
            check_layout(layout, CHUNK)
    assert min(met.values()) > 500


def test_the_largest_layout_is_checked_quickly() -> None:
    runs = Runs(0, 0, MAX_PLANES_IN_ALL // 2, 2 << 20, 2, 1 << 20, 4096, 4096)
    layout = Layout((SharedMemory("kv", 0, 1 << 40),), (replace(GROUP, runs=(runs,)),))
    assert check_layout(layout, CHUNK).groups[0].block_bytes == MAX_PLANES_IN_ALL * 4096


def test_what_is_too_large_is_refused_quickly() -> None:
    """The event loop checks layouts: 64 groups of the largest would hold it up for ten seconds."""
    runs = Runs(0, 0, 256, 256 << 20, 256, 1 << 20, 4096, 4096)
    layout = Layout((SharedMemory("kv", 0, 1 << 40),), (replace(GROUP, runs=(runs,)),) * 64)
    began = time.process_time()
    assert refused(layout).field == "groups[1].runs"
    assert time.process_time() - began < 0.5


def test_whatever_can_be_registered_can_be_named_by_those_without_memory() -> None:
    """Else a scheduler would be refused, and operators could not list spaces."""
    group = replace(GROUP, backend="B" * 32, layout="L" * 32)
    count = (MAX_FORM_BYTES + 1) // (len(stored_form((group,))) + 1)
    check_layout(replace(GOOD, groups=(group,) * count), CHUNK)
    assert refused(replace(GOOD, groups=(group,) * (count + 1))).field == "groups"
    longest = with_orders(MAX_ORDER_BYTES // len("1x1x1,"))
    check_layout(longest, CHUNK)
    assert len(object_order(longest.groups)) <= MAX_ORDER_BYTES
