# SPDX-License-Identifier: Apache-2.0
"""What a client shows and trusts when nobody says otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping

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
