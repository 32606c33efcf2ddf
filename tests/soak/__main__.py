# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.soak [--seconds N] [--seed N] [--json FILE_OR_FOLDER]``: soaks a server; exit code 1 when a goal is
missed."""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path

from tests.soak.report import report, table
from tests.soak.run import soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="mixed traffic of eight engines")
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    parser.add_argument("--json", type=Path, help="writes the result; a folder gets <date>-soak.json")
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}, {chosen.seconds:.0f} s", flush=True)
    soaked = soak(chosen.seconds, chosen.seed)
    found = report(soaked)
    print(table(found, soaked))
    if chosen.json is not None:
        print(f"written: {found.write(chosen.json)}")
    return 0 if all(figure.met is not False for figure in found.figures) else 1


if __name__ == "__main__":
    sys.exit(main())
