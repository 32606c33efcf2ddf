# SPDX-License-Identifier: Apache-2.0
"""The tier in a Valkey or Redis server, or a cluster of them, through redis-py.

    kvgrpc:{NAME}           envelope and payload; of what is larger than a piece, envelope and where its pieces are
    kvgrpc:{NAME}:ID:NNN    a piece, of one write
    kvgrpc:{versions}       kvgrpc.tiers.versions

The first key is written last, so an object is there as a whole; one whose pieces went away is a miss. Keys of an object
are in one slot of a cluster. Everything has a time to live, and the server may evict what it likes.

The client's blocking form runs on threads of the tier: on the event loop it would hold up every call while it parses.
"""

from __future__ import annotations

import errno
import mmap
import secrets
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import redis
from redis._parsers import Encoder, _HiredisParser  # pyright: ignore[reportPrivateUsage]
from redis.backoff import ExponentialBackoff
from redis.cluster import RedisCluster
from redis.connection import PythonRespSerializer
from redis.exceptions import (
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    TimeoutError,
)
from redis.retry import Retry

from kvgrpc.core.types import ObjectName
from kvgrpc.tiers.base import FaultReason, TierFault, TierMiss
from kvgrpc.tiers.envelope import HEADER_BYTES, Sealing, check_header
from kvgrpc.tiers.pieces import PROBES, BlockingTier, Draining, Filling, TornObject

PIECE_BYTES = 1 << 20
"""Small enough that a server answers others in between, large enough that commands cost little."""
GROUP = 8
"""Pieces of an object that travel in one pipeline."""
RETRIES = 2
"""Of a command that met a dropped connection, or a server that has become a replica: each on a new connection, since
the address may be another server's by now."""
VERSIONS_KEY = "kvgrpc:{versions}"
ERRORS = (RedisError, RedisClusterException, OSError, BufferError)

_ENCODE: Any = Encoder("utf-8", "strict", False).encode  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_TAIL = struct.Struct("<16sII")
"""Id of the write, bytes of a piece, pieces."""
_PIECES_MOST = 1 << 16
_SWAP = """
local kept = redis.call('GETRANGE', KEYS[1], 0, 19)
if kept == ARGV[1] or (kept == '' and tonumber(ARGV[1]) == 0) then
    redis.call('SET', KEYS[1], ARGV[2])
    return 1
end
return 0
"""


@dataclass(frozen=True, slots=True)
class Login:
    """How to be let in; with TLS, ``ca`` is trusted beside what the system trusts."""

    name: str = ""
    password: str = field(default="", repr=False)
    ca: Path | None = None


NO_LOGIN = Login()


class _Call(threading.local):
    """Of a thread."""

    until_s = float("inf")


_call = _Call()


def begin_call(deadline_s: float) -> None:
    """What this thread asks from now on is answered within that time or fails."""
    _call.until_s = time.monotonic() + deadline_s


class _InTime(_HiredisParser):
    """The client's own time for an answer begins anew with each byte of it."""

    def read_from_socket(self, *args: Any, **named: Any) -> Any:
        if time.monotonic() >= _call.until_s:
            raise TimeoutError("the answer takes too long")
        return super().read_from_socket(*args, **named)


class _Plain(redis.Connection):
    def set_parser(self, parser_class: Any) -> None:
        super().set_parser(_InTime)  # pyright: ignore[reportUnknownMemberType]


class _Tls(redis.SSLConnection):
    def set_parser(self, parser_class: Any) -> None:
        super().set_parser(_InTime)  # pyright: ignore[reportUnknownMemberType]


def object_key(name: str) -> str:
    return f"kvgrpc:{{{name}}}"


