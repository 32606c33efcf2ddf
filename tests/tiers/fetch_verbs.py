# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.tiers.fetch_verbs FOLDER``: puts libibverbs there, which Mooncake's library loads, also for TCP.

Empty where the system has it; else out of Debian's packages, without installing them.
"""

from __future__ import annotations

import ctypes.util
import shutil
import sys
from pathlib import Path

from tests.tiers.debian import copy_libraries, unpacked

PACKAGES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")


def main(name: str) -> None:
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    if ctypes.util.find_library("ibverbs"):
        return
    if shutil.which("apt-get") is None:
        sys.exit("the tests of the Mooncake tier need libibverbs")
    with unpacked(*PACKAGES) as aside:
        copy_libraries(aside, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
