# SPDX-License-Identifier: Apache-2.0
"""Messages of admin.proto."""

from __future__ import annotations

from dataclasses import asdict

from kvgrpc import api
from kvgrpc.core.inspection import InspectedChunk, Keeper
from kvgrpc.core.types import Cleared, Held, Quota, Role, SpaceRef, Warmed
from kvgrpc.v1 import admin_pb2 as pb
from kvgrpc.wire.cache import WAIT_MS_MOST
from kvgrpc.wire.content import (
    decode_content,
    decode_identity,
    decode_space,
    decode_write_policy,
    encode_content,
    encode_identity,
    encode_space,
    encode_write_policy,
)
from kvgrpc.wire.fields import DAY_MS, check_bytes, check_number, check_text, invalid

# ---- status ---------------------------------------------------------------------------------------------------------


def encode_server_status(status: api.ServerStatus) -> pb.GetStatusResponse:
    return pb.GetStatusResponse(
        server_version=status.server_version,
        server_epoch=status.server_epoch,
        uptime_ms=status.uptime_ms,
        chunk_tokens=status.chunk_tokens,
        draining=status.draining,
        arena=pb.ArenaStatus(**asdict(status.arena)),
        chunks=status.chunks,
        spaces=status.spaces,
        engines=status.engines,
        clients=status.clients,
        jobs=status.jobs,
        pins=status.pins,
        calls_in_flight=status.calls_in_flight,
        tiers=[pb.TierStatus(**asdict(tier)) for tier in status.tiers],
        executors=[pb.ExecutorStatus(**asdict(executor)) for executor in status.executors],
        counters=status.counters,
        restart=pb.RestartStatus(**asdict(status.restart)),
    )


def decode_server_status(message: pb.GetStatusResponse) -> api.ServerStatus:
    arena = message.arena
    return api.ServerStatus(
        server_version=message.server_version,
        server_epoch=message.server_epoch,
        uptime_ms=message.uptime_ms,
        chunk_tokens=message.chunk_tokens,
        draining=message.draining,
        arena=api.ArenaStatus(
            total_bytes=arena.total_bytes,
            free_bytes=arena.free_bytes,
            writing_bytes=arena.writing_bytes,
            ready_bytes=arena.ready_bytes,
            pinned_bytes=arena.pinned_bytes,
            doomed_bytes=arena.doomed_bytes,
            settling_bytes=arena.settling_bytes,
            held_bytes=arena.held_bytes,
        ),
        chunks=message.chunks,
        spaces=message.spaces,
        engines=message.engines,
        clients=message.clients,
        jobs=message.jobs,
        pins=message.pins,
        calls_in_flight=message.calls_in_flight,
        tiers=tuple(
            api.TierStatus(
                tier.name,
                tier.healthy,
                tier.used_bytes,
                tier.reads_in_flight,
                tier.writes_in_flight,
                tier.writes_queued,
                dict(tier.counters),
            )
            for tier in message.tiers
        ),
        executors=tuple(
            api.ExecutorStatus(executor.thread, tuple(executor.clients), executor.queued)
            for executor in message.executors
        ),
        counters=dict(message.counters),
        restart=_decode_restart(message.restart),
    )


def _decode_restart(message: pb.RestartStatus) -> api.RestartStatus:
    return api.RestartStatus(
        checking=message.checking,
        refused=message.refused,
        found_objects=message.found_objects,
        restored_objects=message.restored_objects,
        dropped_objects=message.dropped_objects,
        recorded_objects=message.recorded_objects,
        waiting_objects=message.waiting_objects,
    )


def _encode_client(client: api.ClientStatus) -> pb.ClientStatus:
    return pb.ClientStatus(
        client_id=client.client_id,
        role=client.role.value,
        attached=client.attached,
        registered=client.registered,
        kv_rank=client.kv_rank,
        tp_rank=client.tp_rank,
        memory_bytes=client.memory_bytes,
        calls_in_flight=client.calls_in_flight,
        thread=client.thread,
    )


def encode_engines(engines: tuple[api.EngineStatus, ...]) -> pb.ListEnginesResponse:
    return pb.ListEnginesResponse(
        engines=[
            pb.EngineStatus(
                engine=engine.engine,
                clients=[_encode_client(client) for client in engine.clients],
                jobs=engine.jobs,
                pins=engine.pins,
                draining=engine.draining,
            )
            for engine in engines
        ]
    )


def _decode_client(message: pb.ClientStatus) -> api.ClientStatus:
    return api.ClientStatus(
        client_id=message.client_id,
        role=Role(message.role),
        attached=message.attached,
        registered=message.registered,
        kv_rank=message.kv_rank,
        tp_rank=message.tp_rank,
        memory_bytes=message.memory_bytes,
        calls_in_flight=message.calls_in_flight,
        thread=message.thread,
    )


