# SPDX-License-Identifier: Apache-2.0
"""A worker's half: loads and stores by futures that each step polls.

Thread rule: everything runs on the worker's main thread. Nothing blocks, but ``rest`` and ``close``. Saves are sent at
the begin of the step after the one that computed their blocks, so that they delay neither its forward pass nor its
sampling.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from kvgrpc.api import Content, Hashes, RegisterAnswer, Tokens
from kvgrpc.client.copies import CopyFuture, Ready, Results
from kvgrpc.core.types import DEFAULT_POLICY, ChunkOutcome, Policy, TokenRange
from kvgrpc.engines.vllm.metadata import REST_S, Load, Report, Save, Step
from kvgrpc.engines.vllm.ports import Groups
from kvgrpc.engines.vllm.stats import Data, Tally

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
        ready: Ready | None = None,
        timeout_s: float | None = None,
    ) -> CopyFuture: ...
    def retrieve(
        self,
        job_id: bytes,
        range: TokenRange,
        blocks: Sequence[Sequence[int]],
        *,
        ready: Ready | None = None,
        timeout_s: float | None = None,
    ) -> CopyFuture: ...
    def close(self, timeout_s: float = 30.0) -> bool: ...


FINDABLE = (ChunkOutcome.STORED, ChunkOutcome.RESIDENT)
Order = TypeVar("Order")


@dataclass(slots=True)
class Running(Generic[Order]):
    """A copy that was asked for, and of which server."""

    order: Order
    future: CopyFuture
    registration: RegisterAnswer | None
    began_s: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began_s


class Worker:
    """``client`` is None where the memory cannot be shared: then loads fail and saves end at once.
    ``writes``: whether this worker stores; of several with the same bytes one does. ``server``: index of its own.
    ``mark``: an event of the card behind all that it was given so far; None: blocks are of main memory, and what a step
    computes is there when the step's ``save`` is called."""

    def __init__(
        self,
        client: Copier | None,
        groups: Groups,
        writes: bool,
        copy_timeout_s: float = 30.0,
        server: int = 0,
        mark: Callable[[], Ready] | None = None,
    ) -> None:
        self._client = client
        self._groups = groups
        self._writes = writes
        self._timeout_s = copy_timeout_s
        self._server = server
        self._mark = mark
        self._unsent: list[tuple[Save, Ready | None]] = []
        self._resets = 0
        self._loads: dict[str, Running[Load]] = {}
        self._saves: dict[int, Running[Save]] = {}
        self._received: set[str] = set()
        self._invalid: set[int] = set()
        self._failed: set[str] = set()
        self._report = Report(unusable=client is None)
        self._tally = Tally()
        self._ended = threading.Event()
        """Since the last ``rest`` a copy has."""

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

    def load(self, loads: Sequence[Load]) -> None:
        """Starts loading, behind what the card still does with the blocks for those who had them before."""
        ready = self._mark() if self._mark is not None and loads else None
        for load in loads:
            job_id = load.job_ids[self._server] if self._server < len(load.job_ids) else b""
            if not load.blocks or not job_id or self._client is None:
                self._received_up_to(load, load.start)
                continue
            range_ = TokenRange(load.start, load.end)
            registration = self._client.registration
            future = self._client.retrieve(job_id, range_, load.blocks, ready=ready, timeout_s=self._timeout_s)
            future.add_done_callback(self._has_ended)
            self._loads[load.request_id] = Running(load, future, registration)

    def save(self, saves: Sequence[Save]) -> None:
        """The blocks of these are written now, or by what the card was given; they are sent at the next ``begin`` or
        ``send``."""
        ready = self._mark() if self._mark is not None and saves else None
        self._unsent += [(save, ready) for save in saves]

    def finished(self, request_ids: Iterable[str]) -> None:
        """Requests that are over: what still loads for them is asked to stop."""
        for request_id in request_ids:
            if request_id in self._loads:
                self._loads[request_id].future.cancel()

    def rest(self) -> None:
        """In a step that computes nothing: waits for the end of a copy that runs, ``REST_S`` at most."""
        if (self._loads or self._saves) and not self._received:
            self._ended.wait(REST_S)
        self._ended.clear()

    def poll(self) -> set[str]:
        """Requests whose load has ended since the last call, well or badly."""
        for request_id in [request_id for request_id, load in self._loads.items() if load.future.done()]:
            self._loaded(self._loads.pop(request_id))
        for save_id in [save_id for save_id, save in self._saves.items() if save.future.done()]:
            self._saved(self._saves.pop(save_id))
        received, self._received = self._received, set()
        return received

    def take_invalid(self) -> set[int]:
        """Blocks that were to be loaded and were not, where vLLM knows by them from which token on to compute: where
        everything is needed."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_failed(self) -> set[str]:
        """Received requests that have to be computed from their begin."""
        failed, self._failed = self._failed, set()
        return failed

    def take_report(self) -> Report | None:
        """What happened since the last call."""
        report, self._report = self._report, Report()
        return report or None

    def take_stats(self) -> Data:
        """What was counted since the last call."""
        return self._tally.take()

    # ---- sending ----------------------------------------------------------------------------------------------------

    def send(self) -> None:
        unsent, self._unsent = self._unsent, []
        for save, ready in unsent:
            if self._client is None or not self._writes:
                self._end(save, save.start if self._client is None else None)
                continue
            content: Content = Tokens(save.tokens) if save.tokens else Hashes(save.hashes, save.end, save.first_chunk)
            future = self._client.store(
                content,
                save.blocks,
                range=TokenRange(save.start, save.end),
                lora=save.lora,
                cache_salt=save.cache_salt,
                policy=save.policy,
                ready=ready,
                timeout_s=self._timeout_s,
            )
            future.add_done_callback(self._has_ended)
            self._saves[save.save_id] = Running(save, future, self._client.registration)

    def _has_ended(self, _: Future[Results]) -> None:
        self._ended.set()

    def _drop_unsent(self) -> None:
        for save, _ in self._unsent:
            self._end(save, save.start)
        self._unsent = []

    def close(self, timeout_s: float) -> bool:
        """Ends the session; True when no copy touches the memory any more."""
        return self._client is None or self._client.close(timeout_s)

    # ---- what came of it --------------------------------------------------------------------------------------------

    def _loaded(self, running: Running[Load]) -> None:
        """Whatever is not known to be loaded has failed, and everything behind it."""
        load, registration = running.order, running.registration
        end = load.start
        now = self._client.registration if self._client is not None else None
        if registration is not None and now == registration:  # else the server was another one, and its chunks as well
            for result in _results(running.future):
                first = result.first_chunk * registration.chunk_tokens
                if result.outcome is not ChunkOutcome.LOADED or first > end:
                    break
                end = max(end, first + result.count * registration.chunk_tokens)
        good = self._received_up_to(load, min(end, load.end))
        self._report.loaded_tokens += good - load.start
        self._report.failed_tokens += load.end - good
        self._tally.count("loaded_tokens", good - load.start)
        self._tally.count("load_failed_tokens", load.end - good)
        self._tally.time("load_seconds", running.seconds)

    def _received_up_to(self, load: Load, end: int) -> int:
        """The load has ended, and is good up to the token ``end``; up to which it can be used."""
        self._received.add(load.request_id)
        if not load.blocks:
            return load.end
        if self._groups.whole:
            if end < load.end:
                self._failed.add(load.request_id)
            return load.end if end >= load.end else load.start
        (ids,), size = load.blocks, self._groups.block_size
        good = (end - load.start) // size
        self._invalid.update(ids[good:])
        return load.start + good * size

    def _saved(self, running: Running[Save]) -> None:
        save, registration = running.order, running.registration
        end = save.start
        tokens: Counter[ChunkOutcome] = Counter()
        if registration is not None:
            for result in _results(running.future):
                tokens[result.outcome] += result.count * registration.chunk_tokens
                first = result.first_chunk * registration.chunk_tokens
                if result.outcome in FINDABLE and first == end:
                    end += result.count * registration.chunk_tokens
        self._end(save, end)
        self._report.saved_tokens += tokens[ChunkOutcome.STORED]
        self._tally.count("stored_tokens", tokens[ChunkOutcome.STORED])
        found = sum(tokens[outcome] for outcome in (*FINDABLE, ChunkOutcome.BEING_WRITTEN))
        self._tally.count("store_failed_tokens", save.end - save.start - found)
        self._tally.time("store_seconds", running.seconds)

    def _end(self, save: Save, end: int | None = None) -> None:
        """``end``: up to where its chunks can be found from now on; None: this worker has no say in that."""
        self._report.add(Report({save.save_id: 1}, {} if end is None else {save.save_id: end}))


def _results(future: CopyFuture) -> Results:
    """No results where the call could not be sent."""
    error = future.exception()
    if error is None:
        return future.result()
    log.error("kvgrpc: a copy could not be sent", exc_info=error)
    return ()
