# SPDX-License-Identifier: Apache-2.0
"""Names that follow from content: spaces, chunk keys, objects in tiers. Golden vectors are in docs/protocol.md.

Every field is hashed with its length before it, so no field can imitate another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvgrpc.core.types import SpaceIdentity, SpaceRef

OWN_HASH_ALGORITHM = "sha256-u32le"
"""Of ``chunk_keys``."""
SPACE_BASE_BYTES = 16
KEY_BYTES_MOST = 64
"""Of an engine's own hashes."""


def _digest(*fields: bytes | str) -> bytes:
    sha = hashlib.sha256()
    for value in fields:
        raw = value.encode() if isinstance(value, str) else value
        sha.update(len(raw).to_bytes(4, "little"))
        sha.update(raw)
    return sha.digest()


def space_base(identity: SpaceIdentity, chunk_tokens: int) -> bytes:
    """16 bytes that stand for an identity under a chunk size."""
    return _digest(
        "kvgrpc.space_base.v1",
        identity.model,
        identity.revision,
        identity.kv_dtype,
        str(identity.kv_world_size),
        str(chunk_tokens),
        identity.hash_algorithm,
        identity.stored_form,
    )[:SPACE_BASE_BYTES]


def space_digest(ref: SpaceRef) -> bytes:
    """32 bytes that stand for a space: the seed of its chunk keys."""
    return _digest("kvgrpc.space.v1", ref.space_base, ref.lora, ref.cache_salt)


def chunk_keys(seed: bytes, data: bytes | bytearray | memoryview, chunk_tokens: int) -> list[bytes]:
    """Keys of all full chunks of a prompt: sha256(previous key || token ids as u32le), the first previous: ``seed``."""
    step = chunk_tokens * 4
    view = memoryview(data)
    sha256 = hashlib.sha256
    keys: list[bytes] = []
    previous = seed
    for start in range(0, len(view) - step + 1, step):
        sha = sha256(previous)
        sha.update(view[start : start + step])
        previous = sha.digest()
        keys.append(previous)
    return keys


def part_keys(keys: Sequence[bytes], part: int) -> Sequence[bytes]:
    """Keys of one part of these chunks; those of the first are the chunks' own. No chunk's own key is so long."""
    if not part:
        return keys
    return [key.ljust(KEY_BYTES_MOST, b"\0") + bytes((len(key), part)) for key in keys]


def part_of(key: bytes) -> int:
    """What part of its chunk has this key."""
    return key[-1] if len(key) > KEY_BYTES_MOST else 0


def object_name(digest: bytes, generation: int, key: bytes, kv_rank: int, order: str) -> str:
    """Hex name of one object in tiers; ``digest`` is the space's, ``order`` that of the rank's runs (Geometry)."""
    return _digest("kvgrpc.object.v1", digest, str(generation), key, str(kv_rank), order).hex()


def describe(digest: bytes, generation: int, key: bytes, kv_rank: int, order: str) -> str:
    """What an object's name stands for, for people and tools."""
    about = f'"space": "{digest.hex()}", "version": {generation}, "key": "{key.hex()}", "kv_rank": {kv_rank}'
    return f'{{{about}, "order": "{order}"}}'


def fingerprint(secret: str) -> str:
    """16 hex digits that name an engine id or a salt without giving it away."""
    return hashlib.sha256(secret.encode()).hexdigest()[:16]
