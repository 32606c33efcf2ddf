# SPDX-License-Identifier: Apache-2.0
"""What the rules of the model test have in common."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import LookupCommand, WritePolicy
from tests.model.bench import Bench
from tests.model.cluster import KINDS, EngineModel, Member
from tests.model.oracle import Job, Kind, Place

pick = st.integers(0, 1 << 20)
"""Chooses one of what there is, modulo its length."""
paths = st.sampled_from([[0], [0, 0], [0, 0, 1, 0], [0, 1], [1], [1, 0, 1, 1, 0]])
"""Prompts, as paths in a tree of chunks."""
salts = st.sampled_from(["", "tenant"])
GONE = {Reason.NOT_ATTACHED, Reason.NOT_REGISTERED, Reason.ENGINE_UNKNOWN, Reason.ENGINE_DRAINING}


class Rules(RuleBasedStateMachine):
    """Holds the bench; its heirs add rules."""

    bench: Bench

    @initialize(
        slice_tokens=st.sampled_from([3, 4, 9, 1000]),
        tiers=st.sampled_from([(), ("disk",)]),
        policy=st.sampled_from(WritePolicy),
        kinds=st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from([1, 2, 4])), min_size=1, max_size=3),
    )
    def begin(
        self, slice_tokens: int, tiers: tuple[str, ...], policy: WritePolicy, kinds: list[tuple[Kind, int]]
    ) -> None:
        self.bench = Bench(slice_tokens, tiers, policy)
        self.has_tiers = bool(tiers)
        self.commands: dict[bytes, LookupCommand] = {}
        self.operator_pins: dict[bytes, tuple[int, int, Place, int]] = {}
        """(chunks, end, place, version)."""
        self.bench.add_spaces()
        for kind, block_size in kinds:
            self.bench.add_engine(kind, block_size)

    def engine(self, number: int) -> EngineModel:
        return self.bench.engines[number % len(self.bench.engines)]

    def job(self, number: int) -> tuple[bytes, Job, EngineModel]:
        job_id, job = list(self.bench.oracle.jobs.items())[number % len(self.bench.oracle.jobs)]
        return job_id, job, next(e for e in self.bench.engines if e.name == job.engine)

    def refused_as_gone(self, refusal: Refusal, engine: EngineModel, member: Member) -> None:
        """Calls of clients that are away, of memory that is not shared, of engines that are drained are refused."""
        assert refusal.reason in GONE, refusal
        assert not member.attached or (member.is_worker and not member.mapping_id) or engine.drained, refusal

    def has_jobs(self) -> bool:
        return bool(self.bench.oracle.jobs)
