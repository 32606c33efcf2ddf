# SPDX-License-Identifier: Apache-2.0
"""Any sequence of calls: the core answers what the oracle of plain dicts and sets expects, and its invariants hold."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant

from tests.model.copy_rules import CopyRules
from tests.model.lookup_rules import LookupRules
from tests.model.world_rules import WorldRules


class CacheMachine(LookupRules, CopyRules, WorldRules):
    """Rules are calls of engines, operators, copies, tiers and the clock."""

    @invariant()
    def sums(self) -> None:
        """Pins and bytes are what the oracle counts."""
        bench = self.bench
        arena, counts = bench.book.arena_status(), bench.book.counts()
        parts = (arena.free_bytes, arena.writing_bytes, arena.ready_bytes, arena.pinned_bytes, arena.doomed_bytes)
        assert sum(parts) + arena.settling_bytes == arena.total_bytes
        open_calls = sum(call.results is None for call in bench.oracle.calls.values())
        assert counts.calls_in_flight == open_calls
        assert counts.clients == sum(m.attached for e in bench.engines for m in e.members())
        pins = bench.oracle.pins()
        if not bench.pending:
            assert pins <= counts.pins <= pins + bench.oracle.reading()


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
