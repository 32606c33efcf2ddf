# SPDX-License-Identifier: Apache-2.0
"""The address of this node's server when nobody named one."""

from __future__ import annotations

from urllib.parse import quote

from kvgrpc.config.places import asked_address, asked_socket


def default_address() -> str:
    """KVGRPC_ADDRESS as it is; else where `kvgrpc serve` of this user listens when it is told nothing: KVGRPC_SOCKET,
    else the default place.

    Raises UntrustedSocketError when the default place is neither this user's nor root's, or a symbolic link.
    """
    return asked_address() or f"unix:{quote(str(asked_socket()))}"
