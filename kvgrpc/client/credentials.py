# SPDX-License-Identifier: Apache-2.0
"""What a client shows of itself and how it knows a server: certificates and a bearer token, out of files."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvgrpc.client.address import Address
from kvgrpc.config import is_loopback
from kvgrpc.config.credentials import asked_credentials

_CERTIFICATE = b"CERTIFICATE-----"
LOOK_S = 1.0
"""How long a changed token may go unseen."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Paths of files; empty = none. ``ca_file``: who signs servers (PEM); naming it means TLS over TCP. ``cert_file``
    and ``key_file``: the client's own (PEM), where the server asks for one. ``token_file``: a bearer token, read again
    when it changes. ``server_name``: the name in the server's certificate where it is not the address's host."""

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    token_file: str = ""
    server_name: str = ""

    def __post_init__(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("a client's certificate and its key are of use together only: name both files")

    def uses_tls(self, address: Address) -> bool:
        return not address.is_unix and (address.tls or bool(self.ca_file or self.cert_file))

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """CA, key and certificate. ValueError names a file that cannot be read, or is no certificate."""
        ca, key, cert = (_read(path) if path else None for path in (self.ca_file, self.key_file, self.cert_file))
        for path, text in ((self.ca_file, ca), (self.cert_file, cert)):
            if text is not None and _CERTIFICATE not in text:
                raise ValueError(f"{path}: there is no certificate in it (PEM)")
        return ca, key, cert

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """ValueError as for ``read``."""
        return grpc.ssl_channel_credentials(*self.read())

    def is_it_there(self, address: Address) -> str:
        """What to ask whoever got no answer from there."""
        if address.is_unix:
            return "is the server running?"
        if self.uses_tls(address):
            return "is the server running? If it is, its certificate may be of another CA or name, or expired"
        return "is the server running? If it is, it may have TLS: name the CA (Credentials.ca_file, KVGRPC_CA_FILE)"


def default_credentials() -> Credentials:
    """What KVGRPC_CA_FILE, KVGRPC_CERT_FILE, KVGRPC_KEY_FILE, KVGRPC_TOKEN_FILE and KVGRPC_SERVER_NAME say."""
    return Credentials(**asked_credentials())


class Token:
    """The metadata of a bearer token. Used on one thread."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._next_look_s = 0.0
        self._metadata: tuple[tuple[str, str], ...] = ()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """ValueError when there never was a token in the file; one that was read stays until there is another, so that
        a file that is just being written stops no call."""
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_S
            self._look()
        return self._metadata

    def _look(self) -> None:
        try:
            found = os.stat(self._path)
            seen = (found.st_ino, found.st_mtime_ns, found.st_size)
            if seen == self._seen:
                return
            token = Path(self._path).read_text(errors="replace").strip()
        except OSError as error:
            if not self._metadata:
                raise ValueError(f"token file {self._path}: {error.strerror}") from None
            return
        if not token.isascii() or not token.isprintable() or not token:
            if not self._metadata:
                raise ValueError(f"token file {self._path}: there is no token in it")
            return
        self._seen = seen
        self._metadata = (("authorization", f"Bearer {token}"),)


def token_for(address: Address, credentials: Credentials) -> Token | None:
    """ValueError for a token that would travel in clear, or that is not there."""
    if not credentials.token_file:
        return None
    if not address.is_unix and not credentials.uses_tls(address) and not is_loopback(address.host):
        text = "a token would travel in clear; name the CA of the server's certificate (KVGRPC_CA_FILE, --ca-file)"
        raise ValueError(f"{address.target}: {text}")
    token = Token(credentials.token_file)
    token.metadata()
    return token


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
