# SPDX-License-Identifier: Apache-2.0
"""``python -m kvgrpc`` and the console script ``kvgrpc``."""

from __future__ import annotations

from kvgrpc.cli.root import main

if __name__ == "__main__":
    main()