def decode_engines(message: pb.ListEnginesResponse) -> tuple[api.EngineStatus, ...]:
    return tuple(
        api.EngineStatus(
            engine.engine,
            tuple(_decode_client(client) for client in engine.clients),
            engine.jobs,
            engine.pins,
            engine.draining,
        )
        for engine in message.engines
    )


def encode_spaces(spaces: tuple[api.SpaceStatus, ...]) -> pb.ListSpacesResponse:
    return pb.ListSpacesResponse(
        spaces=[
            pb.SpaceStatus(
                space_base=space.space_base,
                identity=encode_identity(space.identity),
                lora=space.lora,
                salt_fingerprint=space.salt_fingerprint,
                generation=space.generation,
                chunks=space.chunks,
                bytes=space.bytes,
                pinned_chunks=space.pinned_chunks,
                write_policy=encode_write_policy(space.write_policy),
            )
            for space in spaces
        ]
    )


def decode_spaces(message: pb.ListSpacesResponse) -> tuple[api.SpaceStatus, ...]:
    return tuple(
        api.SpaceStatus(
            space_base=space.space_base,
            identity=decode_identity(space.identity, needs_form=True),
            lora=space.lora,
            salt_fingerprint=space.salt_fingerprint,
            generation=space.generation,
            chunks=space.chunks,
            bytes=space.bytes,
            pinned_chunks=space.pinned_chunks,
            write_policy=decode_write_policy(space.write_policy),
        )
        for space in message.spaces
    )


# ---- acts -----------------------------------------------------------------------------------------------------------


def encode_clear_request(target: api.ClearTarget) -> pb.ClearRequest:
    if target.space is not None:
        return pb.ClearRequest(space=encode_space(target.space))
    if target.model is not None:
        return pb.ClearRequest(model=target.model)
    if target.cache_salt is not None:
        return pb.ClearRequest(cache_salt=target.cache_salt)
    return pb.ClearRequest(all=target.all)


def decode_clear_request(message: pb.ClearRequest) -> api.ClearTarget:
    kind = message.WhichOneof("target")
    if kind == "space":
        return api.ClearTarget(space=decode_space(message.space))
    if kind == "model":
        return api.ClearTarget(model=check_text(message.model, "model", least=1, most=512))
    if kind == "cache_salt":
        return api.ClearTarget(cache_salt=check_text(message.cache_salt, "cache_salt", most=512))
    if kind == "all" and message.all:
        return api.ClearTarget(all=True)
    raise invalid("target", "names nothing to clear")


def encode_clear_response(cleared: Cleared) -> pb.ClearResponse:
    return pb.ClearResponse(removed_chunks=cleared.removed_chunks, still_pinned_chunks=cleared.still_pinned_chunks)


def decode_clear_response(message: pb.ClearResponse) -> Cleared:
    return Cleared(message.removed_chunks, message.still_pinned_chunks)


def encode_bump_request(model: str, space_base: bytes) -> pb.BumpGenerationRequest:
    return pb.BumpGenerationRequest(space_base=space_base) if space_base else pb.BumpGenerationRequest(model=model)


def decode_bump_request(message: pb.BumpGenerationRequest) -> tuple[str, bytes]:
    """(model, space_base), one of them empty."""
    kind = message.WhichOneof("target")
    if kind == "space_base":
        return "", check_bytes(message.space_base, "space_base", 16)
    if kind == "model":
        return check_text(message.model, "model", least=1, most=512), b""
    raise invalid("target", "names nothing to bump")


def encode_bump_response(cleared: Cleared) -> pb.BumpGenerationResponse:
    return pb.BumpGenerationResponse(generation=cleared.generation, removed_chunks=cleared.removed_chunks)


def decode_bump_response(message: pb.BumpGenerationResponse) -> Cleared:
    return Cleared(message.removed_chunks, 0, message.generation)


def encode_pin_request(space: SpaceRef, content: api.Content, ttl_ms: int) -> pb.PinRequest:
    return pb.PinRequest(space=encode_space(space), content=encode_content(content), ttl_ms=ttl_ms)


def decode_pin_request(message: pb.PinRequest) -> tuple[SpaceRef, api.Content, int]:
    """(space, content, ttl_ms)."""
    return (
        decode_space(message.space),
        decode_content(message.content),
        check_number(message.ttl_ms, "ttl_ms", 1, DAY_MS),
    )


def encode_warm_request(space: SpaceRef, content: api.Content, wait_ms: int) -> pb.WarmRequest:
    return pb.WarmRequest(space=encode_space(space), content=encode_content(content), wait_ms=wait_ms)


def decode_warm_request(message: pb.WarmRequest) -> tuple[SpaceRef, api.Content, int]:
    """(space, content, wait_ms)."""
    wait_ms = check_number(message.wait_ms, "wait_ms", 1, WAIT_MS_MOST)
    return decode_space(message.space), decode_content(message.content), wait_ms


