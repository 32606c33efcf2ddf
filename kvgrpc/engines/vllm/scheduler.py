# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half: which prefixes to load, which chunks to store, and who owns what meanwhile.

A request goes through rounds. A round begins with a lookup and ends when the request gets its blocks: then it either
loads, or gives back what the lookup pinned. A preempted request begins another round. Every question of vLLM's may be
repeated within a round and gets the same answer.

Blocks that a save reads are held in vLLM's block pool until every worker has let go of them, whatever becomes of the
request meanwhile (finished, aborted, preempted). Blocks that a load writes are held by vLLM itself, until the workers
report the request as received.

Thread rule: everything runs on the engine core's main thread. Nothing blocks, but ``matched`` with ``lookup_async``
off, for ``lookup_block_s`` at most, and ``step`` where nothing is computed.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from itertools import chain

from kvgrpc.api import Content, Hashes, Tokens
from kvgrpc.core.types import NULL_BLOCK
from kvgrpc.engines.vllm.events import Announcer
from kvgrpc.engines.vllm.metadata import REST_S, BlockIds, Load, Report, Save, Step
from kvgrpc.engines.vllm.options import parse_wish
from kvgrpc.engines.vllm.ports import Blocks, Request, Terms, chunk_keys
from kvgrpc.engines.vllm.servers import Asked, Found, Servers
from kvgrpc.engines.vllm.tracked import Held, Tracked

log = logging.getLogger("vllm.kvgrpc")


