# SPDX-License-Identifier: Apache-2.0
"""vLLM's side: turns its hooks into calls of ``Scheduler`` and ``Worker``. Only this module and ``metrics`` import vLLM
(0.32).

One object lives in the engine core (role SCHEDULER), one in each worker. Whatever the server does, no hook raises.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false, reportUntypedBaseClass=false
# pyright: reportUntypedClassDecorator=false, reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.version import __version__ as vllm_version

from kvgrpc.client import (
    ChannelOptions,
    Client,
    Hello,
    LookupBounds,
    NotShareableError,
    Refusal,
    RegisterRequest,
    SchedulerClient,
    SchedulerOptions,
    UntrustedSocketError,
    Watcher,
    WorkerClient,
    default_address,
)
from kvgrpc.config.python import hash_seed
from kvgrpc.engines.vllm.events import Announcer, Departures
from kvgrpc.engines.vllm.memory import preferred_layout, share
from kvgrpc.engines.vllm.metadata import Report, Step
from kvgrpc.engines.vllm.metrics import PromMetrics, Stats, as_vllm
from kvgrpc.engines.vllm.options import parse_options
from kvgrpc.engines.vllm.ports import Terms
from kvgrpc.engines.vllm.scheduler import Scheduler
from kvgrpc.engines.vllm.servers import Node, Servers, check_nodes, node_of, nodes_of
from kvgrpc.engines.vllm.space import Facts, facts_of
from kvgrpc.engines.vllm.worker import Worker

logger = init_logger("vllm.kvgrpc")

RESET_S = 2.0
"""Most that a reset of the cache waits for the server."""
CLOSE_S = 5.0
"""Most that an engine's end waits for copies."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """A step's requests, as vLLM carries them to the workers."""

    step: Step = field(default_factory=Step)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """The workers' reports, as vLLM carries them back."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        self.report.add(other.report)
        return self


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()  # on the stream of the step, which runs the model
    return event


class PoolBlocks:
    """vLLM's block tables and pool. A held block is not given to anybody else, whoever frees it."""

    def __init__(self, cache: Any, pool: Any) -> None:
        self._cache = cache
        self._pool = pool

    @property
    def total(self) -> int:
        return len(self._pool.blocks)

    @property
    def null(self) -> int:
        return self._pool.null_block.block_id

    def of(self, request_id: str) -> Sequence[Sequence[int]]:
        return self._cache.get_block_ids(request_id)

    def hold(self, block_ids: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in block_ids])

    def release(self, block_ids: Sequence[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(block_ids)])


