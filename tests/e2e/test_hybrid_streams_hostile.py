# SPDX-License-Identifier: Apache-2.0
"""Streams of chunks in several objects from those who lie: to the server, and to its client."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgrpc import api
from kvgrpc.api import ChunkPart, WriteChunksRequest
from kvgrpc.client import object_forms, objects
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import MIB, ChunkOutcome, ChunkResult, ObjectForm
from kvgrpc.v1 import cache_pb2 as pb
from kvgrpc.wire.streams import encode_read_response, encode_write_begin
from tests.e2e.harness import local_server, outcomes
from tests.e2e.hybrids import CHUNK, FILL, first_stored, groups, tokens
from tests.e2e.test_hybrid import limits, pool
from tests.e2e.test_hybrid_streams import IDENTITY, beginning, everything, object_of
from tests.e2e.written import nothing_left, refused, sent


def parts_of(found: dict[int, dict[int, bytes]]) -> list[ChunkPart]:
    return [
        ChunkPart(chunk, 0, len(data), zlib.crc32(data), data, groups=bits)
        for chunk, of_groups in sorted(found.items())
        for bits, data in of_groups.items()
    ]


def spoiled(parts: list[ChunkPart]) -> dict[str, list[ChunkPart]]:
    """Wrong from the sixth object on: the second chunk's windows."""
    right, wrong = parts[:5], parts[5]
    return {
        "groups of nothing": [*right, replace(wrong, groups=0)],
        "groups of no object": [*right, replace(wrong, groups=0b00010)],
        "groups of two objects": [*right, replace(wrong, groups=0b10110)],
        "groups that nobody has": [*right, replace(wrong, groups=1 << 63)],
        "twice": [*right, wrong, wrong],
        "back": [*right, parts[6], wrong],
        "a chunk back": [*right, parts[1]],
        "a chunk ahead without the full group": [*right, parts[9]],
        "two chunks ahead": [*parts[:4], parts[8]],
        "past the end": [*parts, replace(parts[0], chunk=3)],
        "length of another object": [*right, replace(wrong, groups=0b00100)],
        "short": [*right, replace(wrong, data=wrong.data[:-1], checksum=zlib.crc32(wrong.data[:-1]))],
        "long": [*right, replace(wrong, data=wrong.data + b"x", checksum=zlib.crc32(wrong.data + b"x"))],
        "a checksum of something else": [*right, replace(wrong, checksum=wrong.checksum ^ 1)],
    }


async def test_who_lies_leaves_whole_objects_and_no_false_hit(tmp_path: Path) -> None:
    async with local_server(tmp_path, l1_bytes=1 << 20, limits=limits()) as server:
        engine = await pool(server, 3)
        parts = parts_of(everything(3))
        for number, (what, lie) in enumerate(spoiled(parts).items()):
            content = tokens(3 * CHUNK, number)
            asked = engine.scheduler.write_chunks(beginning(engine, content), sent(lie))
            assert await refused(asked) is Reason.INVALID_FIELD, what
            await nothing_left(server)
            hit = 3 if what == "past the end" else 1
            assert await engine.hits(content) == hit, what
            ids = engine.take(hit * CHUNK)
            engine.pages[:] = FILL
            job = await engine.lookup(content)
            assert outcomes(await engine.load(job.job_id, ids, end=hit * CHUNK)) == ["LOADED"] * hit
            wanted = np.full_like(engine.pages, FILL)
            engine.put(ids, wanted, first_stored(hit * CHUNK))
            assert np.array_equal(engine.pages, wanted), what
            await (await server.admin()).clear(api.ClearTarget(all=True))


async def test_groups_that_change_inside_an_object(tmp_path: Path) -> None:
    async with local_server(tmp_path, l1_bytes=16 * MIB, limits=limits()) as server:
        engine = await pool(server, 3)
        size = 2 * MIB
        forms = tuple(replace_bytes(form, size) for form in object_forms(groups(), CHUNK))
        identity = replace(IDENTITY, model="large")
        base = (await engine.scheduler.handshake(api.Hello(identity=identity))).space_base
        begin = WriteChunksRequest(engine.engine_id, api.SpaceRef(base), tokens(CHUNK), objects=forms)
        data = bytes(MIB)
        part = ChunkPart(0, 0, size, zlib.crc32(data), data, groups=1)
        asked = engine.scheduler.write_chunks(begin, sent([part, replace(part, offset=MIB, groups=0b10010)]))
        assert await refused(asked) is Reason.INVALID_FIELD
        await nothing_left(server)
        assert server.book.counts().chunks == 0


