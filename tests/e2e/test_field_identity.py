# SPDX-License-Identifier: Apache-2.0
"""Data of one adapter, revision, layout or tenant is never found under another."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvgrpc import api
from kvgrpc.core.types import SpaceIdentity, SpaceRef, TokenRange
from tests.e2e.harness import CHUNK, Engine, LocalServer, local_server, outcomes, tokens_of
from tests.e2e.probes import nothing_changes, refused
from tests.kvdata import ARRANGEMENTS, MHA, Arrangement

SEPARATORS = ["|", "/", "@", "\0"]
EIGHT = tokens_of(1, 8 * CHUNK)


async def space_of(engine: Engine, identity: SpaceIdentity, lora: str = "", salt: str = "") -> SpaceRef:
    """Names a space as a client without memory does."""
    info = await engine.scheduler.handshake(api.Hello(identity=identity))
    return SpaceRef(info.space_base, lora, salt)


async def looker_of(server: LocalServer) -> Engine:
    """An engine that looks up in any space: one with memory may only ask for its own."""
    engine = await server.engine()
    await engine.worker.unregister(engine.engine_id)
    return engine


async def stored_identity(engine: Engine) -> SpaceIdentity:
    """The engine's identity with the stored form that the server computed."""
    answer = await engine.worker.register(engine.registration())
    return replace(engine.identity, stored_form=answer.stored_form)


# ---- 2: adapters ----------------------------------------------------------------------------------------------------


async def test_adapters_do_not_share(tmp_path: Path) -> None:
    """Field report 2: stored under a@v1, looked up under a@v1, a@v2, b@v1, no adapter, and a salt that reads a@v1."""
    async with local_server(tmp_path) as server:
        engine = await server.engine(lora="a@v1")
        await engine.store(EIGHT, range(32))
        base = engine.space.space_base
        wanted = [("a@v1", "", 8), ("a@v2", "", 0), ("b@v1", "", 0), ("", "", 0), ("", "a@v1", 0), ("a@v1", "a@v1", 0)]
        for lora, salt, hits in wanted:
            assert await engine.hits(EIGHT, space=SpaceRef(base, lora, salt)) == hits, (lora, salt)


