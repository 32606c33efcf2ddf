# SPDX-License-Identifier: Apache-2.0
"""A worker's half: loads and stores by futures that each step polls.

Thread rule: everything runs on the worker's main thread. Nothing blocks, but ``close``. Saves are sent at the begin of
the step after the one that computed their blocks, so that they delay neither its forward pass nor its sampling.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from kvgrpc.api import Content, Hashes, RegisterAnswer, Tokens
from kvgrpc.client.copies import CopyFuture, Results
from kvgrpc.core.types import DEFAULT_POLICY, ChunkOutcome, Policy, TokenRange
from kvgrpc.engines.vllm.metadata import Load, Report, Save, Step

log = logging.getLogger("vllm.kvgrpc")


class Copier(Protocol):
    """What is used of a WorkerClient."""

    @property
    def registration(self) -> RegisterAnswer | None: ...
    def store(
        self,
        content: Content,
        blocks: Sequence[Sequence[int]],
        *,
        range: TokenRange | None = None,
        lora: str = "",
        cache_salt: str = "",
        policy: Policy = DEFAULT_POLICY,
        timeout_s: float | None = None,
    ) -> CopyFuture: ...
    def retrieve(
        self, job_id: bytes, range: TokenRange, blocks: Sequence[Sequence[int]], *, timeout_s: float | None = None
    ) -> CopyFuture: ...
    def close(self, timeout_s: float = 30.0) -> bool: ...


class Worker:
    """``client`` is None where the memory cannot be shared: then loads fail and saves end at once.
    ``writes``: whether this worker stores; of several with the same bytes one does."""

    def __init__(self, client: Copier | None, block_size: int, writes: bool, copy_timeout_s: float = 30.0) -> None:
        self._client = client
        self._block_size = block_size
        self._writes = writes
        self._timeout_s = copy_timeout_s
        self._unsent: list[Save] = []
        self._resets = 0
        self._loads: dict[str, tuple[Load, CopyFuture, RegisterAnswer | None]] = {}
        self._saves: dict[int, tuple[Save, CopyFuture]] = {}
        self._received: set[str] = set()
        self._invalid: set[int] = set()
        self._report = Report(unusable=client is None)

    @property
    def busy(self) -> bool:
        """Whether copies run or wait to be sent."""
        return bool(self._unsent or self._loads or self._saves)

    # ---- a step, in this order --------------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Sends what the step before left to be saved."""
        if step.resets != self._resets:
            self._resets = step.resets
            self._drop_unsent()
        self.send()

    def load(self, loads: Iterable[Load]) -> None:
        """Starts loading."""
        for load in loads:
            if not load.blocks or not load.job_id or self._client is None:
                self._invalid.update(load.blocks)
                self._received.add(load.request_id)
                continue
            range_ = TokenRange(load.start, load.end)
            registration = self._client.registration
            future = self._client.retrieve(load.job_id, range_, [load.blocks], timeout_s=self._timeout_s)
            self._loads[load.request_id] = (load, future, registration)

    def save(self, saves: Iterable[Save]) -> None:
        """The blocks of these are written now; they are sent at the next ``begin`` or ``send``."""
        self._unsent += saves

    def finished(self, request_ids: Iterable[str]) -> None:
        """Requests that are over: what still loads for them is asked to stop."""
        for request_id in request_ids:
            if request_id in self._loads:
                self._loads[request_id][1].cancel()

    def poll(self) -> set[str]:
        """Requests whose load has ended since the last call, well or badly."""
        for request_id in [request_id for request_id, (_, future, _) in self._loads.items() if future.done()]:
            load, future, registration = self._loads.pop(request_id)
            self._loaded(load, _results(future), registration)
        for save_id in [save_id for save_id, (_, future) in self._saves.items() if future.done()]:
            _, future = self._saves.pop(save_id)
            self._saved(save_id, _results(future))
        received, self._received = self._received, set()
        return received

    def take_invalid(self) -> set[int]:
        """Blocks that were to be loaded and were not."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> Report | None:
        """What happened since the last call."""
        report, self._report = self._report, Report()
        return report or None

    # ---- sending ----------------------------------------------------------------------------------------------------

    def send(self) -> None:
        unsent, self._unsent = self._unsent, []
        for save in unsent:
            if self._client is None or not self._writes:
                self._end(save.save_id)
                continue
            content: Content = Tokens(save.tokens) if save.tokens else Hashes(save.hashes, save.end, save.first_chunk)
            future = self._client.store(
                content,
                [save.blocks],
                range=TokenRange(save.start, save.end),
                lora=save.lora,
                cache_salt=save.cache_salt,
                policy=save.policy,
                timeout_s=self._timeout_s,
            )
            self._saves[save.save_id] = (save, future)

    def _drop_unsent(self) -> None:
        for save in self._unsent:
            self._end(save.save_id)
        self._unsent = []

    def close(self, timeout_s: float) -> bool:
        """Ends the session; True when no copy touches the memory any more."""
        return self._client is None or self._client.close(timeout_s)

    # ---- what came of it --------------------------------------------------------------------------------------------

    def _loaded(self, load: Load, results: Results, registration: RegisterAnswer | None) -> None:
        """Whatever is not known to be loaded has failed, and everything behind it."""
        end = load.start
        now = self._client.registration if self._client is not None else None
        if registration is not None and now == registration:  # else the server was another one, and its chunks as well
            for result in results:
                first = result.first_chunk * registration.chunk_tokens
                if result.outcome is not ChunkOutcome.LOADED or first > end:
                    break
                end = max(end, first + result.count * registration.chunk_tokens)
        good = (min(end, load.end) - load.start) // self._block_size
        self._invalid.update(load.blocks[good:])
        self._received.add(load.request_id)
        self._report.loaded_tokens += good * self._block_size
        self._report.failed_tokens += (len(load.blocks) - good) * self._block_size

    def _saved(self, save_id: int, results: Results) -> None:
        self._end(save_id)
        if self._client is not None and (registration := self._client.registration) is not None:
            stored = sum(result.count for result in results if result.outcome is ChunkOutcome.STORED)
            self._report.saved_tokens += stored * registration.chunk_tokens

    def _end(self, save_id: int) -> None:
        self._report.ended[save_id] = self._report.ended.get(save_id, 0) + 1


def _results(future: CopyFuture) -> Results:
    """No results where the call could not be sent."""
    error = future.exception()
    if error is None:
        return future.result()
    log.error("kvgrpc: a copy could not be sent", exc_info=error)
    return ()
