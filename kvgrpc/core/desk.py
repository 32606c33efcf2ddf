# SPDX-License-Identifier: Apache-2.0
"""The parts of the core that a call's plan works on."""

from __future__ import annotations

from dataclasses import dataclass

from kvgrpc.core.holds import Holds
from kvgrpc.core.index import Index
from kvgrpc.core.jobs import Jobs
from kvgrpc.core.leases import Leases
from kvgrpc.core.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Desk:
    """What a plan reads, reserves from and writes to."""

    ledger: Ledger
    index: Index
    leases: Leases
    jobs: Jobs
    holds: Holds
