# SPDX-License-Identifier: Apache-2.0
"""What the soak's engines ask for: prompts that share prefixes, and the bytes that their tokens have.

A family of prompts has one beginning; a branch leaves it at a chunk that is its own. Which bytes a token has follows
from the model, the tenant, the family, and from where it lies after the fork, the branch. So two engines that store the
same chunk store the same bytes, and bytes that come from anywhere else are seen.
"""

from __future__ import annotations

import random
import zlib
from collections import OrderedDict
from dataclasses import dataclass, replace

from kvgrpc import api
from tests.e2e.harness import BLOCK, CHUNK, tokens_of
from tests.kvdata import BLOCKS_OUTERMOST, HEADS_FIRST_OPAQUE, LAYERS_OUTERMOST, MHA, Arrangement, Bytes, Image, Kv

FAMILIES = 40
BRANCHES = 4
CHUNKS_MOST = 16
PER_CHUNK = CHUNK // BLOCK
TENANTS = ("", "", "", "tenant")
REMEMBERED_BYTES = 24 << 20
"""Of expected data, in each engine."""


@dataclass(frozen=True)
class Model:
    """Engines of one model share what they store."""

    name: str
    kv: Kv
    arrangement: Arrangement


MODELS = (
    Model("small", MHA, LAYERS_OUTERMOST),
    Model("wide", Kv(layers=8, planes=2, heads=8, head_dim=16), BLOCKS_OUTERMOST),
    Model("opaque", Kv(layers=6, planes=1, heads=2, head_dim=96), HEADS_FIRST_OPAQUE),
)
"""6, 64 and 36 KiB a chunk."""


@dataclass(frozen=True)
class Prompt:
    """The first ``chunks`` chunks of a branch of a family, for a tenant."""

    tenant: str
    family: int
    branch: int
    chunks: int

    @property
    def fork(self) -> int:
        """The first chunk that is the branch's own."""
        return 1 + zlib.crc32(f"{self.family}/{self.branch}".encode()) % (CHUNKS_MOST - 1)

    @property
    def tokens(self) -> api.Tokens:
        whole, cut = self.chunks * CHUNK, min(self.fork, self.chunks) * CHUNK * 4
        shared, own = tokens_of(self.family, whole).data, tokens_of(self._branch_seed, whole).data
        return api.Tokens(bytes(shared[:cut]) + bytes(own[cut:]))

    @property
    def _branch_seed(self) -> int:
        return 1000 + self.family * BRANCHES + self.branch

    def data_seed(self, model: Model, chunk: int) -> int:
        """Of the data of one chunk."""
        whose = self.family if chunk < self.fork else self._branch_seed
        return zlib.crc32(f"{model.name}/{self.tenant}/{whose}".encode())


def any_prompt(chance: random.Random) -> Prompt:
    """Some families are asked for much more often than others."""
    family = min(int(chance.expovariate(1 / 8)), FAMILIES - 1)
    return Prompt(chance.choice(TENANTS), family, chance.randrange(BRANCHES), chance.randint(1, CHUNKS_MOST))


class Expected:
    """The bytes of chunks as [block, layer, plane, token, head, byte]; those asked for last are kept."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._image = Image(model.kv, model.arrangement, BLOCK, 2 * PER_CHUNK)
        self._kept: OrderedDict[tuple[int, int], Bytes] = OrderedDict()
        self._most = REMEMBERED_BYTES // (CHUNK * model.kv.token_bytes)

    def of(self, prompt: Prompt, chunk: int) -> Bytes:
        key = (prompt.data_seed(self._model, chunk), chunk)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        blocks = range(PER_CHUNK)
        self._image.kv = replace(self._model.kv, seed=key[0])
        self._image.write(blocks, chunk * CHUNK)
        self._kept[key] = self._image.blocks[list(blocks)].copy()
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return self._kept[key]