@pytest.mark.parametrize("mark", SEPARATORS, ids=["pipe", "slash", "at", "nul"])
async def test_no_field_imitates_another(tmp_path: Path, mark: str) -> None:
    """Field report 2: the same characters cut differently into model, revision, dtype, algorithm, adapter and salt."""
    async with local_server(tmp_path) as server:
        engine = await server.engine()
        identity = await stored_identity(engine)
        spaces: dict[tuple[str, ...], SpaceRef] = {}
        for ends in itertools.combinations(range(1, 9), 4):
            cut = tuple(mark.join("abcdefghi"[low:high]) for low, high in itertools.pairwise((0, *ends, 9)))
            model, revision, kv_dtype, lora, salt = cut
            other = replace(identity, model=model, revision=revision, kv_dtype=kv_dtype)
            spaces[cut] = await space_of(engine, other, lora, salt)
        assert len({mark.join(cut) for cut in spaces}) == 1 and len(spaces) == 70
        assert len({(ref.space_base, ref.lora, ref.cache_salt) for ref in spaces.values()}) == len(spaces)
        names = list(spaces)
        home = names[len(names) // 2]
        owner = await server.engine(
            model=home[0], revision=home[1], kv_dtype=home[2], lora=home[3], salt=home[4], num_blocks=32
        )
        assert outcomes(await owner.store(EIGHT, range(32))) == ["STORED"] * 8
        looker = await looker_of(server)
        found = {cut: await looker.hits(EIGHT, space=ref) for cut, ref in spaces.items()}
        assert {cut for cut, hits in found.items() if hits} == {home}
        assert found[home] == 8


@pytest.mark.parametrize(
    "change",
    [
        {"model": "test-model "},
        {"revision": "main"},
        {"kv_dtype": "float16"},
        {"kv_world_size": 2},
        {"hash_algorithm": "sha256-u32le "},
        {"stored_form": "token-major:4:8:1"},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_every_part_of_the_identity_counts(tmp_path: Path, change: dict[str, Any]) -> None:
    """Field report 2: one field different, whichever it is, is another space."""
    async with local_server(tmp_path) as server:
        engine = await server.engine()
        await engine.store(EIGHT, range(32))
        identity = await stored_identity(engine)
        looker = await looker_of(server)
        assert await looker.hits(EIGHT, space=await space_of(engine, identity)) == 8
        other = await space_of(engine, replace(identity, **change))
        content = EIGHT if "hash_algorithm" not in change else api.Hashes([bytes(32)] * 8, 8 * CHUNK)
        assert await looker.hits(content, space=other) == 0


# ---- 3: revisions ---------------------------------------------------------------------------------------------------


async def test_revisions_do_not_share(tmp_path: Path) -> None:
    """Field report 3: the same model name with weights f1 and f2: 0 hits under f2, 8 under f1."""
    async with local_server(tmp_path) as server:
        first, second = await server.engine(revision="f1"), await server.engine(revision="f2")
        unnamed = await server.engine(revision="")
        await first.store(EIGHT, range(32))
        assert [await engine.hits(EIGHT) for engine in (second, first, unnamed)] == [0, 8, 0]


# ---- 4: layouts -----------------------------------------------------------------------------------------------------

OPAQUE_16 = Arrangement("BLPTHD", "LPTHD", api.BlockForm.OPAQUE)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=str)
async def test_other_layout_is_not_found(tmp_path: Path, arrangement: Arrangement) -> None:
    """Field report 4: stored under one layout, looked up under every other: 0, or equal bytes where both declare
    themselves token-major."""
    async with local_server(tmp_path, l1_bytes=1 << 20) as server:
        writer = await server.engine(arrangement=arrangement, num_blocks=64)
        await writer.store(EIGHT, range(32))
        for other in ARRANGEMENTS:
            reader = await server.engine(arrangement=other, num_blocks=64)
            answer = await reader.lookup(EIGHT)
            shared = other.form is arrangement.form is api.BlockForm.TOKEN_MAJOR or other == arrangement
            assert answer.status.hit_tokens == (8 * CHUNK if shared else 0), str(other)
            if shared:
                await reader.retrieve(answer, range(63, 31, -1))
                assert reader.image.wrong_tokens(range(63, 31, -1)) == []


async def test_opaque_blocks_of_another_size_or_backend_are_not_found(tmp_path: Path) -> None:
    """Field report 4: opaque blocks are shared by engines of equal backend, layout and block size only."""
    async with local_server(tmp_path) as server:
        engine = await server.engine(arrangement=OPAQUE_16)
        await engine.store(EIGHT, range(32))
        assert await (await server.engine(arrangement=OPAQUE_16)).hits(EIGHT) == 8
        assert await (await server.engine(arrangement=OPAQUE_16, block_size=8)).hits(EIGHT) == 0
        request = engine.registration()
        group = request.layout.groups[0]
        for change in ({"backend": "OTHER"}, {"layout": "OTHER"}):
            layout = replace(request.layout, groups=(replace(group, **change),))
            answer = await engine.worker.register(replace(request, layout=layout))
            assert answer.space_base != engine.space.space_base
            assert await engine.hits(EIGHT, space=SpaceRef(answer.space_base)) == 0


def changed_layout(layout: api.Layout, change: dict[str, Any]) -> api.Layout:
    """``change`` names fields of the first entry of runs, of the group, or of the first piece of memory."""
    group, memory = layout.groups[0], layout.memory[0]
    runs = replace(group.runs[0], **{k: v for k, v in change.items() if k in api.Runs.__slots__})
    fields = {k: v for k, v in change.items() if k in api.KvGroup.__slots__}
    piece = replace(memory, **{k: v for k, v in change.items() if k in api.SharedMemory.__slots__})  # type: ignore[arg-type]
    group = replace(group, **{"runs": (runs, *group.runs[1:]), **fields})
    return api.Layout((piece, *layout.memory[1:]), (group,))


BAD_LAYOUTS: list[tuple[str, dict[str, Any], str]] = [
    ("blocks overlap", {"block_stride_bytes": 255}, "groups[0].runs[0].block_stride_bytes"),
    ("planes overlap", {"plane_stride_bytes": 64}, "groups[0].runs[0]"),
    ("layers overlap", {"layers": 2, "layer_stride_bytes": 64}, "groups[0].runs[0]"),
    ("stride beyond the memory", {"block_stride_bytes": 1 << 20}, "groups[0].runs[0]"),
    ("more blocks than memory", {"num_blocks": 65}, "groups[0].runs[0]"),
    ("starts too late", {"base_bytes": 256}, "groups[0].runs[0]"),
    ("address beyond 64 bits", {"base_bytes": 1 << 63}, "groups[0].runs[0].base_bytes"),
    ("no such memory", {"memory_index": 3}, "groups[0].runs[0].memory_index"),
    ("empty runs", {"run_bytes": 0}, "groups[0].runs[0].run_bytes"),
    ("no layers", {"layers": 0}, "groups[0].runs[0].layers"),
    ("no planes", {"planes": 0}, "groups[0].runs[0].planes"),
    ("tokens do not fill a run", {"run_bytes": 255}, "groups[0].runs[0].run_bytes"),
    ("planes differ", {"planes": 1}, "groups[0].runs[1].planes"),
    ("block does not divide the chunk", {"block_size": 3}, "groups[0].block_size"),
    ("no tokens in a block", {"block_size": 0}, "groups[0].block_size"),
    ("block larger than a chunk", {"block_size": 32}, "groups[0].block_size"),
    ("no blocks", {"num_blocks": 0}, "groups[0].num_blocks"),
    ("token-major without heads", {"heads": 0}, "groups[0].heads"),
    ("token-major without a head size", {"head_dim": 0}, "groups[0].head_dim"),
    ("layout name with a separator", {"layout": "A:B"}, "groups[0].layout"),
    ("empty memory", {"size_bytes": 0}, "memory[0].size_bytes"),
]


@pytest.mark.parametrize(("change", "field"), [bad[1:] for bad in BAD_LAYOUTS], ids=[bad[0] for bad in BAD_LAYOUTS])
async def test_impossible_layout_is_refused(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    """Field report 4: a layout whose strides, sizes or memory do not fit is refused by name; nothing is registered."""
    async with local_server(tmp_path, l1_bytes=1 << 20) as server:
        engine = await server.engine(num_blocks=64)
        await engine.worker.unregister(engine.engine_id)
        request = engine.registration()
        bad = replace(request, layout=changed_layout(request.layout, change))
        async with nothing_changes(server, engine):
            assert await refused(engine.worker.register(bad)) == ("INVALID_ARGUMENT", "LAYOUT", field)
            code = await refused(engine.worker.store(engine.store_request(EIGHT, range(32))))
            assert code[:2] == ("FAILED_PRECONDITION", "NOT_REGISTERED")
        await engine.worker.register(request)
        assert outcomes(await engine.store(EIGHT, range(32))) == ["STORED"] * 8


async def test_undeclared_layout_is_refused(tmp_path: Path) -> None:
    """Field report 4: no group, no runs, a window without a length, a form that the layout does not have."""
    async with local_server(tmp_path, l1_bytes=1 << 20) as server:
        engine = await server.engine(num_blocks=64)
        await engine.worker.unregister(engine.engine_id)
        request = engine.registration()
        group = request.layout.groups[0]
        memory = request.layout.memory
        cases: list[tuple[api.RegisterRequest, tuple[str, str, str]]] = [
            (replace(request, layout=api.Layout(memory, ())), ("INVALID_ARGUMENT", "INVALID_FIELD", "groups")),
            (
                replace(request, layout=api.Layout(memory, (replace(group, runs=()),))),
                ("INVALID_ARGUMENT", "INVALID_FIELD", "groups[0].runs"),
            ),
            (
                replace(request, layout=api.Layout(memory, (replace(group, kind=api.GroupKind.SLIDING_WINDOW),))),
                ("INVALID_ARGUMENT", "LAYOUT", "groups[0].window_tokens"),
            ),
            (
                replace(request, identity=replace(engine.identity, stored_form="token-major:8:128:2")),
                ("INVALID_ARGUMENT", "STORED_FORM_MISMATCH", "identity.stored_form"),
            ),
        ]
        async with nothing_changes(server, engine):
            for bad, error in cases:
                assert await refused(engine.worker.register(bad)) == error
        await engine.worker.register(request)
        assert outcomes(await engine.store(EIGHT, range(32))) == ["STORED"] * 8


async def test_other_number_of_layers_is_refused(tmp_path: Path) -> None:
    """Field report 4: equal heads and planes, but another number of layers: its objects would have another length."""
    async with local_server(tmp_path) as server:
        first = await server.engine()
        await first.store(EIGHT, range(32))
        other = await server.engine(revision="other")
        second = Engine(server, kv=replace(MHA, layers=4))
        second.worker, second.engine_id = other.worker, other.engine_id
        await other.worker.unregister(other.engine_id)
        async with nothing_changes(server, first, second):
            code = await refused(other.worker.register(second.registration()))
            assert code == ("INVALID_ARGUMENT", "GEOMETRY_MISMATCH", "groups")


# ---- 5: tenants -----------------------------------------------------------------------------------------------------


async def test_tenants_do_not_share(tmp_path: Path) -> None:
    """Field report 5: stored with salt t1; Lookup with t1, t2 and none: 8, 0, 0. Retrieve, Query and Free know a job
    and no salt, so their nearest call is another engine's job: NOT_FOUND, and nothing is written or released."""
    salt = "tenant-one-salt"
    async with local_server(tmp_path) as server:
        engine, stranger = await server.engine(salt=salt), await server.engine(salt="t2")
        await engine.store(EIGHT, range(32))
        base = engine.space.space_base
        for cut in (salt, "t2", "", salt + " ", salt[:-1], salt.upper()):
            assert await engine.hits(EIGHT, space=SpaceRef(base, "", cut)) == (8 if cut == salt else 0), cut
            assert await stranger.hits(EIGHT, space=SpaceRef(base, "", cut)) == (8 if cut == salt else 0), cut
        answer = await engine.lookup(EIGHT, request_id="of the first engine")
        stranger.image.memory[:] = 0xA5
        not_found = ("NOT_FOUND", "JOB_UNKNOWN", "job_id")
        async with nothing_changes(server, engine, stranger):
            call = stranger.retrieve_request(answer.job_id, range(32))
            assert await refused(stranger.worker.retrieve(call)) == not_found
            assert await refused(stranger.free(answer)) == not_found
            assert await refused(stranger.scheduler.query(stranger.engine_id, answer.job_id)) == not_found
            assert await refused(stranger.scheduler.free(api.FreeRequest(engine.engine_id, answer.job_id, 1))) == (
                "NOT_FOUND",
                "ENGINE_UNKNOWN",
                "engine_id",
            )
            assert (await stranger.scheduler.end_request(stranger.engine_id, "of the first engine")).ended_jobs == 0
        assert server.counts()[0] == 8
        # the positive control: the job's own engine loads and frees
        target = range(100, 116)
        assert outcomes(await engine.retrieve(answer, target, range=TokenRange(0, 4 * CHUNK))) == ["LOADED"] * 4
        assert engine.image.wrong_tokens(target) == [] and engine.image.untouched(target)
        assert await engine.free(answer) == 4
        admin = await server.admin()
        seen = f"{await admin.get_status()} {await admin.list_spaces()} {await admin.list_engines()}"
        assert salt not in seen and engine.engine_id not in seen
