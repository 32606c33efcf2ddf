# SPDX-License-Identifier: Apache-2.0
"""Memory and layout of engine.proto. Geometry (does it fit?) is checked by transfer/layout.py; here only the form."""

from __future__ import annotations

from kvgrpc import api
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.v1 import engine_pb2 as pb
from kvgrpc.wire.fields import check_bytes, check_number, check_text, invalid

MEMORY_MOST = 4096
GROUPS_MOST = 64
RUNS_MOST = 65536
"""Of all groups: each is at least one plane of one layer (``kvgrpc.transfer.layout``)."""


def encode_memory(memory: api.Memory) -> pb.Memory:
    if isinstance(memory, api.CudaIpcMemory):
        return pb.Memory(
            cuda=pb.CudaIpcMemory(
                handle=memory.handle,
                device_uuid=memory.device_uuid,
                offset_bytes=memory.offset_bytes,
                size_bytes=memory.size_bytes,
            )
        )
    return pb.Memory(
        shared=pb.SharedMemory(name=memory.name, offset_bytes=memory.offset_bytes, size_bytes=memory.size_bytes)
    )


def decode_memory(message: pb.Memory, field: str) -> api.Memory:
    kind = message.WhichOneof("kind")
    if kind == "cuda":
        cuda = message.cuda
        return api.CudaIpcMemory(
            handle=check_bytes(cuda.handle, f"{field}.cuda.handle", 64),
            device_uuid=check_text(cuda.device_uuid, f"{field}.cuda.device_uuid", least=1, most=64),
            offset_bytes=cuda.offset_bytes,
            size_bytes=cuda.size_bytes,
        )
    if kind == "shared":
        shared = message.shared
        return api.SharedMemory(
            name=check_text(shared.name, f"{field}.shared.name", least=1, most=255),
            offset_bytes=shared.offset_bytes,
            size_bytes=shared.size_bytes,
        )
    raise invalid(field, "has no kind of memory that this server knows")


def encode_runs(runs: api.Runs) -> pb.Runs:
    return pb.Runs(
        memory_index=runs.memory_index,
        base_bytes=runs.base_bytes,
        layers=runs.layers,
        layer_stride_bytes=runs.layer_stride_bytes,
        planes=runs.planes,
        plane_stride_bytes=runs.plane_stride_bytes,
        block_stride_bytes=runs.block_stride_bytes,
        run_bytes=runs.run_bytes,
    )


def decode_runs(message: pb.Runs) -> api.Runs:
    return api.Runs(
        memory_index=message.memory_index,
        base_bytes=message.base_bytes,
        layers=message.layers,
        layer_stride_bytes=message.layer_stride_bytes,
        planes=message.planes,
        plane_stride_bytes=message.plane_stride_bytes,
        block_stride_bytes=message.block_stride_bytes,
        run_bytes=message.run_bytes,
    )


def encode_group(group: api.KvGroup) -> pb.KvGroup:
    return pb.KvGroup(
        kind=pb.GroupKind.Value(f"GROUP_KIND_{group.kind.value}"),
        block_size=group.block_size,
        num_blocks=group.num_blocks,
        window_tokens=group.window_tokens,
        runs=[encode_runs(runs) for runs in group.runs],
        form=pb.BlockForm.Value(f"BLOCK_FORM_{group.form.value}"),
        backend=group.backend,
        layout=group.layout,
        heads=group.heads,
        head_dim=group.head_dim,
    )


_KINDS = {pb.GroupKind.Value(f"GROUP_KIND_{kind.value}"): kind for kind in api.GroupKind}
_FORMS = {pb.BlockForm.Value(f"BLOCK_FORM_{form.value}"): form for form in api.BlockForm}


def decode_group(message: pb.KvGroup, field: str) -> api.KvGroup:
    if message.kind not in _KINDS:
        names = ", ".join(pb.GroupKind.Name(kind) for kind in _KINDS)
        text = f"{field}.kind {message.kind} is not known to this server; known are {names}"
        raise Refusal(Reason.GROUP_KIND_UNSUPPORTED, text, field=f"{field}.kind")
    if message.form not in _FORMS:
        raise invalid(f"{field}.form", f"{message.form} is neither BLOCK_FORM_OPAQUE nor BLOCK_FORM_TOKEN_MAJOR")
    if not message.runs:
        raise invalid(f"{field}.runs", "is empty")
    return api.KvGroup(
        block_size=message.block_size,
        num_blocks=message.num_blocks,
        runs=tuple(decode_runs(runs) for runs in message.runs),
        form=_FORMS[message.form],
        kind=_KINDS[message.kind],
        window_tokens=message.window_tokens,
        backend=check_text(message.backend, f"{field}.backend", most=64),
        layout=check_text(message.layout, f"{field}.layout", most=64),
        heads=message.heads,
        head_dim=message.head_dim,
    )


def decode_layout(message: pb.RegisterKvCacheRequest) -> api.Layout:
    check_number(len(message.memory), "memory", 1, MEMORY_MOST)
    check_number(len(message.groups), "groups", 1, GROUPS_MOST)
    check_number(sum(len(group.runs) for group in message.groups), "groups.runs", 0, RUNS_MOST)
    return api.Layout(
        memory=tuple(decode_memory(memory, f"memory[{at}]") for at, memory in enumerate(message.memory)),
        groups=tuple(decode_group(group, f"groups[{at}]") for at, group in enumerate(message.groups)),
    )