def replace_bytes(form: ObjectForm, size: int) -> ObjectForm:
    return form._replace(object_bytes=size)


async def test_a_beginning_that_lies_takes_nothing(tmp_path: Path) -> None:
    async with local_server(tmp_path, l1_bytes=1 << 20, limits=limits()) as server:
        engine = await pool(server, 4)
        right, found = beginning(engine, tokens(CHUNK)), everything(1)
        full, window, state, local = right.objects

        async def reason(*forms: ObjectForm, **changes: Any) -> Reason:
            asked = replace(right, objects=forms, **changes)
            return await refused(engine.scheduler.write_chunks(asked, sent(parts_of(found))))

        assert await reason(full, window, state) is Reason.INVALID_FIELD, "one is not named"
        assert await reason(window, full, state, local) is Reason.INVALID_FIELD, "another order"
        assert await reason(full, window, state, local, local) is Reason.INVALID_FIELD
        assert await reason(full, window, state._replace(groups=0b01100), local) is Reason.INVALID_FIELD
        assert await reason(full._replace(groups=0), window, state, local) is Reason.INVALID_FIELD
        assert await reason(full, window, state, local._replace(object_bytes=0)) is Reason.INVALID_FIELD
        assert await reason(full, window, state, local._replace(order="")) is Reason.INVALID_FIELD
        assert await reason(full, window, state, local._replace(order="x" * 4097)) is Reason.INVALID_FIELD
        assert await reason(*right.objects, object_bytes=1) is Reason.INVALID_FIELD
        assert await reason(*([full] * 9)) is Reason.INVALID_FIELD
        assert await reason(full, window, state._replace(object_bytes=999), local) is Reason.GEOMETRY_MISMATCH
        assert await reason(full, window, state, local._replace(order="1x1x1")) is Reason.GEOMETRY_MISMATCH
        plain = await server.engine()
        begin = replace(right, engine_id=plain.engine_id, space=plain.space)
        assert await refused(plain.scheduler.write_chunks(begin, sent(parts_of(found)))) is Reason.INVALID_FIELD
        await nothing_left(server)
        assert server.book.counts().chunks == 0


@pytest.mark.parametrize(
    "form",
    [
        "recurrent:token-major:1:4:1", "strange:opaque:X:Y:16", "sliding-window:0:opaque:X:Y:16",
        "sliding-window:x:opaque:X:Y:16", "sliding-window:4294967296:opaque:X:Y:16", "recurrent:opaque:X:Y:65",
        "chunked-local:\u0663:opaque:X:Y:16", "recurrent", "+".join(["opaque:X:Y:16"] * 65),
        "+".join(f"sliding-window:{at}:opaque:X:Y:16" for at in range(1, 10)), "opaque:X:Y:16+",
    ],
)  # fmt: skip
async def test_a_form_that_does_not_say_what_it_needs(tmp_path: Path, form: str) -> None:
    async with local_server(tmp_path, l1_bytes=1 << 20, limits=limits()) as server:
        engine = await pool(server, 5)
        hello = api.Hello(identity=replace(IDENTITY, stored_form=form))
        space = api.SpaceRef((await engine.scheduler.handshake(hello)).space_base)
        begin = replace(beginning(engine, tokens(CHUNK)), space=space)
        asked = engine.scheduler.write_chunks(begin, sent(parts_of(everything(1))))
        assert await refused(asked) is Reason.GROUP_KIND_UNSUPPORTED


async def test_an_object_that_fits_nowhere_takes_nothing(tmp_path: Path) -> None:
    async with local_server(tmp_path, l1_bytes=1 << 20, limits=limits()) as server:
        engine = await pool(server, 6)
        full, *others = object_forms(groups(), CHUNK)
        forms = (full, *(replace_bytes(form, 1 << 48) for form in others))
        identity = replace(IDENTITY, model="huge")
        base = (await engine.scheduler.handshake(api.Hello(identity=identity))).space_base
        begin = WriteChunksRequest(engine.engine_id, api.SpaceRef(base), tokens(CHUNK), objects=forms)
        data = object_of(1, 0)
        huge = ChunkPart(0, 0, 1 << 48, zlib.crc32(bytes(MIB)), bytes(MIB), groups=0b10010)
        first = ChunkPart(0, 0, len(data), zlib.crc32(data), data, groups=1)
        results = await engine.scheduler.write_chunks(begin, sent([first, huge, replace(huge, offset=MIB)]))
        assert [(one.outcome.value, one.reason, one.groups) for one in results] == [("REFUSED", "OBJECT_TOO_LARGE", 1)]
        await nothing_left(server)


