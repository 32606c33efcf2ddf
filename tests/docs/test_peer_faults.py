# SPDX-License-Identifier: Apache-2.0
"""docs/peer-faults.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = re.findall(r"^\| (\d+) \|(.*)$", (ROOT / "docs/peer-faults.md").read_text(), re.MULTILINE)


def test_every_fault_has_tests_and_they_exist():
    assert [int(number) for number, _ in ROWS] == list(range(1, len(ROWS) + 1))
    for number, row in ROWS:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, number
        for file, test in named:
            assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE), (number, file, test)
