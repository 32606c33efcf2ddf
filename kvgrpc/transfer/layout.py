# SPDX-License-Identifier: Apache-2.0
"""Checks an engine's layout and says what of it the core needs to know.

A checked layout is one whose every address lies inside its memory: the movers rely on it and check no address again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NoReturn

from kvgrpc.api import BlockForm, GroupKind, KvGroup, Layout, Memory, Runs
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import ALL, MAX_GROUPS, MAX_NEEDS, Geometry, GroupGeometry, Need, ObjectForm

MAX_MEMORY_PIECES = 4096
MAX_PLANES_IN_ALL = 65536
"""Bound of the sum of layers x planes over all entries of all groups: what one piece's run generation walks, and the
check for runs that overlap, which holds up the event loop."""
MAX_NAME_BYTES = 64
MAX_FORM_BYTES = 1024
"""Of a stored form: what a client without memory can name in its identity."""
MAX_ORDER_BYTES = 4096
"""Of an object's order: what can be named in WriteChunks. It is hashed into the name of every object."""
_MAX_INT = 2**63 - 1
_MAX_COUNT = 2**32 - 1
_SEPARATORS = frozenset(":+")


def check_layout(layout: Layout, chunk_tokens: int) -> Geometry:
    """The layout's geometry. Raises Refusal: LAYOUT with the field at fault."""
    _check_memory(layout.memory)
    if not 1 <= len(layout.groups) <= MAX_GROUPS:
        _refuse("groups", f"a layout needs 1 to {MAX_GROUPS} groups; {len(layout.groups)} were sent")
    if len({_need(group) for group in layout.groups}) > MAX_NEEDS:
        _refuse("groups", f"groups may need at most {MAX_NEEDS} different things of a prefix")
    _check_planes(layout.groups)
    geometry = Geometry(tuple(_check_group(layout, index, chunk_tokens) for index in range(len(layout.groups))))
    form_bytes = len(stored_form(layout.groups))
    if form_bytes > MAX_FORM_BYTES:
        _refuse("groups", f"the groups' stored form has {form_bytes} bytes, at most {MAX_FORM_BYTES} can be named")
    order_bytes = max(len(part.order) for part in geometry.parts(chunk_tokens))
    if order_bytes > MAX_ORDER_BYTES:
        text = f"the order of an object's runs takes {order_bytes} bytes to say, at most {MAX_ORDER_BYTES} can be"
        _refuse("groups", f"{text}: put layers of one size behind each other")
    return geometry


def _need(group: KvGroup) -> Need:
    if group.kind is GroupKind.FULL:
        return ALL
    if group.kind is GroupKind.RECURRENT:
        return Need(group.block_size)
    return Need(group.window_tokens, aligned=group.kind is GroupKind.CHUNKED_LOCAL)


def _kept(group: KvGroup) -> str:
    """The kind, in a stored form."""
    if group.kind in (GroupKind.FULL, GroupKind.RECURRENT):
        return "" if group.kind is GroupKind.FULL else "recurrent:"
    return f"{group.kind.value.lower().replace('_', '-')}:{group.window_tokens}:"


def _order(group: KvGroup) -> str:
    """How the runs of an object follow each other: layers x planes x bytes (of a block, or of a token if token-major),
    however the layers are cut into entries. Layouts of one stored form may have different orders."""
    unit = group.block_size if group.form is BlockForm.TOKEN_MAJOR else 1
    merged: list[list[int]] = []
    for runs in group.runs:
        size = runs.run_bytes // unit
        if merged and merged[-1][1:] == [runs.planes, size]:
            merged[-1][0] += runs.layers
        else:
            merged.append([runs.layers, runs.planes, size])
    return ",".join(f"{layers}x{planes}x{size}" for layers, planes, size in merged)


def stored_form(groups: Sequence[KvGroup]) -> str:
    """Fingerprint of what the stored bytes mean; equal on all ranks. Part of a space's identity.

    Opaque: ``opaque:{backend}:{layout}:{block_size}``; token-major: ``token-major:{heads}:{head_dim}:{planes}``; of
    groups that do not need everything, after ``sliding-window:{window_tokens}:``, ``chunked-local:{window_tokens}:`` or
    ``recurrent:``; groups joined by "+".
    """
    return "+".join(
        _kept(group) + f"opaque:{group.backend}:{group.layout}:{group.block_size}"
        if group.form is BlockForm.OPAQUE
        else _kept(group) + f"token-major:{group.heads}:{group.head_dim}:{group.runs[0].planes}"
        for group in groups
    )


