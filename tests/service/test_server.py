# SPDX-License-Identifier: Apache-2.0
"""Listeners, health, reflection: what an operator and the kubelet see."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from kvgrpc.service.listeners import PATH_BYTES_MOST, ListenError, SocketFile
from kvgrpc.service.server import Server, ServerOptions, channel_options
from tests.service import asks
from tests.service.asks import until
from tests.service.conftest import METADATA, Stubs, World

SERVING = health_pb2.HealthCheckResponse.SERVING
SERVICES = ["kvgrpc.v1.KvCacheService", "kvgrpc.v1.EngineService", "kvgrpc.v1.AdminService"]
NOBODY = 65534


async def serves(world: World, server: Server, at: int = 0) -> None:
    assert await Stubs(world.channel(server, at)).cache.Lookup(asks.lookup(), metadata=METADATA, timeout=5)


async def refusal_to_start(server: Server) -> str:
    with pytest.raises(ListenError) as failed:
        await server.start()
    return str(failed.value)


# ---- Unix socket ----------------------------------------------------------------------------------------------------


async def test_the_socket_is_for_its_owner_only_whatever_the_umask(world: World) -> None:
    umask = os.umask(0)
    try:
        server = await world.start()
        assert os.umask(0) == 0
    finally:
        os.umask(umask)
    assert server.addresses == (f"unix:{world.socket}",)
    found = world.socket.lstat()
    assert stat.S_ISSOCK(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o600
    await serves(world, server)


async def test_mode_and_group_as_wanted(world: World) -> None:
    umask = os.umask(0o777)
    try:
        await world.start(socket_mode=0o660, socket_group=str(os.getegid()))
    finally:
        os.umask(umask)
    found = world.socket.lstat()
    assert stat.S_IMODE(found.st_mode) == 0o660
    assert found.st_gid == os.getegid()


def test_nobody_else_can_connect_before_the_mode_is_set(folder: Path) -> None:
    path = folder / "kv.sock"
    file = SocketFile(path, 0o666, "")
    with socket.socket(socket.AF_UNIX) as listener:

        def bind(address: str) -> int:
            listener.bind(address.removeprefix("unix:"))
            assert stat.S_IMODE(path.lstat().st_mode) == 0o600
            return 1

        file.bind(bind)
        assert stat.S_IMODE(path.lstat().st_mode) == 0o666
        file.release()
    assert not path.exists()


@pytest.mark.parametrize("group", ["no-such-group", "4294967296", "9" * 5000])
async def test_an_unknown_group_is_refused_and_leaves_nothing(group: str, world: World) -> None:
    text = await refusal_to_start(world.server(socket_group=group))
    assert f"--socket-group {group}" in text
    assert not world.socket.exists()
    await serves(world, await world.start())


CONNECT_AS = """
import os, socket, sys
os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
socket.socket(socket.AF_UNIX).connect(sys.argv[2])
"""


@pytest.mark.parametrize(("mode", "enters"), [(0o600, False), (0o666, True)])
async def test_another_user_is_refused_unless_the_mode_lets_it_in(world: World, mode: int, enters: bool) -> None:
    await world.start(socket_mode=mode)
    assert stat.S_IMODE(world.socket.lstat().st_mode) == mode
    if os.geteuid() == 0:  # only root can become somebody else
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CONNECT_AS, str(NOBODY), str(world.socket), stderr=subprocess.PIPE
        )
        _, error = await child.communicate()
        assert (child.returncode == 0) is enters
        assert (b"PermissionError" in error) is not enters


async def test_a_second_server_is_refused_by_name_and_the_first_still_serves(world: World) -> None:
    first = await world.start()
    text = await refusal_to_start(world.server())
    assert str(world.socket) in text
    assert str(os.getpid()) in text
    await serves(world, first)
    await first.stop()
    assert not world.socket.exists()
    await serves(world, await world.start())


async def test_a_server_that_stops_leaves_the_socket_of_its_successor(world: World) -> None:
    first = await world.start()
    await first.stop()
    second = await world.start()
    await first.stop()
    await serves(world, second)


SERVE = """
import asyncio, sys
from pathlib import Path
from kvgrpc.service.server import Server, ServerOptions, caught_signals, run
from kvgrpc.telemetry.log import configure
from tests.service.fakes import FakeCache

