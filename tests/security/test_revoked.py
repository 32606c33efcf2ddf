# SPDX-License-Identifier: Apache-2.0
"""Streams that are open while the file of tenants changes: they end with what their tenant may do."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvgrpc import api
from kvgrpc.core.errors import Reason
from kvgrpc.service.access import token_hash
from tests.e2e.written import chunks_of, parts_of, writing
from tests.security.guarded import Guarded, guarded
from tests.security.test_tenants import BLOCKS, PROMPT, Tenants, asked_until, reason_of


async def changed(tenants: Tenants, server: Guarded, **forms: dict[str, Any]) -> None:
    """The file is other than before, and somebody has called since."""
    tenants.write(**forms)
    viewer = tenants.client(server, "viewer", "v")
    await asked_until(viewer, lambda: "was read again" in server.served.log)


def another_token() -> str:
    return token_hash(secrets.token_urlsafe(32))


@pytest.mark.parametrize(
    ("change", "reason"), [("token", Reason.UNAUTHENTICATED), ("salts", Reason.NOT_ALLOWED), ("quota", None)]
)
async def test_a_watcher_is_told_nothing_that_its_tenant_may_not_see_now(
    tmp_path: Path, change: str, reason: Reason | None
):
    tenants = Tenants(tmp_path)
    async with guarded("--access", str(tenants.file)) as server:
        blue = await tenants.engine(server, "blue", salt="both")
        watching = tenants.client(server, "red", "router").watch(api.WatchRequest())
        await anext(watching)
        red: dict[str, Any] = {"tokens": [tenants.tokens["red"][1]], "salts": {"red": "64KiB", "both": None}}
        if change == "token":
            red["tokens"] = [another_token()]
        elif change == "salts":
            red["salts"] = {"red": "64KiB"}
        else:
            red["salts"] = {"red": "32KiB", "both": None}
        await changed(tenants, server, red=red)
        await blue.store(PROMPT, BLOCKS)
        assert await reason_of(anext(watching)) is reason
        await watching.aclose()


async def test_a_recording_ends_with_the_operators_token(tmp_path: Path):
    tenants = Tenants(tmp_path)
    async with guarded("--access", str(tenants.file)) as server:
        blue = await tenants.engine(server, "blue")
        recording = tenants.client(server, "operator", "o").record_trace()
        await anext(recording)
        await changed(tenants, server, operator={"tokens": [another_token()], "may": ["admin"]})
        await blue.store(PROMPT, BLOCKS)
        assert await reason_of(anext(recording)) is Reason.UNAUTHENTICATED
        await recording.aclose()


async def test_no_part_is_taken_under_a_token_that_is_gone(tmp_path: Path):
    tenants = Tenants(tmp_path)
    async with guarded("--access", str(tenants.file)) as server:
        blue = await tenants.engine(server, "blue")
        found, gone = chunks_of(blue, 0, 2), asyncio.Event()
        first, *others = parts_of(found)

        async def parts() -> AsyncIterator[api.ChunkPart]:
            yield first
            await gone.wait()
            for part in others:
                yield part

        writes = asyncio.ensure_future(blue.scheduler.write_chunks(writing(blue, PROMPT), parts()))
        salts = tenants.forms["blue"]["salts"]
        await changed(tenants, server, blue={"tokens": [another_token()], "salts": salts})
        gone.set()
        assert await reason_of(writes) is Reason.UNAUTHENTICATED
        status = await tenants.client(server, "viewer", "v").get_status()
        assert (status.chunks, status.arena.writing_bytes) in ((0, 0), (1, 0))  # the first had come before
