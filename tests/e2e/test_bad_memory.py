# SPDX-License-Identifier: Apache-2.0
"""Shared memory that must not be opened: names that lead elsewhere, things that are no memory, other users' objects."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvgrpc import api
from kvgrpc.core.types import Role
from tests.e2e.harness import CHUNK, Engine, local_server, outcomes, tokens_of
from tests.e2e.probes import TINY, assert_serving, foreign_memory, nothing_changes, out_of_reach, refused
from tests.e2e.unprivileged import NOBODY
from tests.served import serving

EIGHT = tokens_of(1, 8 * CHUNK)
ROOT = os.geteuid() == 0
SHM = Path("/dev/shm")


def named(engine: Engine, *names: str, **changes: int) -> api.RegisterRequest:
    """The engine's registration with other memory behind it (a name for each tensor, the last one for the rest)."""
    request = engine.registration()
    pieces = request.layout.memory
    names = (*names, *[names[-1]] * (len(pieces) - len(names)))
    memory = tuple(replace(piece, name=name, **changes) for piece, name in zip(pieces, names, strict=True))
    return replace(request, layout=replace(request.layout, memory=memory))


@contextlib.contextmanager
def made(kind: str, target: Path) -> Iterator[str]:
    """Something under the folder of shared memory that is none, or not enough of it."""
    name = f"kvgrpc-test-{kind}-{secrets.token_hex(4)}"
    path = SHM / name
    match kind:
        case "symlink":
            path.symlink_to(target)
        case "dangling":
            path.symlink_to(target.with_name("nothing"))
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "short":
            path.write_bytes(target.read_bytes()[:-1])
        case "empty":
            path.touch()
        case _:
            pass
    try:
        yield name
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


KINDS = ("symlink", "dangling", "folder", "pipe", "short", "empty", "missing")


@pytest.mark.parametrize("kind", KINDS)
async def test_not_memory(tmp_path: Path, kind: str) -> None:
    """A link (also to the engine's own object), a folder, a pipe, an object that is too short or missing: MEMORY, with
    the field; the earlier registration stays in force."""
    async with local_server(tmp_path) as server:
        engine = await server.engine(kv=TINY)
        with made(kind, SHM / engine.memory_name) as name:
            second = kind == "short"
            bad = named(engine, engine.memory_name, name) if second else named(engine, name)
            where = f"memory[{int(second)}].shared.{'size_bytes' if kind in ('short', 'empty') else 'name'}"
            async with nothing_changes(server, engine):
                assert await refused(engine.worker.register(bad)) == ("INVALID_ARGUMENT", "MEMORY", where)
        assert outcomes(await engine.store(EIGHT, range(32))) == ["STORED"] * 8


NAMES = ["/kvgrpc", "a/b", "../dev/shm/x", "..", ".", "/etc/passwd", "x\0y", "", "n" * 256]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:16]))
async def test_not_a_name(tmp_path: Path, name: str) -> None:
    """A slash, a step up, a NUL, nothing, too much: refused before anything is opened."""
    async with local_server(tmp_path) as server:
        engine = await server.engine(kv=TINY)
        async with nothing_changes(server, engine):
            code, reason, where = await refused(engine.worker.register(named(engine, name)))
            assert (code, where) == ("INVALID_ARGUMENT", "memory[0].shared.name")
            assert reason in ("MEMORY", "INVALID_FIELD")
        assert outcomes(await engine.store(EIGHT, range(32))) == ["STORED"] * 8


async def test_memory_of_a_card(tmp_path: Path) -> None:
    """CUDA memory is in the protocol and answers UNIMPLEMENTED by name; a handle of another length is no handle."""
    async with local_server(tmp_path) as server:
        engine = await server.engine(kv=TINY)
        request = engine.registration()
        for handle, error in (
            (bytes(64), ("UNIMPLEMENTED", "CUDA_UNSUPPORTED", "memory[0].cuda")),
            (bytes(63), ("INVALID_ARGUMENT", "INVALID_FIELD", "memory[0].cuda.handle")),
        ):
            memory = tuple(api.CudaIpcMemory(handle, "GPU-0", 0, 1 << 30) for _ in request.layout.memory)
            bad = replace(request, layout=replace(request.layout, memory=memory))
            async with nothing_changes(server, engine):
                assert await refused(engine.worker.register(bad)) == error
        assert outcomes(await engine.store(EIGHT, range(32))) == ["STORED"] * 8


async def test_another_owners_object(tmp_path: Path) -> None:
    """An object of a user who is not allowed is refused and not written, also for a server that could open it."""
    allowed = frozenset({0 if ROOT else os.geteuid() + 1})
    async with local_server(tmp_path, allowed_uids=allowed) as server:
        engine = Engine(server, kv=TINY)
        engine.streams.append(await server.attach(engine.worker, engine.engine_id, Role.WORKER))
        with foreign_memory(NOBODY if ROOT else os.geteuid(), engine.image.size_bytes) as name:
            async with nothing_changes(server, engine):
                denied = ("PERMISSION_DENIED", "MEMORY_OWNER", "memory[0].shared.name")
                assert await refused(engine.worker.register(named(engine, name))) == denied
        if ROOT:
            answer = await engine.worker.register(engine.registration())
            engine.space = replace(engine.space, space_base=answer.space_base)
            assert outcomes(await engine.store(EIGHT, range(32))) == ["STORED"] * 8


async def test_server_of_another_user(tmp_path: Path) -> None:
    """A server that does not run as root: objects of others are refused whatever their mode, its own that it may not
    write too, and its own are taken."""
    async with contextlib.AsyncExitStack() as stack:
        served = stack.enter_context(serving(module="tests.e2e.unprivileged"))
        server = out_of_reach(served.address, stack)
        owner = NOBODY if ROOT else os.geteuid()
        engine = Engine(server, kv=TINY)
        engine.streams.append(await server.attach(engine.worker, engine.engine_id, Role.WORKER))
        engine.streams.append(await server.attach(engine.scheduler, engine.engine_id, Role.SCHEDULER))
        path = SHM / engine.memory_name
        where = "memory[0].shared.name"
        if ROOT:
            for mode in (0o600, 0o666):
                path.chmod(mode)
                denied = ("PERMISSION_DENIED", "MEMORY_OWNER", where)
                assert await refused(engine.worker.register(engine.registration())) == denied
        os.chown(path, owner, -1)
        path.chmod(0o400)
        if owner:
            assert await refused(engine.worker.register(engine.registration())) == ("INVALID_ARGUMENT", "MEMORY", where)
        assert engine.image.untouched()
        path.chmod(0o600)
        answer = await engine.worker.register(engine.registration())
        engine.space = replace(engine.space, space_base=answer.space_base)
        assert outcomes(await engine.store(EIGHT, range(32))) == ["STORED"] * 8
        found = await engine.lookup(EIGHT)
        assert outcomes(await engine.retrieve(found, range(100, 132))) == ["LOADED"] * 8
        assert engine.image.wrong_tokens(range(100, 132)) == [] and engine.image.untouched(range(100, 132))
        await assert_serving(server)
