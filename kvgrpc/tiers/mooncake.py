# SPDX-License-Identifier: Apache-2.0
"""The tier in a Mooncake Store: memory of many machines, given by other processes, found through a master.

    kvgrpc:{NAME}    envelope and payload

This process gives no memory to the store. Its library is native and bound to it: bytes go through rooms of the tier,
which alone are registered with it, never through the arena, so that a transfer that comes late touches nothing of
anybody. An object is written by a put session, which makes it readable at its end.

The store loses what it likes: it evicts, and a machine takes its memory with it. So versions of spaces
(``kvgrpc.tiers.versions``) do not lie here.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import socket
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from mooncake.store import MooncakeDistributedStore  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

from kvgrpc.core.types import ObjectName
from kvgrpc.tiers.base import FaultReason, TierFault, TierMiss
from kvgrpc.tiers.envelope import HEADER_BYTES, Sealing
from kvgrpc.tiers.pieces import READERS, WRITERS, BlockingTier, Draining, Filling

PIECE_BYTES = 4 << 20
"""Of an object, in one call of the library and one room."""
REACH_S = 2.0
ABSENT, UNFINISHED, THERE_ALREADY, NO_ROOM = -704, -703, -705, -200
WORDS = {
    -600: "it is not connected",
    -706: "a lease holds it",
    -707: "its lease ended meanwhile",
    -800: "the transfer failed",
    -900: "the master cannot be reached",
    -901: "the master does not answer",
}
ERRORS = (OSError, BufferError, RuntimeError, ValueError, LookupError)

_TRY = """
import os, sys
from mooncake.store import MooncakeDistributedStore
own, metadata, segment, buffer, *rest = sys.argv[1:]
os._exit(bool(MooncakeDistributedStore().setup(own, metadata, int(segment), int(buffer), *rest)))
"""
"""Set-up alone keeps the interpreter lock while it waits for the master: it is tried in another process first."""

_Store: Any = MooncakeDistributedStore  # pyright: ignore[reportUnknownVariableType]


def object_key(name: str) -> str:
    return f"kvgrpc:{{{name}}}"


def bounds(deadline_s: float) -> dict[str, str]:
    """Variables by which the library's waits end; without them they take from half a minute to minutes."""
    seconds = str(math.ceil(deadline_s))
    return {
        "MC_RPC_TIMEOUT_MS": str(math.ceil(deadline_s * 1000)),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_LOG_LEVEL": "ERROR",
    }