async def main():
    configure("warning", "json")
    cache = FakeCache()
    cache.hold.update(sys.argv[2:])
    server = Server(ServerOptions(socket=Path(sys.argv[1]), drain_s=20), cache.client, cache)
    with caught_signals() as signals:
        await run(server, lambda: print("ready", flush=True), signals)
    print("ended", flush=True)

asyncio.run(main())
"""


async def serving_process(world: World, *hold: str) -> asyncio.subprocess.Process:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVE, str(world.socket), *hold, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdout is not None
    assert await asyncio.wait_for(child.stdout.readline(), 30) == b"ready\n"
    return child


async def test_the_socket_of_a_killed_server_is_replaced(world: World) -> None:
    child = await serving_process(world)
    assert str(child.pid) in await refusal_to_start(world.server())
    child.send_signal(signal.SIGKILL)
    await child.wait()
    assert world.socket.exists()
    await serves(world, await world.start())


async def test_a_foreign_listener_or_file_is_left_alone(world: World) -> None:
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(str(world.socket))
        foreign.listen()
        assert "another program listens there" in await refusal_to_start(world.server())
        assert world.socket.exists()
    world.socket.unlink()
    world.socket.write_text("precious")
    assert "not a socket" in await refusal_to_start(world.server())
    assert world.socket.read_text() == "precious"


async def test_path_lengths(world: World) -> None:
    longest = world.folder / ("s" * (PATH_BYTES_MOST - len(str(world.folder)) - 1))
    await serves(world, await world.start(socket=longest))
    text = await refusal_to_start(world.server(socket=Path(f"{longest}s")))
    assert "107" in text
    assert "108" in text
    assert "150" in await refusal_to_start(world.server(socket=Path("/" + "s" * 149)))


async def test_odd_characters_in_a_path(world: World) -> None:
    name = "a b%41?#é.sock"
    server = await world.start(socket=world.folder / name)
    assert name in os.listdir(world.folder)
    await serves(world, server)
    await server.stop()
    assert name not in os.listdir(world.folder)


async def test_a_missing_folder_is_made_and_one_of_a_stranger_refused(world: World) -> None:
    await serves(world, await world.start(socket=world.folder / "run" / "kv.sock"))
    if os.geteuid() == 0:
        stranger = world.folder / "stranger"
        stranger.mkdir()
        os.chown(stranger, NOBODY, NOBODY)
        assert str(NOBODY) in await refusal_to_start(world.server(socket=stranger / "kv.sock"))


async def test_a_lock_that_is_a_link_is_not_followed(world: World) -> None:
    victim = world.folder / "victim"
    victim.write_text("precious")
    os.symlink(victim, f"{world.socket}.lock")
    await refusal_to_start(world.server())
    assert victim.read_text() == "precious"


# ---- TCP ------------------------------------------------------------------------------------------------------------


async def test_tcp_reports_its_port_and_a_taken_port_is_refused(world: World) -> None:
    server = await world.start(socket=None, listen=("127.0.0.1:0", "localhost:0"))
    host, port = server.addresses[0].split(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
    await serves(world, server, at=0)
    await serves(world, server, at=1)
    text = await refusal_to_start(world.server(listen=(server.addresses[0],)))
    assert server.addresses[0] in text
    assert "Address already in use" in text
    text = await refusal_to_start(world.server(health_listen=server.addresses[0]))
    assert f"--health-listen {server.addresses[0]}: Address already in use" in text
    assert not world.socket.exists()
    await serves(world, server, at=0)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "somewhere.example:0"])
async def test_off_the_loopback_needs_to_be_said(world: World, address: str) -> None:
    assert "--insecure" in await refusal_to_start(world.server(listen=(address,)))
    assert not world.socket.exists()


async def test_off_the_loopback_when_said(world: World) -> None:
    server = await world.start(socket=None, listen=("0.0.0.0:0",), insecure=True)
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.addresses[0].rpartition(':')[2]}")
    async with channel:
        assert await Stubs(channel).cache.Lookup(asks.lookup(), metadata=METADATA)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:http", ":50051"])
async def test_what_is_no_address(world: World, address: str) -> None:
    assert "HOST:PORT" in await refusal_to_start(world.server(listen=(address,)))


async def test_no_listener_at_all(world: World) -> None:
    assert "--socket" in await refusal_to_start(world.server(socket=None))


def test_clients_that_ping_are_not_sent_away() -> None:
    options = dict(channel_options(ServerOptions()))
    assert options["grpc.keepalive_permit_without_calls"] == 1
    assert options["grpc.http2.min_ping_interval_without_data_ms"] == 10_000


# ---- health ---------------------------------------------------------------------------------------------------------


async def test_health_names(world: World) -> None:
    health: Any = health_pb2_grpc.HealthStub(world.channel(await world.start()))
    for name in ["", "liveness", "readiness", *SERVICES]:
        assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await health.Check(health_pb2.HealthCheckRequest(service="other"))
    assert failed.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_is_answered_while_every_call_is_stuck(world: World) -> None:
    server = await world.start(running_calls=64)
    stubs = Stubs(world.channel(server))
    health: Any = health_pb2_grpc.HealthStub(world.channel(server, options=[("grpc.use_local_subchannel_pool", 1)]))
    world.cache.hold.add("retrieve")
    stuck = [asyncio.ensure_future(stubs.cache.Retrieve(asks.retrieve(), metadata=METADATA)) for _ in range(64)]
    await until(lambda: world.cache.entered.get("retrieve") == 64)
    watches = [health.Watch(health_pb2.HealthCheckRequest(service="readiness")) for _ in range(50)]
    assert [(await watch.read()).status for watch in watches] == [SERVING] * 50
    times: list[float] = []
    for _ in range(100):
        start = time.perf_counter()
        assert (await health.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=10)).status == SERVING
        times.append(time.perf_counter() - start)
    assert sorted(times)[90] < 0.1
    world.cache.released.set()
    await asyncio.gather(*stuck)


async def test_watchers_of_one_name_live_and_die_apart(world: World) -> None:
    server = await world.start()
    health: Any = health_pb2_grpc.HealthStub(world.channel(server))
    request = health_pb2.HealthCheckRequest(service="readiness")
    gone, stays = health.Watch(request), health.Watch(request)
    assert [(await watch.read()).status for watch in (gone, stays)] == [SERVING] * 2
    gone.cancel()
    unknown = health.Watch(health_pb2.HealthCheckRequest(service="other"))
    assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    world.cache.hold.add("lookup")
    call = asyncio.ensure_future(Stubs(world.channel(server)).cache.Lookup(asks.lookup(), metadata=METADATA))
    await until(lambda: "lookup" in world.cache.entered)
    drain = asyncio.ensure_future(server.drain())
    assert (await asyncio.wait_for(stays.read(), 10)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    world.cache.released.set()
    await asyncio.gather(call, drain)


# ---- reflection -----------------------------------------------------------------------------------------------------


async def grpcurl(*arguments: str) -> tuple[int, str]:
    child = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).parent / "grpcurl"), *arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    out, _ = await asyncio.wait_for(child.communicate(), 30)
    assert child.returncode is not None
    return child.returncode, out.decode()


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_services_in_both_versions(world: World, version: str) -> None:
    channel = world.channel(await world.start(reflection=True))
    call: Any = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    listed = {service.name for service in (await call.read()).list_services_response.service}
    assert {*SERVICES, "grpc.health.v1.Health", f"grpc.reflection.{version}.ServerReflection"} <= listed


async def test_grpcurl_lists_describes_and_calls(world: World) -> None:
    await world.start(reflection=True)
    target = ("-plaintext", "-unix", str(world.socket))
    code, out = await grpcurl(*target, "list")
    assert code == 0
    assert set(SERVICES) <= set(out.split())
    code, out = await grpcurl(*target, "describe", "kvgrpc.v1.LookupRequest")
    assert code == 0
    assert "tp_size" in out
    code, out = await grpcurl(*target, "kvgrpc.v1.AdminService/GetStatus")
    assert code == 0
    assert '"chunk_tokens": 256' in out
    code, out = await grpcurl(*target, "grpc.health.v1.Health/Check")
    assert code == 0
    assert "SERVING" in out
    code, out = await grpcurl("-d", '{"engine_id": "x"}', *target, "kvgrpc.v1.KvCacheService/EndRequest")
    assert code == 64 + grpc.StatusCode.INVALID_ARGUMENT.value[0], out
    assert "kvgrpc-client-id" in out


async def test_reflection_is_off_unless_wanted(world: World) -> None:
    await world.start()
    code, out = await grpcurl("-plaintext", "-unix", str(world.socket), "list")
    assert code != 0
    assert "does not support the reflection API" in out
