# SPDX-License-Identifier: Apache-2.0
"""Keys follow from content alone: not from a process, its hash seed, its Python, or the client that asks."""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvgrpc import api
from kvgrpc.core.types import MIB, ObjectName, TokenRange
from kvgrpc.tiers.memory import MemoryTier
from tests.e2e.harness import CHUNK, local_server, outcomes, tokens_of
from tests.e2e.probes import found, out_of_reach, refused
from tests.kvdata import Kv
from tests.served import serving

ROOT = Path(__file__).resolve().parents[2]
EIGHT = tokens_of(1, 8 * CHUNK)
LLAMA = Kv(layers=1, planes=2, heads=8, head_dim=128)
"""Stored form token-major:8:128:2, the one of the golden values."""

GOLDEN = {
    "space_base": "7d94031b02eeded25d00b1c74950db13",
    "space": "1f44d8ffc10af07292fa17e27bdc681e353b8d91cdbaf7baabf25d78936672c9",
    "lora": "83ed041c84afbc47420f7c85d92abfba72e6d3464762c4b26d8c075ba4e3450e",
    "salt": "c5e9d36cddfe154afbe347532a0e971353719005a585264c5c58449b87445046",
    "first": "f9f8970a046a800ddfc6fd38dc5572b5f0934a84be94a46833fe919304549d18",
    "second": "7d446f904bf52bf8cdbf06767adddc68a6682eaeda50e3eac759a3691d702720",
    "extreme": "7b6306a52969b30864e1f1bf6bd3d16db5598c23128d66e007686539e81dbbc1",
    "object": "1b74cd656a78158027f0d37f022fec50c28ecd2af471cc62e68ecc2f8ec6c4e2",
}
"""For model llama, revision r1, bfloat16, one KV rank, chunks of 16 tokens; as in docs/protocol.md."""

PROGRAM = """
import json, struct, sys
sys.path.insert(0, sys.argv[1])
from kvgrpc.core.keys import chunk_keys, object_name, space_base, space_digest
from kvgrpc.core.types import SpaceIdentity, SpaceRef
base = space_base(SpaceIdentity("llama", "r1", "bfloat16", 1, "sha256-u32le", "token-major:8:128:2"), 16)
plain = space_digest(SpaceRef(base))
first, second = chunk_keys(plain, struct.pack("<32I", *range(32)), 16)
print(json.dumps({
    "space_base": base.hex(),
    "space": plain.hex(),
    "lora": space_digest(SpaceRef(base, lora="a@v1")).hex(),
    "salt": space_digest(SpaceRef(base, cache_salt="a@v1")).hex(),
    "first": first.hex(),
    "second": second.hex(),
    "extreme": chunk_keys(plain, struct.pack("<16I", 0, 2**31 - 1, 2**32 - 1, *[7] * 13), 16)[0].hex(),
    "object": object_name(plain, 0, first, 0, "1x2x2048"),
}))
"""


def interpreters() -> list[str]:
    """This Python, and other ones that this machine has and that are new enough."""
    beside = sorted(Path(sys.base_prefix).parent.glob("3.*/bin/python3"))
    on_path = [Path(folder) / f"python3.{minor}" for folder in os.get_exec_path() for minor in range(10, 15)]
    versions = {sys.version_info[:2]: sys.executable}
    for path in (*beside, *on_path):
        with contextlib.suppress(OSError, ValueError):
            say = [str(path), "-c", "import sys; print(*sys.version_info[:2])"]
            major, minor = map(int, subprocess.run(say, capture_output=True, text=True, check=False).stdout.split())
            if (major, minor) >= (3, 10):
                versions.setdefault((major, minor), str(path))
    return list(versions.values())


@pytest.mark.parametrize("seed", ["0", "4294967295"])
def test_golden_values_on_every_python(seed: str) -> None:
    """Field report 26: the same digests with other hash seeds and on every Python that is here, without any package."""
    for python in interpreters():
        command = [python, "-S", "-c", PROGRAM, str(ROOT)]
        environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == GOLDEN, python


async def test_the_server_uses_the_golden_values(tmp_path: Path) -> None:
    """Field report 26: space_base and the name of an object in a lower tier, as a running server makes them."""
    tier = MemoryTier()
    async with local_server(tmp_path, tier=tier) as server:
        engine = await server.engine(kv=LLAMA, model="llama", revision="r1", num_blocks=8)
        assert engine.space.space_base.hex() == GOLDEN["space_base"]
        engine.image.write(range(4))
        data = engine.image.object_bytes(range(4))
        await tier.write(ObjectName(GOLDEN["object"], len(data)), [memoryview(data)])
        tokens = api.Tokens(array.array("I", range(16)).tobytes())
        job_id, status = await found(engine, tokens)
        assert status.hit_chunks_by_tier == {"memory": 1}
        engine.image.memory[:] = 0xA5
        loaded = await engine.worker.retrieve(engine.retrieve_request(job_id, range(4, 8)))
        assert outcomes(loaded) == ["LOADED"]
        assert engine.image.wrong_tokens(range(4, 8)) == [] and engine.image.untouched(range(4, 8))


