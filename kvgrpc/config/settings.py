# SPDX-License-Identifier: Apache-2.0
"""Settings of a server: one frozen object, made of flags and ``KVGRPC_`` variables.

A field ``l1_size`` is the flag ``--l1-size`` and the variable ``KVGRPC_L1_SIZE``; a flag wins. Lists are separated by
commas in a variable and repeated as a flag. Everything wrong is a ``SettingsError`` that names the flag,
or the variable.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from kvgrpc.config.places import default_socket_path, named_socket
from kvgrpc.config.values import (
    is_loopback,
    parse_addresses,
    parse_collector,
    parse_mode,
    parse_own_address,
    parse_peer,
    parse_policies,
    parse_quotas,
    parse_size,
    parse_store_url,
    parse_valkey_url,
    parse_versions_url,
    split_address,
    split_list,
)
from kvgrpc.core.types import MIB, MS, CoreLimits, WritePolicy

MESSAGE_MIN, MESSAGE_MOST = 64 << 10, 2046 * MIB
"""gRPC counts the bytes of a message, and what is beyond the limit, in 31 bits."""
PAGE_MIN = 512


class SettingsError(Exception):
    """Settings that cannot work, in one plain sentence for the person at the terminal."""


Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
Count = Annotated[int, Field(gt=0, le=1 << 32)]
Millis = Annotated[int, Field(gt=0, le=86_400_000)]
Micros = Annotated[int, Field(ge=0, le=1_000_000)]
Share = Annotated[float, Field(gt=0, le=1)]
Part = Annotated[float, Field(ge=0, le=1)]
Addresses = Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_addresses)]
Uids = Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 32)], ...], NoDecode, BeforeValidator(split_list)]
Quotas = Annotated[dict[str, Size], NoDecode, BeforeValidator(parse_quotas)]
Policies = Annotated[dict[str, WritePolicy], NoDecode, BeforeValidator(parse_policies)]
SocketPath = Annotated[Path, BeforeValidator(named_socket)]
OwnAddress = Annotated[str, BeforeValidator(parse_own_address)]
Collector = Annotated[str, BeforeValidator(parse_collector)]
ValkeyUrl = Annotated[str, BeforeValidator(parse_valkey_url)]
StoreUrl = Annotated[str, BeforeValidator(parse_store_url)]
VersionsUrl = Annotated[str, BeforeValidator(parse_versions_url)]
Peer = Annotated[str, BeforeValidator(parse_peer)]
Mode = Annotated[int, BeforeValidator(parse_mode), Field(ge=0, le=0o777)]

THREADS_MOST = 256
PREFIX = "KVGRPC_"
_LIMITS = CoreLimits()
_WORDS = {
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("auto", "console", "json"),
    "copy_mode": ("auto", "dma", "staged", "direct"),
    "mooncake_protocol": ("tcp", "rdma"),
}


def _doc(default: Any, text: str) -> Any:
    return Field(default=default, description=text)


class Settings(BaseSettings):
    """What `kvgrpc serve` runs with. Times are milliseconds, sizes bytes, shares fractions of L1."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", env_ignore_empty=True)

    # listeners
    socket: SocketPath | None = _doc(None, "Unix socket to listen on; default: a path of this user, printed at start")
    socket_mode: Mode = _doc(0o600, "file mode of the socket: who may connect")
    socket_group: str = _doc("", "group of the socket; needs a --socket-mode that lets it in")
    listen: Addresses = _doc((), "also listen on this HOST:PORT (TCP); port 0 chooses one")
    insecure: bool = _doc(False, "allow --listen off the loopback without TLS: who reaches the port reads KV data")
    tls_cert: Path | None = _doc(None, "certificate chain (PEM) of the TCP listeners; read again when it changes")
    tls_key: Path | None = _doc(None, "its private key (PEM)")
    tls_client_ca: Path | None = _doc(None, "CA (PEM) of client certificates, which clients then must have")
    access: Path | None = _doc(None, "file of tenants (JSON): who may call what; default: whoever can connect")
    health_listen: OwnAddress | None = _doc(None, "also serve health, and only that, here without TLS")
    reflection: bool | None = _doc(None, "serve gRPC reflection; default: on unless a listener is off the loopback")
    allow_uid: Uids = _doc((), "user id whose shared memory may be registered, beside the server's own")

    # memory
    l1_size: Size | None = _doc(None, "memory for KV data; default: half of what is available, at most 4 GiB")
    arena_path: Path | None = _doc(
        None, "file for that memory, which the next server takes over; default: none, private memory"
    )
    fresh: bool = _doc(False, "begin with an empty --arena-path, whatever an earlier server left there")
    huge_pages: bool = _doc(False, "take that memory from the system's reserved huge pages (vm.nr_hugepages)")
    quota: Quotas = Field(default_factory=dict[str, int], description="SALT=SIZE: most that a tenant may hold")
    chunk_tokens: Count = _doc(_LIMITS.chunk_tokens, "tokens in a chunk, the unit that is cached")
    page_size: Size = _doc(_LIMITS.page_bytes, "allocation unit of objects that find no contiguous place")
    slice_size: Size = _doc(_LIMITS.slice_bytes, "most bytes copied before other work gets its turn")

    # cards
    cards: bool = _doc(True, "serve engines on NVIDIA cards where the machine has some; takes memory of each card")
    copy_mode: str = _doc("auto", "how bytes move to and from cards: dma, staged, direct, or auto: by run length")

    # threads
    max_workers: int | None = _doc(None, "size of both thread pools")
    max_gpu_workers: int | None = _doc(None, "threads that launch copies; default: 8, or 2 for each card")
    copy_threads: int | None = _doc(None, "threads that share one copy; default: one a core, at most 4")
    max_cpu_workers: int | None = _doc(None, "threads that hash and call tiers; default: one a core, at most 8")

    # leases and records
    lease_ms: Millis = _doc(_LIMITS.lease_ns // MS, "how long a lookup pins what it found")
    record_ms: Millis = _doc(_LIMITS.record_ns // MS, "how long a lookup's record can be asked for")
    read_record_ms: Millis = _doc(_LIMITS.read_record_ns // MS, "how long a record outlives its last reader")
    records_size: Size = _doc(
        _LIMITS.records_bytes, "memory for records of lookups, and as much for what they ask of lower tiers"
    )
    reattach_grace_ms: Millis = _doc(_LIMITS.reattach_grace_ns // MS, "how long a broken session may stay broken")
    pin_share: Share = _doc(_LIMITS.pin_share, "share of L1 that leases may pin")
    hold_share: Share = _doc(_LIMITS.hold_share, "share of L1 that retention and Pin may hold")
    settling_share: Share = _doc(_LIMITS.settling_share, "share of L1 that may wait for abandoned copies")
    prefetch_share: Share = _doc(_LIMITS.prefetch_share, "share of L1 that prefetch may fill at a time")
    prefetch_wait_ms: Millis = _doc(_LIMITS.prefetch_wait_ns // MS, "how long a lookup waits for lower tiers")
    prefetch_wait_token_us: Micros = _doc(0, "how much longer for each token that is not in L1")
    prefetch_wait_most_ms: Millis = _doc(_LIMITS.prefetch_wait_most_ns // MS, "how long at most, unless it says itself")

    # lower tiers
    disk_path: Path | None = _doc(
        None, "folder for objects below L1, which must be there; servers may share it; default: none, no disk tier"
    )
    disk_size: Size | None = _doc(None, "most bytes of this server's files there; needed with --disk-path")
    disk_direct: bool = _doc(True, "read and write those files past the page cache, where that is possible")
    mooncake_master: Peer | None = _doc(None, "HOST:PORT of the master of a Mooncake Store, for objects below L1")
    mooncake_protocol: str = _doc("tcp", "how its bytes travel: tcp or rdma")
    mooncake_devices: str = _doc("", "RDMA devices for that, separated by commas; default: the library chooses")
    valkey_url: ValkeyUrl | None = _doc(
        None, "valkey(s):// or redis(s):// URL of a server, or of one of a cluster, for objects below L1"
    )
    valkey_ca: Path | None = _doc(None, "CA (PEM) of that server, where its URL is with TLS; beside the system's own")
    valkey_ttl_ms: Millis = _doc(86_400_000, "how long objects are kept there after their writing")
    object_store_url: StoreUrl | None = _doc(
        None, "s3://, gs://, az:// or file:// URL for objects below L1, shared by all servers of it; keys: environment"
    )
    versions_url: VersionsUrl | None = _doc(
        None, "URL as of an object store or Valkey, for versions of spaces alone; default: with the tiers that last"
    )
    write_policy: WritePolicy = _doc(WritePolicy.THROUGH, "what is copied down: through, eviction, second-use or none")
    write_policy_of: Policies = Field(default_factory=dict[str, WritePolicy], description="MODEL=POLICY: for one model")
    write_share: Share = _doc(_LIMITS.write_share, "share of L1 that may be on its way into a tier")
    write_ahead_share: Share = _doc(_LIMITS.write_ahead_share, "share of L1 that policy eviction keeps free or written")
    writes_in_flight: Count = _doc(_LIMITS.writes_in_flight, "objects that are written to a tier at a time")
    writes_queued: Count = _doc(_LIMITS.writes_queued, "objects that wait to be written to a tier")
    tier_deadline_ms: Millis = _doc(10_000, "how long one call of a tier may take")
    flush_ms: Millis = _doc(5_000, "how long waiting writes to lower tiers may take after SIGTERM")

    # limits
    clients: Count = _doc(_LIMITS.clients, "attached clients")
    jobs_per_engine: Count = _doc(_LIMITS.jobs_per_engine, "pinned or pending lookups of one engine")
    keys_per_call: Count = _doc(_LIMITS.keys_per_call, "chunks in one call")
    calls_per_client: Count = _doc(_LIMITS.calls_per_client, "call records of one client")
    call_record_ms: Millis = _doc(
        _LIMITS.call_record_ns // MS, "how long a finished call's result can be asked for again"
    )
    spaces: Count = _doc(_LIMITS.spaces, "spaces that are remembered")
    chunk_streams: Count = _doc(16, "streams of ReadChunks at a time, and as many of WriteChunks")
    watchers: Count = _doc(64, "streams of Watch at a time")
    pins: Count = _doc(_LIMITS.pins, "operator pins (AdminService.Pin) at a time")
    victims_per_turn: Count = _doc(_LIMITS.victims_per_turn, "chunks evicted or reclaimed in one turn")
    message_size: Size = _doc(16 * MIB, "largest gRPC message")
    deadline_ms: Millis = _doc(5_000, "deadline of a call that brings none")
    copy_deadline_ms: Millis = _doc(30_000, "deadline of a Store or Retrieve that brings none")
    drain_ms: Millis = _doc(25_000, "how long running copies may take after SIGTERM")
    stall_ms: Millis = _doc(30_000, "how long one slice of a copy may run before liveness fails")

    # telemetry
    metrics_listen: OwnAddress | None = _doc(None, "serve metrics for Prometheus here; PORT alone is on 127.0.0.1")
    otlp_endpoint: Collector = _doc("", "send metrics and traces to this OpenTelemetry collector (OTLP over HTTP)")
    otlp_interval_ms: Millis = _doc(15_000, "how often metrics are sent")
    trace_share: Part = _doc(0.01, "share of calls that are traced when their engine does not say")

    # logs
    log_level: str = _doc("info", "debug, info, warning or error")
    log_format: str = _doc("auto", "console, json, or auto: console on a terminal, else json")

    @field_validator("max_workers", "max_gpu_workers", "copy_threads", "max_cpu_workers")
    @classmethod
    def _some_threads(cls, value: int | None) -> int | None:
        if value is not None and value < 1:
            raise ValueError(f"must be at least 1, not {value}")
        if value is not None and value > THREADS_MOST:
            raise ValueError(f"must be at most {THREADS_MOST}, not {value}")
        return value

    @field_validator("page_size")
    @classmethod
    def _pages_hold_something(cls, value: int) -> int:
        if value < PAGE_MIN:
            raise ValueError(f"must be at least {PAGE_MIN} bytes, not {value}")
        return value

    @field_validator("log_level", "log_format", "copy_mode", "mooncake_protocol", mode="before")
    @classmethod
    def _small_letters(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @field_validator("message_size")
    @classmethod
    def _message_holds_a_call(cls, value: int) -> int:
        if value < MESSAGE_MIN:
            raise ValueError(f"must be at least {MESSAGE_MIN} bytes, not {value}")
        if value > MESSAGE_MOST:
            raise ValueError(f"must be at most {MESSAGE_MOST} bytes, not {value}")
        return value

    @field_validator("log_level", "log_format", "copy_mode", "mooncake_protocol")
    @classmethod
    def _known_word(cls, value: str, info: Any) -> str:
        words = _WORDS[info.field_name]
        if value not in words:
            raise ValueError(f"must be one of {', '.join(words)}, not {value!r}")
        return value

    @model_validator(mode="after")
    def _one_kind_of_memory(self) -> Settings:
        if self.arena_path is not None and self.huge_pages:
            raise ValueError("--huge-pages and --arena-path exclude each other: huge pages have no name")
        if self.fresh and self.arena_path is None:
            raise ValueError("--fresh is about what lies at --arena-path, and there is none")
        return self

    @model_validator(mode="after")
    def _disk_has_a_limit(self) -> Settings:
        if (self.disk_path is None) != (self.disk_size is None):
            raise ValueError("--disk-path and --disk-size belong together: a folder, and the most bytes in it")
        return self

    @model_validator(mode="after")
    def _a_ca_is_for_tls(self) -> Settings:
        urls = (self.valkey_url or "", self.versions_url or "")
        if self.valkey_ca is not None and not any(url.startswith(("valkeys:", "rediss:")) for url in urls):
            raise ValueError("--valkey-ca is for TLS, and there is no --valkey-url that begins with valkeys or rediss")
        return self

    @model_validator(mode="after")
    def _versions_outlive_what_they_are_of(self) -> Settings:
        lasting = self.disk_path or self.valkey_url or self.object_store_url
        if self.mooncake_master is not None and not (lasting or self.versions_url):
            raise ValueError(
                "--mooncake-master keeps objects and no versions of spaces, without which cleared ones would be found "
                "again; say where those lie, for all servers of the store, with --versions-url"
            )
        if self.versions_url is not None and not (lasting or self.mooncake_master):
            raise ValueError("--versions-url is about what lies in lower tiers, and there is none")
        if self.mooncake_devices and self.mooncake_protocol != "rdma":
            raise ValueError("--mooncake-devices needs --mooncake-protocol rdma")
        if self.mooncake_protocol != "tcp" and self.mooncake_master is None:
            raise ValueError("--mooncake-protocol has no effect without --mooncake-master")
        return self

    @model_validator(mode="after")
    def _listeners_are_safe(self) -> Settings:
        for address in self.listen:
            if not is_loopback(split_address(address)[0]) and not self.insecure and self.tls_cert is None:
                raise ValueError(
                    f"--listen {address} is off the loopback and would serve without TLS; "
                    "give it --tls-cert and --tls-key, listen on 127.0.0.1 or the Unix socket, "
                    "or say --insecure if the network is trusted"
                )
        return self

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Settings:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key belong together: give both")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-client-ca needs --tls-cert and --tls-key: without TLS nobody shows a certificate")
        if self.tls_cert is not None and not self.listen:
            raise ValueError("--tls-cert is for TCP, and there is no --listen; a Unix socket has no TLS")
        if self.tls_cert is not None and self.insecure:
            raise ValueError("--insecure and --tls-cert contradict each other: every --listen has TLS then")
        return self

    @model_validator(mode="after")
    def _group_gets_in(self) -> Settings:
        if self.socket_group and self.socket_mode & 0o060 != 0o060:
            text = f"mode {self.socket_mode:04o} keeps the group out; say --socket-mode 0660"
            raise ValueError(f"--socket-group {self.socket_group}: {text}")
        return self

    def core_limits(self) -> CoreLimits:
        return CoreLimits(
            chunk_tokens=self.chunk_tokens,
            page_bytes=self.page_size,
            slice_bytes=self.slice_size,
            lease_ns=self.lease_ms * MS,
            record_ns=self.record_ms * MS,
            read_record_ns=self.read_record_ms * MS,
            records_bytes=self.records_size,
            pin_share=self.pin_share,
            hold_share=self.hold_share,
            settling_share=self.settling_share,
            prefetch_share=self.prefetch_share,
            prefetch_wait_ns=self.prefetch_wait_ms * MS,
            prefetch_wait_token_ns=self.prefetch_wait_token_us * 1000,
            prefetch_wait_most_ns=self.prefetch_wait_most_ms * MS,
            write_share=self.write_share,
            write_ahead_share=self.write_ahead_share,
            writes_in_flight=self.writes_in_flight,
            writes_queued=self.writes_queued,
            jobs_per_engine=self.jobs_per_engine,
            keys_per_call=self.keys_per_call,
            victims_per_turn=self.victims_per_turn,
            clients=self.clients,
            calls_per_client=self.calls_per_client,
            reattach_grace_ns=self.reattach_grace_ms * MS,
            call_record_ns=self.call_record_ms * MS,
            spaces=self.spaces,
            pins=self.pins,
        )

    def gpu_workers(self, cards: int = 0) -> int:
        return self.max_gpu_workers or self.max_workers or max(8, 2 * cards)

    def cpu_workers(self) -> int:
        return self.max_cpu_workers or self.max_workers or min(8, os.cpu_count() or 1)

    def socket_path(self) -> Path:
        return self.socket or default_socket_path()

    def serves_reflection(self) -> bool:
        if self.reflection is not None:
            return self.reflection
        return all(is_loopback(split_address(address)[0]) for address in self.listen)


def load_settings(**flags: Any) -> Settings:
    """Flags (None = not given) over variables over defaults."""
    given = {name: value for name, value in flags.items() if value is not None and value != ()}
    try:
        return Settings(**given)
    except ValidationError as error:
        raise SettingsError("; ".join(_describe(item, given) for item in error.errors())) from None


def strange_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """For each variable that nearly has the name of a setting, a sentence. Others may be there for other reasons, as
    those that Kubernetes makes of a Service's name."""
    known = [f"{PREFIX}{name.upper()}" for name in Settings.model_fields]
    strange = [name for name in environ if name.startswith(PREFIX) and name not in known]
    pairs = [(name, meant) for name in strange for meant in get_close_matches(name, known, 1, 0.85)]
    return [f"{name} is no setting and is ignored; did you mean {meant}?" for name, meant in pairs]


_SENTENCES = {
    "int_parsing": "{input!r} is not a whole number",
    "float_parsing": "{input!r} is not a number",
    "bool_parsing": "{input!r} is neither true nor false",
    "greater_than": "must be more than {gt:.12g}, not {input}",
    "greater_than_equal": "must be at least {ge:.12g}, not {input}",
    "less_than": "must be less than {lt:.12g}, not {input}",
    "less_than_equal": "must be at most {le:.12g}, not {input}",
    "enum": "must be {expected}, not {input!r}",
}


def _describe(item: Any, flags: Container[str]) -> str:
    text = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] in _SENTENCES:
        text = _SENTENCES[item["type"]].format(input=item["input"], **item.get("ctx", {}))
    if not item["loc"]:
        return text
    name = str(item["loc"][0])
    flag = "--" + name.replace("_", "-")
    return f"{flag}: {text}" if name in flags else f"KVGRPC_{name.upper()} ({flag}): {text}"
