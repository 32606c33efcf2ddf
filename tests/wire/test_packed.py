# SPDX-License-Identifier: Apache-2.0
"""Requests that are written and read past protobuf are what protobuf makes of them, whoever made the bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvgrpc import api
from kvgrpc.core.errors import Refusal
from kvgrpc.core.types import SpaceRef, TokenRange
from kvgrpc.v1 import cache_pb2
from kvgrpc.wire import cache, packed

ENGINE = "e" * 32
SPACE = SpaceRef(bytes(range(16)), "adapter", "salt")
LOOKUP = api.LookupRequest(
    ENGINE, "r", SPACE, api.Tokens(b""), attempt=3, tp_size=4, kv_ranks=(1, 2), prefetch_wait_ms=7
)
STORE = api.StoreRequest(ENGINE, 9, SPACE, api.Tokens(b""), ((1, 2, 3), (70000,)), TokenRange(16, 32))
TOKENS = bytes(range(256)) * 64


def lookup(data: bytes) -> bytes:
    return cache.write_lookup_request(api.LookupRequest(ENGINE, "r", SPACE, api.Tokens(data)))


def read(reader: Callable[[bytes], object], raw: bytes) -> object:
    """The request, or why there is none; numbers and bytes compare by value whatever type holds them."""
    try:
        return reader(raw)
    except DecodeError:
        return "no message"
    except Refusal as refusal:
        return refusal.reason, refusal.field


def by_protobuf(raw: bytes) -> object:
    return cache.decode_lookup_request(cache_pb2.LookupRequest.FromString(raw))


@pytest.mark.parametrize("data", [b"", TOKENS[:4], TOKENS[:4092], TOKENS, bytearray(TOKENS), memoryview(TOKENS)])
@pytest.mark.parametrize(
    ("request_of", "write", "encode", "message"),
    [
        (LOOKUP, cache.write_lookup_request, cache.encode_lookup_request, cache_pb2.LookupRequest),
        (STORE, cache.write_store_request, cache.encode_store_request, cache_pb2.StoreRequest),
    ],
)
def test_what_is_written_is_the_same_message(
    data: bytes,
    request_of: api.LookupRequest,
    write: Callable[..., bytes],
    encode: Callable[..., Message],
    message: type,
) -> None:
    request = replace(request_of, content=api.Tokens(data))
    assert message.FromString(write(request)) == encode(request)
    hashes = replace(request_of, content=api.Hashes((b"h" * 32,) * 3, 700))
    assert write(hashes) == encode(hashes).SerializeToString()


@pytest.mark.parametrize("size", [0, 4, 4096, len(TOKENS)])
def test_what_is_read_is_the_same_request(size: int) -> None:
    content = api.Tokens(TOKENS[:size])
    asked = replace(LOOKUP, content=content)
    assert cache.read_lookup_request(cache.write_lookup_request(asked)) == asked
    stored = replace(STORE, content=content)
    found = cache.read_store_request(cache.write_store_request(stored))
    assert (found.content, [list(ids) for ids in found.blocks]) == (content, [[1, 2, 3], [70000]])
    assert (found.call_id, found.space, found.range) == (9, SPACE, TokenRange(16, 32))


def test_long_prompts_are_cut_out_and_not_copied() -> None:
    raw = lookup(TOKENS)
    split = packed.split_token_ids(raw, 5)
    assert split is not None
    assert split[1].obj is raw
    assert len(split[0]) + len(TOKENS) < len(raw)


@pytest.mark.parametrize(
    "behind", [b"\x78\x00" * 400_000, b"\x7a\x00" * 400_000, b"\x38\x01" * 400_000, b"\x78" + b"\x80" * 800_000]
)
def test_a_stranger_does_not_keep_the_reader_busy(behind: bytes) -> None:
    """Very many small fields, or a number without end: no byte more is looked at than a client of ours could mean."""

    class Counted(bytes):
        looks = 0

        def __getitem__(self, place: Any) -> Any:
            self.looks += isinstance(place, int)
            return super().__getitem__(place)

    raw = Counted(lookup(TOKENS) + behind)
    assert packed.split_token_ids(raw, 5) is None
    assert raw.looks < 10_000
    assert read(cache.read_lookup_request, bytes(raw)) == read(by_protobuf, bytes(raw))


def test_memory_that_is_no_whole_number_of_tokens_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="4 bytes a token"):
        lookup(b"12345")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_bytes_of_strangers_are_read_as_protobuf_reads_them(data: st.DataObject) -> None:
    """Fields twice, cut, reordered, overlong, unknown or flipped."""
    raw = bytearray(lookup(TOKENS[: data.draw(st.sampled_from([4096, 8192]))]))
    for _ in range(data.draw(st.integers(0, 3))):
        change = data.draw(st.sampled_from(["flip", "cut", "insert", "twice", "behind", "odd"]))
        # most of the message is tokens, where nothing happens: aim at its ends
        near = data.draw(st.one_of(st.integers(0, min(160, len(raw) - 1)), st.integers(0, len(raw) - 1)))
        if change == "flip":
            raw[near] ^= 1 << data.draw(st.integers(0, 7))
        elif change == "cut":
            del raw[near : near + data.draw(st.integers(1, 9))]
        elif change == "insert":
            raw[near:near] = data.draw(st.binary(min_size=1, max_size=6))
        elif change == "twice":
            raw += bytes(raw)
        elif change == "odd":
            raw += bytes.fromhex("2a060a040a02ffff")
        else:
            raw += data.draw(
                st.sampled_from([b"\x2a\x00", b"\x2a\x02\x0a\x00", b"\xa8\x7d\x01", b"\x2b\x2c", b"\x28\x01"])
            )
        if not raw:
            break
    message = bytes(raw)
    assert read(cache.read_lookup_request, message) == read(by_protobuf, message)


@given(st.binary(max_size=64), st.integers(1, 40))
@example(b"\x2a\xff\xff\xff\xff\xff\xff\x01", 5)
def test_no_bytes_break_the_reader(head: bytes, repeats: int) -> None:
    message = head * repeats + bytes(packed.SPLIT_BYTES)
    assert read(cache.read_lookup_request, message) == read(by_protobuf, message)
