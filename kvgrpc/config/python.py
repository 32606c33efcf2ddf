# SPDX-License-Identifier: Apache-2.0
"""Settings of the interpreter itself."""

from __future__ import annotations

import os


def hash_seed() -> str | None:
    """PYTHONHASHSEED as the process was given it; None: not set."""
    return os.environ.get("PYTHONHASHSEED")
