# SPDX-License-Identifier: Apache-2.0
"""The states of a slot, as a table.

Theory of operation. A slot is memory in the arena that one object may use. What may happen to it depends on who may be
touching it, and only evidence ends that: a copy that was launched goes on whatever a clock, a cancel or a Clear says.

    FREE      nobody's. A store or prefetch reserves it.
    WRITING   one call or tier read fills it; nobody else may read it. Commit makes it READY; an abort makes it FREE, or
              SETTLING while a copy is in flight.
    READY     complete and found by lookups of its table. Eviction frees it.
    PINNED    READY, and leases or running reads hold its chunk. Nothing frees it before the last of them lets go.
    DOOMED    its table was cleared while it was PINNED or WRITING. Never found again, never committed; the last release
              (or the end of the copy that fills it) frees it.
    SETTLING  whoever filled it is gone, but the copy may still be writing. Only the report of that copy frees it.

Pins are kept by chunk, so PINNED is not stored in the slot: a READY slot of a chunk with pins is PINNED. All
other states are stored, and change only along this table.
"""

from __future__ import annotations

from enum import Enum


class SlotState(Enum):
    """See the module's theory of operation."""

    __hash__ = object.__hash__  # members are single; Enum's own hash costs a Python call for each slot that moves

    FREE = "free"
    WRITING = "writing"
    READY = "ready"
    PINNED = "pinned"
    DOOMED = "doomed"
    SETTLING = "settling"


FREE, WRITING, READY, PINNED, DOOMED, SETTLING = SlotState  # a name costs a tenth of a member's

TRANSITIONS: frozenset[tuple[SlotState, SlotState]] = frozenset(
    {
        (FREE, WRITING),  # reserve
        (WRITING, READY),  # commit
        (WRITING, FREE),  # abort, no copy in flight
        (WRITING, SETTLING),  # abort, a copy in flight
        (WRITING, DOOMED),  # its table was cleared
        (READY, FREE),  # evict, reclaim
        (READY, DOOMED),  # its table was cleared while it was pinned
        (DOOMED, FREE),  # last release, end of the copy
        (DOOMED, SETTLING),  # its writer is gone too
        (SETTLING, FREE),  # the copy's end was reported
    }
)
