# SPDX-License-Identifier: Apache-2.0
"""How a command reaches a server: its address, and what it shows and trusts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import click

from kvgrpc.client.credentials import Credentials, default_credentials
from kvgrpc.config.credentials import VARIABLES

C = TypeVar("C", bound=Callable[..., Any])

_TEXTS = {
    "ca_file": "CA (PEM) of the server's certificate; naming it means TLS over TCP",
    "cert_file": "own certificate (PEM), where the server asks for one",
    "key_file": "its private key (PEM)",
    "token_file": "file with a bearer token",
    "server_name": "name in the server's certificate, where it is not the address's host",
}


def connection_options(command: C) -> C:
    """Adds ``--address`` and an option for each field of Credentials."""
    for name, text in reversed(_TEXTS.items()):
        metavar = "NAME" if name == "server_name" else "FILE"
        flag = "--" + name.replace("_", "-")
        command = click.option(flag, name, metavar=metavar, help=f"{text}; default: {VARIABLES[name]}")(command)
    text = "unix:/path, host:port or grpcs://host:port; default: KVGRPC_ADDRESS, KVGRPC_SOCKET, else this user's socket"
    return click.option("--address", metavar="ADDRESS", help=text)(command)


def credentials_of(given: dict[str, str | None]) -> Credentials:
    """Options over variables. ValueError as for Credentials."""
    return replace(default_credentials(), **{name: value for name, value in given.items() if value is not None})
