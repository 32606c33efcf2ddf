# SPDX-License-Identifier: Apache-2.0
"""Layouts out of tensors: where they lie in allocations, what their runs are, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvgrpc.api import BlockForm, CudaIpcMemory, GroupKind, Runs
from kvgrpc.client import KvForm, NotShareableError, kv_groups, kv_layout
from kvgrpc.transfer.layout import check_layout
from tests.cards import fake

FORM = KvForm(16, 8)


class Tensor:
    """What CuPy and others show of an array."""

    def __init__(self, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> None:
        self.__cuda_array_interface__ = {"data": (pointer, False), "shape": shape, "strides": strides, "typestr": "<f2"}


@pytest.fixture
def memory() -> Iterator[fake.CardMemory]:
    fake.driver()
    memory = fake.CardMemory(1 << 20)
    yield memory
    memory.free()


def runs(*tensors: Any, form: KvForm = FORM) -> tuple[Runs, ...]:
    layout = kv_layout(tensors, form)
    check_layout(layout, 64)
    return layout.groups[0].runs


def test_tensors_inside_one_allocation(memory: fake.CardMemory) -> None:
    """Where they begin in it is sent; layers at one distance are one entry."""
    layer = 8 * 16 * 4 * 2
    tensors = [Tensor(memory.pointer + 512 + 3 * at * layer, (8, 16, 4)) for at in range(4)]
    layout = kv_layout(tensors, FORM)
    (piece,) = layout.memory
    assert isinstance(piece, CudaIpcMemory)
    assert (piece.offset_bytes, piece.size_bytes) == (512, 10 * layer)
    assert layout.groups[0].runs == (Runs(0, 0, 4, 3 * layer, 1, 0, 128, 128),)
    check_layout(layout, 64)


def test_planes_first(memory: fake.CardMemory) -> None:
    form = KvForm(16, 8, block_axis=1, token_axis=2, heads=2, head_dim=4)
    (one,) = runs(Tensor(memory.pointer, (2, 8, 16, 2, 4)), form=form)
    assert one == Runs(0, 0, 1, 0, 2, 8 * 256, 256, 256)
    assert kv_layout([Tensor(memory.pointer, (2, 8, 16, 2, 4))], form).groups[0].form is BlockForm.TOKEN_MAJOR


def test_blocks_outermost(memory: fake.CardMemory) -> None:
    """All of a block is one run; with a token axis, its layers and planes are."""
    tensor = Tensor(memory.pointer, (8, 3, 2, 16, 4))
    assert runs(tensor) == (Runs(0, 0, 1, 0, 1, 0, 768, 768),)
    assert runs(tensor, form=KvForm(16, 8, token_axis=3, heads=1, head_dim=4)) == (
        Runs(0, 0, 3, 256, 2, 128, 768, 128),
    )


def test_planes_of_one_token(memory: fake.CardMemory) -> None:
    """Found by review: a run was one number, where a token axis of one was named."""
    planes = KvForm(1, 8, token_axis=2, heads=2, head_dim=4)
    assert runs(Tensor(memory.pointer, (8, 2, 1, 2, 4)), form=planes) == (Runs(0, 0, 1, 0, 2, 16, 32, 16),)
    first = KvForm(1, 8, block_axis=1, token_axis=2, heads=2, head_dim=4)
    assert runs(Tensor(memory.pointer, (2, 8, 1, 2, 4)), form=first) == (Runs(0, 0, 1, 0, 2, 128, 16, 16),)


@pytest.mark.parametrize("strides", [None, (32, 0, 16, 2)], ids=["", "the tokens' is 0, as of a new axis"])
def test_blocks_of_one_token(memory: fake.CardMemory, strides: tuple[int, ...] | None) -> None:
    """A run is all of the token: engines with longer blocks have the same form."""
    (one,) = runs(Tensor(memory.pointer, (8, 1, 2, 8), strides), form=KvForm(1, 8, token_axis=1, heads=2, head_dim=8))
    assert one == Runs(0, 0, 1, 0, 1, 0, 32, 32)
    (longer,) = runs(Tensor(memory.pointer, (8, 16, 2, 8)), form=KvForm(16, 8, token_axis=1, heads=2, head_dim=8))
    assert (longer.layers, longer.planes, longer.run_bytes) == (1, 1, 16 * 32)


@pytest.mark.parametrize("tokens", [1, 16])
def test_heads_outside_of_tokens(memory: fake.CardMemory, tokens: int) -> None:
    """Each head's tokens are a run, however many there are in a block."""
    form = KvForm(tokens, 8, token_axis=2, heads=2, head_dim=8)
    (one,) = runs(Tensor(memory.pointer, (8, 2, tokens, 8)), form=form)
    assert (one.layers, one.planes, one.plane_stride_bytes, one.run_bytes) == (1, 2, tokens * 16, tokens * 16)


