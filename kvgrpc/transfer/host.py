# SPDX-License-Identifier: Apache-2.0
"""The name of this host, made by one rule on both sides of a registration."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id(boot_id_file: Path = BOOT_ID) -> str:
    """32 hex digits of sha256(boot id, newline, host name).

    The boot id tells hosts apart that were cloned with their name; the name tells network namespaces with their own
    /dev/shm (containers) apart when they share a kernel. Containers that share memory must share both: set the same
    host name, or give the client the server's answer from Handshake.
    """
    try:
        boot_id = boot_id_file.read_text(encoding="ascii").strip()
    except OSError:
        boot_id = ""
    return hashlib.sha256(f"{boot_id}\n{socket.gethostname()}".encode()).hexdigest()[:32]