@pytest.mark.parametrize("edge", [0, 2**31 - 1, 2**31, 2**32 - 1])
async def test_every_token_id_is_taken(tmp_path: Path, edge: int) -> None:
    """Field report 26: token ids 0, 2**31 - 1 and 2**32 - 1 are ids like any other, unlike their neighbours."""
    async with local_server(tmp_path) as server:
        engine = await server.engine()

        def prompt(at: int, value: int) -> api.Tokens:
            ids = array.array("I", [5] * 32)
            ids[at] = value % 2**32
            return api.Tokens(ids.tobytes())

        for at in (0, 15, 16, 31):
            assert set(outcomes(await engine.store(prompt(at, edge), range(8)))) <= {"STORED", "RESIDENT"}
            assert await engine.hits(prompt(at, edge)) == 2
            for near in (edge - 1, edge + 1, edge ^ 2**31):
                assert await engine.hits(prompt(at, near)) == at // CHUNK


@pytest.mark.timeout(180)
async def test_processes_with_other_hash_seeds_find_each_others_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field report 26: three servers and three clients, all with different hash seeds: 8 hits in all nine cases."""
    seeds = ("0", "1", "random")
    async with contextlib.AsyncExitStack() as stack:
        addresses: list[str] = []
        form = ""
        for seed in seeds:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
            served = stack.enter_context(serving("--chunk-tokens", str(CHUNK), "--l1-size", str(16 * MIB)))
            engine = await out_of_reach(served.address, stack).engine(num_blocks=32)
            assert outcomes(await engine.store(EIGHT, range(32))) == ["STORED"] * 8
            form = (await engine.worker.register(engine.registration())).stored_form
            addresses.append(served.address)

        async def look(seed: str) -> list[int]:
            environ = {**os.environ, "PYTHONHASHSEED": seed}
            command = (sys.executable, "-m", "tests.e2e.elsewhere", form, str(8 * CHUNK + 7), *addresses)
            process = await asyncio.create_subprocess_exec(
                *command, env=environ, cwd=ROOT, stdout=asyncio.subprocess.PIPE
            )
            said, _ = await process.communicate()
            return json.loads(said)

        assert await asyncio.gather(*map(look, ("2", "3", "random"))) == [[8, 8, 8]] * 3


async def test_hashes_of_an_engine_are_found_under_its_algorithm_only(tmp_path: Path) -> None:
    """Field report 26: hashes that an engine brings are used as they are; the kind of content must fit the space."""
    async with local_server(tmp_path) as server:
        ours, theirs = await server.engine(), await server.engine(hash_algorithm="engine-sha256")
        hashes = api.Hashes([bytes([at] * 32) for at in range(8)], 8 * CHUNK + 3)
        theirs.image.write(range(32))
        assert outcomes(await theirs.worker.store(theirs.store_request(hashes, range(32)))) == ["STORED"] * 8
        assert await theirs.hits(hashes) == 8
        assert await theirs.hits(replace(hashes, hashes=[bytes([9] * 32), *hashes.hashes[1:]])) == 0
        kind = ("INVALID_ARGUMENT", "CONTENT_KIND", "content")
        assert await refused(ours.lookup(hashes)) == kind
        assert await refused(theirs.lookup(EIGHT)) == kind
        assert await ours.hits(EIGHT) == 0


async def test_hashes_may_begin_later_in_the_prompt(tmp_path: Path) -> None:
    """Field report 26: a Store names the chunk that its first hash belongs to; the bytes are those of that place."""
    async with local_server(tmp_path) as server:
        engine = await server.engine(hash_algorithm="engine-sha256")
        keys = [bytes([at] * 20) for at in range(8)]
        engine.image.write(range(32))
        head = engine.store_request(api.Hashes(keys[:3], 8 * CHUNK), range(12), range=TokenRange(0, 3 * CHUNK))
        tail = engine.store_request(
            api.Hashes(keys[3:], 8 * CHUNK, 3), range(11, 32), range=TokenRange(3 * CHUNK - 4, 8 * CHUNK)
        )
        stored = await engine.worker.store(tail)
        assert [(each.first_chunk, each.count, each.outcome.value) for each in stored] == [(3, 5, "STORED")]
        assert await engine.hits(api.Hashes(keys, 8 * CHUNK)) == 0
        assert outcomes(await engine.worker.store(head)) == ["STORED"] * 3
        answer = await engine.lookup(api.Hashes(keys, 8 * CHUNK))
        target = range(255, 223, -1)
        assert outcomes(await engine.retrieve(answer, target)) == ["LOADED"] * 8
        assert engine.image.wrong_tokens(target) == [] and engine.image.untouched(target)
        few = engine.store_request(api.Hashes(keys[:2], 8 * CHUNK), range(32))
        assert (await refused(engine.worker.store(few)))[:2] == ("INVALID_ARGUMENT", "RANGE")
        late = engine.store_request(api.Hashes(keys[4:], 8 * CHUNK, 4), range(32))
        assert (await refused(engine.worker.store(late)))[:2] == ("INVALID_ARGUMENT", "RANGE")
        many = api.Hashes(keys, 8 * CHUNK - 1)
        assert await refused(engine.lookup(many)) == ("INVALID_ARGUMENT", "INVALID_FIELD", "content")
