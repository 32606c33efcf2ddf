# SPDX-License-Identifier: Apache-2.0
"""`kvgrpc quota` and `kvgrpc write-policy` against a server: what they set is in force, and shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgrpc.client.aio import AioClient
from kvgrpc.core.types import WritePolicy
from kvgrpc.tiers.memory import MemoryTier
from tests.cli.test_inspect import kvgrpc
from tests.e2e.harness import CHUNK, local_server, outcomes, tokens_of, until
from tests.e2e.probes import TINY

BLOCKS = range(4)


async def test_a_quota_is_shown_set_and_taken_away(tmp_path: Path) -> None:
    async with local_server(tmp_path) as server:
        engine = await server.engine(kv=TINY, salt="tenant-a")
        where = ("--address", server.address)
        for seed in range(8):
            assert outcomes(await engine.store(tokens_of(seed, CHUNK), BLOCKS)) == ["STORED"]
        assert await kvgrpc("quota", "tenant-a", *where) == (0, "'tenant-a' has no quota and holds 16 KiB\n", "")
        said = "'tenant-a' has a quota of 8 KiB and holds 8 KiB\n"
        assert await kvgrpc("quota", "tenant-a", "8KiB", *where) == (0, said, "")
        for seed in range(8, 16):
            await engine.store(tokens_of(seed, CHUNK), BLOCKS)
        assert await kvgrpc("quota", "tenant-a", *where) == (0, said, "")
        assert await kvgrpc("quota", "", *where) == (0, "'' has no quota and holds 0 B\n", "")
        said = "'tenant-a' has no quota and holds 8 KiB\n"
        assert await kvgrpc("quota", "tenant-a", "none", *where) == (0, said, "")


async def test_a_policy_is_set_for_a_model_for_all_and_taken_away(tmp_path: Path) -> None:
    tier = MemoryTier("below")
    async with local_server(tmp_path, tier=tier, writes=WritePolicy.THROUGH) as server:
        llama, other = await server.engine(kv=TINY, model="llama"), await server.engine(kv=TINY, model="other")
        seeds = iter(range(100))

        async def written() -> tuple[bool, bool]:
            """Whether what is stored now, by each model, goes down."""
            before = server.book.counters["written_objects"]
            found: list[bool] = []
            for engine in (llama, other):
                assert outcomes(await engine.store(tokens_of(next(seeds), CHUNK), BLOCKS)) == ["STORED"]
                await until(lambda: not any(lane.flights or lane.queue for lane in server.book.writes.lanes))
                now = server.book.counters["written_objects"]
                found.append(now > before)
                before = now
            return found[0], found[1]

        for arguments, said, expected in (
            (("none", "--model", "llama"), "model 'llama': none", (False, True)),
            (("second-use",), "models without one of their own: second-use", (False, False)),
            (("through", "--model", "llama"), "model 'llama': through", (True, False)),
            (("default", "--model", "llama"), "model 'llama': second-use", (False, False)),
            (("default",), "models without one of their own: through", (True, True)),
        ):
            assert await kvgrpc("write-policy", *arguments, "--address", server.address) == (0, said + "\n", "")
            assert await written() == expected, arguments
            async with AioClient(server.address) as client:
                now = {space.identity.model: space.write_policy for space in await client.list_spaces()}
            assert now[arguments[-1] if arguments[1:] else "other"] == WritePolicy(said.split()[-1])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("quota", "a", "much"), "'much' is not a size"),
        (("quota", "a", "0"), "a quota is more than 0 bytes; 'none' takes it away"),
        (
            ("write-policy", "sometimes"),
            "'sometimes' is not one of 'through', 'eviction', 'second-use', 'none', 'default'",
        ),
        (("write-policy", "none"), "no server answers at"),
        (("quota", "a"), "no server answers at"),
    ],
)
async def test_what_cannot_be_is_told(tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    code, out, problem = await kvgrpc(*arguments, "--address", f"unix:{tmp_path}/nobody")
    assert code != 0 and out == "" and sentence in problem
