# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine of the comparison, a program that is told what to do line by line. Runs in the vLLM environment.

    python -m benchmarks.vllm_side MODEL CONNECTOR      (kv_transfer_config as JSON, or "")

Each order is a line of JSON, and so is its answer. Prompts are made of a seed, so that no two orders share any by
mistake. ``forget`` empties the engine's own prefix cache.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

VOCABULARY = 990
Prompt = list[int]


def prompt(seed: int, tokens: int) -> Prompt:
    return random.Random(seed).choices(range(3, VOCABULARY), k=tokens)


class Side:
    """The engine, in processes of its own as in production."""

    def __init__(self, model: str, connector: str) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        options: dict[str, Any] = {}
        if connector:
            options["kv_transfer_config"] = KVTransferConfig(**json.loads(connector))
        self._llm = LLM(
            model,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            block_size=32,
            max_model_len=8192,
            max_num_seqs=64,
            seed=0,
            disable_log_stats=False,
            **options,
        )

    def ready(self) -> dict[str, Any]:
        return {}

    def forget(self) -> dict[str, Any]:
        deadline = time.monotonic() + 30
        while not self._llm.reset_prefix_cache():  # refused while anything still uses blocks
            if time.monotonic() > deadline:
                raise TimeoutError("the engine's prefix cache is in use")
            time.sleep(0.01)
        return {}

    def ask(self, seeds: Sequence[Sequence[int]], lengths: Sequence[int], tokens: int) -> dict[str, Any]:
        """Each prompt is made of parts: one seed a part, parts of these lengths. Seconds for all together, tokens that
        came from a cache, and what was said."""
        from vllm import SamplingParams

        prompts = [[word for part in zip(one, lengths, strict=True) for word in prompt(*part)] for one in seeds]
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        outputs = self._llm.generate([{"prompt_token_ids": one} for one in prompts], sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        cached = [output.num_cached_tokens or 0 for output in outputs]
        return {"s": seconds, "cached": cached, "said": [list(output.outputs[0].token_ids) for output in outputs]}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    side = Side(*sys.argv[1:3])
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(side, order.pop("do"))(**order)), file=answers, flush=True)


if __name__ == "__main__":
    main()
