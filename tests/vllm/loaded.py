# SPDX-License-Identifier: Apache-2.0
"""Whether loaded blocks hold the bytes that were computed: for models that say other words behind a hit, because they
compute the rest of a prompt in other steps. ``python -m tests.vllm.loaded MODEL ADDRESS OPTIONS`` (JSON) prints a line.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from kvgrpc.engines.vllm import connector as ours
from kvgrpc.engines.vllm.scheduler import Scheduler
from tests.vllm.bench import prompt
from tests.vllm.engine import Engine, answer, connector


class Kept:
    """The blocks of each finished request, before anybody else gets them: their ids and all their bytes."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.requests: list[tuple[list[int], dict[str, torch.Tensor]]] = []
        share, finished = ours.share, Scheduler.finished

        def sharing(tensors: dict[str, torch.Tensor], forms: Any) -> Any:
            self.tensors = {layer: tensors[layer] for form in forms for layer in form.layers}
            return share(tensors, forms)

        def finishing(scheduler: Scheduler, request_id: str) -> None:
            assert scheduler.blocks is not None
            (ids,) = map(list, scheduler.blocks.of(request_id))
            self.requests.append((ids, {layer: tensor[ids].clone() for layer, tensor in self.tensors.items()}))
            finished(scheduler, request_id)

        ours.share, Scheduler.finished = sharing, finishing  # type: ignore[method-assign]


def main() -> None:
    model, address, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    kept, asked = Kept(), prompt(3, 460)
    engine = Engine(model, connector(address), kv_cache_memory_bytes=128 << 20, **options)
    engine.say(asked)
    assert engine.forget() == 0
    for tensor in kept.tensors.values():
        tensor.view(torch.uint8).fill_(0xA5)
    (said,) = engine.say(asked)
    engine.settle()
    (first, computed), (second, loaded) = kept.requests
    blocks = said.cached // options["block_size"]
    wrong = [
        (layer, at)
        for layer in computed
        for at in range(blocks)
        if not torch.equal(computed[layer][at].view(torch.uint8), loaded[layer][at].view(torch.uint8))
    ]
    ours_alone = engine.metric("external_prefix_cache_hits") == said.cached
    answer({"cached": said.cached, "ours": ours_alone, "wrong": wrong, "moved": first[:blocks] != second[:blocks]})
    engine.close()


if __name__ == "__main__":
    main()
