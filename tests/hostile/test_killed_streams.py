# SPDX-License-Identifier: Apache-2.0
"""SIGKILL in the middle of ReadChunks and WriteChunks: of clients and of the server, all in processes of their own."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from kvgrpc.core.errors import Reason
from tests.hostile.process import EngineProcess
from tests.hostile.stand import Stand, stand, until
from tests.hostile.streaming import BIG, OBJECT_BYTES, PARTS_A_CHUNK, PER_CHUNK, Streaming

CHUNKS = 3
BLOCKS = [*reversed(range(CHUNKS * PER_CHUNK))]
KEPT, KEPT_CHUNKS = 1_000, 16
"""A prompt that is there all the time, longer than what gRPC sends ahead."""
KEPT_BLOCKS = [*reversed(range(KEPT_CHUNKS * PER_CHUNK))]
WAVES, AT_ONCE = 1, 3
ENDED = {reason.value for reason in (Reason.INTERNAL, Reason.SERVER_UNREACHABLE)}


def witness_of(server: Stand) -> EngineProcess:
    return server.engine(kv=BIG, num_blocks=len(KEPT_BLOCKS))


def store_kept(witness: EngineProcess) -> None:
    witness.do("store", "kept", KEPT, KEPT_CHUNKS, KEPT_BLOCKS)
    assert witness.do("ended", "kept") == [("STORED", "")] * KEPT_CHUNKS


@pytest.mark.parametrize("parts", [1, PARTS_A_CHUNK, 2 * PARTS_A_CHUNK + 1])
def test_clients_killed_while_they_write(parts: int) -> None:
    with stand(l1="128MiB") as server, ExitStack() as stack:
        witness = witness_of(server)
        before = server.counts()
        for wave in range(WAVES):
            prompts = [wave * AT_ONCE + number for number in range(1, AT_ONCE + 1)]
            peers = [
                stack.enter_context(Streaming(server.served.address, "write", prompt, CHUNKS, parts))
                for prompt in prompts
            ]
            for peer in peers:
                peer.wait_in_the_middle()
            if parts % PARTS_A_CHUNK:
                until(lambda: server.counts()["bytes being written"] == AT_ONCE * OBJECT_BYTES, what="a slot each")
            for peer in peers:
                peer.kill()
            until(lambda: server.counts() == before, 5, "the counts before")
            for prompt in prompts:
                assert witness.do("load", prompt, CHUNKS, BLOCKS) == parts // PARTS_A_CHUNK
                assert witness.do("store", f"{prompt}", prompt, CHUNKS, BLOCKS) is None
                assert {outcome for outcome, _ in witness.do("ended", f"{prompt}")} <= {"STORED", "RESIDENT"}
                assert witness.do("load", prompt, CHUNKS, BLOCKS) == CHUNKS
        server.assert_well()


def test_clients_killed_while_they_read() -> None:
    with stand(l1="128MiB") as server, ExitStack() as stack:
        witness = witness_of(server)
        store_kept(witness)
        before = server.counts()
        for parts in (1, PARTS_A_CHUNK):
            peers = [
                stack.enter_context(Streaming(server.served.address, "read", KEPT, KEPT_CHUNKS, parts))
                for _ in range(AT_ONCE)
            ]
            for peer in peers:
                peer.wait_in_the_middle()
            assert server.counts()["pinned bytes"] > 0 and server.counts()["pins"] > 0
            for peer in peers:
                peer.kill()
            until(lambda: server.counts() == before, 5, "the counts before")
            assert witness.do("load", KEPT, KEPT_CHUNKS, KEPT_BLOCKS) == KEPT_CHUNKS
        with Streaming(server.served.address, "read", KEPT, KEPT_CHUNKS, 1) as peer:
            peer.wait_in_the_middle()
            peer.go_on()
            assert peer.ended() == ["LOADED"] * KEPT_CHUNKS
        server.assert_well()


def test_a_server_killed_in_the_middle_of_streams(tmp_path: Path) -> None:
    """The next one, on the same named arena: half a chunk is found by nobody, and what is found is right."""
    arena = ("--arena-path", str(tmp_path / "arena"))
    with stand(*arena, l1="64MiB") as server, ExitStack() as stack:
        witness = witness_of(server)
        store_kept(witness)
        address = server.served.address
        writes = stack.enter_context(Streaming(address, "write", 1, CHUNKS, PARTS_A_CHUNK + 1))
        reads = stack.enter_context(Streaming(address, "read", KEPT, KEPT_CHUNKS, PARTS_A_CHUNK + 1))
        for peer in (writes, reads):
            peer.wait_in_the_middle()
        until(lambda: server.counts()["bytes being written"] == OBJECT_BYTES, what="a slot")
        server.served.process.kill()
        server.served.process.wait()
        for peer in (writes, reads):
            peer.go_on()
        (lost,) = writes.ended()
        assert lost in ENDED
        (torn,) = reads.ended()
        assert torn in ENDED, "a torn stream was taken for a whole one"
    with stand(*arena, l1="64MiB") as server:
        late = witness_of(server)
        assert late.do("load", 1, CHUNKS, BLOCKS) <= 1
        assert late.do("load", KEPT, KEPT_CHUNKS, KEPT_BLOCKS) <= KEPT_CHUNKS
        with Streaming(server.served.address, "write", 1, CHUNKS, 1) as again:
            again.wait_in_the_middle()
            again.go_on()
            assert {*again.ended()} <= {"STORED", "RESIDENT"}
        assert late.do("load", 1, CHUNKS, BLOCKS) == CHUNKS
        server.assert_well()
