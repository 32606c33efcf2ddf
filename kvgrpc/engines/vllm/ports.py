# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's half needs of vLLM, so that it can be tested without it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Request(Protocol):
    """What is read of vLLM's request."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def all_token_ids(self) -> Iterable[int]: ...
    @property
    def block_hashes(self) -> Sequence[bytes]: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def kv_transfer_params(self) -> dict[str, object] | None: ...
    @property
    def skip_reading_prefix_cache(self) -> bool: ...


def chunk_keys(request: Request, chunk: int, hash_block_size: int, first: int, end: int) -> tuple[bytes, ...]:
    """The last block's hash of each of the chunks ``first`` to ``end``, of ``chunk`` tokens. The chunk's size is
    part of a key, so that keys that were made for one server can never name other tokens at its successor."""
    hashes, step = request.block_hashes, chunk // hash_block_size
    size = chunk.to_bytes(4, "little")
    return tuple([each + size for each in hashes[(first + 1) * step - 1 : end * step : step]])  # a lookup's main cost


class Blocks(Protocol):
    """vLLM's block tables, one a KV group, and its block pool. ``null``: what stands in a table for no block."""

    @property
    def total(self) -> int: ...
    @property
    def null(self) -> int: ...
    def of(self, request_id: str) -> Sequence[Sequence[int]]: ...
    def hold(self, block_ids: Sequence[int]) -> None: ...
    def release(self, block_ids: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class Groups:
    """The KV groups of the model: their block sizes, and which of them keep one state instead of tokens.

    ``whole``: a hit is good as a whole or not at all, since not all layers need everything, or since vLLM cannot be
    told which blocks of several groups are bad. ``again``: the last token of a hit can be computed again.
    """

    sizes: tuple[int, ...]
    states: frozenset[int] = frozenset()
    whole: bool = False
    again: bool = True

    @property
    def block_size(self) -> int:
        """Tokens after which a block of every group ends."""
        return math.lcm(*self.sizes)


@dataclass(frozen=True, slots=True)
class Terms:
    """What is the same for all requests. ``own_hashes``: the server hashes token ids, instead of taking vLLM's block
    hashes. ``ahead``: how many tokens a drafter's layers read ahead (EAGLE, MTP): the KV of so many last tokens, of a
    decoding request and of a hit, depends on those that follow."""

    groups: Groups
    hash_block_size: int
    workers: int = 1
    own_hashes: bool = False
    lookup_async: bool = True
    lookup_block_s: float = 0.2
    store_share: float = 0.25
    store_generated: bool = True
    ahead: int = 0

    @property
    def block_size(self) -> int:
        """Of all groups; see Groups."""
        return self.groups.block_size

    @property
    def unsure(self) -> int:
        """Last tokens of a prompt that are computed, whatever was found."""
        return 1 if self.ahead else int(not self.groups.again)

    @property
    def dropped(self) -> int:
        """Tokens of a hit's end that are computed anew, by whole blocks, as vLLM does with its own hits: who stored
        them may have gone on otherwise."""
        return -(-self.ahead // self.block_size) * self.block_size
