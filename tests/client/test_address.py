# SPDX-License-Identifier: Apache-2.0
"""Addresses as people write them."""

from __future__ import annotations

import pytest

from kvgrpc.client import Address, parse_address


@pytest.mark.parametrize(
    ("text", "address", "target"),
    [
        ("grpc://127.0.0.1:50051", Address(host="127.0.0.1", port=50051), "127.0.0.1:50051"),
        ("grpc://node-7.example:1/", Address(host="node-7.example", port=1), "node-7.example:1"),
        ("localhost:65535", Address(host="localhost", port=65535), "localhost:65535"),
        ("[::1]:50051", Address(host="::1", port=50051), "[::1]:50051"),
        ("grpc://[fe80::1%eth0]:50051", Address(host="fe80::1%eth0", port=50051), "[fe80::1%eth0]:50051"),
        ("grpc+unix:///run/kvgrpc/kvgrpc.sock", Address("/run/kvgrpc/kvgrpc.sock"), "unix:/run/kvgrpc/kvgrpc.sock"),
        ("unix:/run/kvgrpc/kvgrpc.sock", Address("/run/kvgrpc/kvgrpc.sock"), "unix:/run/kvgrpc/kvgrpc.sock"),
        ("unix:///run/kvgrpc/kvgrpc.sock", Address("/run/kvgrpc/kvgrpc.sock"), "unix:/run/kvgrpc/kvgrpc.sock"),
        ("/srv/a%20b/s", Address("/srv/a%20b/s"), "unix:/srv/a%2520b/s"),
        ("unix:/srv/a b/s", Address("/srv/a b/s"), "unix:/srv/a%20b/s"),
        ("unix:/srv/a%20b/s", Address("/srv/a b/s"), "unix:/srv/a%20b/s"),
    ],
)
def test_understood(text: str, address: Address, target: str) -> None:
    assert parse_address(text) == address
    assert address.target == target
    assert address.is_unix == text.startswith(("unix", "grpc+unix", "/"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "host:port"),
        ("localhost", "host:port"),
        ("localhost:", "host:port"),
        (":50051", "host:port"),
        ("localhost:0", "port 0"),
        ("localhost:65536", "port 65536"),
        ("::1:50051", "host:port"),
        ("http://localhost:50051", "grpc://host:port"),
        ("grpc://localhost", "host:port"),
        ("grpc://user@localhost:1", "host:port"),
        ("grpc://localhost:1/path", "host:port"),
        ("run/kvgrpc.sock", "unix:/path"),
        ("unix:kvgrpc.sock", "absolute path"),
        ("unix:/", "absolute path"),
        ("unix:", "absolute path"),
        ("unix:/run/", "absolute path"),
        ("grpc+unix://run/kvgrpc.sock", "three slashes"),
        ("unix:/" + "x" * 107, "107 bytes"),
    ],
)
def test_refused_with_what_would_be_right(text: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_address(text)
    assert says in str(caught.value)
    assert repr(text) in str(caught.value)
