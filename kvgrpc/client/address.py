# SPDX-License-Identifier: Apache-2.0
"""Addresses of a server as people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

FORMS = "grpc://host:port, grpcs://host:port (TLS), grpc+unix:///path, unix:/path, /path or host:port"

_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\[\]:/\s?#@]+):(?P<port>[0-9]{1,5})")
_UNIX_PATH_BYTES = 107
"""What sockaddr_un holds, less the closing zero."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens: ``path`` of a Unix socket, or ``host`` (IPv6 without brackets) and ``port``.

    ``tls``: with TLS, whether credentials are named or not.
    """

    path: str = ""
    host: str = ""
    port: int = 0
    tls: bool = False

    @property
    def is_unix(self) -> bool:
        return bool(self.path)

    @property
    def target(self) -> str:
        """The name that gRPC dials."""
        if self.path:
            return f"unix:{quote(self.path)}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Accepts ``grpc://host:port``, ``grpcs://host:port`` (TLS), ``grpc+unix:///path``, ``unix:/path``,
    ``unix:///path``, ``/path``, ``host:port``.

    Paths of a URI may be percent-encoded; a bare one is taken as it is. Raises ValueError, saying what is wrong and
    what would be right.
    """
    for scheme in ("grpc+unix:", "unix:"):
        if text.startswith(scheme):
            return _unix_address(text, unquote(text.removeprefix(scheme)))
    if text.startswith("/"):
        return _unix_address(text, text)
    scheme = next((scheme for scheme in ("grpc://", "grpcs://") if text.startswith(scheme)), "")
    host_port = text.removeprefix(scheme).removesuffix("/") if scheme else text
    match = _HOST_PORT.fullmatch(host_port)
    if match is None:
        raise ValueError(f"address {text!r} is not understood; write {FORMS}")
    port = int(match["port"])
    if not 1 <= port <= 65535:
        raise ValueError(f"address {text!r}: port {port} is not between 1 and 65535")
    return Address(host=match["host"].strip("[]"), port=port, tls=scheme == "grpcs://")


def _unix_address(text: str, path: str) -> Address:
    if path.startswith("//"):
        path = path.removeprefix("//")
        if not path.startswith("/"):
            raise ValueError(f"address {text!r} names a host; a Unix socket is unix:///path with three slashes")
    if not path.startswith("/") or path.endswith("/"):
        raise ValueError(f"address {text!r} needs the absolute path of a socket, as in unix:/run/kvgrpc/kvgrpc.sock")
    if len(path.encode()) > _UNIX_PATH_BYTES:
        raise ValueError(f"address {text!r}: a Unix socket path has at most {_UNIX_PATH_BYTES} bytes")
    return Address(path=path)
