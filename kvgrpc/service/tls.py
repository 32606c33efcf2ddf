# SPDX-License-Identifier: Apache-2.0
"""TLS of the TCP listeners: files that are read again whenever they have changed, without a restart.

gRPC asks for the certificates at each handshake, on a thread of its own. What is broken when it is read again (a pair
that does not fit, in the middle of a rotation) is noted, and the pair before it stays in force.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from kvgrpc.service.listeners import ListenError
from kvgrpc.telemetry.log import logger

log = logger("service")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the server's certificate chain and key; ``client_ca`` None = clients need no certificate."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    @property
    def all(self) -> tuple[Path, ...]:
        return (self.cert, self.key) if self.client_ca is None else (self.cert, self.key, self.client_ca)


class Certificates:
    """What is in the files. Used by gRPC's threads one at a time."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._seen: tuple[tuple[int, int, int], ...] = self._look()
        self._current = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        fetch: Any = self._changed  # may answer None, whatever its type says there
        return grpc.dynamic_ssl_server_credentials(self._current, fetch, self._files.client_ca is not None)

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        """What changes with the files, also when a folder behind a link is exchanged, as Kubernetes does."""
        found: list[os.stat_result] = [os.stat(path) for path in self._files.all]
        return tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in found)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """For gRPC: the new certificates, or None where nothing has changed."""
        try:
            seen = self._look()
            if seen == self._seen:
                return None
            current = self._read()
        except (ListenError, OSError) as error:
            log.error("certificates were not taken, the ones before stay", problem=str(error))
            return None
        self._seen, self._current = seen, current
        log.info("certificates were read again", cert=str(self._files.cert))
        return current

    def _read(self) -> grpc.ServerCertificateConfiguration:
        files = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        at = f"--tls-cert {files.cert}, --tls-key {files.key}"
        try:
            context.load_cert_chain(files.cert, files.key, lambda: "")  # a key with a password would be asked for here
            if files.client_ca is not None:
                at = f"--tls-client-ca {files.client_ca}"
                context.load_verify_locations(files.client_ca)
        except ssl.SSLError as error:
            why = f" ({error.reason})" if error.reason else ""
            raise ListenError(f"{at}: they are no PEM files that fit together{why}") from None
        except OSError as error:  # ssl's own names no file
            raise ListenError(f"{at}: {error.strerror}") from None
        ca = None if files.client_ca is None else files.client_ca.read_bytes()
        return grpc.ssl_server_certificate_configuration([(files.key.read_bytes(), files.cert.read_bytes())], ca)


def read_certificates(files: TlsFiles) -> Certificates:
    """ListenError says which file is wrong."""
    try:
        return Certificates(files)
    except OSError as error:
        raise ListenError(f"a TLS file cannot be read: {error.strerror} ({error.filename})") from None
