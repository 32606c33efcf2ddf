# SPDX-License-Identifier: Apache-2.0
"""An engine and a server side by side, and what tests ask of the two."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from vllm.config import KVEventsConfig

from kvgrpc.client import ClearTarget, Client, ServerStatus
from tests.served import Served, wait_until
from tests.vllm.engine import Engine, Said, connector
from tests.vllm.processes import Server

KV_BYTES = 128 << 20
NO_CACHE = {"kvgrpc.no_store": True, "kvgrpc.no_lookup": True}


def prompt(seed: int, length: int) -> list[int]:
    return [(7 * at * seed + seed) % 997 + 3 for at in range(length)]


class Bench:
    """``changes`` are arguments of LLM, ``extra`` options of the connector."""

    def __init__(
        self, model: str, served: Served | Server, extra: dict[str, Any] | None = None, **changes: Any
    ) -> None:
        self.served = served
        kv = connector(served.address, **(extra or {}))
        events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        usual = {"kv_cache_memory_bytes": KV_BYTES, "kv_events_config": events}
        self.engine = Engine(model, kv, **{**usual, **changes})
        self._known: dict[tuple[Any, ...], tuple[int, ...]] = {}

    # ---- the engine -------------------------------------------------------------------------------------------------

    def say(self, *prompts: Sequence[int], **asked: Any) -> list[Said]:
        """Answers, with everything stored that is to be stored."""
        said = self.engine.say(*prompts, **asked)
        self.engine.settle()
        return said

    def cold(self, *prompts: Sequence[int], **asked: Any) -> list[tuple[int, ...]]:
        """What the prompts are answered with when nothing is cached anywhere; leaves everything empty."""
        answers = []
        for each in prompts:
            key = (tuple(each), *sorted(asked.items()))
            if key not in self._known:
                self.wipe()
                (said,) = self.say(each, **asked)
                assert said.cached == 0
                self._known[key] = said.tokens
            answers.append(self._known[key])
        self.wipe()
        return answers

    def local(self, asked: list[int], cached: int) -> tuple[int, ...]:
        """What vLLM says behind so many tokens of its own prefix cache. Its matrix products round otherwise for other
        lengths of the rest, so with few tokens cached that may not be what it says without a cache."""
        self.wipe()
        nothing = {"kvgrpc.no_store": True, "kvgrpc.no_lookup": True}
        self.say(asked[: cached + 1], tokens=1, params=nothing)
        (said,) = self.say(asked, params=nothing)
        assert said.cached == cached
        self.wipe()
        return said.tokens

    def forget(self) -> None:
        """Empties vLLM's own prefix cache, not the server."""
        assert self.engine.forget() == 0

    def wipe(self) -> None:
        self.forget()
        with Client(self.served.address) as client:
            client.clear(ClearTarget(all=True))

    def scheduler(self) -> Any:
        return self.engine.connector._scheduler

    def client(self) -> Any:
        """The scheduler's, of its only server."""
        (client,) = self.scheduler()._servers._servers
        return client

    def blocks_at_the_end(self) -> dict[int, tuple[list[list[int]], dict[str, torch.Tensor]]]:
        """Grows with each request that finishes, by its number: its block tables, and a copy of every layer's blocks in
        their order, taken before anybody else gets them."""
        kept: dict[int, tuple[list[list[int]], dict[str, torch.Tensor]]] = {}
        scheduler, real = self.scheduler(), self.scheduler().finished

        def finished(request_id: str) -> None:
            tables = [list(ids) for ids in scheduler.blocks.of(request_id)]
            groups = self.engine.core.scheduler.kv_cache_config.kv_cache_groups
            layers = {layer: ids for group, ids in zip(groups, tables, strict=True) for layer in group.layer_names}
            tensors = self.layers()
            copies = {layer: tensors[layer][ids].clone() for layer, ids in layers.items()}
            kept[int(request_id.split("-")[0])] = tables, copies
            real(request_id)

        scheduler.finished = finished
        return kept

    def layers(self) -> dict[str, torch.Tensor]:
        """The KV memory of every layer."""
        return self.worker()._client._kept

    # ---- the server -------------------------------------------------------------------------------------------------

    def status(self) -> ServerStatus:
        with Client(self.served.address) as client:
            return client.get_status()

    def check_nothing_left(self) -> None:
        """No request, copy, block, lease or pin; all but free and ready memory is given back."""
        self.engine.settle()
        scheduler, pool = self.scheduler(), self.engine.pool
        assert (scheduler.tracked, scheduler.held_blocks, scheduler.busy) == (0, 0, False)
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert not self.worker().busy

        def quiet() -> bool:
            now = self.status()
            used = now.arena.total_bytes - now.arena.free_bytes - now.arena.ready_bytes
            return (now.pins, now.calls_in_flight, used) == (0, 0, 0)

        wait_until(quiet, 10)

    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    def damage(self) -> None:
        """Turns round every bit that the server has stored, in its own memory."""
        descriptors = Path(f"/proc/{self.served.process.pid}/fd")
        arena = next(each for each in descriptors.iterdir() if each.readlink().name.startswith("memfd:kvgrpc-arena"))
        with arena.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            stored = numpy.frombuffer(memory, numpy.uint8)
            numpy.bitwise_xor(stored, 0xFF, out=stored)
            del stored
