# SPDX-License-Identifier: Apache-2.0
"""Everything that is bounded. Defaults are the design's."""

from __future__ import annotations

from dataclasses import dataclass

MS = 1_000_000
S = 1_000_000_000
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """Durations end in ``_ns``, sizes in ``_bytes``; shares are fractions of the arena; the rest are counts."""

    chunk_tokens: int = 256
    page_bytes: int = 256 << 10
    slice_bytes: int = 64 * MIB
    lease_ns: int = 60 * S
    record_ns: int = 600 * S
    read_record_ns: int = 5 * S
    """How long a job's record outlives its last reader."""
    records_bytes: int = 64 * MIB
    pin_share: float = 0.5
    hold_share: float = 0.25
    settling_share: float = 0.05
    prefetch_share: float = 0.25
    prefetch_wait_ns: int = 2 * S
    prefetch_wait_token_ns: int = 0
    """More for each token that is not there."""
    prefetch_wait_most_ns: int = 10 * S
    write_share: float = 0.125
    """What may be on its way into one tier at a time, and one object more."""
    write_ahead_share: float = 0.25
    """How much is written ahead of its eviction, where a space wants that."""
    writes_in_flight: int = 8
    writes_queued: int = 4096
    jobs_per_engine: int = 4096
    keys_per_call: int = 16384
    victims_per_turn: int = 1024
    clients: int = 256
    calls_per_client: int = 4096
    call_record_ns: int = 600 * S
    reattach_grace_ns: int = 500 * MS
    spaces: int = 65536
    pins: int = 4096
    """Operator pins (AdminService.Pin) at a time."""