def object_order(groups: Sequence[KvGroup]) -> str:
    """How the runs of an object of these groups, which all need everything, follow each other."""
    return "+".join(map(_order, groups))


def object_forms(groups: Sequence[KvGroup], chunk_tokens: int) -> tuple[ObjectForm, ...]:
    """The objects of a chunk, in the order in which they travel; where all groups need everything it is one, of groups
    0. The groups must be such as can be registered."""
    parts = Geometry(tuple(map(_geometry, groups))).parts(chunk_tokens)
    whole = [part.need for part in parts] == [ALL]
    return tuple(ObjectForm(0 if whole else part.group_bits, part.object_bytes, part.order) for part in parts)


def _geometry(group: KvGroup) -> GroupGeometry:
    block_bytes = sum(runs.layers * runs.planes * runs.run_bytes for runs in group.runs)
    return GroupGeometry(group.block_size, group.num_blocks, block_bytes, _need(group), _order(group))


def memory_bytes(layout: Layout) -> int:
    """Bytes of memory that the layout shares."""
    return sum(memory.size_bytes for memory in layout.memory)


def digest(layout: Layout, objects: Sequence[object]) -> bytes:
    """16 bytes that stand for the layout and what its memory was found to be. Not kept beyond the process."""
    return hashlib.blake2b(repr((layout, objects)).encode(), digest_size=16).digest()


def _check_memory(pieces: Sequence[Memory]) -> None:
    if not pieces:
        _refuse("memory", "a layout needs memory; none was sent")
    if len(pieces) > MAX_MEMORY_PIECES:
        _refuse("memory", f"{len(pieces)} pieces of memory were sent; at most {MAX_MEMORY_PIECES} are allowed")
    for index, memory in enumerate(pieces):
        _in_range(f"memory[{index}].size_bytes", memory.size_bytes, 1, _MAX_INT)
        _in_range(f"memory[{index}].offset_bytes", memory.offset_bytes, 0, _MAX_INT - memory.size_bytes)
    if sum(memory.size_bytes for memory in pieces) > _MAX_INT:
        _refuse("memory", f"the pieces of memory have more than {_MAX_INT} bytes in all")


def _check_planes(groups: Sequence[KvGroup]) -> None:
    planes_in_all = 0
    for index, group in enumerate(groups):
        planes_in_all += sum(runs.layers * runs.planes for runs in group.runs)
        if planes_in_all > MAX_PLANES_IN_ALL:
            text = f"layers x planes over all entries of all groups must not exceed {MAX_PLANES_IN_ALL}"
            _refuse(f"groups[{index}].runs", text)