def connect(url: str, deadline_s: float, login: Login = NO_LOGIN) -> Any:
    """A client of the server, or of the cluster that it belongs to, for threads that have begun a call. Raises what is
    in ERRORS."""
    scheme, _, place = url.partition(":")
    tls = scheme in ("valkeys", "rediss")
    options: dict[str, Any] = {
        "connection_class": _Tls if tls else _Plain,
        "username": login.name or None,
        "password": login.password or None,
        "socket_timeout": deadline_s,
        "socket_connect_timeout": min(2.0, deadline_s),
        "socket_read_size": PIECE_BYTES,
        "command_packer": PythonRespSerializer(6000, _ENCODE),  # copies no large value
        "retry": Retry(ExponentialBackoff(cap=0.5, base=0.05), RETRIES, (ConnectionError, ReadOnlyError)),
    }
    if login.ca is not None and tls:
        options["ssl_ca_certs"] = str(login.ca)
    plain = f"redis:{place}"  # one for TLS would choose the class of connections itself
    client: Any = redis.Redis.from_url(plain, **options)  # pyright: ignore[reportUnknownMemberType]
    if client.info("cluster").get("cluster_enabled"):
        client.close()
        client = RedisCluster.from_url(plain, **options)  # pyright: ignore[reportUnknownMemberType]
    return client


