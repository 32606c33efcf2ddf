# SPDX-License-Identifier: Apache-2.0
"""When a server's process is known to have ended, so that nothing of it writes into an engine's blocks any more.

Evidence, in this order:
1. The process itself: over a Unix socket the kernel names the server's process, and a descriptor of it (pidfd) becomes
   readable when its last thread has ended. Needs Linux 6.5, or a server in the same process namespace. Where this
   evidence can be had, nothing else counts. The socket is taken to be the server's own, not a proxy's.
2. Another server under the same address: a server keeps its lock file (Unix socket) or its port (TCP, not shared) until
   its last copy has ended.
3. Every attempt to connect was refused (not: timed out) for some time: nobody listens, and the connection that the call
   went over is gone too.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from typing import Any

from kvgrpc.client.address import Address

SO_PEERPIDFD = 77
"""Linux 6.5; not yet in the socket module."""

REFUSED_S = 5.0
"""Longer than any slice of a copy takes, so that a server that closed its listener first has ended its copies."""

POLL_S = 0.25


def open_pidfd(address: Address) -> int | None:
    """A descriptor of the process that listens on a Unix socket, or None where there is no way to have one."""
    if not address.is_unix:
        return None
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:  # no descriptors are left
        return None
    with sock:
        sock.setblocking(False)
        try:
            sock.connect(address.path)
        except OSError:
            return None
        try:
            return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        except OSError:
            pass
        pid, _, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        open_process: Any = getattr(os, "pidfd_open", None)
        if pid <= 0 or open_process is None:
            return None
        try:
            return open_process(pid)
        except OSError:
            return None


async def is_refused(address: Address) -> bool:
    """Whether somebody says that nobody listens there. Silence is no refusal."""
    try:
        if address.is_unix:
            opening = asyncio.open_unix_connection(address.path)
        else:
            opening = asyncio.open_connection(address.host, address.port)
        _, writer = await asyncio.wait_for(opening, 1.0)
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return False


class ServerLife:
    """One run of a server (one ``epoch``), as far as its end can be seen from here.

    Thread rule: made and used on the client's loop.
    """

    def __init__(self, epoch: bytes, address: Address) -> None:
        self.epoch = epoch
        self.ended = asyncio.Event()
        self._address = address
        self._pidfd = open_pidfd(address)
        if self._pidfd is not None:
            asyncio.get_running_loop().add_reader(self._pidfd, self._process_ended)

    def close(self) -> None:
        """Lets go of the descriptor."""
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)  # before another file gets its number
            os.close(pidfd)

    def succeeded(self) -> None:
        """Another server answers under the same address."""
        if self._pidfd is None:
            self.ended.set()

    async def watch(self) -> None:
        """Sets ``ended`` once there is evidence. Run it while the server cannot be reached; cancel it when it can."""
        if self._pidfd is not None:
            await self.ended.wait()
            return
        loop = asyncio.get_running_loop()
        refused_since: float | None = None
        while not self.ended.is_set():
            if not await is_refused(self._address):
                refused_since = None
            elif refused_since is None:
                refused_since = loop.time()
            elif loop.time() - refused_since >= REFUSED_S:
                self.ended.set()
            await asyncio.sleep(POLL_S)

    def _process_ended(self) -> None:
        assert self._pidfd is not None
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self.ended.set()
