# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.e2e.unprivileged SOCKET``: a server of small chunks under a user who is not root.

Everything is imported before the change of user, who may not be able to read where Python lies.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import pkgutil
import sys

import kvgrpc
from kvgrpc.app import serve
from kvgrpc.cli.serve import announce
from kvgrpc.config.settings import load_settings
from kvgrpc.telemetry.log import configure

NOBODY = 65534


def import_everything() -> None:
    for part in ("client", "core", "runtime", "service", "tiers", "transfer", "wire"):
        folder = f"{kvgrpc.__path__[0]}/{part}"
        for module in pkgutil.iter_modules([folder], f"kvgrpc.{part}."):
            importlib.import_module(module.name)
    for codec in ("ascii", "latin_1", "idna", "punycode"):
        importlib.import_module(f"encodings.{codec}")


def main(socket: str) -> None:
    import_everything()
    settings = load_settings(socket=socket, chunk_tokens="16", l1_size="16MiB", page_size="4KiB")
    configure("info", "json")
    if os.geteuid() == 0:
        os.chown(os.path.dirname(socket), NOBODY, NOBODY)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    asyncio.run(serve(settings, announce))


if __name__ == "__main__":
    main(sys.argv[1])
