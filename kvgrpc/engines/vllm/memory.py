# SPDX-License-Identifier: Apache-2.0
"""An engine's KV memory, described as a layout.

Of a card it is exported as it lies. That of a CPU is moved into POSIX shared memory: torch moves a storage in
place, and every tensor on it follows. The object under /dev/shm has mode 0600 and belongs to the engine's user; torch's
own janitor process unlinks it when the engine has ended, however it ended.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvgrpc.api import BlockForm, GroupKind, KvGroup, Layout, Runs, SharedMemory
from kvgrpc.client import KvForm, NotShareableError, kv_groups

SHM = Path("/dev/shm")  # noqa: S108 - where shm_open puts its objects, not a temporary file
SPARE_BYTES = 16 << 20
"""Room under /dev/shm that is left to others."""


@dataclass(frozen=True, slots=True)
class Form:
    """The layers of a group, and what the bytes of its blocks mean; see KvGroup."""

    layers: tuple[str, ...]
    block_size: int
    num_blocks: int
    backend: str
    layout: str
    kind: GroupKind = GroupKind.FULL
    window_tokens: int = 0

    @property
    def kv(self) -> KvForm:
        return KvForm(
            self.block_size,
            self.num_blocks,
            backend=self.backend,
            layout=self.layout,
            kind=self.kind,
            window_tokens=self.window_tokens,
        )

    def group(self, runs: tuple[Runs, ...] = ()) -> KvGroup:
        return KvGroup(
            self.block_size,
            self.num_blocks,
            runs,
            BlockForm.OPAQUE,
            self.kind,
            self.window_tokens,
            backend=self.backend,
            layout=self.layout,
        )


def preferred_layout(device: str) -> str | None:
    """vLLM's name of the layout that copies best: a block's layers side by side, so that a block is one run instead of
    one a layer. CPU backends have one layout only; vLLM drops a preference that a backend cannot have."""
    return "BLHNC" if device == "cuda" else None


def share(tensors: Mapping[str, torch.Tensor], forms: Sequence[Form]) -> Layout:
    """Shares the tensors of all groups' layers, which may lie in the same memory; those of a CPU are moved into shared
    memory. Raises NotShareableError; then they stay where they are, but for those that were moved before."""
    every = [tensors[layer] for form in forms for layer in form.layers]
    if {tensor.device.type for tensor in every} == {"cuda"}:
        return kv_groups(
            [([_OnCard.of(layer, tensors[layer], form.num_blocks) for layer in form.layers], form.kv) for form in forms]
        )
    by_group = [[_blocks(layer, tensors[layer], form.num_blocks) for layer in form.layers] for form in forms]
    storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in every)}
    _check_room(sum(storage.nbytes() for storage in storages.values() if not storage.is_shared()))
    memory: list[SharedMemory] = []
    places: dict[int, int] = {}
    for storage in storages.values():
        piece = _move(storage)
        places[storage.data_ptr()] = len(memory)
        memory.append(piece)
    groups = [
        form.group(_merged([_Plane.of(blocks, places[blocks.untyped_storage().data_ptr()]) for blocks in layers]))
        for form, layers in zip(forms, by_group, strict=True)
    ]
    return Layout(tuple(memory), tuple(groups))


def _blocks(layer: str, tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """The layer's tensor with vLLM's blocks as its first axis: kernels may have cut each into several of theirs."""
    if tensor.device.type != "cpu":
        raise NotShareableError(
            f"layer {layer} lies on {tensor.device}: only memory of CUDA cards and of CPUs is shared"
        )
    _check_shape(layer, tensor, num_blocks)
    blocks = tensor if tensor.shape[0] == num_blocks else tensor.view(num_blocks, -1, *tensor.shape[1:])
    _check_dense(layer, blocks)
    return blocks


def _check_shape(layer: str, tensor: torch.Tensor, num_blocks: int) -> None:
    shape = tuple(tensor.shape)
    if len(shape) < 2 or not shape[0] or shape[0] % num_blocks:
        raise NotShareableError(f"layer {layer} has shape {shape}, which does not begin with {num_blocks} blocks")


@dataclass(frozen=True, slots=True)
class _OnCard:
    """The same of a card, where nothing may be copied: what kv_groups reads of a tensor. Strides count elements."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, layer: str, tensor: torch.Tensor, num_blocks: int) -> _OnCard:
        _check_shape(layer, tensor, num_blocks)
        count, (stride, *inner) = tensor.shape[0] // num_blocks, tensor.stride()
        return cls(tensor, (num_blocks, count, *tensor.shape[1:]), (count * stride, stride, *inner))

    def data_ptr(self) -> int:
        return self.tensor.data_ptr()

    def element_size(self) -> int:
        return self.tensor.element_size()

    def stride(self) -> tuple[int, ...]:
        return self.strides


def _check_dense(layer: str, tensor: torch.Tensor) -> None:
    """A block must be one run of bytes, in whatever order."""
    block = tensor[0]
    dims = sorted((stride, size) for stride, size in zip(block.stride(), block.shape, strict=True) if size > 1)
    reach = 1
    for stride, size in dims:
        if stride != reach:
            raise NotShareableError(
                f"layer {layer}: a block is not one run of bytes (strides {tuple(tensor.stride())})"
            )
        reach *= size


def _check_room(needed: int) -> None:
    room = os.statvfs(SHM)
    free = room.f_bavail * room.f_frsize
    if needed + SPARE_BYTES > free:
        raise NotShareableError(
            f"the KV memory of {needed >> 20} MiB does not fit into {SHM}, which has {free >> 20} MiB free; "
            "give the container a larger one (--shm-size, or an emptyDir of medium Memory)"
        )


def _move(storage: torch.UntypedStorage) -> SharedMemory:
    size = storage.nbytes()
    move: Callable[[], tuple[Any, bytes, int]] = getattr(storage, "_share_filename_cpu_")  # noqa: B009 - no public way
    name = move()[1].decode().removeprefix("/")
    # torch puts a header of its own before the data
    return SharedMemory(name, (SHM / name).stat().st_size - size, size)


@dataclass(frozen=True, slots=True)
class _Plane:
    """One layer: where its block 0 begins, how far blocks are apart, and how long each is."""

    memory_index: int
    base_bytes: int
    stride_bytes: int
    run_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor, memory_index: int) -> _Plane:
        item = tensor.element_size()
        return cls(memory_index, int(tensor.storage_offset()) * item, tensor.stride(0) * item, tensor[0].numel() * item)


def _merged(planes: Sequence[_Plane]) -> tuple[Runs, ...]:
    """As few entries as possible: layers that follow each other at one distance are one."""
    runs: list[Runs] = []
    at = 0
    while at < len(planes):
        first = planes[at]
        end = at + 1
        step = planes[end].base_bytes - first.base_bytes if end < len(planes) else 0
        while end < len(planes) and _continues(planes[end - 1], planes[end], step):
            end += 1
        count = end - at
        runs.append(
            Runs(
                first.memory_index,
                first.base_bytes,
                count,
                step if count > 1 else 0,
                1,
                0,
                first.stride_bytes,
                first.run_bytes,
            )
        )
        at = end
    return tuple(runs)


def _continues(before: _Plane, plane: _Plane, step: int) -> bool:
    same = (before.memory_index, before.stride_bytes, before.run_bytes) == (
        plane.memory_index,
        plane.stride_bytes,
        plane.run_bytes,
    )
    return same and step > 0 and plane.base_bytes - before.base_bytes == step