class Scheduler:
    """``lora_of`` names a request's adapter; None: what identifies the request is not in its tokens alone, so that it
    must not be cached by them."""

    def __init__(
        self, servers: Servers, terms: Terms, lora_of: Callable[[Request], str | None], blocks: Blocks | None = None
    ) -> None:
        self.blocks = blocks
        self.unusable = False
        self.report = Report()
        """Sums of what the workers reported."""
        self.announcer: Announcer | None = None
        """Set where routers want to know what can be found."""
        self._servers = servers
        self._terms = terms
        self._lora_of = lora_of
        self._requests: dict[str, Tracked] = {}
        self._loads: dict[str, Load] = {}
        self._held: dict[int, Held] = {}
        self._held_blocks = 0
        self._save_ids = itertools.count(1)
        self._resets = 0
        self._told: set[str] = set()

    @property
    def tracked(self) -> int:
        """Requests that are not finished."""
        return len(self._requests)

    @property
    def held_blocks(self) -> int:
        """Blocks that saves hold."""
        return self._held_blocks

    @property
    def busy(self) -> bool:
        """Whether workers must be asked again, though there may be no request left."""
        return bool(self._held)

    # ---- lookups ----------------------------------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """Begins the first round."""
        if request.request_id not in self._requests:
            tracked = self._track(request)
            if self._asks(tracked):
                self._try(tracked)

    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded behind the first ``computed`` ones; None: ask again at the next step."""
        tracked = self._requests.get(request.request_id) or self._track(request)
        if not self._asks(tracked):
            return 0, False
        if tracked.spent:
            tracked.attempt += 1
            tracked.spent = False
            tracked.result = None
        if self._terms.lookup_async:  # the client remembers the answer, and whether its server is still there
            tracked.result = self._try(tracked)
            if tracked.result is None:
                return None, False
        elif tracked.result is None or tracked.result.hit_tokens:  # the client knows whether a hit still holds
            tracked.result = self._wait(tracked)
        # vLLM's prefix ends at a block; of a prompt that is loaded as a whole it computes the last token
        block = self._terms.block_size
        end = min(tracked.result.hit_tokens, self._loadable(tracked)) // block * block - self._terms.dropped
        tokens = end - computed
        if tokens <= 0:
            return 0, False
        tracked.offer = (computed, tokens)
        return tokens, True

    def allocated(self, request: Request, external: int) -> None:
        """The request has its blocks: loads ``external`` tokens of the offer. Comes again, with 0, after a load."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.load is not None:
            return
        tracked.ends.clear()
        result, asked, chunk = tracked.result, tracked.asked, self._servers.chunk_tokens
        tracked.spent = True
        if result is not None and asked is not None and asked.chunk_tokens == chunk:  # else another server was asked
            self._count_stored(tracked, result.hit_tokens)
            if result.complete and self.announcer is not None:
                self.announcer.looked_up(request, result.hit_tokens, self._loadable(tracked), chunk)
        if not external:
            if result is not None and result.pinned:
                self._servers.free(request.request_id)
            tracked.result = None
            return
        start = tracked.offer[0]
        end = start + external
        blocks = self._table(request.request_id, start, end)
        job_ids = result.job_ids if result is not None and self._is_good(result, end) else ()
        tracked.load = self._loads[request.request_id] = Load(request.request_id, job_ids, start, end, blocks)

    def loaded_from_below(self, request_id: str) -> int:
        """How many of the tokens that the request loads come from tiers below the server's memory: its last ones."""
        tracked = self._requests.get(request_id)
        return tracked.result.below if tracked is not None and tracked.result is not None else 0

    def _loadable(self, tracked: Tracked) -> int:
        """Most tokens of the request that may be loaded."""
        return max(0, min(tracked.wish.load_most, tracked.request.num_tokens - self._terms.unsure))

    def _is_good(self, result: Found, end: int) -> bool:
        """Whether the prefix up to ``end`` is what was found: where a hit is good as a whole only, a shorter one would
        be loaded without the windows that it needs."""
        return end == result.hit_tokens or not self._terms.groups.whole

    def _track(self, request: Request) -> Tracked:
        wish, bad = parse_wish(request.kv_transfer_params)
        if bad:
            self._tell(f"kv_transfer_params: {bad}")
        lora, salt = self._lora_of(request), self._salt(request)
        sendable = lora is not None and _is_text(lora) and _is_text(salt)
        if lora is not None and not sendable:
            self._tell("a request whose salt or adapter has a character that is none is not cached")
        tracked = Tracked(request, wish, lora or "", cacheable=sendable)
        self._requests[request.request_id] = tracked
        return tracked

    def _asks(self, tracked: Tracked) -> bool:
        never = self.unusable or tracked.load_failed or not tracked.cacheable
        never = never or tracked.request.skip_reading_prefix_cache
        return not never and not tracked.wish.policy.no_lookup and tracked.wish.load_most >= self._terms.block_size

    def _try(self, tracked: Tracked) -> Found | None:
        asked = self._asked(tracked)
        return self._servers.try_lookup(asked) if asked is not None else Found()

    def _wait(self, tracked: Tracked) -> Found:
        asked = self._asked(tracked)
        return self._servers.lookup(asked, self._terms.lookup_block_s) if asked is not None else Found()

    def _asked(self, tracked: Tracked) -> Asked | None:
        """The round's question, made once; None: there is nobody who could be asked."""
        chunk, asked = self._servers.chunk_tokens, tracked.asked
        if asked is None or (asked.attempt, asked.chunk_tokens) != (tracked.attempt, chunk):
            if not self._fits(chunk):
                return None
            asked = tracked.asked = Asked(
                tracked.request.request_id,
                lambda: self._prefix(tracked, chunk),
                chunk,
                tracked.attempt,
                tracked.lora,
                self._salt(tracked.request),
                tracked.wish.policy,
            )
        return asked

    # ---- content ----------------------------------------------------------------------------------------------------

    def _fits(self, chunk: int) -> bool:
        if len(self._servers.chunk_sizes) > 1:
            sizes = ", ".join(map(str, sorted(self._servers.chunk_sizes)))
            self._tell(f"the servers have chunks of {sizes} tokens: nothing is cached until all have the same")
            return False
        if chunk and chunk % self._terms.block_size:
            self._tell(
                f"a block has {self._terms.block_size} tokens, the server's chunk {chunk}: nothing is cached; "
                f"start the server with --chunk-tokens of a multiple of {self._terms.block_size}"
            )
            return False
        if self._terms.groups.states and chunk > self._terms.block_size:
            self._tell(
                f"a state is found where a step ended with a chunk of {chunk} tokens, and steps end with blocks of "
                f"{self._terms.block_size}: start the server with --chunk-tokens {self._terms.block_size} for more hits"
            )
        return chunk > 0

    def _prefix(self, tracked: Tracked, chunk: int) -> Content:
        """What may be loaded at most where a hit cannot be cut."""
        request = tracked.request
        most = self._loadable(tracked) if self._terms.groups.whole else request.num_tokens
        if self._terms.own_hashes:
            return Tokens(_packed(request, most))
        tokens = min(most, len(request.block_hashes) * self._terms.hash_block_size)
        return Hashes(self._keys(request, chunk, 0, tokens // chunk), most)

    def _keys(self, request: Request, chunk: int, first: int, end: int) -> tuple[bytes, ...]:
        return chunk_keys(request, chunk, self._terms.hash_block_size, first, end)

    def _salt(self, request: Request) -> str:
        """vLLM's block hashes contain the salt."""
        return request.cache_salt or "" if self._terms.own_hashes else ""

    # ---- steps ------------------------------------------------------------------------------------------------------

    def step(self, scheduled: Sequence[tuple[str, int]]) -> Step:
        """What the workers are asked for. ``scheduled``: (request, its computed tokens when the step is done); without
        any, and with nothing to load, the next lookup's answer is waited for, ``REST_S`` at most."""
        step = Step(self._resets, idle=not scheduled)
        for request_id, computed in scheduled:
            tracked = self._requests.get(request_id)
            if tracked is not None:
                self._save(tracked, computed, step)
        step.loads = list(self._loads.values())
        self._loads = {}
        if step.idle and not step.loads:
            self._servers.rest(REST_S)
        return step

    def _save(self, tracked: Tracked, computed: int, step: Step) -> None:
        if self.unusable or tracked.wish.policy.no_store or not tracked.cacheable or not self._servers.attached:
            return
        chunk = self._servers.chunk_tokens
        if not self._fits(chunk):
            return
        self._count_stored(tracked, 0)
        if self._terms.groups.states and computed % chunk == 0:
            tracked.ends.add(computed)
        end = min(self._final(tracked, computed), tracked.wish.store_most) // chunk
        if end <= tracked.stored:
            return
        first = tracked.stored
        blocks = self._table(tracked.request.request_id, first * chunk, end * chunk, tracked.ends)
        if any(len(ids) * size < (end - first) * chunk for ids, size in zip(blocks, self._sizes, strict=True)):
            return
        named = tuple(block for ids in blocks for block in ids if block != NULL_BLOCK)
        if self._held_blocks + len(named) > max(1, int(self._terms.store_share * self._blocks().total)):
            return  # the server does not keep up; at the next step perhaps
        save_id = next(self._save_ids)
        own = self._terms.own_hashes
        save = Save(
            save_id,
            first * chunk,
            end * chunk,
            blocks,
            hashes=() if own else self._keys(tracked.request, chunk, first, end),
            first_chunk=first,
            tokens=_packed(tracked.request, end * chunk) if own else b"",
            lora=tracked.lora,
            cache_salt=self._salt(tracked.request),
            policy=tracked.wish.policy,
        )
        self._blocks().hold(named)
        self._held[save_id] = Held(named, self._terms.workers, tracked.request, save.start, save.end, chunk)
        self._held_blocks += len(named)
        tracked.stored = end
        tracked.ends = {each for each in tracked.ends if each > end * chunk}
        step.saves.append(save)

    def _final(self, tracked: Tracked, computed: int) -> int:
        """Tokens whose KV is final after the step: no drafts, and not the last ones where a drafter reads ahead."""
        request = tracked.request
        known = request.num_tokens
        if not self._terms.own_hashes:
            known = min(known, len(request.block_hashes) * self._terms.hash_block_size)
        if not self._terms.store_generated:
            known = min(known, request.num_prompt_tokens)
        final = min(computed, known)
        return min(final, request.num_tokens - self._terms.ahead)

    def _count_stored(self, tracked: Tracked, hit_tokens: int) -> None:
        chunk = self._servers.chunk_tokens
        if chunk != tracked.chunk_tokens:
            tracked.chunk_tokens, tracked.stored = chunk, 0
        if chunk:
            tracked.stored = max(tracked.stored, hit_tokens // chunk)

    # ---- ends -------------------------------------------------------------------------------------------------------

    def update(
        self, report: Report | None, received: Iterable[str], invalid: Iterable[int], failed: Iterable[str] = ()
    ) -> None:
        """What the workers say after a step: ``received`` requests, of which some ``failed`` as a whole, and
        ``invalid`` blocks of others."""
        bad, lost = frozenset(invalid), frozenset(failed)
        for tracked in self._requests.values() if bad else ():
            if tracked.load is not None and not bad.isdisjoint(chain.from_iterable(tracked.load.blocks)):
                tracked.load_failed = True  # one worker says so, maybe many steps before the last one has ended
        for request_id in received:
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.load is None:
                continue
            if request_id in lost or tracked.load_failed:
                tracked.load_failed = True
                tracked.stored = 0
                tracked.result = None
                self._servers.free(request_id)
            tracked.load = None
        if report is None:
            return
        for save_id, count in report.ended.items():
            held = self._held[save_id]
            held.workers -= count
            held.findable = min(held.findable, report.findable.get(save_id, held.findable))
            if held.workers <= 0:
                del self._held[save_id]
                self._held_blocks -= len(held.blocks)
                self._blocks().release(held.blocks)
                if self.announcer is not None:
                    self.announcer.stored(held.request, held.start, held.findable, held.chunk)
        if report.unusable and not self.unusable:
            self.unusable = True
            self._tell("a worker cannot share its KV memory: this engine runs without the cache")
        self.report.add(replace(report, ended={}, findable={}))

    def finished(self, request_id: str) -> None:
        """Finished or aborted, in whatever state."""
        tracked = self._requests.pop(request_id, None)
        if tracked is not None:
            tracked.asked = None  # which refers to it
            self._servers.discard(request_id)
        if request_id in self._loads:
            self._loads[request_id] = Load(request_id, (), 0, 0, ())

    def reset(self) -> None:
        """What was computed so far is no longer to be found or stored."""
        self._resets += 1
        if self.announcer is not None:
            self.announcer.forget()
        for request_id, tracked in self._requests.items():
            tracked.cacheable = False
            if tracked.load is None:
                self._servers.discard(request_id)

    # ---- inside -----------------------------------------------------------------------------------------------------

    @property
    def _sizes(self) -> Sequence[int]:
        return self._terms.groups.sizes

    def _table(self, request_id: str, start: int, end: int, ends: Set[int] | None = None) -> BlockIds:
        """The request's blocks of these tokens, NULL_BLOCK where it has none. Of a group of states, with ``ends`` of
        steps: only a block whose last token was a step's is known to hold a state, which stays as long as the block is
        in the table."""
        blocks = self._blocks()
        tables: list[tuple[int, ...]] = []
        for group, (ids, size) in enumerate(zip(blocks.of(request_id), self._sizes, strict=True)):
            first, last = start // size, end // size
            named = [NULL_BLOCK if block == blocks.null else block for block in ids[first:last]]
            if ends is not None and group in self._terms.groups.states:
                named = [block if (first + at + 1) * size in ends else NULL_BLOCK for at, block in enumerate(named)]
            tables.append(tuple(named))
        return tuple(tables)

    def _blocks(self) -> Blocks:
        assert self.blocks is not None, "vLLM has not bound its block pool"
        return self.blocks

    def _tell(self, text: str) -> None:
        if text not in self._told and len(self._told) < 64:
            self._told.add(text)
            log.warning("kvgrpc: %s (not logged again)", text)


def _is_text(text: str) -> bool:
    """Whether it can be sent: half of a surrogate pair cannot."""
    return text.isascii() or text.encode(errors="replace").decode() == text


def _packed(request: Request, end: int) -> bytes:
    return bytes(Tokens.from_ids(itertools.islice(request.all_token_ids, end)).data)
