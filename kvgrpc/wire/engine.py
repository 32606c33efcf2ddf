# SPDX-License-Identifier: Apache-2.0
"""Messages of engine.proto, but for memory and layout."""

from __future__ import annotations

import dataclasses

from kvgrpc import api
from kvgrpc.core.types import Role
from kvgrpc.v1 import engine_pb2 as pb
from kvgrpc.wire.cache import check_engine_id
from kvgrpc.wire.content import decode_identity, encode_identity
from kvgrpc.wire.fields import check_bytes, check_number, check_text, invalid
from kvgrpc.wire.layout import decode_layout, encode_group, encode_memory

_ROLES = {pb.CLIENT_ROLE_SCHEDULER: Role.SCHEDULER, pb.CLIENT_ROLE_WORKER: Role.WORKER}
_ROLE_NUMBERS = {Role.SCHEDULER: pb.CLIENT_ROLE_SCHEDULER, Role.WORKER: pb.CLIENT_ROLE_WORKER}


def encode_handshake_request(hello: api.Hello) -> pb.HandshakeRequest:
    return pb.HandshakeRequest(
        protocol_major=hello.protocol_major,
        protocol_minor=hello.protocol_minor,
        client_version=hello.client_version,
        identity=None if hello.identity is None else encode_identity(hello.identity),
    )


def decode_handshake_request(message: pb.HandshakeRequest) -> api.Hello:
    has_identity = message.HasField("identity")
    return api.Hello(
        protocol_major=message.protocol_major,
        protocol_minor=message.protocol_minor,
        client_version=check_text(message.client_version, "client_version", most=128),
        identity=decode_identity(message.identity, needs_form=True) if has_identity else None,
    )


def encode_handshake_response(info: api.ServerInfo) -> pb.HandshakeResponse:
    return pb.HandshakeResponse(
        protocol_major=info.protocol_major,
        protocol_minor=info.protocol_minor,
        server_version=info.server_version,
        server_epoch=info.server_epoch,
        chunk_tokens=info.chunk_tokens,
        hash_algorithm=info.hash_algorithm,
        limits=pb.Limits(**dataclasses.asdict(info.limits)),
        host_id=info.host_id,
        space_base=info.space_base,
    )


def decode_handshake_response(message: pb.HandshakeResponse) -> api.ServerInfo:
    limits = message.limits
    return api.ServerInfo(
        protocol_major=message.protocol_major,
        protocol_minor=message.protocol_minor,
        server_version=message.server_version,
        server_epoch=message.server_epoch,
        chunk_tokens=message.chunk_tokens,
        hash_algorithm=message.hash_algorithm,
        limits=api.Limits(
            keys_per_call=limits.keys_per_call,
            jobs_per_engine=limits.jobs_per_engine,
            message_bytes=limits.message_bytes,
            clients=limits.clients,
            calls_per_client=limits.calls_per_client,
            lease_ms=limits.lease_ms,
            record_ms=limits.record_ms,
            reattach_grace_ms=limits.reattach_grace_ms,
            pin_bytes=limits.pin_bytes,
            hold_bytes=limits.hold_bytes,
        ),
        host_id=message.host_id,
        space_base=message.space_base,
    )


def encode_attach_request(engine_id: str, role: Role, session_id: bytes) -> pb.AttachRequest:
    return pb.AttachRequest(engine_id=engine_id, role=_ROLE_NUMBERS[role], session_id=session_id)


def decode_attach_request(message: pb.AttachRequest) -> tuple[str, Role, bytes]:
    """(engine_id, role, session_id)."""
    if message.role not in _ROLES:
        raise invalid("role", f"{message.role} is neither CLIENT_ROLE_SCHEDULER nor CLIENT_ROLE_WORKER")
    return (check_engine_id(message.engine_id), _ROLES[message.role], check_bytes(message.session_id, "session_id", 16))


def encode_attach_response(event: api.AttachEvent) -> pb.AttachResponse:
    if event.draining:
        return pb.AttachResponse(draining=pb.Draining(reason=event.reason))
    return pb.AttachResponse(attached=pb.Attached(server_epoch=event.server_epoch, resumed=event.resumed))


def decode_attach_response(message: pb.AttachResponse) -> api.AttachEvent | None:
    """None for an event that only a newer server knows."""
    kind = message.WhichOneof("event")
    if kind == "attached":
        return api.AttachEvent(False, message.attached.server_epoch, message.attached.resumed)
    if kind == "draining":
        return api.AttachEvent(True, reason=message.draining.reason)
    return None


def encode_register_request(request: api.RegisterRequest) -> pb.RegisterKvCacheRequest:
    return pb.RegisterKvCacheRequest(
        engine_id=request.engine_id,
        identity=encode_identity(request.identity),
        kv_rank=request.kv_rank,
        tp_rank=request.tp_rank,
        tp_size=request.tp_size,
        kv_tp_size=request.kv_tp_size,
        memory=[encode_memory(memory) for memory in request.layout.memory],
        groups=[encode_group(group) for group in request.layout.groups],
        host_id=request.host_id,
    )


def decode_register_request(message: pb.RegisterKvCacheRequest) -> api.RegisterRequest:
    return api.RegisterRequest(
        engine_id=check_engine_id(message.engine_id),
        identity=decode_identity(message.identity, needs_form=False),
        kv_rank=message.kv_rank,
        tp_rank=message.tp_rank,
        tp_size=check_number(message.tp_size, "tp_size", 1, 128),
        kv_tp_size=check_number(message.kv_tp_size, "kv_tp_size", 1, 128),
        layout=decode_layout(message),
        host_id=check_text(message.host_id, "host_id", most=128),
    )


def encode_register_response(answer: api.RegisterAnswer) -> pb.RegisterKvCacheResponse:
    return pb.RegisterKvCacheResponse(
        space_base=answer.space_base,
        chunk_tokens=answer.chunk_tokens,
        registration_epoch=answer.registration_epoch,
        stored_form=answer.stored_form,
        object_bytes=answer.object_bytes,
    )


def decode_register_response(message: pb.RegisterKvCacheResponse) -> api.RegisterAnswer:
    return api.RegisterAnswer(
        space_base=message.space_base,
        chunk_tokens=message.chunk_tokens,
        registration_epoch=message.registration_epoch,
        stored_form=message.stored_form,
        object_bytes=message.object_bytes,
    )


def encode_unregister_request(engine_id: str) -> pb.UnregisterKvCacheRequest:
    return pb.UnregisterKvCacheRequest(engine_id=engine_id)


def decode_unregister_request(message: pb.UnregisterKvCacheRequest) -> str:
    """engine_id."""
    return check_engine_id(message.engine_id)
