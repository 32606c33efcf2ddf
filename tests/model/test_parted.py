# SPDX-License-Identifier: Apache-2.0
"""One to four groups of mixed needs: every hit, pin and copy is what an oracle says that works out token by token what
the layers look at, after any stores, evictions and failures."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvgrpc.core import types as t
from tests.core.desk import BLOCK, CHUNK
from tests.core.parted import NULL, Ids, PartedDesk, first_token, outcomes

CHUNKS = 6
PROMPTS = ["a", "a/3/b", "c"]
needs = st.one_of(
    st.just(t.ALL),
    st.just(t.Need(BLOCK)),
    st.integers(1, 5 * CHUNK).map(t.Need),
    st.sampled_from([4, 8, 16, 32, 48]).map(lambda window: t.Need(window, aligned=True)),
)
chunks = st.integers(1, CHUNKS)
losses = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.integers(0, CHUNKS - 1)), max_size=2)
Object = tuple[bytes, int, int]
"""(chunk key, group, KV rank)."""


class Parted(RuleBasedStateMachine):
    """``there`` is what answers say is stored, less what was evicted."""

    @initialize(groups=st.lists(needs, min_size=1, max_size=4), ranks=st.sampled_from([1, 1, 2]))
    def begin(self, groups: list[t.Need], ranks: int) -> None:
        self.p = PartedDesk(groups, ranks=ranks)
        self.there: set[Object] = set()
        self.jobs: list[tuple[t.LookupAnswer, str, int, set[tuple[int, int]]]] = []
        """(answer, prompt, hit, (rank, group and chunk pairs) not read yet)."""
        self.cleared: set[bytes] = set()
        """Jobs of before a Clear: streams begin nothing of them."""

    # ---- the oracle -------------------------------------------------------------------------------------------------

    def key(self, prompt: str, at: int) -> bytes:
        return self.p.engine.content(prompt, at + 1).keys[at]

    def looked_at(self, group: int, hit: int) -> list[int]:
        """Chunks that hold a token which the group's layers look at."""
        first = first_token(self.p.needs[group], hit * CHUNK)
        return sorted({token // CHUNK for token in range(first, hit * CHUNK)})

    def served(self, prompt: str, hit: int) -> bool:
        return all(
            (self.key(prompt, at), group, rank) in self.there
            for group in range(len(self.p.needs))
            for at in self.looked_at(group, hit)
            for rank in range(self.p.ranks)
        )

    def longest(self, prompt: str, most: int) -> int:
        return max(hit for hit in range(most + 1) if hit == 0 or self.served(prompt, hit))

    # ---- rules ------------------------------------------------------------------------------------------------------

    def lacking(self, ids: Ids, lacks: list[int], count: int) -> Ids:
        """Leading blocks that the engine does not have, a number for each group that may lack some."""
        for group, need in enumerate(self.p.needs):
            if need != t.ALL:
                lack = lacks[group] % (count * CHUNK // BLOCK + 1)
                ids[group][:lack] = [NULL] * lack
        return ids

    @rule(
        prompt=st.sampled_from(PROMPTS),
        count=chunks,
        rank=st.integers(0, 1),
        lacks=st.lists(st.integers(0, 30), min_size=4, max_size=4),
    )
    def store(self, prompt: str, count: int, rank: int, lacks: list[int]) -> None:
        rank %= self.p.ranks
        ids = self.lacking(self.p.ids(count), lacks, count)
        for at, (outcome, groups) in enumerate(outcomes(self.p.store(prompt, count, ids, rank))):
            assert outcome in ("STORED", "RESIDENT", "REFUSED")
            same = set(self.p.needs) == {t.ALL}
            for group, need in enumerate(self.p.needs):
                mates = [g for g, other in enumerate(self.p.needs) if other == need]
                tail = range((at + 1) * CHUNK // BLOCK - need.tail(BLOCK, CHUNK), (at + 1) * CHUNK // BLOCK)
                has = all(ids[g][block] != NULL for g in mates for block in tail)
                assert bool(groups >> group & 1) == (has and not same)
                if has:
                    self.there.add((self.key(prompt, at), group, rank))

    @rule(
        prompt=st.sampled_from(PROMPTS),
        count=chunks,
        rank=st.integers(0, 1),
        lacks=st.sets(st.tuples(st.integers(0, 3), st.integers(0, CHUNKS - 1))),
        most=st.integers(0, 30),
    )
    def write(self, prompt: str, count: int, rank: int, lacks: set[tuple[int, int]], most: int) -> None:
        """A stream of bytes that leaves out some objects and may end early."""
        rank, parts = rank % self.p.ranks, self.p.parts
        filling, coming = self.p.fill(prompt, count, rank), [(at, part) for at in range(count) for part in range(4)]
        sent = [(at, p) for at, p in coming if p < len(parts) and (parts[p] == t.ALL or (p, at) not in lacks)][:most]
        for at, part in sent:
            key = self.key(prompt, at)
            mates = [group for group, need in enumerate(self.p.needs) if need == parts[part]]
            wanted = self.p.put(filling, at, part)
            assert wanted == ((key, mates[0], rank) not in self.there)
            self.there |= {(key, group, rank) for group in mates}
        results = outcomes(self.p.close(filling))
        assert len(results) == count
        for at, (outcome, groups) in enumerate(results):
            here = [part for one, part in sent if one == at]
            assert groups == sum(self.p.forms[part].groups for part in here)
            assert (outcome in ("STORED", "RESIDENT")) == bool(here)

    @rule(prompt=st.sampled_from(PROMPTS), count=chunks)
    def look_up(self, prompt: str, count: int) -> None:
        answer = self.p.engine.lookup(prompt, count)
        hit = answer.status.hit_tokens // CHUNK
        assert hit == self.longest(prompt, count)
        if hit:
            self.note(answer, prompt, hit)

    def note(self, answer: t.LookupAnswer, prompt: str, hit: int) -> None:
        """A lookup has pinned what such a hit needs."""
        parts = self.p.parts
        units = [(part, at) for part, need in enumerate(parts) for at in self.looked_at(self.p.needs.index(need), hit)]
        left = {(rank, part * CHUNKS + at) for rank in range(self.p.ranks) for part, at in units}
        self.jobs.append((answer, prompt, hit, left))

    @precondition(lambda self: bool(self.jobs))
    @rule(number=st.integers(0, 99), rank=st.integers(0, 1), start=st.integers(0, CHUNKS), lack=st.booleans())
    def retrieve(self, number: int, rank: int, start: int, lack: bool) -> None:
        answer, _, hit, left = self.jobs[number % len(self.jobs)]
        rank, start = rank % self.p.ranks, start % hit
        ids = self.p.ids(hit, base=1024)
        firsts = [first_token(need, hit * CHUNK) // BLOCK for need in self.p.needs]
        if lack:
            for group, first in enumerate(firsts):
                ids[group][:first] = [NULL] * first
        results = outcomes(self.p.retrieve(answer, hit, ids, rank, start))
        found = {outcome for outcome, _ in results}
        assert len(results) == hit - start
        wanted = {
            (rank, self.p.parts.index(need) * CHUNKS + at)
            for group, need in enumerate(self.p.needs)
            for at in self.looked_at(group, hit)
            if at >= start
        }
        read = {one for one in left if one[0] == rank and one[1] % CHUNKS >= start}
        if set(self.p.needs) == {t.ALL} and not wanted <= left:  # some were read before: each chunk for itself
            left -= read
            return
        if not wanted <= left and "LOADED" not in found:
            assert "MISSING" in found
            assert not self.p.written()
            return
        assert found == {"LOADED"}, "promised, or good as a whole only"
        written = self.p.written()
        blocks = CHUNK // BLOCK
        for group, first in enumerate(firsts):
            mine = {block - 1024 - group * 256 for g, block in written if g == group}
            named = {at for at, block in enumerate(ids[group]) if block != NULL}
            must = set(range(max(first, start * blocks), hit * blocks))
            may = {block for block in named if block // blocks in self.looked_at(group, hit)}
            assert must & named <= mine <= may, "exactly the blocks that are looked at, and what shares their chunk"
        left -= read

    @precondition(lambda self: bool(self.jobs))
    @rule(number=st.integers(0, 99), rank=st.integers(0, 1), start=st.integers(0, CHUNKS), losses=losses)
    def read(self, number: int, rank: int, start: int, losses: list[tuple[int, int, int]]) -> None:
        """The hit as bytes; ``losses``: (objects read before it, group, chunk) of evictions meanwhile."""
        answer, prompt, hit, left = self.jobs[number % len(self.jobs)]
        rank, start, parts = rank % self.p.ranks, start % hit, self.p.parts
        reading, read = self.p.reading(answer, hit, rank, start), list[tuple[int, int]]()
        while (one := self.p.read_one(reading)) is not None:
            read.append(one)
            for _, group, at in (loss for loss in losses if loss[0] == len(read)):
                left -= {(rank, part * CHUNKS + at) for at, part in read}
                self.forget(prompt, group, at)
        wanted = [(at, p) for at in range(start, hit) for p, need in enumerate(parts) if at in self.seen(need, hit)]
        assert read == wanted[: len(read)], "in their order, and nothing else"
        promised = all((rank, part * CHUNKS + at) in left for at, part in wanted[len(read) :])
        assert len(read) == len(wanted) or not promised or answer.job_id in self.cleared
        assert not read or answer.job_id not in self.cleared
        left -= {(rank, part * CHUNKS + at) for at, part in read}
        results = outcomes(reading.results())
        assert len(results) == hit - start
        for at, (outcome, groups) in enumerate(results, start):
            here = [part for one, part in read if one == at]
            assert groups == sum(self.p.forms[part].groups for part in here)
            if len(read) == len(wanted):
                assert outcome == "LOADED"
            elif parts != [t.ALL]:
                assert outcome == "TORN" if here else outcome in ("MISSING", "FAILED"), "good as a whole only"

    def seen(self, need: t.Need, hit: int) -> list[int]:
        return self.looked_at(self.p.needs.index(need), hit)

    @rule(prompt=st.sampled_from(PROMPTS), group=st.integers(0, 3), at=st.integers(0, CHUNKS - 1))
    def evict(self, prompt: str, group: int, at: int) -> None:
        self.forget(prompt, group, at)

    def forget(self, prompt: str, group: int, at: int) -> None:
        """Evicts the object of a group, unless somebody uses it."""
        group %= len(self.p.needs)
        if self.p.evict(group, at, prompt):
            need, key = self.p.needs[group], self.key(prompt, at)
            self.there = {one for one in self.there if one[0] != key or self.p.needs[one[1]] != need}

    @precondition(lambda self: bool(self.jobs))
    @rule(number=st.integers(0, 99))
    def free(self, number: int) -> None:
        answer, _, _, left = self.jobs.pop(number % len(self.jobs))
        assert self.p.engine.free(answer) == len(left)

    @rule()
    def clear(self) -> None:
        self.p.engine.clear()
        self.there.clear()
        self.cleared |= {answer.job_id for answer, *_ in self.jobs}

    # ---- always -----------------------------------------------------------------------------------------------------

    @invariant()
    def pins(self) -> None:
        if hasattr(self, "jobs"):
            assert self.p.desk.counts.pins == sum(len(left) for *_, left in self.jobs)


SETTINGS = settings(
    max_examples=80,
    stateful_step_count=30,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

TestParted = Parted.TestCase
TestParted.settings = SETTINGS