class ValkeyTier(BlockingTier):
    """Keeps objects for ``ttl_ms`` after their writing. ``deadline_s`` bounds each call on its thread, too."""

    def __init__(
        self, url: str, ttl_ms: int, deadline_s: float = 10.0, login: Login = NO_LOGIN, *, name: str = "valkey"
    ) -> None:
        super().__init__(name, url, ERRORS, self._counted)
        self._ttl_ms = ttl_ms
        self._how = (deadline_s, login)

    def _call_begins(self) -> None:
        begin_call(self._how[0])

    def _connect(self) -> Any:
        return connect(self._where, *self._how)

    def _fault(self, error: Exception) -> TierFault:
        full = isinstance(error, OutOfMemoryError)
        return TierFault(FaultReason.FULL, f"{self._where}: {error}") if full else super()._fault(error)

    def _exists(self, names: Sequence[str]) -> list[bool]:
        pipeline = self._connected().pipeline(transaction=False)
        for name in names:
            pipeline.exists(object_key(name))
        return [bool(there) for there in pipeline.execute()]

    def _read(self, object: ObjectName, filling: Filling) -> None:
        key = object_key(object.name)
        first = memoryview(self._first(key, HEADER_BYTES + max(PIECE_BYTES, _TAIL.size)))
        check_header(object, first)
        filling.take(first[:HEADER_BYTES])
        if object.size_bytes <= PIECE_BYTES:
            filling.take(first[HEADER_BYTES:])
        else:
            self._take_pieces(object, key, first[HEADER_BYTES:], filling)
        filling.end()

    def _first(self, key: str, most: int) -> bytes:
        """What is kept under the key, but not more than that. Raises TierMiss."""
        there, kept = self._connected().pipeline(transaction=False).exists(key).getrange(key, 0, most - 1).execute()
        if not there:
            raise TierMiss(f"{key}: not kept")
        return kept

    def _take_pieces(self, object: ObjectName, key: str, tail: memoryview, filling: Filling) -> None:
        if len(tail) != _TAIL.size:
            raise TierFault(FaultReason.SHORT, f"{key}: nothing says where its pieces are")
        keys, piece_bytes = _pieces_of(key, tail)
        if len(keys) * piece_bytes >= object.size_bytes + piece_bytes or piece_bytes > 16 * PIECE_BYTES:
            raise TierFault(FaultReason.CORRUPT, f"{key}: its pieces are not those of its bytes")
        for at in range(0, len(keys), GROUP):
            pipeline = self._connected().pipeline(transaction=False)
            for piece in keys[at : at + GROUP]:
                pipeline.getrange(piece, 0, piece_bytes)  # one byte more than it may have
            for kept in pipeline.execute():
                if not kept:
                    raise TornObject(f"{key}: a piece is gone")
                filling.take(kept)

    def _write(self, object: ObjectName, draining: Draining) -> int:
        """Pieces first, then what names them."""
        key, client, room = object_key(object.name), self._connected(), _scratch()
        sealing = Sealing(object)

        def take(number: int) -> memoryview:
            view = room[number % GROUP * PIECE_BYTES :][:PIECE_BYTES]
            view = view[: draining.take(view)]
            sealing.update(view)
            return view

        freed, old_keys = self._kept(key)
        if object.size_bytes <= PIECE_BYTES:
            piece = take(0)
            client.set(key, b"".join([sealing.header(), piece]), px=self._ttl_ms)
        else:
            count = -(-object.size_bytes // PIECE_BYTES)
            tail = _TAIL.pack(secrets.token_bytes(16), PIECE_BYTES, count)
            keys, _ = _pieces_of(key, memoryview(tail))
            with _gone_unless_whole(client, keys):
                for at in range(0, count, GROUP):
                    pipeline = client.pipeline(transaction=False)
                    for number, piece_key in enumerate(keys[at : at + GROUP], at):
                        pipeline.set(piece_key, take(number), px=self._ttl_ms)
                    pipeline.execute()
                client.set(key, sealing.header() + tail, px=self._ttl_ms)
        if old_keys:
            client.unlink(*old_keys)
        return freed

    def _kept(self, key: str) -> tuple[int, list[str]]:
        """(bytes of what is kept under the key, keys of its pieces)."""
        there, size, head = (
            self._connected()
            .pipeline(transaction=False)
            .exists(key)
            .strlen(key)
            .getrange(key, 0, HEADER_BYTES + _TAIL.size - 1)
            .execute()
        )
        if not there or size != HEADER_BYTES + _TAIL.size:
            return size, []
        keys, piece_bytes = _pieces_of(key, memoryview(head)[HEADER_BYTES:])
        return size + len(keys) * piece_bytes, keys

    def _remove(self, name: str) -> int:
        key = object_key(name)
        freed, keys = self._kept(key)
        self._connected().unlink(key)
        for at in range(0, len(keys), PROBES):
            self._connected().unlink(*keys[at : at + PROBES])
        return freed

    async def _counted(self) -> AsyncIterator[int]:
        pages = self._pages()
        while (used := await self._run(self._readers, lambda: next(pages, -1))) >= 0:
            yield used

    def _pages(self) -> Iterator[int]:
        client = self._connected()
        keys: Iterator[Any] = client.scan_iter(match="kvgrpc:*", count=PROBES)
        while page := list(islice(keys, PROBES)):
            yield _lengths(client, page)


@contextmanager
def _gone_unless_whole(client: Any, keys: Sequence[str]) -> Generator[None]:
    """Around the writing of pieces: a server that is full must not fill with those of objects that did not fit. Where
    that fails, too, they go with their time."""
    try:
        yield
    except ERRORS:
        with suppress(*ERRORS):
            for at in range(0, len(keys), PROBES):
                client.unlink(*keys[at : at + PROBES])
        raise


_local = threading.local()


def _scratch() -> memoryview:
    """Room for a group of pieces, of this thread: fresh memory for each would cost more than the copies."""
    if len(getattr(_local, "room", b"")) != GROUP * PIECE_BYTES:
        _local.room = memoryview(mmap.mmap(-1, GROUP * PIECE_BYTES))
    return _local.room


def _pieces_of(key: str, tail: memoryview) -> tuple[list[str], int]:
    """(keys of the pieces, bytes of each but the last); none where the tail is none."""
    write_id, piece_bytes, count = _TAIL.unpack(tail)
    return [f"{key}:{write_id.hex()}:{number}" for number in range(count if count <= _PIECES_MOST else 0)], piece_bytes


def _lengths(client: Any, keys: list[Any]) -> int:
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.strlen(key)
    return sum(size for size in pipeline.execute(raise_on_error=False) if isinstance(size, int))


class ValkeyVersions:
    """VersionPlace: one key without a time to live, changed by a script, so that nobody comes between."""

    def __init__(self, url: str, deadline_s: float = 4.0, login: Login = NO_LOGIN) -> None:
        self.where = f"{VERSIONS_KEY} of {url}"
        self._url = url
        self._deadline_s = deadline_s
        self._login = login

    def load(self) -> tuple[int, bytes]:
        kept = self._ask(lambda client: client.get(VERSIONS_KEY)) or b""
        number, _, text = kept.partition(b"\n")
        return (int(number), text) if number.isdigit() else (0, text)

    def swap(self, seen: int, text: bytes) -> bool:
        kept = f"{seen + 1:020}\n".encode() + text
        return bool(self._ask(lambda client: client.eval(_SWAP, 1, VERSIONS_KEY, f"{seen:020}", kept)))

    def _ask(self, work: Callable[[Any], Any]) -> Any:
        begin_call(self._deadline_s)
        try:
            client = connect(self._url, self._deadline_s, self._login)
            try:
                return work(client)
            finally:
                client.close()
        except ERRORS as error:
            raise OSError(errno.EIO, f"{self._url}: {str(error)[:300]}") from error
