# SPDX-License-Identifier: Apache-2.0
"""What workers counted and what routers want to know, in vLLM's own classes (0.32)."""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false, reportUntypedBaseClass=false
# pyright: reportUntypedClassDecorator=false

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys

from kvgrpc.engines.vllm.events import Removed, Stored
from kvgrpc.engines.vllm.stats import BUCKETS_S, COUNTS, TIMES, merge, summary

LOCALITY = "LOCAL"
OWNERSHIP = "kvgrpc"


@dataclass
class Stats(KVConnectorStats):
    """``data`` is a stats.Data."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return summary(self.data)

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(KVConnectorPromMetrics):
    """``vllm:kvgrpc_...`` at the engine's /metrics."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {
            name: self._counter_cls(name=f"vllm:kvgrpc_{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTS.items()
        }
        for name, text in TIMES.items():
            self._metrics[name] = self._histogram_cls(
                name=f"vllm:kvgrpc_{name}", documentation=text, labelnames=labelnames, buckets=BUCKETS_S
            )
        for metric in self._metrics.values():  # so that all are shown from the start, with 0
            for values in per_engine_labelvalues.values():
                metric.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            metric = self._metrics[name].labels(*labels)
            if isinstance(value, list):
                for seconds in value:
                    metric.observe(seconds)
            else:
                metric.inc(value)


def as_vllm(events: Iterable[Stored | Removed], block_size: int) -> Iterable[KVCacheEvent]:
    """What a router hears: blocks by vLLM's hashes, in the memory of the engine's node."""
    for event in events:
        hashes = [maybe_convert_block_hash(block) for block in event.hashes]
        if isinstance(event, Removed):
            yield BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU, locality=LOCALITY, ownership=OWNERSHIP)
            continue
        request: Any = event.request
        lora = request.lora_request
        yield BlockStored(
            block_hashes=hashes,
            parent_block_hash=maybe_convert_block_hash(event.parent) if event.parent is not None else None,
            token_ids=list(event.tokens),
            block_size=block_size,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_CPU,
            lora_name=lora.name if lora else None,
            extra_keys=_extra_keys(request, event, block_size),
            locality=LOCALITY,
            ownership=OWNERSHIP,
        )


def _extra_keys(request: Any, event: Stored, block_size: int) -> Any:
    """What each block's hash contains besides tokens."""
    keys: list[Any] = []
    at = 0
    for block in range(len(event.hashes)):
        start = event.start + block * block_size
        key, at = generate_block_hash_extra_keys(request, start, start + block_size, at)
        keys.append(key)
    return to_event_extra_keys(keys)
