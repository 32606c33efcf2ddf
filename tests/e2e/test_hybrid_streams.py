# SPDX-License-Identifier: Apache-2.0
"""ReadChunks and WriteChunks of models whose chunks are several objects, each for the groups that need the same: what
comes as bytes is what engines load, in other processes; nothing that lacks a group is a hit."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvgrpc import api
from kvgrpc.api import ChunkPart, ReadChunksRequest, WriteChunksRequest
from kvgrpc.client import Client, object_forms
from kvgrpc.core.errors import Reason
from kvgrpc.core.geometry import needs_of
from kvgrpc.core.keys import OWN_HASH_ALGORITHM
from kvgrpc.core.types import MIB, ChunkOutcome, ChunkResult, Reader, Role, SpaceIdentity, TokenRange
from kvgrpc.transfer.layout import check_layout, stored_form
from tests.e2e.disk_server import DiskServer
from tests.e2e.harness import local_server, outcomes
from tests.e2e.hybrid_server import elsewhere
from tests.e2e.hybrids import CHUNK, CHUNKS, FILL, FLAGS, LAYERS, SCALE, first_stored, groups, hybrid_engine, tokens
from tests.e2e.test_hybrid import Pool, limits, pool
from tests.e2e.written import nothing_left, refused
from tests.pooled import coded

PARTS = {0b00001: (0, 4), 0b10010: (1, 4), 0b00100: (2, 1), 0b01000: (3, 2)}
"""By the groups (bits) of an object: its first group, and how many of the chunk's last blocks it holds."""
ALL = [*PARTS]
IDENTITY = SpaceIdentity("hybrid", "", "bfloat16", 1, OWN_HASH_ALGORITHM, stored_form(groups(SCALE)))


def object_of(bits: int, chunk: int, scale: int = 1, prompt: int = 0) -> bytes:
    """By the test's own arithmetic: group by group, layer by layer, block by block."""
    runs: list[bytes] = []
    for number, group in enumerate(groups(scale)):
        if bits >> number & 1:
            a_chunk, tail = CHUNK // group.block_size, PARTS[bits][1]
            places = range((chunk + 1) * a_chunk - tail, (chunk + 1) * a_chunk)
            length = group.runs[0].run_bytes
            runs += [coded(number, la, at, length, prompt).tobytes() for la in range(LAYERS) for at in places]
    return b"".join(runs)