def test_layers_planes_blocks_in_one_tensor(memory: fake.CardMemory) -> None:
    assert runs(Tensor(memory.pointer, (3, 2, 8, 16, 4)), form=KvForm(16, 8, block_axis=2)) == (
        Runs(0, 0, 3, 2048, 2, 1024, 128, 128),
    )


def test_a_view_with_room_between_its_blocks(memory: fake.CardMemory) -> None:
    assert runs(Tensor(memory.pointer, (8, 16, 4), (1024, 8, 2))) == (Runs(0, 0, 1, 0, 1, 0, 1024, 128),)


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (lambda at: Tensor(at, (4, 16, 4)), "has no 8 blocks"),
        (lambda at: Tensor(at, (8, 2, 2, 2, 4), (1024, 512, 256, 64, 2)), "too many pieces"),
        (lambda at: Tensor(at, (8, 4), (-8, 2)), "negative strides"),
        (lambda at: Tensor(4096, (8, 16, 4)), "no memory that CUDA knows"),
        (lambda at: object(), "neither of torch nor of a card"),
    ],
)
def test_what_cannot_be_shared_is_refused_in_words(memory: fake.CardMemory, tensor: Any, said: str) -> None:
    with pytest.raises(NotShareableError, match=said):
        kv_layout([tensor(memory.pointer)], FORM)


@pytest.mark.parametrize("axis", [0, 2, 3, -2])
def test_a_token_axis_that_is_none_is_refused_in_words(memory: fake.CardMemory, axis: int) -> None:
    with pytest.raises(NotShareableError, match=rf"axis {axis} is not the 16 tokens of a block"):
        kv_layout([Tensor(memory.pointer, (16, 16, 4))], KvForm(16, 8, token_axis=axis, heads=1, head_dim=4))


def test_groups_in_one_memory(memory: fake.CardMemory) -> None:
    """One piece for all of them; of each its kind, its blocks and where it begins."""
    window = KvForm(16, 8, kind=GroupKind.SLIDING_WINDOW, window_tokens=32)
    state = KvForm(32, 8, kind=GroupKind.RECURRENT)
    full, short = Tensor(memory.pointer, (8, 16, 4)), Tensor(memory.pointer + 64, (8, 20), (128, 2))
    layout = kv_groups([([full], FORM), ([full], window), ([short], state)])
    check_layout(layout, 64)
    (piece,) = layout.memory
    assert (piece.offset_bytes, piece.size_bytes) == (0, 8 * 128)
    whole = (Runs(0, 0, 1, 0, 1, 0, 128, 128),)
    assert [(one.kind, one.window_tokens, one.block_size, one.runs) for one in layout.groups] == [
        (GroupKind.FULL, 0, 16, whole),
        (GroupKind.SLIDING_WINDOW, 32, 16, whole),
        (GroupKind.RECURRENT, 0, 32, (Runs(0, 64, 1, 0, 1, 0, 128, 40),)),
    ]


def test_no_tensors() -> None:
    with pytest.raises(NotShareableError):
        kv_layout([], FORM)
