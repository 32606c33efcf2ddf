# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.tiers.fetch_redis FOLDER``: puts a redis-server there.

From PATH when it is there; else out of Debian's packages, without installing them.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.tiers.debian import copy_libraries, unpacked

PACKAGES = ("redis-tools", "libjemalloc2", "liblua5.1-0", "liblzf1")
"""The server is a part of the tools, called by another name; the rest are libraries that it loads."""
SCRIPT = """#!/bin/sh
here=$(dirname "$0")
LD_LIBRARY_PATH="$here/lib" exec "$here/bin/redis-server" "$@"
"""


def from_debian(folder: Path) -> None:
    with unpacked(*PACKAGES) as aside:
        copy_libraries(aside, folder / "lib")
        (folder / "bin").mkdir(exist_ok=True)
        shutil.copy(aside / "usr/bin/redis-check-rdb", folder / "bin/redis-server")
    script = folder / "redis-server"
    script.write_text(SCRIPT)
    script.chmod(0o755)


def main(name: str) -> None:
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    there = shutil.which("redis-server")
    if there is not None:
        (folder / "redis-server").symlink_to(there)
    elif shutil.which("apt-get") is None:
        sys.exit("the tests of the Valkey tier need a redis-server on the PATH")
    else:
        from_debian(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
