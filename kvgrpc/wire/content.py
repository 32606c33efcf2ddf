# SPDX-License-Identifier: Apache-2.0
"""Messages of common.proto, and policies."""

from __future__ import annotations

from kvgrpc import api
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import (
    DEFAULT_POLICY,
    MS,
    Policy,
    Priority,
    Reader,
    SpaceIdentity,
    SpaceRef,
    TokenRange,
    WritePolicy,
)
from kvgrpc.transfer.layout import MAX_FORM_BYTES
from kvgrpc.v1 import admin_pb2
from kvgrpc.v1 import common_pb2 as pb
from kvgrpc.wire.fields import DAY_MS, check_bytes, check_number, check_text, invalid
from kvgrpc.wire.packed import decode_token_ids, encode_token_ids

HASHES_MOST = 1 << 18
"""More than any setting of keys_per_call makes sense for; the setting itself is checked by the driver."""

_PRIORITIES = {
    pb.PRIORITY_UNSPECIFIED: Priority.NORMAL,
    pb.PRIORITY_LOW: Priority.LOW,
    pb.PRIORITY_NORMAL: Priority.NORMAL,
    pb.PRIORITY_HIGH: Priority.HIGH,
}
_PRIORITY_NUMBERS = {
    Priority.LOW: pb.PRIORITY_LOW,
    Priority.NORMAL: pb.PRIORITY_NORMAL,
    Priority.HIGH: pb.PRIORITY_HIGH,
}
_WRITE_POLICY_NUMBERS = {
    WritePolicy.THROUGH: admin_pb2.WRITE_POLICY_THROUGH,
    WritePolicy.EVICTION: admin_pb2.WRITE_POLICY_EVICTION,
    WritePolicy.SECOND_USE: admin_pb2.WRITE_POLICY_SECOND_USE,
    WritePolicy.NONE: admin_pb2.WRITE_POLICY_NONE,
}


def encode_identity(identity: SpaceIdentity) -> pb.SpaceIdentity:
    return pb.SpaceIdentity(
        model=identity.model,
        revision=identity.revision,
        kv_dtype=identity.kv_dtype,
        kv_world_size=identity.kv_world_size,
        hash_algorithm=identity.hash_algorithm,
        stored_form=identity.stored_form,
    )


def decode_identity(message: pb.SpaceIdentity, *, needs_form: bool) -> SpaceIdentity:
    """``needs_form``: the identity comes without a layout that its stored_form could be computed from."""
    return SpaceIdentity(
        model=check_text(message.model, "identity.model", least=1, most=512),
        revision=check_text(message.revision, "identity.revision", most=512),
        kv_dtype=check_text(message.kv_dtype, "identity.kv_dtype", least=1, most=64),
        kv_world_size=check_number(message.kv_world_size, "identity.kv_world_size", 1, 1024),
        hash_algorithm=check_text(message.hash_algorithm, "identity.hash_algorithm", least=1, most=64),
        stored_form=check_text(message.stored_form, "identity.stored_form", least=int(needs_form), most=MAX_FORM_BYTES),
    )


def encode_space(space: SpaceRef) -> pb.SpaceRef:
    return pb.SpaceRef(space_base=space.space_base, lora=space.lora, cache_salt=space.cache_salt)


def decode_space(message: pb.SpaceRef) -> SpaceRef:
    return SpaceRef(
        space_base=check_bytes(message.space_base, "space.space_base", 16),
        lora=check_text(message.lora, "space.lora", most=512),
        cache_salt=check_text(message.cache_salt, "space.cache_salt", most=512),
    )


def encode_content(content: api.Content) -> pb.Content:
    if isinstance(content, api.Tokens):
        return pb.Content(tokens=encode_token_ids(content.data))
    if not isinstance(content, api.Hashes):  # pyright: ignore[reportUnnecessaryIsInstance] - callers are not all typed
        raise TypeError(f"content is {type(content).__name__}; send Tokens or Hashes")
    return pb.Content(
        hashes=pb.ChunkHashes(hashes=content.hashes, num_tokens=content.num_tokens, first_chunk=content.first_chunk)
    )


def decode_content(message: pb.Content) -> api.Content:
    kind = message.WhichOneof("kind")
    if kind == "tokens":
        return api.Tokens(decode_token_ids(message.tokens))
    if kind == "hashes":
        check_number(len(message.hashes.hashes), "content.hashes.hashes", 0, HASHES_MOST)
        hashes = tuple(message.hashes.hashes)
        if hashes and not 16 <= min(map(len, hashes)) <= max(map(len, hashes)) <= 64:
            raise invalid("content.hashes.hashes", "has a hash that is not 16 to 64 bytes long")
        return api.Hashes(hashes, message.hashes.num_tokens, message.hashes.first_chunk)
    raise Refusal(Reason.CONTENT_KIND, "content has neither tokens nor hashes", field="content")


def encode_range(tokens: TokenRange) -> pb.TokenRange:
    return pb.TokenRange(start=tokens.start, end=tokens.end)


def decode_range(message: pb.TokenRange) -> TokenRange:
    if message.start > message.end:
        raise Refusal(Reason.RANGE, f"range starts at {message.start}, after its end {message.end}", field="range")
    return TokenRange(message.start, message.end)


def encode_reader(reader: Reader) -> pb.Reader:
    return pb.Reader(kv_rank=reader.kv_rank, tp_rank=reader.tp_rank)


def decode_reader(message: pb.Reader) -> Reader:
    return Reader(message.kv_rank, message.tp_rank)


def encode_policy(policy: Policy) -> pb.RequestPolicy | None:
    if policy == DEFAULT_POLICY:
        return None
    return pb.RequestPolicy(
        no_store=policy.no_store,
        no_lookup=policy.no_lookup,
        retention_ms=policy.retention_ns // MS,
        priority=_PRIORITY_NUMBERS[policy.priority],
    )


def encode_write_policy(policy: WritePolicy | None) -> admin_pb2.WritePolicy.ValueType:
    return admin_pb2.WRITE_POLICY_UNSPECIFIED if policy is None else _WRITE_POLICY_NUMBERS[policy]


def decode_write_policy(number: int) -> WritePolicy | None:
    """None: no policy of its own."""
    if number == admin_pb2.WRITE_POLICY_UNSPECIFIED:
        return None
    for policy, known in _WRITE_POLICY_NUMBERS.items():
        if number == known:
            return policy
    raise invalid("policy", f"{number} is not known to this server")


def decode_write_policy_request(message: admin_pb2.SetWritePolicyRequest) -> tuple[str, WritePolicy | None]:
    """(model, policy)."""
    return check_text(message.model, "model", most=512), decode_write_policy(message.policy)


def decode_policy(message: pb.RequestPolicy) -> Policy:
    if message.priority not in _PRIORITIES:
        raise invalid("policy.priority", f"{message.priority} is not known to this server")
    return Policy(
        no_store=message.no_store,
        no_lookup=message.no_lookup,
        retention_ns=check_number(message.retention_ms, "policy.retention_ms", 0, DAY_MS) * MS,
        priority=_PRIORITIES[message.priority],
    )
