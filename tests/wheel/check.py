# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.wheel.check SITE``: the installed package is whole and comes from SITE."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import version
from pathlib import Path

import kvgrpc
from kvgrpc.transfer import _native

FILES = ("py.typed", "transfer/_native.pyi", "v1/cache_pb2.py", "v1/cache_pb2.pyi", "v1/cache_pb2_grpc.py")


def main(site: str) -> None:
    home = Path(kvgrpc.__file__).parent
    assert home.parent == Path(site), f"kvgrpc comes from {home}"
    assert _native.__file__ is not None and Path(_native.__file__).parent == home / "transfer"
    assert version("kvgrpc") == kvgrpc.__version__
    missing = [name for name in FILES if not (home / name).is_file()]
    assert not missing, f"not in the wheel: {missing}"
    foreign = [path.name for path in home.parent.glob("csrc*")] + [str(path) for path in home.rglob("*.cpp")]
    assert not foreign, f"in the wheel and not meant to be: {foreign}"
    for name in ("app", "cli.root", "client", "service.server"):
        importlib.import_module(f"kvgrpc.{name}")
    print(f"kvgrpc {kvgrpc.__version__} from {home}")


if __name__ == "__main__":
    main(*sys.argv[1:])
