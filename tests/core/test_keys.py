# SPDX-License-Identifier: Apache-2.0
"""Names that follow from content: nothing imitates anything else."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from kvgrpc.core.keys import chunk_keys, fingerprint, object_name, space_base, space_digest
from kvgrpc.core.types import SpaceIdentity, SpaceRef

IDENTITY = SpaceIdentity("llama", "r1", "bfloat16", 1, "sha256-u32le", "token-major:8:128:2")


def test_the_golden_values_of_the_protocol():
    base = space_base(IDENTITY, 16)
    assert base.hex() == "7d94031b02eeded25d00b1c74950db13"
    digest = space_digest(SpaceRef(base))
    assert digest.hex() == "1f44d8ffc10af07292fa17e27bdc681e353b8d91cdbaf7baabf25d78936672c9"
    keys = chunk_keys(digest, b"".join(token.to_bytes(4, "little") for token in range(32)), 16)
    assert keys[0].hex() == "f9f8970a046a800ddfc6fd38dc5572b5f0934a84be94a46833fe919304549d18"
    assert keys[1].hex() == "7d446f904bf52bf8cdbf06767adddc68a6682eaeda50e3eac759a3691d702720"
    assert (
        object_name(digest, 0, keys[0], 0, "1x2x2048")
        == "1b74cd656a78158027f0d37f022fec50c28ecd2af471cc62e68ecc2f8ec6c4e2"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"model": "llamar1", "revision": ""},
        {"model": "llama", "revision": "r1bfloat16", "kv_dtype": ""},
        {"kv_world_size": 11},
        {"hash_algorithm": "sha256-u32le:"},
        {"stored_form": ""},
    ],
)
def test_no_field_imitates_another(change: dict[str, str | int]):
    assert space_base(replace(IDENTITY, **change), 16) != space_base(IDENTITY, 16)  # type: ignore[arg-type]


def test_chunk_size_lora_and_salt_make_other_spaces():
    assert space_base(IDENTITY, 16) != space_base(IDENTITY, 161)
    base = space_base(IDENTITY, 16)
    refs = [
        SpaceRef(base),
        SpaceRef(base, "a"),
        SpaceRef(base, "", "a"),
        SpaceRef(base, "a", "a"),
        SpaceRef(base, "aa"),
    ]
    assert len({space_digest(ref) for ref in refs}) == len(refs)


def test_keys_are_chained_and_only_of_whole_chunks():
    seed = b"s" * 32
    data = bytes(range(200))
    keys = chunk_keys(seed, data, 16)
    assert keys == [
        first := hashlib.sha256(seed + data[:64]).digest(),
        second := hashlib.sha256(first + data[64:128]).digest(),
        hashlib.sha256(second + data[128:192]).digest(),
    ]
    assert chunk_keys(seed, memoryview(data)[:63], 16) == []
    assert chunk_keys(seed, bytearray(data), 16) == keys


def test_fingerprints_give_nothing_away():
    assert fingerprint("secret") == hashlib.sha256(b"secret").hexdigest()[:16]
