# SPDX-License-Identifier: Apache-2.0
"""Two minutes of `make soak`."""

from __future__ import annotations

import secrets

import pytest

from tests.soak.report import report, table
from tests.soak.run import soak

SECONDS = 120.0


@pytest.mark.timeout(400)
def test_two_minutes() -> None:
    """Every byte is right, all counts are zero at the end, memory is flat: its goal is for half an hour, and half of
    two minutes is the server's youth, so twice as much is let through here."""
    soaked = soak(SECONDS, secrets.randbelow(1 << 32))
    found = report(soaked)
    print(table(found, soaked))
    assert [figure.name for figure in found.figures if not figure.within(2.0)] == []
    for name in ("stored_chunks", "loaded_chunks", "torn_chunks", "expired_copies", "cancelled_copies", "canary_looks"):
        assert soaked.tally[name] > 50, soaked.tally
    assert soaked.accidents["engines killed"] > 3, soaked.accidents
    assert soaked.tally["found_chunks"] > soaked.tally["asked_chunks"] / 10
