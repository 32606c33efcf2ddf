# SPDX-License-Identifier: Apache-2.0
"""KV memory on a card, as its engine holds it: found in tensors, exported by CUDA IPC, described as a layout.

Takes torch tensors and everything with ``__cuda_array_interface__``, and imports neither torch nor CuPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvgrpc import api
from kvgrpc.client.worker import WorkerClient, WorkerOptions
from kvgrpc.transfer import device


class NotShareableError(Exception):
    """Why this memory cannot be shared, in one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class KvForm:
    """What the tensors hold; all of them the same, one after the other in the order of the layers.

    ``block_axis`` counts blocks. Axes that lie inside a block make its run as far as they are contiguous; at most two
    axes may be left, layers before planes. ``token_axis`` is for TOKEN_MAJOR: a run is then the tokens of one block and
    all that lies inside of a token. Without it blocks are OPAQUE: name ``backend`` and ``layout``, since nothing else
    keeps engines apart whose blocks hold the same bytes in another order. ``backend``, ``layout``, ``heads``,
    ``head_dim``, ``kind`` and ``window_tokens`` as in api.KvGroup.
    """

    block_size: int
    num_blocks: int
    block_axis: int = 0
    token_axis: int | None = None
    backend: str = ""
    layout: str = ""
    heads: int = 0
    head_dim: int = 0
    kind: api.GroupKind = api.GroupKind.FULL
    window_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Array:
    """Where a tensor lies: address, bytes of an element, sizes and strides (in bytes) of its axes."""

    pointer: int
    item_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def reach_bytes(self) -> int:
        return sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)) + self.item_bytes


@dataclass(slots=True)
class _Allocation:
    """What the tensors use of an allocation; offsets lie in it."""

    handle: bytes
    uuid: str
    begin: int
    end: int


def kv_layout(tensors: Sequence[Any], form: KvForm) -> api.Layout:
    """The layout of these tensors, of which each has the blocks of a layer (or of several). Keep them alive for as long
    as they are registered. Raises NotShareableError."""
    return kv_groups([(tensors, form)])


def kv_groups(groups: Sequence[tuple[Sequence[Any], KvForm]]) -> api.Layout:
    """The layout of several KV groups, each with tensors of its own, which may lie in the same memory. As kv_layout."""
    arrays: list[_Array] = []
    for tensors, _ in groups:
        if not tensors:
            raise NotShareableError("there are no tensors to share")
        arrays += [_array(len(arrays) + index, tensor) for index, tensor in enumerate(tensors)]
    allocations, placed = _exported(arrays)
    numbers = {handle: number for number, handle in enumerate(allocations)}
    memory = [api.CudaIpcMemory(one.handle, one.uuid, one.begin, one.end - one.begin) for one in allocations.values()]
    found: list[api.KvGroup] = []
    index = 0
    for tensors, form in groups:
        runs: list[api.Runs] = []
        for _ in tensors:
            handle, offset = placed[index]
            begin = offset - allocations[handle].begin
            runs.append(_runs(f"tensor {index}", arrays[index], form, numbers[handle], begin))
            index += 1
        found.append(_group(form, _merged(runs)))
    return api.Layout(tuple(memory), tuple(found))


def _exported(arrays: Sequence[_Array]) -> tuple[dict[bytes, _Allocation], list[tuple[bytes, int]]]:
    """The allocations that these lie in, by handle, and where in them each begins."""
    allocations: dict[bytes, _Allocation] = {}
    placed: list[tuple[bytes, int]] = []
    for index, array in enumerate(arrays):
        try:
            handle, uuid, offset, _ = device.export_memory(array.pointer)
        except (ValueError, RuntimeError) as error:
            raise NotShareableError(f"tensor {index} cannot be shared: {error}") from error
        end = offset + array.reach_bytes
        known = allocations.setdefault(handle, _Allocation(handle, uuid, offset, end))
        known.begin, known.end = min(known.begin, offset), max(known.end, end)
        placed.append((handle, offset))
    return allocations, placed


def _group(form: KvForm, runs: tuple[api.Runs, ...]) -> api.KvGroup:
    return api.KvGroup(
        form.block_size,
        form.num_blocks,
        runs,
        api.BlockForm.OPAQUE if form.token_axis is None else api.BlockForm.TOKEN_MAJOR,
        form.kind,
        form.window_tokens,
        backend=form.backend,
        layout=form.layout,
        heads=form.heads,
        head_dim=form.head_dim,
    )