def needed(hit: int, scale: int = 1, prompt: int = 0) -> dict[int, dict[int, bytes]]:
    """The objects that a hit of so many chunks needs."""
    firsts = {bits: first_stored(hit * CHUNK)[group] // CHUNK for bits, (group, _) in PARTS.items()}
    return {
        at: {bits: object_of(bits, at, scale, prompt) for bits in ALL if at >= firsts[bits]} for at in range(hit)
    }  # fmt: skip


def everything(chunks: int, scale: int = 1, prompt: int = 0) -> dict[int, dict[int, bytes]]:
    return {at: {bits: object_of(bits, at, scale, prompt) for bits in ALL} for at in range(chunks)}


def beginning(engine: Pool, content: api.Content) -> WriteChunksRequest:
    return WriteChunksRequest(engine.engine_id, engine.space, content, objects=object_forms(groups(), CHUNK))


def test_forms_are_those_of_the_layout() -> None:
    forms = object_forms(groups(), CHUNK)
    assert [(form.groups, form.object_bytes) for form in forms] == [(bits, len(object_of(bits, 0))) for bits in ALL]
    assert [form.order for form in forms] == ["2x1x256", "2x1x384+2x1x256", "2x1x512", "2x1x128"]
    assert [form.groups for form in object_forms(groups()[:1], CHUNK)] == [0], "one object of all groups"


def test_a_stored_form_says_what_its_groups_need() -> None:
    """As it is read where no layout is known."""
    layout = api.Layout((api.SharedMemory("pool", 0, MIB),), groups())
    geometry = check_layout(layout, CHUNK)
    assert needs_of(stored_form(groups()), CHUNK) == [group.need for group in geometry.groups]


# ---- other processes ------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskServer]:
    with contextlib.closing(DiskServer(tmp_path)) as one:
        yield one


class Mover:
    """A client without memory, for engines of ``hybrids``."""

    def __init__(self, client: Client) -> None:
        self._client, self._engine_id = client, secrets.token_hex(16)
        self._session = client.attach(self._engine_id, Role.SCHEDULER, secrets.token_bytes(16))
        next(self._session)
        self._space = api.SpaceRef(client.handshake(api.Hello(identity=IDENTITY)).space_base)
        self._number = 0

    def write(self, prompt: int, found: dict[int, dict[int, bytes]]) -> list[tuple[str, int]]:
        content, forms = tokens(CHUNKS * CHUNK, prompt), object_forms(groups(SCALE), CHUNK)
        request = WriteChunksRequest(self._engine_id, self._space, content, objects=forms)
        results = self._client.write_groups(request, found)
        return [(one.outcome.value, one.groups) for one in results for _ in range(one.count)]

    def read(self, prompt: int, chunks: int = CHUNKS) -> dict[int, dict[int, bytes]]:
        self._number += 1
        asked = api.LookupRequest(self._engine_id, f"r{self._number}", self._space, tokens(chunks * CHUNK, prompt))
        answer = self._client.lookup(asked)
        assert answer.status.hit_tokens == chunks * CHUNK
        whole = TokenRange(0, chunks * CHUNK)
        found, results = self._client.read_groups(
            ReadChunksRequest(self._engine_id, answer.job_id, Reader(0, 0), whole)
        )
        assert outcomes(results) == ["LOADED"] * chunks
        return found


@contextlib.contextmanager
def mover(server: DiskServer) -> Iterator[Mover]:
    with Client(server.address, "mover") as client:
        yield Mover(client)


def test_what_is_written_is_loaded_by_engines_of_other_processes(disk: DiskServer) -> None:
    """In objects of several parts of a stream; and again from the disk, after a kill. One prompt has every object, one
    those of its end only, one lacks the window of its last chunk, one a state."""
    no_window, no_state = everything(CHUNKS, SCALE, 2), everything(CHUNKS, SCALE, 3)
    del no_window[CHUNKS - 1][0b10010], no_state[CHUNKS - 2][0b00100]
    disk.start(*FLAGS)
    with mover(disk) as one:
        assert one.write(0, everything(CHUNKS, SCALE, 0)) == [("STORED", 0b11111)] * CHUNKS
        ends = [("STORED", 1)] * (CHUNKS - 2) + [("STORED", 0b10011), ("STORED", 0b11111)]
        assert one.write(1, needed(CHUNKS, SCALE, 1)) == ends
        assert one.write(2, no_window)[-1] == ("STORED", 0b01101)
        assert one.write(3, no_state)[-2] == ("STORED", 0b11011)
        assert one.write(0, everything(CHUNKS, SCALE, 0)) == [("RESIDENT", 0b11111)] * CHUNKS
    hits = [CHUNKS, CHUNKS, CHUNKS - 1, CHUNKS]
    assert elsewhere(disk, 2, 0, 1, 2, 3) == hits
    with hybrid_engine(disk.address, 3) as engine:
        assert [engine.load(prompt, CHUNKS - 1) for prompt in range(4)] == [CHUNKS - 1, 0, CHUNKS - 1, CHUNKS - 2]
    disk.wait_written(4 * CHUNKS * 4 - 2 - (CHUNKS - 2) * 3 - 2, 60)
    disk.kill()
    disk.start(*FLAGS)
    assert elsewhere(disk, 4, 0, 1, 2, 3) == hits


def test_what_an_engine_stored_moves_to_another_server(disk: DiskServer, tmp_path: Path) -> None:
    """What a hit needs, and no more: there it is a hit of that length alone."""
    with contextlib.closing(DiskServer(tmp_path, "t", disk=tmp_path / "other")) as there:
        disk.start(*FLAGS)
        there.start(*FLAGS)
        with hybrid_engine(disk.address, 5) as engine, mover(disk) as one, mover(there) as other:
            engine.store(1)
            found = one.read(1)
            assert found == needed(CHUNKS, SCALE, 1)
            assert one.read(1, 2) == needed(2, SCALE, 1)
            other.write(1, found)
            assert other.read(1) == found
        assert elsewhere(there, 6, 1) == [CHUNKS]
        with hybrid_engine(there.address, 7) as engine:
            assert [engine.load(1, chunks) for chunks in (1, 2, 3, 4)] == [0, 0, 0, 4]


# ---- what a stream has ----------------------------------------------------------------------------------------------


async def test_parts_of_a_hit_say_what_they_are(tmp_path: Path) -> None:
    async with local_server(tmp_path, l1_bytes=1 << 20, limits=limits()) as server:
        writer = await pool(server, 1)
        await writer.keep(tokens(3 * CHUNK), writer.take(3 * CHUNK))
        job = await writer.lookup(tokens(3 * CHUNK))
        asked = ReadChunksRequest(writer.engine_id, job.job_id, Reader(0, 0), TokenRange(CHUNK, 3 * CHUNK), True)
        answers = [one async for one in writer.scheduler.read_chunks(asked)]
        said = [(one.chunk, one.groups, one.order, one.data) for one in answers if isinstance(one, ChunkPart)]
        orders = {form.groups: form.order for form in object_forms(groups(), CHUNK)}
        places = [(1, 0b00001), (1, 0b10010), *((2, bits) for bits in ALL)]
        assert said == [(at, bits, orders[bits], object_of(bits, at)) for at, bits in places]
        loaded = ChunkOutcome.LOADED
        assert answers[-1] == (ChunkResult(1, 1, loaded, "", 0b10011), ChunkResult(2, 1, loaded, "", 0b11111))
        assert server.book.counts().pins == 1, "chunk 0 was not read"


async def test_a_hit_that_lost_a_group_is_not_begun(tmp_path: Path) -> None:
    """Nobody pinned it, and the state at its end has gone."""
    async with local_server(tmp_path, l1_bytes=1 << 20, limits=replace(limits(), pin_share=0.0)) as server:
        writer = await pool(server, 1)
        await writer.keep(tokens(3 * CHUNK), writer.take(3 * CHUNK))
        job = await writer.lookup(tokens(3 * CHUNK))
        assert (job.status.hit_tokens, job.status.pinned) == (3 * CHUNK, False)
        index = server.book.index
        table = index.space(writer.space).table
        (state,) = [chunk for key, chunk in table.chunks.items() if key[-1] == 2 and len(key) > 64][-1:]
        index.free_ready(state)
        asked = ReadChunksRequest(writer.engine_id, job.job_id, Reader(0, 0), TokenRange(0, 3 * CHUNK))
        found, results = await writer.scheduler.read_groups(asked)
        assert (found, outcomes(results)) == ({}, ["FAILED", "FAILED", "MISSING"])
        assert await writer.hits(tokens(3 * CHUNK)) == 2


async def test_who_does_not_ask_by_groups_is_refused(tmp_path: Path) -> None:
    async with local_server(tmp_path, l1_bytes=1 << 20, limits=limits()) as server:
        writer = await pool(server, 1)
        await writer.keep(tokens(CHUNK), writer.take(CHUNK))
        job = await writer.lookup(tokens(CHUNK))
        asked = ReadChunksRequest(writer.engine_id, job.job_id, Reader(0, 0), TokenRange(0, CHUNK))
        assert await refused(writer.scheduler.read_objects(asked)) is Reason.GROUP_KIND_UNSUPPORTED
        alone = WriteChunksRequest(writer.engine_id, writer.space, tokens(CHUNK, 1), 2048, "2x1x256")
        assert await refused(writer.scheduler.write_objects(alone, {0: bytes(2048)})) is Reason.GROUP_KIND_UNSUPPORTED
        await nothing_left(server)


async def test_a_written_prompt_is_loaded_whole_or_not_at_all(tmp_path: Path) -> None:
    async with local_server(tmp_path, l1_bytes=1 << 20, limits=limits()) as server:
        reader = await pool(server, 2)
        await reader.scheduler.write_groups(beginning(reader, tokens(3 * CHUNK)), needed(3))
        assert await reader.hits(tokens(2 * CHUNK)) == 0
        job = await reader.lookup(tokens(3 * CHUNK))
        ids = reader.take(3 * CHUNK)
        assert outcomes(await reader.load(job.job_id, ids)) == ["LOADED"] * 3
        wanted = np.full_like(reader.pages, FILL)
        reader.put(ids, wanted, first_stored(3 * CHUNK))
        assert np.array_equal(reader.pages, wanted)
        await nothing_left(server)
