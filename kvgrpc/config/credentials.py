# SPDX-License-Identifier: Apache-2.0
"""What a client shows and trusts when nobody says otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

VARIABLES = {
    "ca_file": "KVGRPC_CA_FILE",
    "cert_file": "KVGRPC_CERT_FILE",
    "key_file": "KVGRPC_KEY_FILE",
    "token_file": "KVGRPC_TOKEN_FILE",
    "server_name": "KVGRPC_SERVER_NAME",
}


def asked_credentials(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """By the names of the fields of ``kvgrpc.client.credentials.Credentials``."""
    return {field: environ[variable] for field, variable in VARIABLES.items() if environ.get(variable)}


def valkey_login(environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """(name, password) for Valkey; empty: none."""
    return environ.get("VALKEY_USERNAME", ""), environ.get("VALKEY_PASSWORD", "")


def offer_variables(variables: Mapping[str, str], environ: MutableMapping[str, str] = os.environ) -> None:
    """For libraries that are told by the environment alone; what is set there stays."""
    for name, value in variables.items():
        environ.setdefault(name, value)


def plain_http(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an object store may be spoken to without TLS: the rest of what concerns it obstore finds itself."""
    clouds = ("AWS", "GOOGLE", "AZURE")
    return any(environ.get(f"{cloud}_ALLOW_HTTP", "").lower() in ("1", "true") for cloud in clouds)
