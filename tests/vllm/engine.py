# SPDX-License-Identifier: Apache-2.0
"""A real vLLM with the connector: in this process, or as a program of its own that is told what to do line by line.

python -m tests.vllm.engine MODEL OPTIONS     (JSON) answers {"ready": true}, then one JSON line for each
{"prompts": [[...]], "salt": "", "tokens": 32}
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.lora.request import LoRARequest

TOKENS = 32
BLOCK = 32


def _plan_ahead() -> None:
    """vLLM plans a step before it knows what the last one has sampled, but for CPUs, which need it not."""
    from vllm.platforms.cpu import CpuPlatform

    real = CpuPlatform.check_and_update_config

    def update(vllm_config: Any) -> None:
        kept = vllm_config.scheduler_config.async_scheduling
        real(vllm_config)
        vllm_config.scheduler_config.async_scheduling = kept

    CpuPlatform.check_and_update_config = staticmethod(update)  # type: ignore[method-assign,assignment]


if os.environ.get("PLAN_AHEAD"):
    _plan_ahead()


def connector(address: str, *, by_name: bool = False, **extra: object) -> KVTransferConfig:
    """``by_name``: vLLM knows the connector by its plugin."""
    return KVTransferConfig(
        kv_connector="KvgrpcConnector",
        kv_connector_module_path=None if by_name else "kvgrpc.engines.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"address": address, **extra},
    )


def both(first: str, second: str) -> KVTransferConfig:
    """vLLM's MultiConnector over two servers; the first one with a hit wins."""
    each = [
        {
            "kv_connector": "KvgrpcConnector",
            "kv_connector_module_path": "kvgrpc.engines.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"address": address},
        }
        for address in (first, second)
    ]
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": each},
    )


@dataclass(frozen=True, slots=True)
class Said:
    """What a prompt was answered with, and how much of it came from a cache."""

    tokens: tuple[int, ...]
    cached: int
    seconds: float


class Engine:
    """An engine in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0): its parts are in reach."""

    def __init__(self, model: str, kv: KVTransferConfig | None, **changes: Any) -> None:
        options: dict[str, Any] = {
            "model": model,
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "enforce_eager": True,
            "block_size": BLOCK,
            "max_model_len": 2048,
            "max_num_seqs": 8,
            "seed": 0,
            "disable_log_stats": False,
        }
        if torch.cuda.is_available():  # the blocks are told in bytes; others may use the card, too
            options["gpu_memory_utilization"] = 0.1
        if kv is not None:
            options["kv_transfer_config"] = kv
        self.llm = LLM(**{**options, **changes})

    def say(
        self, *prompts: Sequence[int], salt: str = "", tokens: int = TOKENS, params: Any = None, lora: str = ""
    ) -> list[Said]:
        """``lora``: folder of an adapter, whose last part is its name."""
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        if salt:
            asked = [{**each, "cache_salt": salt} for each in asked]
        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra)
        start = time.monotonic()
        adapter = LoRARequest(Path(lora).name, 1 + sum(lora.encode()), lora) if lora else None
        outputs = self.llm.generate(asked, sampling, use_tqdm=False, lora_request=adapter)
        seconds = time.monotonic() - start
        return [Said(tuple(output.outputs[0].token_ids), output.num_cached_tokens or 0, seconds) for output in outputs]

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        """The scheduler's half."""
        return self.core.scheduler.connector

    @property
    def pool(self) -> Any:
        return self.core.scheduler.kv_cache_manager.block_pool

    @property
    def in_process(self) -> bool:
        return hasattr(self.llm.llm_engine.engine_core, "engine_core")

    def settle(self, timeout_s: float = 60.0) -> None:
        """Steps on until nothing is being copied any more; an engine core of its own process does so by itself."""
        if not self.in_process:
            return
        end = time.monotonic() + timeout_s
        while self.core.scheduler.has_requests():
            assert time.monotonic() < end, "the engine does not come to rest"
            self.llm.llm_engine.step()
            time.sleep(0.001)

    def forget(self) -> int:
        """Empties vLLM's own prefix cache; the blocks that are still in use."""
        self.settle()
        if self.in_process:
            return self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks() + (not self.llm.reset_prefix_cache())
        end = time.monotonic() + 30
        while not self.llm.reset_prefix_cache():  # the engine core steps on by itself until its blocks are free
            assert time.monotonic() < end, "the engine does not come to rest"
            time.sleep(0.01)
        return 0

    def metric(self, name: str) -> int:
        return sum(each.value for each in self.llm.get_metrics() if each.name == f"vllm:{name}")

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def main() -> None:
    model, options = sys.argv[1], json.loads(sys.argv[2])
    address, extra, second = options.pop("address"), options.pop("extra", {}), options.pop("second", "")
    by_name = options.pop("by_name", False)
    kv = both(address, second) if second else connector(address, by_name=by_name, **extra)
    engine = Engine(model, kv, **options)
    answer({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        settle = asked.pop("settle", True)
        said = engine.say(*asked.pop("prompts"), **asked)
        left = engine.forget() if settle else None
        words = [[list(each.tokens), each.cached, each.seconds] for each in said]
        preemptions = engine.metric("num_preemptions")
        answer({"said": words, "left": left, "preemptions": preemptions})


def answer(words: object) -> None:
    print(f"@{json.dumps(words)}", flush=True)


if __name__ == "__main__":
    main()