def _check_group(layout: Layout, index: int, chunk_tokens: int) -> GroupGeometry:
    group, where = layout.groups[index], f"groups[{index}]"
    _in_range(f"{where}.block_size", group.block_size, 1, chunk_tokens)
    if chunk_tokens % group.block_size:
        _refuse(f"{where}.block_size", f"block_size {group.block_size} must divide chunk_tokens {chunk_tokens}")
    _in_range(f"{where}.num_blocks", group.num_blocks, 1, _MAX_COUNT)
    if group.kind in (GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL):
        _in_range(f"{where}.window_tokens", group.window_tokens, 1, _MAX_COUNT)
    if not group.runs:
        _refuse(f"{where}.runs", "a group needs at least one entry of runs")
    _check_names(group, where)
    for entry, runs in enumerate(group.runs):
        _check_counts(runs, len(layout.memory), f"{where}.runs[{entry}]")
    for entry, runs in enumerate(group.runs):
        _check_addresses(runs, group.num_blocks, layout.memory[runs.memory_index].size_bytes, f"{where}.runs[{entry}]")
    if group.form is BlockForm.TOKEN_MAJOR:
        _check_token_major(group, where)
    geometry = _geometry(group)
    if geometry.block_bytes * (chunk_tokens // group.block_size) > _MAX_INT:
        _refuse(f"{where}.runs", "a chunk of this layout would take 2^63 bytes or more")
    return geometry


def _check_names(group: KvGroup, where: str) -> None:
    """Backend and layout go into the identity, so neither may imitate a boundary of it."""
    for field, text in (("backend", group.backend), ("layout", group.layout)):
        if len(text.encode(errors="replace")) > MAX_NAME_BYTES:
            _refuse(f"{where}.{field}", f"{field} is longer than {MAX_NAME_BYTES} bytes")
        if any(not "!" <= character <= "~" or character in _SEPARATORS for character in text):
            _refuse(f"{where}.{field}", f"{field} {text!r} must be printable ASCII without spaces, ':' and '+'")


def _check_counts(runs: Runs, memory_pieces: int, where: str) -> None:
    if not 0 <= runs.memory_index < memory_pieces:
        _refuse(
            f"{where}.memory_index", f"memory_index {runs.memory_index} is not below the {memory_pieces} pieces sent"
        )
    _in_range(f"{where}.base_bytes", runs.base_bytes, 0, _MAX_INT)
    _in_range(f"{where}.layers", runs.layers, 1, MAX_PLANES_IN_ALL)
    _in_range(f"{where}.planes", runs.planes, 1, MAX_PLANES_IN_ALL)
    _in_range(f"{where}.run_bytes", runs.run_bytes, 1, _MAX_INT)
    _in_range(f"{where}.layer_stride_bytes", runs.layer_stride_bytes, 0, _MAX_INT)
    _in_range(f"{where}.plane_stride_bytes", runs.plane_stride_bytes, 0, _MAX_INT)
    _in_range(f"{where}.block_stride_bytes", runs.block_stride_bytes, 0, _MAX_INT)
    if runs.block_stride_bytes < runs.run_bytes:
        sentence = (
            f"block_stride_bytes {runs.block_stride_bytes} is less than run_bytes {runs.run_bytes}: blocks overlap"
        )
        _refuse(f"{where}.block_stride_bytes", sentence)


def _check_addresses(runs: Runs, num_blocks: int, size_bytes: int, where: str) -> None:
    # Strides are not negative, so the last block of the last plane of the last layer reaches furthest.
    end = (
        runs.base_bytes
        + (runs.layers - 1) * runs.layer_stride_bytes
        + (runs.planes - 1) * runs.plane_stride_bytes
        + (num_blocks - 1) * runs.block_stride_bytes
        + runs.run_bytes
    )
    if end > size_bytes:
        sentence = f"runs reach up to byte {end} of memory[{runs.memory_index}], which has only {size_bytes} bytes"
        _refuse(where, sentence)
    if _overlap(runs, num_blocks):
        _refuse(where, "two runs share bytes: layer, plane and block strides do not fit run_bytes")


def _overlap(runs: Runs, num_blocks: int) -> bool:
    """Whether two different (layer, plane, block) share a byte. Exact.

    Two runs overlap when their distance is below run_bytes. For each distance in layers and planes (one of each pair
    of opposite ones) the block distance that comes closest to undoing it decides.
    """
    stride, furthest = runs.block_stride_bytes, num_blocks - 1
    for layers in range(runs.layers):
        for planes in range(1 - runs.planes if layers else 1, runs.planes):
            shift = layers * runs.layer_stride_bytes + planes * runs.plane_stride_bytes
            below = -(shift // stride)
            for blocks in (below - 1, below):
                if abs(shift + max(-furthest, min(furthest, blocks)) * stride) < runs.run_bytes:
                    return True
    return False


def _check_token_major(group: KvGroup, where: str) -> None:
    _in_range(f"{where}.heads", group.heads, 1, _MAX_COUNT)
    _in_range(f"{where}.head_dim", group.head_dim, 1, _MAX_COUNT)
    for entry, runs in enumerate(group.runs):
        if runs.run_bytes % group.block_size:
            sentence = (
                f"run_bytes {runs.run_bytes} of a token-major group must be a multiple of block_size {group.block_size}"
            )
            _refuse(f"{where}.runs[{entry}].run_bytes", sentence)
        if runs.planes != group.runs[0].planes:
            _refuse(f"{where}.runs[{entry}].planes", "all entries of a token-major group must have the same planes")


def _in_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        _refuse(field, f"{field.rpartition('.')[2]} is {value}; it must be {low} to {high}")


def _refuse(field: str, message: str) -> NoReturn:
    raise Refusal(Reason.LAYOUT, message, field=field)
