# SPDX-License-Identifier: Apache-2.0
"""`kvgrpc inspect` against a server with a lower tier: where chunks are, of which space, and who keeps them."""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvgrpc import api
from kvgrpc.cli.root import main
from kvgrpc.core.types import WritePolicy
from kvgrpc.tiers.memory import MemoryTier
from tests.e2e.harness import BLOCK, CHUNK, Engine, LocalServer, local_server, tokens_of, until

PROMPT = tokens_of(1, 3 * CHUNK)
BLOCKS = range(3 * CHUNK // BLOCK)


async def kvgrpc(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    command = (sys.executable, "-m", "kvgrpc", *arguments)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    out, err = await asyncio.wait_for(process.communicate(stdin.encode()), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def text_of(tokens: api.Tokens) -> str:
    return json.dumps(array("I", bytes(tokens.data)).tolist())


async def filled(server: LocalServer, tier: MemoryTier, **facts: str) -> Engine:
    engine = await server.engine(**facts)
    await engine.store(PROMPT, BLOCKS)
    await until(lambda: server.book.counters["written_objects"] >= 3, what="all three are written below")
    return engine


async def test_where_chunks_are_and_who_keeps_them(tmp_path: Path) -> None:
    tier = MemoryTier("below")
    async with local_server(tmp_path, tier=tier, writes=WritePolicy.THROUGH) as server:
        engine = await filled(server, tier, lora="adapter")
        await engine.lookup(tokens_of(1, 2 * CHUNK), request_id="request-of-the-night")
        held = await (await server.admin()).pin(engine.space, tokens_of(1, CHUNK), 60_000)
        asked = text_of(tokens_of(1, 4 * CHUNK))
        code, screen, problem = await kvgrpc("inspect", "-", "--address", server.address, stdin=asked)
        assert (code, problem) == (0, "")
        for words in (
            "test-model lora adapter",
            "3 of 4 chunks are in L1",
            "below",
            "request-of-the-night",
            held.pin_id.hex(),
        ):
            assert words in screen
        (tmp_path / "tokens.txt").write_text(asked.strip("[]").replace(",", ""))
        code, text, _ = await kvgrpc("inspect", str(tmp_path / "tokens.txt"), "--json", "--address", server.address)
        (found,) = json.loads(text)
        assert (found["space"]["identity"]["model"], found["space"]["lora"]) == ("test-model", "adapter")
        assert [(one["ready_ranks"], one["pins"], one["holds"], one["tier_ranks"]) for one in found["chunks"]] == [
            (1, 1, 1, {"below": 1}),
            (1, 1, 0, {"below": 1}),
            (1, 0, 0, {"below": 1}),
            (0, 0, 0, {}),
        ]
        assert engine.engine_id not in text
        key = found["chunks"][2]["key"]
        code, text, _ = await kvgrpc("inspect", "--hash", key, "--json", "--address", server.address)
        assert [one["chunks"][0]["ready_ranks"] for one in json.loads(text)] == [1]


async def test_what_is_below_only_is_seen_there_and_stays_there(tmp_path: Path) -> None:
    tier = MemoryTier("below")
    async with local_server(tmp_path, l1_bytes=1 << 20, tier=tier, writes=WritePolicy.THROUGH) as server:
        engine = await filled(server, tier)
        seed = 2
        while server.book.counters["evicted_chunks"] < 3:
            await engine.store(tokens_of(seed, 3 * CHUNK), BLOCKS)
            seed += 1
        before = dict(server.book.counters)
        found = await (await server.admin()).inspect(engine.space, PROMPT)
        assert [one.ready_ranks for one in found.chunks] == [0, 0, 0]
        assert found.tier_ranks == ({"below": 1},) * 3
        assert found.asked_objects == 3
        assert dict(server.book.counters) == before


async def test_tenants_are_looked_into_by_their_salt_only(tmp_path: Path) -> None:
    tier = MemoryTier("below")
    async with local_server(tmp_path, tier=tier, writes=WritePolicy.THROUGH) as server:
        await filled(server, tier, salt="tenant-a")
        asked = text_of(PROMPT)
        _, screen, _ = await kvgrpc("inspect", "-", "--address", server.address, stdin=asked)
        assert "1 other spaces were not asked" in screen
        _, text, _ = await kvgrpc(
            "inspect", "-", "--salt", "tenant-a", "--json", "--address", server.address, stdin=asked
        )
        assert [one["chunks"][0]["ready_ranks"] for one in json.loads(text)] == [1]
        assert "tenant-a" not in text


async def test_a_server_that_has_some_ranks_of_an_engine_only(tmp_path: Path) -> None:
    """As docs/operations.md has it: what is there is shown, and is of use to those who name these ranks."""
    async with local_server(tmp_path) as server:
        engine = await server.engine(kv_world_size=2, parallel=(0, 0, 2, 2))
        await engine.store(PROMPT, BLOCKS)
        asked = text_of(tokens_of(1, 4 * CHUNK))
        _, screen, _ = await kvgrpc("inspect", "-", "--address", server.address, stdin=asked)
        assert "0 of 4 chunks are in L1 from the first on; 3 of fewer than all 2 KV ranks" in screen
        assert "1 of 2 ranks" in screen
        admin = await server.admin()
        (space,) = await admin.list_spaces()
        assert space.chunks == 0 and space.bytes > 0
        assert (await admin.pin(engine.space, PROMPT, 60_000)).pin_id == b""
        mine = api.LookupRequest(engine.engine_id, "mine", engine.space, PROMPT, tp_size=2, kv_ranks=(0,))
        assert (await engine.scheduler.lookup(mine)).status.hit_tokens == 3 * CHUNK


async def test_an_empty_cache_is_said_to_be_one(tmp_path: Path) -> None:
    async with local_server(tmp_path) as server:
        where = ("--address", server.address)
        said = "no space has data in L1, and lower tiers are asked only of spaces that have\n"
        assert await kvgrpc("inspect", "-", *where, stdin="1") == (0, said, "")
        assert await kvgrpc("inspect", "-", "--json", *where, stdin="1") == (0, "[]\n", "")


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        ((), "", "name a file with TOKENS"),
        (("-",), "", "TOKENS is empty"),
        (("-",), "hello", "something else than token ids"),
        (("-",), "1.5 2", "something else than token ids"),
        (("-",), b"\xd0\x00\xff", "TOKENS is no text"),
        (("-",), "4294967296", "beyond 32 bits"),
        (("-",), "9" * 5000, "beyond 32 bits"),
        (("-",), b"\x00\xff\xfe", "TOKENS is no text"),
        (("--hash", "xyz"), "", "hexadecimal"),
        (("--hash", "abcd"), "", "32 to 128 digits"),
    ],
)
def test_what_is_no_prompt_is_refused(arguments: tuple[str, ...], stdin: str | bytes, words: str) -> None:
    done = CliRunner().invoke(main, ["inspect", *arguments], input=stdin)
    assert done.exit_code == 2
    assert words in done.output
