# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.cards.serve SOCKET FLAGS...``: the server on fake cards, which have no device files."""

from __future__ import annotations

import sys

import kvgrpc.app
from kvgrpc.cli.root import main

if __name__ == "__main__":
    kvgrpc.app.nvidia_devices = lambda: 1
    main(["serve", "--socket", sys.argv[1], *sys.argv[2:]])
