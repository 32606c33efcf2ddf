# SPDX-License-Identifier: Apache-2.0
"""Before the modules of tests are imported: what Mooncake's library needs of the system."""

from __future__ import annotations

from tests.tiers.mooncakes import load_verbs

load_verbs()
