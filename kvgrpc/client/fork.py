# SPDX-License-Identifier: Apache-2.0
"""What becomes of a client in a forked child: it refuses, and lets go of the parent's connections.

gRPC does not survive a fork: its threads are gone in the child, and a call there can hang parent and child alike, since
they share the poller's descriptors. So nothing of gRPC is touched in a child. Its copies of the client's sockets are
replaced by /dev/null as soon as the child runs; otherwise they would keep the parent's session alive after its death
(TCP to a host by name is not recognised: give the number, or a Unix socket). A child that is started by spawn or exec
inherits nothing and may use a client of its own.

gRPC has fork handlers of its own, which start its threads anew in every child. Beside a channel of grpc.aio they crash
one child in five, whether it uses gRPC or not (grpcio 1.85). They are turned off for this process, whatever
GRPC_ENABLE_FORK_SUPPORT said: gRPC reads it once, when it is first imported, so this module is loaded before gRPC is.
In a process that imported gRPC before ``kvgrpc.client``, set GRPC_ENABLE_FORK_SUPPORT=0 before that.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import sys
from weakref import WeakKeyDictionary

from kvgrpc.client.address import Address


class ForkedProcessError(RuntimeError):
    """A client was used in a process that was forked from one that had already used one."""


if "grpc._cython.cygrpc" not in sys.modules:
    os.putenv("GRPC_ENABLE_FORK_SUPPORT", "0")

_used_by_pid = 0
"""The process that first used a client; inherited by forked children, which is how they know."""
_connections: WeakKeyDictionary[object, Address] = WeakKeyDictionary()
"""Open channels and where they lead."""
_inherited: list[object] = []
"""Channels of the parent: kept in the child for ever, since taking one down would touch the parent's connection."""


def claim_process() -> None:
    """Call before anything that touches gRPC. Raises ForkedProcessError in a child of a process that has called it."""
    global _used_by_pid
    pid = os.getpid()
    if _used_by_pid not in (0, pid):
        raise ForkedProcessError(
            f"process {pid} was forked from process {_used_by_pid}, which had already used a kvgrpc client; "
            "gRPC does not survive a fork: start processes by 'spawn', or fork before the first client is made"
        )
    _used_by_pid = pid


def add_connection(channel: object, address: Address) -> None:
    """For as long as the channel lives, forked children let go of their copies of sockets connected to this address."""
    _connections[channel] = address


def is_connected_to(sock: socket.socket, addresses: list[Address]) -> bool:
    """Whether the socket's other end is one of these addresses; TCP hosts match by number, or "localhost"."""
    try:
        peer = sock.getpeername()
    except OSError:
        return False
    if sock.family == socket.AF_UNIX:
        return any(address.path and os.fsencode(address.path) == os.fsencode(peer) for address in addresses)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        number = _number(peer[0])
        return any(address.port == peer[1] and number and number in _numbers(address.host) for address in addresses)
    return False


def _numbers(host: str) -> set[str]:
    return {"127.0.0.1", "::1"} if host == "localhost" else {_number(host)}


def _number(host: str) -> str:
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        return ""
    mapped = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    return str(mapped or number)


def release_inherited_sockets() -> None:
    """Runs in a forked child: replaces sockets connected to our servers by /dev/null, under the same numbers.

    The numbers stay taken, so that nothing left of gRPC in this process can close a stranger's descriptor later.
    """
    addresses = list(_connections.values())
    if not addresses:
        return
    _inherited.extend(_connections.keys())
    _connections.clear()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for name in os.listdir("/proc/self/fd"):
            _release(int(name), null, addresses)
    finally:
        os.close(null)


def _release(fd: int, null: int, addresses: list[Address]) -> None:
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return
        copy = socket.socket(fileno=os.dup(fd))
    except OSError:
        return
    with copy:
        ours = is_connected_to(copy, addresses)
    if ours:
        os.dup2(null, fd, inheritable=False)


os.register_at_fork(after_in_child=release_inherited_sockets)