class KvgrpcConnector(KVConnectorBase_V1, SupportsHMA):
    """Named in ``kv_connector``; docs/engines/vllm.md is the manual."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra: dict[str, Any] = self._kv_transfer_config.kv_connector_extra_config
        self._options = parse_options(extra)
        options = self._options
        self._facts: Facts = facts_of(
            vllm_config, kv_cache_config, options.namespace, options.hashes, hash_seed(), vllm_version
        )
        self._addresses = self._find_addresses()
        nodes = int(vllm_config.parallel_config.nnodes_within_dp)
        check_nodes(self._facts.strategy, nodes, len(self._addresses))
        self._scheduler: Scheduler | None = None
        self._clients: tuple[SchedulerClient, ...] = ()
        self._watchers: tuple[Watcher, ...] = ()
        self._worker = Worker(None, self._facts.groups, writes=False)
        if role is KVConnectorRole.SCHEDULER:
            for note in self._facts.notes:
                logger.warning("kvgrpc: %s", note)
            if self._kv_transfer_config.kv_load_failure_policy != "recompute":
                logger.warning(
                    "kvgrpc: kv_load_failure_policy is not 'recompute': vLLM will fail requests whose prefix cannot be "
                    "loaded, instead of computing it"
                )
            self._start_scheduler()

    def _find_addresses(self) -> tuple[str, ...]:
        """One a node; none where there is none that may be trusted."""
        options = self._options
        try:
            return options.addresses or (options.address or default_address(),)
        except UntrustedSocketError as error:
            logger.warning("kvgrpc: %s; this engine runs without the cache", error)
            return ()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        options = parse_options(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return preferred_layout(str(vllm_config.device_config.device_type)) if options.prefer_layout else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- scheduler --------------------------------------------------------------------------------------------------

    def _start_scheduler(self) -> None:
        facts, options = self._facts, self._options
        terms = Terms(
            groups=facts.groups,
            hash_block_size=facts.hash_block_size,
            workers=facts.strategy.world_size,
            own_hashes=facts.own_hashes,
            lookup_async=options.lookup_async,
            lookup_block_s=options.lookup_block_ms / 1000,
            store_share=options.store_share,
            store_generated=options.store_generated,
            ahead=facts.ahead,
        )
        nodes = nodes_of(facts.strategy, len(self._addresses)) if self._addresses else ()
        self._clients = tuple(
            self._scheduler_client(address, node) for address, node in zip(self._addresses, nodes, strict=True)
        )
        self._scheduler = Scheduler(Servers(self._clients, facts.groups.whole), terms, self._lora_of)
        events = self._vllm_config.kv_events_config
        if events is not None and events.enable_kv_cache_events:
            self._scheduler.announcer = Announcer(terms.block_size, terms.hash_block_size)
            self._watchers = tuple(map(Watcher, self._addresses))
            self._departures = Departures(tuple(zip(self._clients, self._watchers, strict=True)))
            for watcher in self._watchers:
                watcher.start()
        for address, client in zip(self._addresses, self._clients, strict=True):
            wait_s = options.start_timeout_ms / 1000 / len(self._clients)
            self._say_start(address, client.start(wait_s), client.problem)

    def _scheduler_client(self, address: str, node: Node) -> SchedulerClient:
        facts, options = self._facts, self._options
        bounds = LookupBounds(
            answer_s=options.lookup_timeout_ms / 1000,
            pending_s=options.prefetch_timeout_ms / 1000,
            prefetch_wait_ms=options.prefetch_timeout_ms,
        )
        choice = SchedulerOptions(facts.strategy.tp_size, node.kv_ranks, bounds=bounds)
        return SchedulerClient(address, facts.engine_id, facts.identity, choice)

    def _say_start(self, address: str, started: bool, problem: Refusal | None) -> None:
        if not started:
            logger.warning(
                "kvgrpc: no session with %s yet (%s); the engine serves without the cache until there is one",
                address,
                problem or "no answer",
            )

    def _lora_of(self, request: Any) -> str | None:
        if request.mm_features and not self._facts.media_named:
            return None
        if not self._facts.own_hashes:
            return ""  # vLLM's block hashes contain all of it
        if request.mm_features or request.prompt_embeds is not None:
            return None
        lora = request.lora_request
        return f"{lora.lora_name}@{lora.lora_path}" if lora is not None else ""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._of_scheduler.blocks = PoolBlocks(self._kv_cache_manager, gpu_block_pool)

    @property
    def _of_scheduler(self) -> Scheduler:
        assert self._scheduler is not None, "a hook of the scheduler was called in a worker"
        return self._scheduler

    def on_new_request(self, request: Any) -> None:
        self._of_scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._of_scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._of_scheduler.allocated(request, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        below = min(num_external_tokens, self._of_scheduler.loaded_from_below(request.request_id))
        sources = {CacheHitSource.HOST: num_external_tokens - below, CacheHitSource.DISK: below}
        return {source: tokens for source, tokens in sources.items() if tokens}

    def take_events(self) -> Iterable[KVCacheEvent]:
        announcer = self._of_scheduler.announcer
        if announcer is None:
            return ()
        self._departures.tell(announcer)
        return list(as_vllm(announcer.take(), self._facts.groups.block_size))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        counts: dict[str, int] = scheduler_output.num_scheduled_tokens
        scheduled = [
            (new.req_id, new.num_computed_tokens + counts[new.req_id]) for new in scheduler_output.scheduled_new_reqs
        ]
        cached = scheduler_output.scheduled_cached_reqs
        scheduled += [
            (request_id, computed + counts[request_id])
            for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        ]
        return StepMetadata(self._of_scheduler.step(scheduled))

    def update_connector_output(self, connector_output: Any) -> None:
        announcer = self._of_scheduler.announcer
        if announcer is not None:
            self._departures.tell(announcer)  # what has gone before this step's stores are told of
        meta = connector_output.kv_connector_worker_meta
        report = meta.report if isinstance(meta, WorkerReport) else None
        self._of_scheduler.update(
            report,
            connector_output.finished_recving or (),
            connector_output.invalid_block_ids or (),
            connector_output.failed_recving or (),
        )

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._of_scheduler.finished(request.request_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._of_scheduler.busy

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """A MultiConnector hands on what its other connectors have for each other."""

    def reset_cache(self) -> bool:
        """Nothing that was stored before is found again, by any engine of the same space."""
        self._of_scheduler.reset()
        done = [self._reset(address) for address in self._addresses]
        return all(done)

    def _reset(self, address: str) -> bool:
        try:
            with Client(address, options=ChannelOptions(call_s=RESET_S / 2)) as client:
                base = client.handshake(Hello(identity=self._facts.identity)).space_base
                client.bump_generation(space_base=base)
        except Refusal as refusal:
            logger.warning("kvgrpc: the cache at %s could not be reset: %s", address, refusal)
            return False
        return True

    # ---- worker -----------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        facts, strategy = self._facts, self._facts.strategy
        if not self._addresses:
            return
        try:
            layout = share(kv_caches, facts.forms)
        except (NotShareableError, OSError, RuntimeError) as error:
            logger.warning("kvgrpc: %s; this engine runs without the cache", error)
            return
        request = RegisterRequest(
            facts.engine_id,
            facts.identity,
            strategy.kv_rank,
            strategy.tp_rank,
            strategy.tp_size,
            strategy.kv_tp_size,
            layout,
        )
        node = node_of(strategy, len(self._addresses))
        address = self._addresses[node.index]
        client = WorkerClient(address, request)
        client.keep(kv_caches)
        mark = _mark if all(tensor.is_cuda for tensor in kv_caches.values()) else None
        self._worker = Worker(client, facts.groups, node.writes, self._options.copy_timeout_ms / 1000, node.index, mark)
        self._say_start(address, client.start(self._options.start_timeout_ms / 1000), client.problem)

    @property
    def _step(self) -> Step:
        meta = self._get_connector_metadata()
        assert isinstance(meta, StepMetadata)
        return meta.step

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin(self._step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.load(self._step.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are of whole requests, which do not run before."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Saves are of whole blocks of all layers."""

    def wait_for_save(self) -> None:
        self._worker.save(self._step.saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._worker.finished(finished_req_ids)
        if self._step.idle:
            self._worker.rest()
        received = self._worker.poll()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=self._worker.take_failed())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_invalid()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        data = self._worker.take_stats()
        return Stats(data) if data else None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self._worker.take_report()
        return WorkerReport(report) if report is not None else None

    # ---- end --------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        for one in (*self._clients, *self._watchers):
            one.close()
        self._worker.send()
        self._worker.close(CLOSE_S)
