# SPDX-License-Identifier: Apache-2.0
"""Ports of the loopback, for servers that cannot choose one themselves."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

PORTS = range(18_000, 22_000)
"""Below those that the kernel gives to sockets without a port, also 10,000 above: the second port of cluster nodes. And
beyond those that Mooncake's library takes by itself."""

_kept: list[int] = []
"""Locked descriptors, one a port, until this process ends."""


def free_port() -> int:
    """One that nobody listens on and that no other process of the tests is given while this one lives."""
    folder = Path(tempfile.gettempdir()) / f"kvgrpc-test-ports-{os.geteuid()}"
    folder.mkdir(exist_ok=True)
    while True:
        port = random.SystemRandom().choice(PORTS)
        lock = os.open(folder / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", port))
        except OSError:
            os.close(lock)
            continue
        _kept.append(lock)
        return port
