# SPDX-License-Identifier: Apache-2.0
"""The servers of one engine: one on each node that it spans, asked together; their answers are taken as one.

A prefix is there as far as every server has it for the ranks of its node. Pins of what only some have are given back
with the request's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvgrpc.api import Content
from kvgrpc.client.lookups import LookupResult
from kvgrpc.client.parallel import ParallelStrategy
from kvgrpc.core.types import DEFAULT_POLICY, Policy
from kvgrpc.engines.vllm.groups import UnsupportedError

MEMORY = "l1"
"""The tier that is the server's memory."""


class Server(Protocol):
    """What is used of a SchedulerClient."""

    @property
    def chunk_tokens(self) -> int: ...
    @property
    def attached(self) -> bool: ...
    def try_lookup(
        self,
        request_id: str,
        content: Callable[[], Content],
        *,
        attempt: int = 0,
        lora: str = "",
        cache_salt: str = "",
        policy: Policy = ...,
    ) -> LookupResult | None: ...
    def lookup(
        self,
        request_id: str,
        content: Callable[[], Content],
        *,
        timeout_s: float = 0.2,
        attempt: int = 0,
        lora: str = "",
        cache_salt: str = "",
        policy: Policy = ...,
    ) -> LookupResult: ...
    def wait_for_answer(self, timeout_s: float) -> bool: ...
    def discard(self, request_id: str) -> None: ...
    def free(self, request_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Found:
    """The prefix that all servers have, and the name that each gave the lookup. ``below``: how many of its
    tokens came from tiers below the memory. ``complete``: all have answered, and there is no more."""

    hit_tokens: int = 0
    job_ids: tuple[bytes, ...] = ()
    below: int = 0
    complete: bool = False

    @property
    def pinned(self) -> bool:
        """Whether there may be something to give back."""
        return any(self.job_ids)


@dataclass(frozen=True, slots=True)
class Asked:
    """One question, the same for all servers. ``chunk_tokens``: what its content was cut by."""

    request_id: str
    content: Callable[[], Content]
    chunk_tokens: int
    attempt: int = 0
    lora: str = ""
    cache_salt: str = ""
    policy: Policy = DEFAULT_POLICY


class Servers:
    """Without any, everything is a miss. ``whole``: a hit is good as a whole or not at all, so that one which not all
    have alike is none. Thread rule: as for SchedulerClient."""

    def __init__(self, servers: Sequence[Server], whole: bool = False) -> None:
        self._servers = tuple(servers)
        self._whole = whole

    @property
    def chunk_tokens(self) -> int:
        """0 where they do not agree, or are not all known yet."""
        sizes = {server.chunk_tokens for server in self._servers}
        return sizes.pop() if len(sizes) == 1 else 0

    @property
    def chunk_sizes(self) -> frozenset[int]:
        """Of the servers that are known."""
        return frozenset(server.chunk_tokens for server in self._servers) - {0}

    @property
    def attached(self) -> bool:
        return bool(self._servers) and all(server.attached for server in self._servers)

    def try_lookup(self, asked: Asked) -> Found | None:
        """None until all have answered."""
        answers = [self._try(server, asked) for server in self._servers]
        known = [answer for answer in answers if answer is not None]
        return self._least(known) if len(known) == len(answers) else None

    def lookup(self, asked: Asked, timeout_s: float) -> Found:
        """Waits for all together, no longer than ``timeout_s``."""
        end = time.monotonic() + timeout_s
        if len(self._servers) > 1:  # so that none waits for another
            for server in self._servers:
                self._try(server, asked)
        return self._least([self._wait(server, asked, max(0.0, end - time.monotonic())) for server in self._servers])

    def rest(self, timeout_s: float) -> None:
        """Waits for the next answer that is to come, if any, no longer than ``timeout_s``."""
        for server in self._servers:
            if server.wait_for_answer(timeout_s):
                return

    def discard(self, request_id: str) -> None:
        for server in self._servers:
            server.discard(request_id)

    def free(self, request_id: str) -> None:
        for server in self._servers:
            server.free(request_id)

    def _least(self, answers: Sequence[LookupResult]) -> Found:
        hits = {answer.hit_tokens for answer in answers}
        hit = 0 if self._whole and len(hits) > 1 else min(hits, default=0)
        below = max((_below(answer) for answer in answers), default=0)
        complete = bool(answers) and not any(answer.reason or answer.limited_by for answer in answers)
        return Found(hit, tuple(answer.job_id for answer in answers), min(below, hit), complete)

    def _try(self, server: Server, asked: Asked) -> LookupResult | None:
        return server.try_lookup(
            asked.request_id,
            asked.content,
            attempt=asked.attempt,
            lora=asked.lora,
            cache_salt=asked.cache_salt,
            policy=asked.policy,
        )

    def _wait(self, server: Server, asked: Asked, timeout_s: float) -> LookupResult:
        return server.lookup(
            asked.request_id,
            asked.content,
            timeout_s=timeout_s,
            attempt=asked.attempt,
            lora=asked.lora,
            cache_salt=asked.cache_salt,
            policy=asked.policy,
        )


def _below(answer: LookupResult) -> int:
    chunks = sum(answer.hit_chunks_by_tier.values())
    return answer.hit_tokens * (chunks - answer.hit_chunks_by_tier.get(MEMORY, 0)) // chunks if chunks else 0


@dataclass(frozen=True, slots=True)
class Node:
    """A worker's place: the index of its node's server, the KV ranks that are asked for there (none: all), and whether
    it stores. Of the workers of a node with the same bytes the first one stores."""

    index: int
    kv_ranks: tuple[int, ...]
    writes: bool


def check_nodes(strategy: ParallelStrategy, nodes: int, servers: int) -> None:
    """Raises UnsupportedError where ``servers`` addresses do not fit an engine on so many nodes. vLLM counts nodes only
    where it starts the workers on them itself."""
    if nodes > 1 and 0 < servers != nodes:
        raise UnsupportedError(
            f"kvgrpc: this engine spans {nodes} nodes and has {servers} address(es): "
            "set addresses to a list with one server a node, in the order of node ranks"
        )
    if servers and strategy.world_size % servers:
        raise UnsupportedError(
            f"kvgrpc: {strategy.world_size} ranks cannot lie equally on the nodes of {servers} addresses"
        )


def node_of(strategy: ParallelStrategy, servers: int) -> Node:
    """Ranks lie on nodes in their order, equally many on each."""
    each = strategy.world_size // servers
    index = strategy.rank // each
    mates = [replace(strategy, rank=rank) for rank in range(index * each, (index + 1) * each)]
    first = next(mate for mate in mates if mate.kv_rank == strategy.kv_rank)
    kv_ranks = tuple(sorted({mate.kv_rank for mate in mates})) if servers > 1 else ()
    return Node(index, kv_ranks, first.rank == strategy.rank)


def nodes_of(strategy: ParallelStrategy, servers: int) -> tuple[Node, ...]:
    """All nodes, each seen by its first rank."""
    each = strategy.world_size // servers
    return tuple(node_of(replace(strategy, rank=index * each), servers) for index in range(servers))