class Rooms:
    """Memory that the library may touch, in pieces. Threads: any."""

    def __init__(self, count: int) -> None:
        self._memory = mmap.mmap(-1, count * PIECE_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.size_bytes = count * PIECE_BYTES
        self._free: SimpleQueue[int] = SimpleQueue()
        for at in range(0, self.size_bytes, PIECE_BYTES):
            self._free.put(at)

    @contextmanager
    def lent(self) -> Generator[tuple[int, memoryview]]:
        """(address, view) of a piece."""
        at = self._free.get()
        try:
            yield self.address + at, memoryview(self._memory)[at : at + PIECE_BYTES]
        finally:
            self._free.put(at)


def connect(master: str, deadline_s: float, protocol: str, devices: str) -> Any:
    """A client of the store. Raises OSError."""
    host, _, port = master.rpartition(":")
    with socket.create_connection((host, int(port)), min(REACH_S, deadline_s)) as there:
        own = there.getsockname()[0]  # where the others reach this process
    how = (own, "P2PHANDSHAKE", 0, 0, protocol, devices, master)
    program = [sys.executable, "-c", _TRY, *map(str, how)]
    try:
        tried = subprocess.run(program, capture_output=True, timeout=deadline_s + REACH_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise OSError("Mooncake's master does not answer") from None
    if tried.returncode:
        told = tried.stderr.decode(errors="replace").strip().rpartition("\n")[2][-200:]
        raise OSError(f"Mooncake's client cannot be set up: {told}")
    client = _Store()
    code = client.setup(*how)
    if code:
        raise OSError(f"Mooncake's client cannot be set up ({code})")
    return client


class MooncakeTier(BlockingTier):
    """Keeps objects in the store of ``master``. ``bounds(deadline_s)`` are in the environment by then. Usage is what
    this server has written: the store does not say what it has evicted. A call that was cancelled leaves its thread to
    the library with a room.
    """

    def __init__(
        self, master: str, deadline_s: float = 10.0, *, protocol: str = "tcp", devices: str = "", name: str = "mooncake"
    ) -> None:
        super().__init__(name, master, ERRORS)
        self._how = (deadline_s, protocol, devices)
        self._rooms = Rooms(READERS + WRITERS)

    def start(self) -> None:
        """Connects in the background, which takes longer than a call may; where that fails, calls try it again."""
        self._writers.submit(self._connected)

    def _connect(self) -> Any:
        client = connect(self._where, *self._how)
        code = client.register_buffer(self._rooms.address, self._rooms.size_bytes)
        if code:
            client.close()
            raise OSError(f"Mooncake's client does not take the tier's memory ({code})")
        return client

    def _exists(self, names: Sequence[str]) -> list[bool]:
        asked = [object_key(name) for name in names]
        return [bool(_checked(code, asked[0])) for code in self._connected().batch_is_exist(asked)]

    def _read(self, object: ObjectName, filling: Filling) -> None:
        client, key = self._connected(), object_key(object.name)
        size = _checked(client.get_size(key), key)
        end = min(size, HEADER_BYTES + object.size_bytes)
        with self._rooms.lent() as (address, view):
            for at in range(0, end, PIECE_BYTES):
                length = min(PIECE_BYTES, end - at)
                read = client.get_into_ranges([address], [[key]], [[[0]]], [[[at]]], [[[length]]])[0][0][0]
                if _checked(read, key) != length:
                    raise TierFault(FaultReason.IO, f"{key}: {read} bytes where {length} were asked for")
                filling.take(view[:length])
                if filling.stopped:
                    break
        filling.end()

    def _write(self, object: ObjectName, draining: Draining) -> int:
        """Payload first, then the header."""
        client, key = self._connected(), object_key(object.name)
        freed = self._begin(client, key, HEADER_BYTES + object.size_bytes)
        sealing, whole = Sealing(object), False
        try:
            with self._rooms.lent() as (address, view):
                for at in range(0, object.size_bytes, PIECE_BYTES):
                    piece = view[: min(PIECE_BYTES, object.size_bytes - at)]
                    draining.take(piece)
                    sealing.update(piece)
                    _put(client, key, address, len(piece), HEADER_BYTES + at)
                view[:HEADER_BYTES] = sealing.header()
                _put(client, key, address, HEADER_BYTES, 0)
            _checked(client.batch_put_session_end([key])[0], key)
            whole = True
        finally:
            if not whole:
                client.batch_put_session_revoke([key])
        return freed

    def _begin(self, client: Any, key: str, size_bytes: int) -> int:
        """Reserves room in the store; bytes of what had the name."""
        code, freed = client.batch_put_session_start([key], [size_bytes])[0], 0
        if code == THERE_ALREADY and client.is_exist(key) == 1:
            freed = self._remove_key(client, key)
            code = client.batch_put_session_start([key], [size_bytes])[0]
        if code == THERE_ALREADY:
            raise TierFault(FaultReason.FULL, f"{key}: another server writes it, or has begun to")
        _checked(code, key)
        return freed

    def _remove(self, name: str) -> int:
        return self._remove_key(self._connected(), object_key(name))

    def _remove_key(self, client: Any, key: str) -> int:
        size = client.get_size(key)
        code = client.remove(key, True)  # also where a reader's lease holds it: it may be damaged
        if code not in (ABSENT, UNFINISHED):
            _checked(code, key)
        return max(size, 0)


def _put(client: Any, key: str, address: int, length: int, at: int) -> None:
    written = client.batch_put_from_multi_buffer_ranges([key], [[address]], [[length]], [[at]])[0]
    if _checked(written, key) != length:
        raise TierFault(FaultReason.IO, f"{key}: {written} of {length} bytes were written")


def _checked(code: int, key: str) -> int:
    """What the library answered. Raises TierMiss or TierFault."""
    if code in (ABSENT, UNFINISHED):
        raise TierMiss(f"{key}: not kept")
    if code == NO_ROOM:
        raise TierFault(FaultReason.FULL, f"{key}: the store has no room")
    if code < 0:
        raise TierFault(FaultReason.IO, f"{key}: {WORDS.get(code, 'the store failed')} ({code})")
    return code
