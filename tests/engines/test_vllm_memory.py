# SPDX-License-Identifier: Apache-2.0
"""KV memory of a CPU engine, moved into shared memory: tensors follow, and the layout says where each block lies."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvgrpc.api import CudaIpcMemory, Layout, SharedMemory
from kvgrpc.client import NotShareableError
from kvgrpc.engines.vllm import memory
from kvgrpc.engines.vllm.memory import Form, share
from kvgrpc.transfer import device
from kvgrpc.transfer.layout import check_layout
from tests.engines.fakes import OnACard

BLOCKS, HEADS, STATES, CONTENT = 8, 2, 32, 16
RUN = HEADS * STATES * CONTENT * 2
FORM = Form(("a", "b"), STATES, BLOCKS, "test", "layout")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """torch unlinks an object with its last tensor."""
    before = set(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))
    yield
    gc.collect()
    assert set(Path("/dev/shm").glob(f"torch_{os.getpid()}_*")) <= before


def layers_outermost() -> dict[str, torch.Tensor]:
    raw = torch.zeros(2 * BLOCKS * RUN, dtype=torch.int8).view(torch.bfloat16)
    layers = raw.view(2, BLOCKS, HEADS, STATES, CONTENT)
    return {"a": layers[0], "b": layers[1]}


def blocks_outermost() -> dict[str, torch.Tensor]:
    raw = torch.zeros(2 * BLOCKS * RUN, dtype=torch.int8).view(torch.bfloat16)
    layers = raw.view(BLOCKS, 2, HEADS, STATES, CONTENT)
    return {"a": layers[:, 0], "b": layers[:, 1]}


def tokens_outermost() -> dict[str, torch.Tensor]:
    raw = torch.zeros(2 * BLOCKS * RUN, dtype=torch.int8).view(torch.bfloat16)
    layers = raw.view(2, BLOCKS, STATES, HEADS, CONTENT).transpose(2, 3)
    return {"a": layers[0], "b": layers[1]}


def of_their_own() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(BLOCKS, HEADS, STATES, CONTENT, dtype=torch.bfloat16) for name in "ab"}


def read(layout: Layout, layer: int, block: int) -> bytes:
    """A block's bytes as the layout says, from the file."""
    (group,) = layout.groups
    at = layer
    for runs in group.runs:
        if at < runs.layers:
            piece = layout.memory[runs.memory_index]
            assert isinstance(piece, SharedMemory)
            place = runs.base_bytes + at * runs.layer_stride_bytes + block * runs.block_stride_bytes
            data = Path("/dev/shm", piece.name).read_bytes()[piece.offset_bytes :][: piece.size_bytes]
            return data[place : place + runs.run_bytes]
        at -= runs.layers
    raise AssertionError("no such layer")


@pytest.mark.parametrize("make", [layers_outermost, blocks_outermost, tokens_outermost, of_their_own])
def test_what_the_engine_writes_is_where_the_layout_says(make):
    tensors = make()
    tensors["a"][3] = 1
    layout = share(tensors, [FORM])
    check_layout(layout, 2 * STATES)
    for number, (name, tensor) in enumerate(tensors.items()):
        for block in range(BLOCKS):
            tensor[block] = 10 * number + block + 1
        assert [read(layout, number, block) for block in range(BLOCKS)] == [
            torch.full((RUN // 2,), 10 * number + block + 1, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
            for block in range(BLOCKS)
        ], name


def test_what_was_there_before_is_kept_and_the_object_is_private():
    tensors = layers_outermost()
    tensors["b"][5] = 7
    layout = share(tensors, [FORM])
    assert tensors["b"][5].eq(7).all()
    (piece,) = layout.memory
    assert isinstance(piece, SharedMemory)
    assert Path("/dev/shm", piece.name).stat().st_mode & 0o777 == 0o600
    assert len(layout.groups[0].runs) == 1


def test_layers_that_lie_alike_are_one_entry():
    assert [len(share(make(), [FORM]).groups[0].runs) for make in (layers_outermost, of_their_own)] == [1, 2]


def test_what_does_not_fit_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "SPARE_BYTES", 1 << 60)
    tensors = layers_outermost()
    place = tensors["a"].data_ptr()
    with pytest.raises(NotShareableError, match="does not fit into /dev/shm"):
        share(tensors, [FORM])
    assert tensors["a"].data_ptr() == place


def test_blocks_in_pieces_are_refused_by_name():
    raw = torch.zeros(2, BLOCKS, HEADS, STATES, CONTENT)
    with pytest.raises(NotShareableError, match="layer a: a block is not one run"):
        share({"a": raw.transpose(0, 1)[:, :, 0]}, [replace(FORM, layers=("a",))])
    with pytest.raises(NotShareableError, match="8 blocks"):
        share({"a": torch.zeros(4, 2, 2)}, [replace(FORM, layers=("a",))])
    with pytest.raises(NotShareableError, match="meta"):
        share({"a": torch.zeros(BLOCKS, 2, 2, device="meta")}, [replace(FORM, layers=("a",))])


def test_cards_are_asked_to_put_a_blocks_layers_side_by_side():
    assert (memory.preferred_layout("cuda"), memory.preferred_layout("cpu")) == ("BLHNC", None)
    (runs,) = share(blocks_outermost(), [FORM]).groups[0].runs
    assert (runs.layer_stride_bytes, runs.block_stride_bytes) == (RUN, 2 * RUN)


@pytest.mark.parametrize("make", [layers_outermost, blocks_outermost, tokens_outermost])
def test_tensors_of_a_card_are_exported_as_they_lie(make, monkeypatch: pytest.MonkeyPatch):
    """The layouts of vLLM that such backends have: LBHNC, BLHNC and LBNHC."""
    begin = 0x7F0000000000
    monkeypatch.setattr(device, "export_memory", lambda at: (b"h" * 64, "uuid", at - begin, 1 << 30))
    tensors = {name: OnACard(begin, tensor) for name, tensor in make().items()}
    layout = share(tensors, [FORM])  # pyright: ignore[reportArgumentType]
    check_layout(layout, 2 * STATES)
    (piece,), (group,) = layout.memory, layout.groups
    assert isinstance(piece, CudaIpcMemory)
    assert piece.size_bytes == 2 * BLOCKS * RUN
    (of_a_cpu,) = share(make(), [FORM]).groups
    assert group == of_a_cpu