def register_kv_caches(
    address: str,
    tensors: Sequence[Any],
    form: KvForm,
    request: api.RegisterRequest,
    options: WorkerOptions | None = None,
) -> WorkerClient:
    """A worker client that shares these tensors, and keeps them alive; ``start`` it. ``request.layout`` is replaced.

    Raises NotShareableError.
    """
    client = WorkerClient(address, replace(request, layout=kv_layout(tensors, form)), options)
    client.keep(tensors)
    return client


def _array(index: int, tensor: Any) -> _Array:
    """torch is asked in its own words: its array interface knows no bfloat16."""
    if hasattr(tensor, "data_ptr"):
        item = int(tensor.element_size())
        shape, strides = tuple(tensor.shape), tuple(int(stride) * item for stride in tensor.stride())
        return _Array(int(tensor.data_ptr()), item, shape, strides)
    interface: dict[str, Any] | None = getattr(tensor, "__cuda_array_interface__", None)
    if interface is None:
        raise NotShareableError(f"tensor {index} is a {type(tensor).__name__}, neither of torch nor of a card")
    shape = tuple(int(size) for size in interface["shape"])
    item = int(interface["typestr"][2:])
    strides = interface.get("strides")
    if strides is None:
        strides, inner = (), item
        for size in reversed(shape):
            strides, inner = (inner, *strides), inner * size
    return _Array(int(interface["data"][0]), item, shape, tuple(int(stride) for stride in strides))


def _runs(what: str, array: _Array, form: KvForm, memory_index: int, base_bytes: int) -> api.Runs:
    axes = range(len(array.shape))
    if form.block_axis not in axes or array.shape[form.block_axis] < form.num_blocks:
        raise NotShareableError(
            f"{what} has shape {array.shape}: axis {form.block_axis} has no {form.num_blocks} blocks"
        )
    others = {axis: array.shape[axis] for axis in axes if axis != form.block_axis}
    if form.token_axis is not None and others.get(form.token_axis) != form.block_size:
        raise NotShareableError(
            f"{what} has shape {array.shape}: axis {form.token_axis} is not the {form.block_size} tokens of a block"
        )
    if any(stride < 0 for stride in array.strides):
        raise NotShareableError(f"{what} has negative strides {array.strides}")
    rest = sorted((array.strides[axis], axis) for axis in axes if axis != form.block_axis and array.shape[axis] > 1)
    inside = rest if form.token_axis is None else [one for one in rest if _is_inside(one, array, form.token_axis)]
    run = array.item_bytes
    while rest and rest[0][0] == run and rest[0] in inside:
        run *= array.shape[rest.pop(0)[1]]
    if (form.token_axis is not None and set(inside) & set(rest)) or len(rest) > 2:
        raise NotShareableError(
            f"{what}: a block's bytes lie in too many pieces (shape {array.shape}, strides in bytes {array.strides})"
        )
    (layers, layer_stride), (planes, plane_stride) = [
        *[(1, 0)] * (2 - len(rest)),
        *[(array.shape[axis], stride) for stride, axis in reversed(rest)],
    ]
    stride = array.strides[form.block_axis]
    return api.Runs(memory_index, base_bytes, layers, layer_stride, planes, plane_stride, stride, run)


def _is_inside(axis: tuple[int, int], array: _Array, token_axis: int) -> bool:
    """Whether a run goes along this (stride, axis): the tokens', or one inside of a token. Where a block has one token
    its axis has the stride that it would have with more; some arrays say 0, and then the order of the axes counts."""
    within = math.prod(array.shape[token_axis + 1 :]) * array.item_bytes
    return axis[1] == token_axis or axis[0] < (array.strides[token_axis] or within)


def _merged(runs: Sequence[api.Runs]) -> tuple[api.Runs, ...]:
    """As few entries as possible: single layers that follow each other at one distance are one."""
    merged: list[api.Runs] = []
    for one in runs:
        last = merged[-1] if merged else None
        if last is not None and one.layers == 1:
            step = (one.base_bytes - last.base_bytes) // last.layers
            fits = last.layers == 1 or last.layer_stride_bytes == step
            next_one = replace(last, base_bytes=last.base_bytes + last.layers * step, layers=1, layer_stride_bytes=0)
            if step > 0 and fits and one == next_one:
                merged[-1] = replace(last, layers=last.layers + 1, layer_stride_bytes=step)
                continue
        merged.append(one)
    return tuple(merged)