# ---- a client that is lied to ---------------------------------------------------------------------------------------


def part(chunk: int, bits: int, data: bytes) -> ChunkPart:
    return ChunkPart(chunk, 0, len(data), zlib.crc32(data), data, groups=bits)


async def taken(*answers: api.ReadChunksAnswer, by_groups: bool = True) -> dict[int, dict[int, bytes]]:
    async def messages() -> AsyncIterator[pb.ReadChunksResponse]:
        for answer in answers:
            yield pb.ReadChunksResponse.FromString(encode_read_response(answer).SerializeToString())

    return (await objects.collected(objects.checked(messages()), by_groups=by_groups))[0]


def said(*outcomes: tuple[ChunkOutcome, int]) -> tuple[ChunkResult, ...]:
    return tuple(ChunkResult(at, 1, outcome, groups=bits) for at, (outcome, bits) in enumerate(outcomes))


LOADED, TORN = ChunkOutcome.LOADED, ChunkOutcome.TORN


async def test_a_client_takes_what_its_results_say() -> None:
    parts = [part(0, 1, b"a"), part(1, 1, b"b"), part(1, 2, b"c")]
    assert await taken(*parts, said((LOADED, 1), (LOADED, 3))) == {0: {1: b"a"}, 1: {1: b"b", 2: b"c"}}
    assert await taken(*parts, said((TORN, 1), (TORN, 3))) == {}, "torn bytes are nobody's"
    assert await taken(part(1, 1, b"b"), said((LOADED, 0), (LOADED, 1))) == {0: {}, 1: {1: b"b"}}


@pytest.mark.parametrize(
    "answers",
    [
        (part(0, 1, b"a"), part(0, 1, b"b"), said((LOADED, 1))),
        (part(0, 1, b"a"), part(0, 3, b"b"), said((LOADED, 3))),
        (part(0, 0, b"a"), part(0, 2, b"b"), said((LOADED, 2))),
        (part(0, 1, b"a"), part(0, 0, b"b"), said((LOADED, 1))),
        (part(0, 1, b"a"), said((LOADED, 3))),
        (part(0, 1, b"a"), part(0, 2, b"b"), said((LOADED, 1))),
        (part(0, 1, b"a"), said((ChunkOutcome.MISSING, 1))),
        (part(1, 1, b"a"), said((LOADED, 1))),
        (part(1, 1, b"a"), part(0, 1, b"a"), said((LOADED, 1), (LOADED, 1))),
    ],
)
async def test_a_client_takes_nothing_else(answers: Sequence[api.ReadChunksAnswer]) -> None:
    with pytest.raises(Refusal) as refusal:
        await taken(*answers)
    assert refusal.value.reason is Reason.INTERNAL


async def test_a_client_that_knows_no_groups_takes_none() -> None:
    with pytest.raises(Refusal) as refusal:
        await taken(part(0, 1, b"a"), said((LOADED, 1)), by_groups=False)
    assert refusal.value.reason is Reason.INTERNAL


async def test_a_program_that_names_groups_of_no_object_is_told() -> None:
    with pytest.raises(ValueError, match="named are"):
        async for _ in objects.parts_of({0: {4: b"x"}}, object_forms(groups()[:2], CHUNK)):
            pass


def test_messages_of_before_are_as_they_were() -> None:
    """A client that knows no objects says nothing new."""
    begin = encode_write_begin(WriteChunksRequest("e" * 16, api.SpaceRef(b"b" * 16), tokens(CHUNK), 4, "1x1x4"))
    assert not begin.begin.objects
    before = ChunkPart(0, 0, 1, zlib.crc32(b"x"), b"x", "1x1x4")
    assert (
        encode_read_response(before).part.SerializeToString()
        == pb.ChunkPart(
            chunk=0, object_bytes=1, checksum=zlib.crc32(b"x"), data=b"x", order="1x1x4"
        ).SerializeToString()
    )
