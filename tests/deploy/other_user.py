# SPDX-License-Identifier: Apache-2.0
"""The example engine, giving its shared memory to the group in SHM_GROUP, as an engine of another user must."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/python_client.py"
GROUP = int(os.environ["SHM_GROUP"])
plain_open = os.open


def shared_open(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
    descriptor = plain_open(path, flags, mode, **more)
    if flags & os.O_CREAT and str(path).startswith("/dev/shm/"):
        os.fchown(descriptor, -1, GROUP)
        os.fchmod(descriptor, 0o660)
    return descriptor


os.open = shared_open
exec(compile(EXAMPLE.read_text(), EXAMPLE, "exec"), {"__name__": "__main__", "__file__": __file__})
