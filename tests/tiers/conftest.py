# SPDX-License-Identifier: Apache-2.0
"""Before the modules of tests are imported: what Mooncake's library needs of the system."""

from __future__ import annotations

import math

import pytest

from kvgrpc.tiers import valkey
from tests.tiers.mooncakes import load_verbs

load_verbs()


@pytest.fixture(autouse=True)
def no_call_has_begun() -> None:
    """What tests ask of a store on their own thread is in no call, whatever was asked there before."""
    valkey.begin_call(math.inf)
