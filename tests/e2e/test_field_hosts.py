# SPDX-License-Identifier: Apache-2.0
"""Field report 48: a balanced connection that reaches another node's server is refused before anything is opened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import Role
from kvgrpc.transfer.host import host_id
from tests.e2e.harness import local_server


async def test_another_hosts_memory_is_refused_naming_both_and_never_opened(tmp_path: Path) -> None:
    async with local_server(tmp_path) as server:
        engine = await server.engine()
        stranger = server.client("stranger")
        await server.attach(stranger, "engine-of-another-node", Role.WORKER)
        before = server.open_shared_memory()
        request = replace(engine.registration(), engine_id="engine-of-another-node", host_id="node-b")
        with pytest.raises(Refusal) as caught:
            await stranger.register(request)
        assert caught.value.reason is Reason.HOST_MISMATCH
        assert "node-b" in caught.value.message and host_id() in caught.value.message
        assert server.open_shared_memory() == before
        assert server.book.counts().clients == 3, "its session goes on: it may try the right one"
        await stranger.register(replace(request, host_id=host_id()))
