# SPDX-License-Identifier: Apache-2.0
"""As ``test_parted``, with a lower tier that has what was written and loses some of it: what a lookup finds after its
prefetch is the longest prefix that memory and tier can serve together, whatever is evicted and fails meanwhile."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from kvgrpc.core import types as t
from tests.core.desk import CHUNK
from tests.core.parted import PartedDesk
from tests.model import test_parted
from tests.model.test_parted import CHUNKS, PROMPTS, Parted, chunks, needs

places = st.lists(st.tuples(st.integers(0, 3), st.integers(0, CHUNKS - 1)), max_size=6)
"""(group, chunk)."""


class PartedBelow(Parted):
    """``below`` are names of objects that the tier has."""

    @initialize(groups=st.lists(needs, min_size=1, max_size=4), ranks=st.sampled_from([1, 1, 2]))
    def begin(self, groups: list[t.Need], ranks: int) -> None:
        super().begin(groups, ranks)
        self.p = PartedDesk(groups, ranks=ranks, tiers=("disk",))
        self.below: set[str] = set()

    def names(self, prompt: str, of: list[tuple[int, int]]) -> set[str]:
        """Of all ranks."""
        return {
            self.p.name(group % len(self.p.needs), at, prompt, rank) for group, at in of for rank in range(self.p.ranks)
        }

    def take_written(self) -> None:
        self.below |= self.p.below
        self.p.desk.written.clear()

    def known(self, prompt: str, below: set[str]) -> set[tuple[bytes, int, int]]:
        """Objects of the prompt that lie below."""
        return {
            (self.key(prompt, at), group, rank)
            for at in range(CHUNKS)
            for group in range(len(self.p.needs))
            for rank in range(self.p.ranks)
            if self.p.name(group, at, prompt, rank) in below
        }

    @rule(prompt=st.sampled_from(PROMPTS), of=places)
    def lose(self, prompt: str, of: list[tuple[int, int]]) -> None:
        self.take_written()
        self.below -= self.names(prompt, of)

    @rule(prompt=st.sampled_from(PROMPTS), but=places)
    def restart(self, prompt: str, but: list[tuple[int, int]]) -> None:
        """As far as nobody uses it, memory has nothing any more of a prompt that is stored anew, but for these."""
        for rank in range(self.p.ranks):
            self.store(prompt, CHUNKS, rank, [0] * 4)
        for group in range(len(self.p.needs)):
            for at in range(CHUNKS):
                if (group, at) not in but:
                    self.forget(prompt, group, at)

    @rule(prompt=st.sampled_from(PROMPTS), of=places)
    def evict_many(self, prompt: str, of: list[tuple[int, int]]) -> None:
        for group, at in of:
            self.forget(prompt, group, at)

    @rule(prompt=st.sampled_from(PROMPTS), count=chunks, early=places, late=places, failing=places)
    def look_up(
        self,
        prompt: str,
        count: int,
        early: list[tuple[int, int]] | None = None,
        late: list[tuple[int, int]] | None = None,
        failing: list[tuple[int, int]] | None = None,
    ) -> None:
        """``early`` goes from memory before the tier has answered, ``late`` after it; ``failing`` do not come."""
        self.take_written()
        desk, first = self.p.desk, self.longest(prompt, count)
        answer = self.p.engine.lookup(prompt, count)
        assert answer.status.done == (first == count), "what is missing is asked for"
        if not answer.status.done:
            for group, at in early or []:
                self.forget(prompt, group, at)
            (probe,) = desk.probes.values()
            asked, bad = {one.name for one in probe.objects}, self.names(prompt, failing or [])
            before = self.there
            self.there = before | self.known(prompt, (self.below & asked) - bad)
            wanted = max(first, self.longest(prompt, count))
            self.there = before
            self.p.answer(self.below)
            for group, at in late or []:
                self.forget(prompt, group, at)
            self.read_all(prompt, bad)
            status = self.p.engine.query(answer)
            assert status.done
            assert status.hit_tokens == wanted * CHUNK
            first = wanted
        if first:
            self.note(answer, prompt, first)

    def read_all(self, prompt: str, bad: set[str]) -> None:
        """The oldest read first; what comes although nobody waits for it is not there."""
        desk = self.p.desk
        while desk.reads:
            read = next(iter(desk.reads.values()))
            ok = read.object.name not in bad
            if ok and read.read_id not in desk.cancelled:
                self.there |= self.known(prompt, {read.object.name})
            desk.end_read(ok)


TestPartedBelow = PartedBelow.TestCase
TestPartedBelow.settings = test_parted.SETTINGS
