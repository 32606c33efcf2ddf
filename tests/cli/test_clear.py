# SPDX-License-Identifier: Apache-2.0
"""`kvgrpc clear` against a server with a lower tier: what is named is gone everywhere, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgrpc.core.types import WritePolicy
from kvgrpc.tiers.memory import MemoryTier
from tests.cli.test_inspect import kvgrpc
from tests.e2e.harness import CHUNK, Engine, local_server, outcomes, tokens_of, until
from tests.e2e.probes import TINY

PROMPT = tokens_of(1, CHUNK)
BLOCKS = range(4)
OWNERS = ({"model": "llama"}, {"model": "llama", "salt": "tenant-a"}, {"model": "other"})


async def found_tokens(engine: Engine) -> int:
    """Of the prompt, when all tiers have answered."""
    answer = await engine.lookup(PROMPT)
    status = answer.status
    while not status.done:
        status = await engine.scheduler.query(engine.engine_id, answer.job_id, 1000)
    return status.hit_tokens


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (("--model", "llama"), (0, 0, CHUNK)),
        (("--salt", "tenant-a"), (CHUNK, 0, CHUNK)),
        (("--salt", ""), (0, CHUNK, 0)),
        (("--all",), (0, 0, 0)),
        (("--model", "nobody's"), (CHUNK, CHUNK, CHUNK)),
    ],
)
async def test_what_is_named_is_gone_and_nothing_else(
    tmp_path: Path, arguments: tuple[str, ...], left: tuple[int, ...]
) -> None:
    async with local_server(tmp_path, tier=MemoryTier("below"), writes=WritePolicy.THROUGH) as server:
        engines = [await server.engine(kv=TINY, **owner) for owner in OWNERS]
        for engine in engines:
            assert outcomes(await engine.store(PROMPT, BLOCKS)) == ["STORED"]
        await until(lambda: server.book.counters["written_objects"] == len(engines), what="all are written below")
        said = f"{left.count(0)} chunks are forgotten\n"
        assert await kvgrpc("clear", *arguments, "--address", server.address) == (0, said, "")
        assert tuple([await found_tokens(engine) for engine in engines]) == left


async def test_what_is_in_use_is_counted(tmp_path: Path) -> None:
    async with local_server(tmp_path) as server:
        engine = await server.engine(kv=TINY)
        await engine.store(PROMPT, BLOCKS)
        await engine.lookup(PROMPT)
        said = "1 chunks are forgotten, 1 of them are still in use\n"
        assert await kvgrpc("clear", "--all", "--address", server.address) == (0, said, "")


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ((), 2, "say what to forget: one of --model, --salt and --all"),
        (("--model", "a", "--all"), 2, "say what to forget"),
        (("--model", ""), 2, "a model has a name"),
        (("--all",), 1, "no server answers at"),
    ],
)
async def test_what_cannot_be_is_told(tmp_path: Path, arguments: tuple[str, ...], code: int, sentence: str) -> None:
    found, out, problem = await kvgrpc("clear", *arguments, "--address", f"unix:{tmp_path}/nobody")
    assert found == code and out == "" and sentence in problem
