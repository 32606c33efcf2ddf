# SPDX-License-Identifier: Apache-2.0
"""A request, a client and a block pool for the scheduler's half of the vLLM connector, each in plain sight."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from kvgrpc.api import Content, Hashes, RegisterAnswer
from kvgrpc.client.lookups import LookupResult
from kvgrpc.core.types import TokenRange
from kvgrpc.engines.vllm.ports import Groups, Terms
from kvgrpc.engines.vllm.scheduler import Scheduler
from kvgrpc.engines.vllm.servers import Servers

BLOCK, CHUNK = 16, 32
ONE = Groups((BLOCK,))
"""A model whose layers all need everything."""


class FakeRequest:
    """Hashes of its full blocks, chained as vLLM's are."""

    def __init__(self, request_id: str, tokens: int, **facts: Any) -> None:
        self.request_id = request_id
        self.all_token_ids = list(range(tokens))
        self.num_prompt_tokens = tokens
        self.cache_salt: str | None = facts.get("salt")
        self.kv_transfer_params: dict[str, object] | None = facts.get("params")
        self.skip_reading_prefix_cache: bool = facts.get("computes_all", False)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        hashes, last = [], b""
        for at in range(0, self.num_tokens // BLOCK * BLOCK, BLOCK):
            last = hashlib.sha256(last + repr(self.all_token_ids[at : at + BLOCK]).encode()).digest()
            hashes.append(last)
        return hashes


@dataclass
class FakeClient:
    """Answers every lookup with ``hit`` tokens, or, while ``silent``, not yet."""

    chunk_tokens: int = CHUNK
    attached: bool = True
    hit: int = 0
    silent: bool = False
    asked: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    contents: list[Content] = field(default_factory=list[Content])
    given_back: list[str] = field(default_factory=list[str])
    waited: list[float] = field(default_factory=list[float])
    answers: dict[tuple[str, int], LookupResult] = field(default_factory=dict[tuple[str, int], LookupResult])

    def try_lookup(
        self, request_id: str, content: Callable[[], Content], *, attempt: int = 0, **_: Any
    ) -> LookupResult | None:
        key = (request_id, attempt)
        if key not in self.asked:
            self.asked.append(key)
            self.contents.append(content())
        if self.silent:
            return None
        return self.answers.setdefault(key, LookupResult(self.hit, b"job" if self.hit else b"", bool(self.hit)))

    def lookup(
        self, request_id: str, content: Callable[[], Content], *, timeout_s: float = 0.2, attempt: int = 0, **_: Any
    ) -> LookupResult:
        return self.try_lookup(request_id, content, attempt=attempt) or LookupResult(reason="DEADLINE")

    def wait_for_answer(self, timeout_s: float) -> bool:
        self.waited.append(timeout_s)
        return self.silent

    def discard(self, request_id: str) -> None:
        self.given_back.append(f"all of {request_id}")

    def free(self, request_id: str) -> None:
        self.given_back.append(f"pins of {request_id}")


class FakeBlocks:
    """Tables that tests fill, and how often each block is held."""

    null = 0

    def __init__(self, total: int = 1000) -> None:
        self.total = total
        self.tables: dict[str, list[int]] = {}
        self.others: dict[str, list[list[int]]] = {}
        """Of the groups behind the first one."""
        self.held: Counter[int] = Counter()

    def of(self, request_id: str) -> Sequence[Sequence[int]]:
        return [self.tables[request_id], *self.others.get(request_id, [])]

    def hold(self, block_ids: Sequence[int]) -> None:
        assert self.null not in block_ids
        self.held.update(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        self.held.subtract(block_ids)
        self.held = +self.held


@dataclass
class Desk:
    """A scheduler's half with everything around it."""

    client: FakeClient
    blocks: FakeBlocks
    scheduler: Scheduler

    def arrive(self, request_id: str, tokens: int, **facts: Any) -> FakeRequest:
        request = FakeRequest(request_id, tokens, **facts)
        first = 1 + 100 * len(self.blocks.tables)
        self.blocks.tables[request_id] = list(range(first, first + -(-tokens // BLOCK) + 4))
        self.scheduler.arrived(request)
        return request


def desk(
    lora: str | None = "", others: Sequence[FakeClient] = (), servers: Servers | None = None, **terms: Any
) -> Desk:
    """``others``: servers of further nodes. ``servers``: instead of all these."""
    client, blocks = FakeClient(), FakeBlocks()
    groups = terms.pop("groups", ONE)
    asked = servers if servers is not None else Servers([client, *others], groups.whole)
    return Desk(client, blocks, Scheduler(asked, Terms(groups, BLOCK, **terms), lambda _: lora, blocks))


class FakeCopier:
    """Hands out futures that tests finish."""

    def __init__(self, chunk_tokens: int = CHUNK) -> None:
        self.registration: RegisterAnswer | None = RegisterAnswer(b"b" * 16, chunk_tokens, 1, "form", 1)
        self.stores: list[tuple[Content, list[list[int]], TokenRange | None]] = []
        self.retrieves: list[tuple[bytes, TokenRange, list[list[int]]]] = []
        self.futures: list[Any] = []
        self.ready: list[Any] = []

    def store(
        self, content: Content, blocks: Any, *, range: TokenRange | None = None, ready: Any = None, **_: Any
    ) -> Any:
        self.ready.append(ready)
        self.stores.append((content, [list(ids) for ids in blocks], range))
        return self._future()

    def retrieve(self, job_id: bytes, range: TokenRange, blocks: Any, *, ready: Any = None, **_: Any) -> Any:
        self.ready.append(ready)
        self.retrieves.append((job_id, range, [list(ids) for ids in blocks]))
        return self._future()

    def close(self, timeout_s: float = 30.0) -> bool:
        return True

    def _future(self) -> Any:
        self.futures.append(Future())
        return self.futures[-1]


def keys_of(content: Content) -> list[bytes]:
    assert isinstance(content, Hashes)
    return list(content.hashes)


class OnACard:
    """What is read of a tensor of a card."""

    device = torch.device("cuda", 0)

    def __init__(self, address: int, like: torch.Tensor) -> None:
        self._address, self._like = address, like
        self.shape = like.shape

    def data_ptr(self) -> int:
        return self._address + int(self._like.storage_offset()) * self._like.element_size()

    def element_size(self) -> int:
        return self._like.element_size()

    def stride(self) -> tuple[int, ...]:
        return self._like.stride()
