# SPDX-License-Identifier: Apache-2.0
"""TLS and client certificates over TCP, and their exchange while the server runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from grpc_health.v1 import health_pb2

from kvgrpc.api import OWN_HASH_ALGORITHM, Hello
from kvgrpc.client.aio import AioClient
from kvgrpc.client.channel import ChannelOptions
from kvgrpc.client.credentials import Credentials
from kvgrpc.client.scheduler import SchedulerClient, SchedulerOptions
from kvgrpc.client.watcher import Watcher
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import SpaceIdentity
from tests.cli.test_serve import refused
from tests.e2e.harness import BLOCK, CHUNK, outcomes, tokens_of
from tests.security.guarded import Authority, guarded

ENGINE = "engine-of-the-tls-tests"


def tls(authority: Authority, *, client_ca: bool = False) -> tuple[str, ...]:
    cert, key = authority.sign("server", "127.0.0.1", "localhost")
    more = ("--tls-client-ca", str(authority.ca)) if client_ca else ()
    return ("--tls-cert", str(cert), "--tls-key", str(key), *more)


async def reason_of(address: str, credentials: Credentials) -> Reason | None:
    """None: the server answered."""
    async with AioClient(address, "c", ChannelOptions(credentials=credentials, retries=False)) as client:
        try:
            await client.handshake(Hello())
        except Refusal as refusal:
            return refusal.reason
    return None


async def test_an_engine_works_over_tls(tmp_path: Path):
    authority = Authority(tmp_path)
    async with guarded(*tls(authority), tcp=True) as server:
        server.shown = Credentials(ca_file=str(authority.ca))
        engine = await server.engine()
        prompt, blocks = tokens_of(1, 2 * CHUNK), tuple(range(2 * CHUNK // BLOCK))
        assert outcomes(await engine.store(prompt, blocks)) == ["STORED"] * 2
        answer = await engine.lookup(prompt)
        assert outcomes(await engine.retrieve(answer, blocks)) == ["LOADED"] * 2
        assert engine.image.wrong_tokens(blocks) == []
        assert "with TLS over TCP" in server.says("access")


async def test_who_does_not_fit_gets_nowhere(tmp_path: Path):
    """Field report 7: a plain client to a TLS port, among others."""
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    async with guarded(*tls(authority), tcp=True) as server:
        assert await reason_of(server.address, Credentials(ca_file=str(authority.ca))) is None
        assert await reason_of(f"grpc://{server.address}", Credentials()) is Reason.SERVER_UNREACHABLE
        assert await reason_of(server.address, Credentials(ca_file=str(other.ca))) is Reason.SERVER_UNREACHABLE
        named = Credentials(ca_file=str(authority.ca), server_name="elsewhere.example")
        assert await reason_of(server.address, named) is Reason.SERVER_UNREACHABLE
        assert await reason_of(server.served.address, Credentials()) is None  # the Unix socket has no TLS


async def test_clients_need_a_certificate_of_the_ca(tmp_path: Path):
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    async with guarded(*tls(authority, client_ca=True), tcp=True) as server:
        for signed_by, expected in ((authority, None), (other, Reason.SERVER_UNREACHABLE)):
            cert, key = signed_by.sign("client", "engine.example")
            shown = Credentials(ca_file=str(authority.ca), cert_file=str(cert), key_file=str(key))
            assert await reason_of(server.address, shown) is expected
        without = Credentials(ca_file=str(authority.ca))
        assert await reason_of(server.address, without) is Reason.SERVER_UNREACHABLE


def serial(address: str, authority: Authority) -> int:
    """Of the certificate that a new connection is shown."""
    context = ssl.create_default_context(cafile=str(authority.ca))
    context.set_alpn_protocols(["h2"])
    host, port = address.split(":")
    with context.wrap_socket(socket.create_connection((host, int(port)), 5), server_hostname=host) as connection:
        found = connection.getpeercert()
    assert found is not None
    return int(str(found["serialNumber"]), 16)


async def test_certificates_are_exchanged_without_a_restart(tmp_path: Path):
    authority = Authority(tmp_path)
    async with guarded(*tls(authority), tcp=True) as server:
        server.shown = Credentials(ca_file=str(authority.ca))
        held = server.client("held")
        await held.handshake(Hello())
        first = serial(server.address, authority)
        assert serial(server.address, authority) == first
        (tmp_path / "server-cert.pem").write_text("half a file")
        assert serial(server.address, authority) == first  # what is broken is not taken
        assert "certificates were not taken" in server.served.log
        authority.sign("server", "127.0.0.1")
        second = serial(server.address, authority)
        assert second != first
        await held.handshake(Hello())  # connections that are open go on
        assert await reason_of(server.address, server.shown) is None


async def test_health_has_a_port_of_its_own(tmp_path: Path):
    authority = Authority(tmp_path)
    async with guarded(*tls(authority), "--health-listen", "0", tcp=True) as server:
        address = server.says("health")
        assert address.startswith("127.0.0.1:") and address != server.address
        with grpc.insecure_channel(address) as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            asked = health_pb2.HealthCheckRequest(service="readiness")
            assert check(asked, timeout=5).status == health_pb2.HealthCheckResponse.SERVING
            for method in ("/kvgrpc.v1.AdminService/GetStatus", "/kvgrpc.v1.EngineService/Handshake"):
                with pytest.raises(grpc.RpcError) as error:
                    channel.unary_unary(method)(b"", timeout=5)
                assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]
        command = [sys.executable, "-m", "kvgrpc", "healthcheck"]
        own = [*command, "--address", server.address, "--ca-file", str(authority.ca)]
        for asked_by in ([*command, "--address", address], own):
            assert subprocess.run(asked_by, capture_output=True, timeout=30, check=False).returncode == 0  # noqa: ASYNC221


def test_a_file_without_a_certificate_is_named(tmp_path: Path):
    cert, key = Authority(tmp_path).sign("client", "127.0.0.1")
    for wrong in (Credentials(ca_file=str(key)), Credentials(cert_file=str(key), key_file=str(cert))):
        with pytest.raises(ValueError, match=f"{key}: there is no certificate in it"):
            wrong.channel_credentials()


def test_a_file_that_is_not_there_is_told_when_a_client_is_made(tmp_path: Path):
    """Not at every attempt to connect, by a background thread, for ever."""
    authority = Authority(tmp_path)
    wrong = Credentials(ca_file=f"{tmp_path}/none.pem")
    options = ChannelOptions(credentials=wrong)
    identity = SpaceIdentity("llama", "r1", "bfloat16", 1, OWN_HASH_ALGORITHM, "opaque:x:y:16")
    makes: list[Callable[[str], object]] = [
        lambda address: AioClient(address, options=options),
        lambda address: Watcher(address, options=options),
        lambda address: SchedulerClient(address, ENGINE, identity, SchedulerOptions(channel=options)),
    ]
    for make in makes:
        with pytest.raises(ValueError, match=r"none\.pem: No such file"):
            make("127.0.0.1:1")
        make(f"unix:{tmp_path}/s")  # it has no TLS, so nothing is read
    assert Credentials(ca_file=str(authority.ca)).read()[0] == authority.ca.read_bytes()


async def test_a_scheduler_is_told_what_else_than_the_server_may_be_wrong(tmp_path: Path):
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    identity = SpaceIdentity("llama", "r1", "bfloat16", 1, OWN_HASH_ALGORITHM, "opaque:x:y:16")
    async with guarded(*tls(authority), tcp=True) as server:
        for shown, hint in (
            (Credentials(), "it may have TLS: name the CA"),
            (Credentials(ca_file=str(other.ca)), "its certificate may be of another CA or name, or expired"),
        ):
            options = SchedulerOptions(channel=ChannelOptions(credentials=shown))
            scheduler = SchedulerClient(server.address, ENGINE, identity, options)
            try:
                assert not await asyncio.to_thread(scheduler.start, 0.2)
                assert scheduler.problem is not None and hint in scheduler.problem.message
            finally:
                await asyncio.to_thread(scheduler.close)


async def test_kvgrpc_status_over_tls(tmp_path: Path):
    authority = Authority(tmp_path)
    async with guarded(*tls(authority), tcp=True) as server:
        command = [sys.executable, "-m", "kvgrpc", "status", "--json", "--address", f"grpcs://{server.address}"]
        shown = ["--ca-file", str(authority.ca)]
        done = subprocess.run([*command, *shown], capture_output=True, text=True, timeout=30, check=False)  # noqa: ASYNC221
        assert done.returncode == 0 and '"server_version"' in done.stdout, done.stderr
        without = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)  # noqa: ASYNC221
        assert without.returncode == 1 and "Traceback" not in without.stderr


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--tls-cert", "x"), "--tls-cert and --tls-key belong together"),
        (("--tls-client-ca", "x"), "--tls-client-ca needs --tls-cert"),
        (("--tls-cert", "x", "--tls-key", "y"), "there is no --listen"),
        (("--tls-cert", "x", "--tls-key", "y", "--listen", "0.0.0.0:0", "--insecure"), "contradict each other"),
        (("--listen", "0.0.0.0:0"), "would serve without TLS"),
        (("--tls-cert", "/none/x", "--tls-key", "/none/y", "--listen", "127.0.0.1:0"), "No such file"),
        (("--tls-cert", "/dev", "--tls-key", "/dev", "--listen", "127.0.0.1:0"), "--tls-key /dev: Is a directory"),
        (("--access", "/none/x"), "--access /none/x: No such file"),
    ],
)
def test_settings_that_cannot_be(flags: tuple[str, ...], sentence: str, tmp_path: Path):
    assert sentence in refused("--l1-size", "8MiB", *flags, folder=tmp_path)


def test_a_key_of_another_certificate_is_refused_at_the_start(tmp_path: Path):
    authority = Authority(tmp_path)
    cert, _ = authority.sign("one", "127.0.0.1")
    _, key = authority.sign("two", "127.0.0.1")
    flags = ("--tls-cert", str(cert), "--tls-key", str(key), "--listen", "127.0.0.1:0", "--l1-size", "8MiB")
    assert "no PEM files that fit together" in refused(*flags, folder=tmp_path)
    cert.write_text("no certificate")
    assert refused(*flags, folder=tmp_path).rstrip().endswith("they are no PEM files that fit together")


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(tmp_path: Path):
    """On a terminal OpenSSL would ask, and a handshake after a rotation would wait for somebody to type."""
    cert, key = Authority(tmp_path).sign("one", "127.0.0.1")
    plain = serialization.load_pem_private_key(key.read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"password")
    form = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
    key.write_bytes(plain.private_bytes(*form, locked))
    program = (
        "import os, sys; os.login_tty(0); from pathlib import Path; from kvgrpc.service.tls import *\n"
        "read_certificates(TlsFiles(*map(Path, sys.argv[1:])))"
    )
    terminal, end = os.openpty()
    child = subprocess.Popen([sys.executable, "-c", program, str(cert), str(key)], stdin=end, stdout=end, stderr=end)
    os.close(end)
    said = b""
    with contextlib.suppress(OSError):  # the terminal is gone when the child is
        while b"pass phrase" not in said and select.select([terminal], [], [], 30)[0]:
            said += os.read(terminal, 4096)
    os.close(terminal)
    child.kill()
    child.wait()
    assert b"no PEM files that fit together" in said
    assert b"pass phrase" not in said
