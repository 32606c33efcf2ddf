# SPDX-License-Identifier: Apache-2.0
"""Settings: flags over variables over defaults; what cannot work is refused in a sentence that names the flag."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvgrpc.config.settings import Settings, SettingsError, default_socket_path, load_settings
from kvgrpc.config.values import format_size, is_loopback, parse_size, split_address
from kvgrpc.core.types import CoreLimits

COUNTS = {
    "chunk_tokens",
    "clients",
    "jobs_per_engine",
    "keys_per_call",
    "calls_per_client",
    "spaces",
    "pins",
    "victims_per_turn",
    "writes_in_flight",
    "writes_queued",
}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch):
    for name in list(os.environ):
        if name.startswith("KVGRPC_"):
            monkeypatch.delenv(name)


def test_defaults_are_the_designs():
    settings = load_settings()
    assert settings.core_limits() == CoreLimits()
    assert settings.socket_mode == 0o600
    assert settings.listen == ()
    assert settings.message_size == 16 << 20
    assert (settings.deadline_ms, settings.copy_deadline_ms, settings.drain_ms) == (5_000, 30_000, 25_000)


def test_every_limit_of_the_core_can_be_set():
    shares = {name: "0.75" for name in Settings.model_fields if name.endswith("_share")}
    counts = {name: "77777" for name in Settings.model_fields if name in COUNTS or name.endswith(("_ms", "_us"))}
    sizes = dict.fromkeys(("page_size", "slice_size", "records_size"), "123KiB")
    changed = load_settings(**shares, **counts, **sizes).core_limits()
    unchanged = CoreLimits()
    assert [f.name for f in fields(CoreLimits) if getattr(changed, f.name) == getattr(unchanged, f.name)] == []


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4GiB", 4 << 30),
        ("512 MiB", 512 << 20),
        ("1.5gib", 3 << 29),
        ("2GB", 2 * 10**9),
        ("4096", 4096),
        ("1 TiB", 1 << 40),
    ],
)
def test_sizes(text: str, size_bytes: int):
    assert parse_size(text) == size_bytes
    assert load_settings(l1_size=text).l1_size == size_bytes


@pytest.mark.parametrize("text", ["four", "4 potatoes", "-1GiB", "0", "1e9", "GiB", ""])
def test_what_is_no_size_is_refused_by_flag(text: str):
    with pytest.raises(SettingsError, match="--l1-size"):
        load_settings(l1_size=text)


def test_a_flag_wins_over_a_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVGRPC_L1_SIZE", "1GiB")
    monkeypatch.setenv("KVGRPC_LEASE_MS", "1000")
    assert load_settings().l1_size == 1 << 30
    assert load_settings(l1_size="2GiB").l1_size == 2 << 30
    assert load_settings(l1_size="2GiB").core_limits().lease_ns == 10**9


def test_lists_and_quotas_from_variables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVGRPC_LISTEN", "127.0.0.1:0, [::1]:7000")
    monkeypatch.setenv("KVGRPC_ALLOW_UID", "1000,1001")
    monkeypatch.setenv("KVGRPC_QUOTA", "tenant=a=1GiB,b=512MiB")
    settings = load_settings()
    assert settings.listen == ("127.0.0.1:0", "[::1]:7000")
    assert settings.allow_uid == (1000, 1001)
    assert settings.quota == {"tenant=a": 1 << 30, "b": 512 << 20}


def test_max_workers_sets_both_pools_and_the_others_override():
    both = load_settings(max_workers="3")
    assert (both.gpu_workers(cards=8), both.cpu_workers()) == (3, 3)
    own = load_settings(max_workers="3", max_gpu_workers="5", max_cpu_workers="7")
    assert (own.gpu_workers(), own.cpu_workers()) == (5, 7)
    assert load_settings().gpu_workers(cards=0) == 8
    assert load_settings().gpu_workers(cards=8) == 16


@pytest.mark.parametrize("name", ["max_workers", "max_gpu_workers", "max_cpu_workers"])
@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_no_workers_are_refused_by_flag(name: str, value: str):
    with pytest.raises(SettingsError, match="--" + name.replace("_", "-")):
        load_settings(**{name: value})


@pytest.mark.parametrize("address", ["0.0.0.0:50051", "[::]:50051", "10.0.0.1:1", "node.example:50051"])
def test_off_the_loopback_needs_insecure(address: str):
    with pytest.raises(SettingsError, match="--insecure"):
        load_settings(listen=(address,))
    assert load_settings(listen=(address,), insecure=True).listen == (address,)


def test_reflection_is_on_for_local_listeners_and_off_beyond():
    assert load_settings().serves_reflection()
    assert load_settings(listen=("127.0.0.1:0",)).serves_reflection()
    assert not load_settings(listen=("0.0.0.0:1",), insecure=True).serves_reflection()
    assert load_settings(listen=("0.0.0.0:1",), insecure=True, reflection=True).serves_reflection()
    assert not load_settings(reflection=False).serves_reflection()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("listen", ("localhost",)),
        ("listen", ("localhost:http",)),
        ("listen", ("127.0.0.1:70000",)),
        ("quota", ("tenant",)),
        ("socket_mode", "9"),
        ("socket_mode", "1777"),
        ("pin_share", "1.5"),
        ("pin_share", "0"),
        ("log_level", "loud"),
        ("log_format", "xml"),
        ("allow_uid", ("root",)),
        ("chunk_tokens", "0"),
        ("message_size", "1KiB"),
        ("message_size", "2GiB"),
        ("l1_size", "9" * 400),
        ("l1_size", "8EiB"),
        ("records_size", "8388608TiB"),
        ("valkey_url", "valkey://h:70000"),
        ("valkey_url", "valkey://h:x"),
        ("otlp_endpoint", "http://h:70000"),
        ("otlp_endpoint", "http://[h"),
    ],
)
def test_bad_values_name_their_flag(name: str, value: object):
    with pytest.raises(SettingsError, match="--" + name.replace("_", "-")):
        load_settings(**{name: value})


@pytest.mark.parametrize("url", ["s3://bucket", "gs://b/a/prefix/", "az://container/p", "file:///srv/objects"])
def test_places_of_object_stores(url: str):
    assert load_settings(object_store_url=url).object_store_url == url.rstrip("/")


@pytest.mark.parametrize(
    "url",
    [
        "bucket",
        "https://bucket",
        "s3://",
        "file://srv",
        "s3://key:secret@bucket",
        "s3://b?aws_access_key_id=a",
        "s3://b#a",
    ],
)
def test_no_place_of_an_object_store_or_one_with_a_key_in_it(url: str):
    with pytest.raises(SettingsError, match="--object-store-url") as refused:
        load_settings(object_store_url=url)
    assert "secret" not in str(refused.value)


def test_a_ca_of_valkey_needs_tls(tmp_path: Path):
    ca = tmp_path / "ca.crt"
    assert load_settings(valkey_url="valkeys://h", valkey_ca=str(ca)).valkey_ca == ca
    for url in ("valkey://h", None):
        with pytest.raises(SettingsError, match="--valkey-ca is for TLS"):
            load_settings(valkey_url=url, valkey_ca=str(ca))


@pytest.mark.parametrize("lasting", ["versions_url", "valkey_url"])
@pytest.mark.parametrize("url", ["valkey://h", "rediss://h:1"])
def test_mooncake_needs_a_place_for_versions(lasting: str, url: str):
    assert load_settings(mooncake_master="m:1", **{lasting: url}).mooncake_master == "m:1"
    with pytest.raises(SettingsError, match="--versions-url"):
        load_settings(mooncake_master="m:1")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"mooncake_master": "m"}, "--mooncake-master: 'm' is not HOST:PORT"),
        ({"mooncake_master": "m:70000"}, "--mooncake-master: 'm:70000' is not HOST:PORT"),
        ({"mooncake_master": "m:0"}, "--mooncake-master: 'm:0': nobody is at port 0"),
        ({"versions_url": "s3://b"}, "lower tiers, and there is none"),
        ({"mooncake_protocol": "rdma"}, "--mooncake-protocol has no effect"),
        ({"mooncake_protocol": "udp"}, "must be one of tcp, rdma"),
        ({"mooncake_master": "m:1", "versions_url": "s3://b", "mooncake_devices": "mlx5_0"}, "protocol rdma"),
        ({"mooncake_master": "m:1", "versions_url": "http://b"}, "--versions-url"),
        ({"mooncake_master": "m:1", "versions_url": "s3://key:secret@b"}, "--versions-url"),
    ],
)
def test_settings_of_mooncake_that_cannot_be_meant(flags: dict[str, str], named: str):
    with pytest.raises(SettingsError, match=named) as refused:
        load_settings(**flags)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["valkey://h", "redis://127.0.0.1:6379/0", "rediss://h:1", "valkeys://[::1]:7/"])
def test_places_of_valkey(url: str):
    assert load_settings(valkey_url=url).valkey_url == url.rstrip("/")


@pytest.mark.parametrize(
    "url", ["h:6379", "http://h", "valkey://", "valkey://:secret@h", "redis://h/x", "redis://h?a=b"]
)
def test_no_place_of_valkey_or_one_with_a_password_in_it(url: str):
    with pytest.raises(SettingsError, match="--valkey-url") as refused:
        load_settings(valkey_url=url)
    assert "secret" not in str(refused.value)


def test_settings_are_frozen():
    with pytest.raises(ValidationError):
        load_settings().chunk_tokens = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_the_socket_lies_in_the_users_run_time_folder(tmp_path):
    assert default_socket_path({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "kvgrpc" / "kvgrpc.sock"
    elsewhere = default_socket_path({"XDG_RUNTIME_DIR": str(tmp_path / "missing")})
    assert elsewhere.name == "kvgrpc.sock" and tmp_path not in elsewhere.parents


def test_addresses():
    assert split_address("[::1]:50051") == ("::1", 50051)
    assert is_loopback("127.8.8.8") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("localhost.example")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"listen": ("m",)}, "--listen: 'm' is not HOST:PORT, for example 127.0.0.1:50051"),
        ({"listen": ("127.0.0.1:0", "[::1]:70000")}, "--listen: '[::1]:70000' is not HOST:PORT"),
        ({"metrics_listen": "h:70000"}, "--metrics-listen: 'h:70000' is not PORT or HOST:PORT"),
        ({"health_listen": "h:"}, "--health-listen: 'h:' is not PORT or HOST:PORT"),
        ({"mooncake_master": ":1", "versions_url": "s3://b"}, "--mooncake-master: ':1' is not HOST:PORT"),
    ],
)
def test_what_is_no_address_is_told_with_its_flag(flags: dict[str, object], named: str):
    with pytest.raises(SettingsError) as refused:
        load_settings(**flags)
    assert str(refused.value).startswith(named)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"l1_size": "0"}, "--l1-size: must be more than 0, not 0"),
        ({"pin_share": "50"}, "--pin-share: must be at most 1, not 50"),
        ({"lease_ms": "999999999"}, "--lease-ms: must be at most 86400000, not 999999999"),
        ({"trace_share": "-1"}, "--trace-share: must be at least 0, not -1"),
        ({"allow_uid": ("5000000000",)}, "--allow-uid: must be less than 4294967296, not 5000000000"),
        ({"quota": ("a=0",)}, "--quota: must be more than 0, not 0"),
        (
            {"write_policy": "trough"},
            "--write-policy: must be 'through', 'eviction', 'second-use' or 'none', not 'trough'",
        ),
        (
            {"write_policy_of": ("m=x",)},
            "--write-policy-of: must be 'through', 'eviction', 'second-use' or 'none', not 'x'",
        ),
        ({"socket_mode": "7777"}, "--socket-mode: '7777' is not an octal file mode, for example 0660"),
    ],
)
def test_what_is_out_of_bounds_is_told_with_the_bound(flags: dict[str, object], sentence: str):
    with pytest.raises(SettingsError) as refused:
        load_settings(**flags)
    assert str(refused.value) == sentence


def test_sizes_for_people():
    assert [format_size(n) for n in (0, 1023, 1536, 4 << 30)] == ["0 B", "1023 B", "1.5 KiB", "4 GiB"]
