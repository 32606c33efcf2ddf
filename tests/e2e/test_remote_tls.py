# SPDX-License-Identifier: Apache-2.0
"""Remote tiers over TLS with a CA of one's own and with passwords, as the chart gives them to a server process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from tests.e2e import remote_server
from tests.e2e.disk_server import CHUNKS, engine
from tests.e2e.remote_server import RemoteServer
from tests.served import wait_until
from tests.tiers.stores import BUCKET, Keys, Moto, redis_program


class Certified:
    """A CA, and what a server of 127.0.0.1 shows."""

    def __init__(self, folder: Path) -> None:
        ca = trustme.CA()
        own = ca.issue_cert("127.0.0.1")
        self.ca, self.cert, self.key = folder / "ca.crt", folder / "tls.crt", folder / "tls.key"
        ca.cert_pem.write_to_path(self.ca)
        own.cert_chain_pems[0].write_to_path(self.cert)
        own.private_key_pem.write_to_path(self.key)


@pytest.fixture
def certified(tmp_path: Path) -> Certified:
    return Certified(tmp_path)


@pytest.fixture
def secure_keys(tmp_path: Path, certified: Certified) -> Iterator[Keys]:
    store = Keys(tmp_path / "keys.log", redis_program())
    files = ("--tls-cert-file", certified.cert, "--tls-key-file", certified.key, "--tls-ca-cert-file", certified.ca)
    try:
        where = ("--port", "0", "--tls-port", str(store.port), "--tls-auth-clients", "no")
        store.start(*where, *map(str, files), "--requirepass", "of the test")
        yield store
    finally:
        store.kill()


@pytest.fixture
def secure_moto(tmp_path: Path, certified: Certified) -> Iterator[Moto]:
    import boto3

    store = Moto(tmp_path / "moto.log")
    try:
        place = ["-H", "127.0.0.1", "-p", str(store.port), "-s", "-c", str(certified.cert), "-k", str(certified.key)]
        store.run([sys.executable, "-m", "moto.server", *place])
        names = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
        address = f"https://127.0.0.1:{store.port}"
        boto3.client("s3", endpoint_url=address, verify=str(certified.ca), **names).create_bucket(Bucket=BUCKET)
        yield store
    finally:
        store.kill()


def variables(monkeypatch: pytest.MonkeyPatch, given: dict[str, object]) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))


def test_valkey_with_tls_and_a_password(
    tmp_path: Path, certified: Certified, secure_keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables(monkeypatch, {"VALKEY_PASSWORD": "of the test"})
    flags = ("--valkey-url", f"rediss://127.0.0.1:{secure_keys.port}", "--valkey-ca", str(certified.ca))
    with contextlib.closing(RemoteServer(tmp_path, *flags)) as server:
        remote_server.it_comes_back_after_a_kill(server)


def test_an_object_store_with_tls(
    tmp_path: Path, certified: Certified, secure_moto: Moto, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = {"AWS_ENDPOINT": f"https://127.0.0.1:{secure_moto.port}", "SSL_CERT_FILE": certified.ca}
    variables(monkeypatch, {**secure_moto.environment(), **address, "AWS_ALLOW_HTTP": ""})
    with contextlib.closing(RemoteServer(tmp_path, "--object-store-url", f"s3://{BUCKET}/kv")) as server:
        remote_server.it_comes_back_after_a_kill(server)


@pytest.mark.parametrize("kind", ["valkey", "objectstore"])
def test_a_server_whose_ca_nobody_trusts_gets_nothing(
    tmp_path: Path, secure_keys: Keys, secure_moto: Moto, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The cache goes on without it."""
    address = {"AWS_ENDPOINT": f"https://127.0.0.1:{secure_moto.port}", "VALKEY_PASSWORD": "of the test"}
    variables(monkeypatch, {**secure_moto.environment(), **address, "AWS_ALLOW_HTTP": ""})
    flags = {"valkey": ("--valkey-url", f"rediss://127.0.0.1:{secure_keys.port}")}
    flags["objectstore"] = ("--object-store-url", f"s3://{BUCKET}/kv")
    with contextlib.closing(RemoteServer(tmp_path, *flags[kind])) as server:
        server.start()
        with engine(server.address) as one:
            assert one.store(1) == ["STORED"] * CHUNKS
            wait_until(lambda: server.counter("failed_writes") + server.counter("skipped_writes") > 0, 60)
            assert one.load(1) == CHUNKS
            assert server.counter("written_objects") == 0
