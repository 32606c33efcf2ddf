# SPDX-License-Identifier: Apache-2.0
"""`kvgrpc serve` with certificates and tenants of a test's own, and clients that show what they are told to."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trustme

from kvgrpc.client.aio import AioClient
from kvgrpc.client.channel import ChannelOptions
from kvgrpc.client.credentials import Credentials
from kvgrpc.core.types import CoreLimits
from kvgrpc.service.access import token_hash
from tests.e2e.harness import CHUNK, LocalServer
from tests.served import Served, serving
from tests.telemetry.watched import SMALL


class Authority:
    """A CA and what it signs, as files."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._ca = trustme.CA()
        self._folder = folder
        self.ca = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.ca))

    def sign(self, name: str, *identities: str) -> tuple[Path, Path]:
        """(certificate chain, key); an earlier pair of the name is replaced, each file as a whole."""
        pair = self._ca.issue_cert(*identities, common_name=identities[0])
        files = self._folder / f"{name}-cert.pem", self._folder / f"{name}-key.pem"
        chain = b"".join(blob.bytes() for blob in pair.cert_chain_pems)
        for file, data in zip(files, (chain, pair.private_key_pem.bytes()), strict=True):
            part = file.with_suffix(".part")
            part.write_bytes(data)
            part.rename(file)
        return files


def write_access(path: Path, **tenants: dict[str, Any]) -> None:
    """As an operator exchanges the file. ``socket=...`` beside the tenants names who uses the socket."""
    form: dict[str, Any] = {"socket": tenants.pop("socket")} if "socket" in tenants else {}
    part = path.with_suffix(".part")
    part.write_text(json.dumps({**form, "tenants": tenants}))
    part.rename(path)


def new_token(folder: Path, name: str) -> tuple[str, str]:
    """(file of the token, its hash)."""
    token = secrets.token_urlsafe(32)
    file = folder / f"{name}.token"
    file.write_text(token + "\n")
    return str(file), token_hash(token)


@dataclass
class Guarded(LocalServer):
    """A server process; see ``tests.telemetry.watched`` for what is not there. ``shown`` is what its clients show."""

    served: Served = field(kw_only=True)
    shown: Credentials = field(default_factory=Credentials)

    def client(self, client_id: str) -> AioClient:
        options = ChannelOptions(credentials=self.shown, retries=False)
        client = AioClient(self.address, client_id, options)
        self.stack.push_async_callback(client.close)
        return client

    def says(self, key: str) -> str:
        lines = [json.loads(line) for line in self.served.log.splitlines() if line.startswith("{")]
        return next(line[key] for line in lines if line["event"] == "started")

    def tcp(self) -> str:
        return next(part for part in self.says("listens").replace(",", " ").split() if part.startswith("127.0.0.1:"))


@contextlib.asynccontextmanager
async def guarded(*flags: str, tcp: bool = False) -> AsyncIterator[Guarded]:
    with serving(*SMALL, *(("--listen", "127.0.0.1:0") if tcp else ()), *flags) as served:
        async with contextlib.AsyncExitStack() as stack:
            absent: Any = None
            limits = CoreLimits(chunk_tokens=CHUNK, page_bytes=4096)
            server = Guarded(absent, absent, absent, absent, limits, None, stack, served.address, served=served)
            if tcp:
                server.address = server.tcp()
            yield server
