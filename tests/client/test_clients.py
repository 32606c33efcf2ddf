# SPDX-License-Identifier: Apache-2.0
"""AioClient and Client where they differ from the cache in process: deadlines, a missing server, big messages, ends."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvgrpc import api
from kvgrpc.client import AioClient, ChannelOptions, Client
from kvgrpc.client.loop import LoopThread
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import Role, SpaceRef
from kvgrpc.transfer.host import host_id
from tests.client.fakes import ENGINE, FakeServer, Knobs, fake_process, wait_until
from tests.client.memory import register_request, tokens


def lookup_request(num_tokens: int = 32) -> api.LookupRequest:
    return api.LookupRequest(ENGINE, "r1", SpaceRef(b"\x07" * 16), tokens(num_tokens))


def test_a_missing_server_is_a_refusal_soon(folder: Path) -> None:
    with Client(f"unix:{folder}/nobody") as client:
        start = time.monotonic()
        with pytest.raises(Refusal) as caught:
            client.get_status()
        assert caught.value.reason is Reason.SERVER_UNREACHABLE
        assert time.monotonic() - start < 10


def test_deadlines(server: FakeServer) -> None:
    server.start(Knobs(hang=["handshake", "end_request"]))
    with Client(server.address, options=ChannelOptions(call_s=0.1)) as client:
        for call in (
            lambda: client.handshake(api.Hello()),
            lambda: client.handshake(api.Hello(), timeout_s=0.2),
            lambda: client.end_request(ENGINE, "r1"),
        ):
            start = time.monotonic()
            with pytest.raises(Refusal) as caught:
                call()
            assert caught.value.reason is Reason.DEADLINE
            assert time.monotonic() - start < 10


def test_reading_calls_survive_a_restart_without_an_error(server: FakeServer) -> None:
    server.start()
    with Client(server.address) as client:
        client.handshake(api.Hello())
        server.stop()
        threading.Timer(0.05, server.start).start()
        assert client.handshake(api.Hello(), timeout_s=30, wait_for_server=True).server_version == "fake"


def test_messages_beyond_4_mib(server: FakeServer) -> None:
    """Field report 27: a prompt of two million tokens is 8 MiB."""
    cache = server.start()
    with Client(server.address) as client:
        stream = client.attach(ENGINE, Role.SCHEDULER, b"s" * 16)
        assert not next(stream).draining
        assert client.lookup(lookup_request(2_000_000)).status.hit_tokens == 2_000_000 // 16 * 16
        assert len(cache.asked("lookup")[0].content.data) == 8_000_000
        with pytest.raises(Refusal) as caught:
            client.lookup(lookup_request(5_000_000))
        assert caught.value.reason is Reason.MESSAGE_TOO_LARGE
        assert client.lookup(lookup_request()).status.hit_tokens == 32
        stream.close()


async def test_a_closed_stream_ends_the_session(server: FakeServer) -> None:
    cache = server.start()
    async with AioClient(server.address, "me") as client:
        stream = client.attach(ENGINE, Role.SCHEDULER, b"s" * 16)
        event = await anext(stream)
        assert (event.server_epoch, event.resumed) == (cache.epoch, False)
        server.drain()
        assert (await anext(stream)).draining
        assert list(cache.streams) == ["me"]
        await stream.aclose()
        with pytest.raises(Refusal) as caught:
            await client.register(replace(register_request(), host_id=host_id()))
        assert caught.value.reason is Reason.NOT_ATTACHED


async def test_a_stream_that_ends_can_be_continued(server: FakeServer) -> None:
    server.start()
    async with AioClient(server.address) as client:
        stream = client.attach(ENGINE, Role.SCHEDULER, b"s" * 16)
        await anext(stream)
        server.cut_streams()
        assert [event async for event in stream] == []
        stream = client.attach(ENGINE, Role.SCHEDULER, b"s" * 16)
        assert (await anext(stream)).resumed


async def test_a_stream_that_breaks_is_a_refusal(folder: Path) -> None:
    with fake_process(f"unix:{folder}/s") as process:
        async with AioClient(f"unix:{folder}/s") as client:
            stream = client.attach(ENGINE, Role.SCHEDULER, b"s" * 16)
            await anext(stream)
            process.kill()
            with pytest.raises(Refusal) as caught:
                await anext(stream)
            assert caught.value.reason is Reason.SERVER_UNREACHABLE


def test_threads_may_share_a_client(server: FakeServer) -> None:
    server.start()
    answers: list[str] = []
    with Client(server.address) as client:
        threads = [
            threading.Thread(target=lambda: answers.append(client.handshake(api.Hello()).server_version))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert answers == ["fake"] * 8


def test_close_ends_the_thread_and_is_final(server: FakeServer) -> None:
    """But for gRPC's own, and those of whoever else works in this process."""
    server.start()
    before = set(threading.enumerate())
    client = Client(server.address)
    client.handshake(api.Hello())
    own = {thread for thread in threading.enumerate() if thread.name.startswith("kvgrpc-client")} - before
    assert own
    client.close()
    client.close()
    wait_until(lambda: not own.intersection(threading.enumerate()))
    with pytest.raises(RuntimeError, match="closed"):
        client.get_status()


async def test_a_closed_aio_client_says_so(server: FakeServer) -> None:
    server.start()
    client = AioClient(server.address)
    await client.handshake(api.Hello())
    await client.close()
    await client.close()
    with pytest.raises(RuntimeError, match="closed"):
        await client.handshake(api.Hello())


def test_client_ids_are_unique_without_a_process_id() -> None:
    """Field report 53: every container's main process is number 1."""
    ids = {AioClient("localhost:1").client_id for _ in range(100)}
    assert len(ids) == 100
    assert all(len(name) <= 64 and name.isascii() and name.isprintable() for name in ids)


def test_host_ids_follow_the_boot_and_the_name(tmp_path: Path) -> None:
    assert host_id() == host_id()
    assert len(host_id()) == 32
    other = tmp_path / "boot_id"
    other.write_text("another boot\n")
    assert host_id(other) not in (host_id(), host_id(tmp_path / "missing"))


def test_tokens_of_ids() -> None:
    assert api.Tokens.from_ids([1, 2**32 - 1]).data == b"\1\0\0\0\xff\xff\xff\xff"
    assert api.Tokens.from_ids(iter(range(1000))).num_tokens == 1000
    for wrong in (-1, 2**32):
        with pytest.raises(OverflowError):
            api.Tokens.from_ids([wrong])


def test_events_of_closed_clients_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    """gRPC's one poller hands an event of a closed client to the loop of another one, where it raises."""
    closed = asyncio.new_event_loop()
    closed.close()
    done = threading.Event()
    loop = LoopThread("test")
    loop.post(closed.call_soon_threadsafe, print)
    loop.post(int, "what is a fault is told")
    loop.post(done.set)
    assert done.wait(5)
    loop.stop()
    assert [type(record.exc_info[1]) for record in caplog.records if record.exc_info] == [ValueError]
