# SPDX-License-Identifier: Apache-2.0
"""A bounded run of the fuzzer; `make fuzz` is the long one."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from kvgrpc.client.credentials import Credentials
from kvgrpc.service.calls import RULES
from kvgrpc.v1 import cache_pb2
from tests.fuzz.messages import spoiled
from tests.fuzz.run import ROUND, fuzz, resident_bytes
from tests.security.guarded import guarded, new_token, write_access

ROUNDS = 8


@pytest.mark.parametrize("seed", [1, 2])
async def test_hostile_messages_are_refused_and_change_nothing(seed: int):
    async with guarded() as server:
        await fuzz(server, 0, 1)
        before = resident_bytes(server.served.process.pid)
        codes = await fuzz(server, seed, ROUNDS)
        assert sum(codes.values()) == ROUNDS * len(RULES) * ROUND
        assert codes["OK"] and codes["INVALID_ARGUMENT"]
        assert "call failed" not in server.served.log and "Traceback" not in server.served.log
        assert resident_bytes(server.served.process.pid) - before < 96 << 20


async def test_nothing_gets_past_the_file_of_tenants(tmp_path: Path):
    file, hashed = new_token(tmp_path, "t")
    write_access(tmp_path / "access.json", t={"tokens": [hashed], "salts": {"": None}, "may": ["engine", "viewer"]})
    async with guarded("--access", str(tmp_path / "access.json")) as server:
        server.shown = Credentials(token_file=file)
        codes = await fuzz(server, 3, 2)
        assert codes["UNAUTHENTICATED"] and "OK" not in codes
        assert "call failed" not in server.served.log


def test_a_seed_repeats_its_messages():
    message = cache_pb2.LookupRequest(engine_id="x", request_id="r")
    first, second = ([spoiled(message, chance) for _ in range(50)] for chance in (Random(7), Random(7)))
    assert first == second and len(set(first)) > 25