def encode_inspect_request(space: SpaceRef, content: api.Content) -> pb.InspectRequest:
    return pb.InspectRequest(space=encode_space(space), content=encode_content(content))


def decode_inspect_request(message: pb.InspectRequest) -> tuple[SpaceRef, api.Content]:
    """(space, content)."""
    return decode_space(message.space), decode_content(message.content)


def encode_inspect_response(found: api.Inspection) -> pb.InspectResponse:
    return pb.InspectResponse(
        chunks=[
            pb.InspectedChunk(**asdict(chunk), tier_ranks=ranks)
            for chunk, ranks in zip(found.chunks, found.tier_ranks, strict=True)
        ],
        keepers=[pb.Keeper(**asdict(keeper)) for keeper in found.keepers],
        more_keepers=found.more_keepers,
        asked_objects=found.asked_objects,
        silent_tiers=found.silent_tiers,
    )


def decode_inspect_response(message: pb.InspectResponse) -> api.Inspection:
    return api.Inspection(
        chunks=tuple(
            InspectedChunk(c.key, c.ready_ranks, c.writing_ranks, c.bytes, c.pins, c.holds) for c in message.chunks
        ),
        keepers=tuple(Keeper(k.chunks, k.left_ms, k.engine, k.request_id, k.pin_id) for k in message.keepers),
        more_keepers=message.more_keepers,
        tier_ranks=tuple(dict(chunk.tier_ranks) for chunk in message.chunks),
        asked_objects=message.asked_objects,
        silent_tiers=tuple(message.silent_tiers),
    )


_KINDS = {api.CallKind.LOOKUP: pb.TracedCall.KIND_LOOKUP, api.CallKind.STORE: pb.TracedCall.KIND_STORE}


def encode_traced_calls(some: api.TracedCalls) -> pb.RecordTraceResponse:
    return pb.RecordTraceResponse(
        calls=[
            pb.TracedCall(
                kind=_KINDS[call.kind],
                at_ms=call.at_ms,
                space=call.space,
                num_tokens=call.num_tokens,
                chunks=call.chunks,
                prefix_chunks=call.prefix_chunks,
                chunk_bytes=call.chunk_bytes,
            )
            for call in some.calls
        ],
        dropped=some.dropped,
        chunk_tokens=some.chunk_tokens,
    )


def decode_traced_calls(message: pb.RecordTraceResponse) -> api.TracedCalls:
    """Without calls of kinds that a newer server may know."""
    kinds = {number: kind for kind, number in _KINDS.items()}
    calls = tuple(
        api.TracedCall(
            kinds[call.kind],
            call.at_ms,
            call.space,
            call.num_tokens,
            tuple(call.chunks),
            call.prefix_chunks,
            call.chunk_bytes,
        )
        for call in message.calls
        if call.kind in kinds
    )
    return api.TracedCalls(calls, message.dropped, message.chunk_tokens)


def encode_warm_response(warmed: Warmed) -> pb.WarmResponse:
    return pb.WarmResponse(resident_tokens=warmed.resident_tokens, limited_by=warmed.limited_by)


def decode_warm_response(message: pb.WarmResponse) -> Warmed:
    return Warmed(message.resident_tokens, message.limited_by)


def encode_pin_response(held: Held) -> pb.PinResponse:
    return pb.PinResponse(pin_id=held.pin_id, pinned_tokens=held.pinned_tokens)


def decode_pin_response(message: pb.PinResponse) -> Held:
    return Held(message.pin_id, message.pinned_tokens)


def decode_unpin_request(message: pb.UnpinRequest) -> bytes:
    """pin_id."""
    return check_bytes(message.pin_id, "pin_id", 16)


def encode_set_quota_request(cache_salt: str, size_bytes: int | None) -> pb.SetQuotaRequest:
    size = 0 if size_bytes is None else check_number(size_bytes, "size_bytes", 1, (1 << 63) - 1)
    return pb.SetQuotaRequest(cache_salt=cache_salt, size_bytes=size)


def decode_set_quota_request(message: pb.SetQuotaRequest) -> tuple[str, int | None]:
    """(cache_salt, size_bytes)."""
    salt = check_text(message.cache_salt, "cache_salt", most=512)
    return salt, check_number(message.size_bytes, "size_bytes", 0, (1 << 63) - 1) or None


def decode_get_quota_request(message: pb.GetQuotaRequest) -> str:
    return check_text(message.cache_salt, "cache_salt", most=512)


def decode_quota(message: pb.SetQuotaResponse | pb.GetQuotaResponse) -> Quota:
    return Quota(message.size_bytes or None, message.used_bytes)


def decode_drain_request(message: pb.DrainEngineRequest) -> tuple[str, int]:
    """(engine, wait_ms)."""
    return (
        check_text(message.engine, "engine", least=16, most=64),
        check_number(message.wait_ms, "wait_ms", 0, WAIT_MS_MOST),
    )
