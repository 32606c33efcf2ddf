# SPDX-License-Identifier: Apache-2.0
"""The driver: the only owner of the bookkeeper.

It lives on one event loop. Every call reads the clock, asks the bookkeeper, and then carries out the outbox: slices go
to the affinity threads, tier reads become tasks, waiting callers are woken. What the hands report comes back onto the
loop as data. Nothing but this loop's thread ever touches the bookkeeper.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from kvgrpc import api
from kvgrpc.core.cache import Bookkeeper
from kvgrpc.core.calls import SLICES_AHEAD, SLICES_LAUNCHED
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.keys import chunk_keys
from kvgrpc.core.types import (
    MS,
    Action,
    CallEnded,
    CancelRead,
    ChunkKeys,
    ChunkResult,
    CoreLimits,
    Direction,
    EngineDraining,
    JobDone,
    KeysChanged,
    ProbeTiers,
    ReadTier,
    RunSlice,
    SessionEnded,
    SliceReport,
    SpaceRef,
    Unmap,
    Versions,
    WriteObject,
)
from kvgrpc.runtime.affinity import AffinityExecutor
from kvgrpc.runtime.below import Below
from kvgrpc.runtime.clock import Clock, monotonic_clock
from kvgrpc.runtime.figures import LookupFigures
from kvgrpc.runtime.reading import Reads
from kvgrpc.runtime.ready import ReadyWaits
from kvgrpc.runtime.saves import Saves
from kvgrpc.runtime.slices import SliceRunner
from kvgrpc.runtime.trace import Recordings
from kvgrpc.runtime.watching import Watching
from kvgrpc.runtime.writing import Writes
from kvgrpc.tiers.base import Tier
from kvgrpc.transfer.arena import Arena
from kvgrpc.transfer.base import Mover

if TYPE_CHECKING:
    from kvgrpc.runtime.recorder import Recorder
    from kvgrpc.runtime.session import DriverSession

log = structlog.get_logger(__name__)

INLINE_HASH_TOKENS = 256 << 10
"""Prompts up to this long are hashed on the loop (a millisecond); longer ones in the CPU pool, which costs two hops
between threads."""

CallKey = tuple[str, int]


@dataclass
class Hands:
    """What acts in the world for the driver."""

    mover: Mover
    arena: Arena
    affinity: AffinityExecutor
    cpu_pool: ThreadPoolExecutor
    tiers: dict[str, Tier] = field(default_factory=dict[str, Tier])
    clock: Clock = monotonic_clock
    save_versions: Callable[[Versions, Versions], None] | None = None
    """Keeps the second, which the first has become; blocks; raises OSError."""
    flush_s: float = 5.0
    """What lower tiers get at the end to take what waits for them."""
    chunk_streams: int = 16
    """Most streams of ReadChunks at a time, and as many of WriteChunks."""
    watchers: int = 64
    """Most streams of Watch at a time."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself."""

    server_version: str
    host_id: str
    message_bytes: int = 16 << 20
    server_epoch: bytes = field(default_factory=lambda: secrets.token_bytes(16))


class Driver:
    """Runs the bookkeeper on the current event loop. Build and use it on that loop's thread only."""

    def __init__(self, book: Bookkeeper, limits: CoreLimits, hands: Hands, facts: ServerFacts) -> None:
        self.book = book
        self.limits = limits
        self.hands = hands
        self.facts = facts
        self.figures = LookupFigures()
        self.recordings = Recordings(hands.clock, limits.chunk_tokens)
        self.copied_bytes = dict.fromkeys(Direction, 0)
        """Of slices that have ended; a part of an object counts as far as the slice covers it."""
        self.started_ns = hands.clock()
        self.block_sizes: dict[str, int] = {}
        """Range alignment of each registered client, in tokens."""
        self.forgets = 0
        """Clears and new generations so far: a Store whose keys are made meanwhile began before them."""
        self.mapped: dict[int, str] = {}  # every open mapping of a registration, and its client
        self.current: dict[str, int] = {}  # the mapping in force of each registered client
        self._calls: dict[CallKey, set[asyncio.Future[tuple[ChunkResult, ...]]]] = {}
        self._jobs: dict[bytes, set[asyncio.Future[None]]] = {}
        self._unmaps: dict[int, set[asyncio.Future[None]]] = {}
        self._streams: dict[str, asyncio.Queue[api.AttachEvent | None]] = {}
        self.below = Below(self)
        self.reads = Reads(hands.chunk_streams)
        self.writes = Writes(hands.chunk_streams)
        self.ready = ReadyWaits(self, self._post)
        self.watching = Watching(book, facts.server_epoch, hands.watchers)
        self.recorder: Recorder | None = None
        """Of a named arena."""
        self._slices = SliceRunner(hands.affinity, hands.mover, self._post)
        self._copying: dict[str, int] = {}
        """Clients of which a slice was handed over, was launched or has ended, so that others may be planned behind it,
        until so many are in flight."""
        self._pulse = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self.next_mapping_id = itertools.count(1).__next__
        self._closing: asyncio.Future[None] | None = None
        self.saves = Saves(self)
        self._loop = asyncio.get_running_loop()

    # ---- for callers ------------------------------------------------------------------------------------------------

    def now(self) -> int:
        """Nanoseconds of the driver's clock."""
        return self.hands.clock()

    def client(self, client_id: str) -> DriverSession:
        """The cache as seen by one client."""
        from kvgrpc.runtime.session import DriverSession

        return DriverSession(self, client_id)

    def tick(self) -> None:
        """Lets time pass: expires leases, records and graces, reclaims memory in a bounded turn."""
        self.book.tick(self.now())
        self.pump()

    async def chunk_keys(self, space: SpaceRef, content: api.Content) -> ChunkKeys:
        """Keys of the content's full chunks. Refuses: SPACE_UNKNOWN, CONTENT_KIND, INVALID_FIELD (too many chunks)."""
        seed, takes_tokens = self.book.space_seed(space)
        if isinstance(content, api.Tokens) != takes_tokens:
            wanted = "token ids" if takes_tokens else "the engine's hashes"
            raise Refusal(Reason.CONTENT_KIND, f"this space is keyed by {wanted}", field="content")
        chunk_tokens = self.limits.chunk_tokens
        count = content.num_tokens // chunk_tokens if isinstance(content, api.Tokens) else len(content.hashes)
        if count > self.limits.keys_per_call:
            text = f"content has {count} chunks; a call may name {self.limits.keys_per_call}"
            raise Refusal(Reason.INVALID_FIELD, text, field="content")
        if isinstance(content, api.Hashes):
            return ChunkKeys(content.hashes, content.num_tokens, content.first_chunk)
        if content.num_tokens <= INLINE_HASH_TOKENS:
            keys = chunk_keys(seed, content.data, chunk_tokens)
        else:
            work = (seed, content.data, chunk_tokens)
            keys = await self._loop.run_in_executor(self.hands.cpu_pool, chunk_keys, *work)
        return ChunkKeys(keys, content.num_tokens)

    # ---- waiting ----------------------------------------------------------------------------------------------------

    async def wait_call(self, client_id: str, call_id: int) -> tuple[ChunkResult, ...]:
        """Results of a running call. If the last waiter is cancelled, the call is revoked."""
        key = (client_id, call_id)
        future: asyncio.Future[tuple[ChunkResult, ...]] = self._loop.create_future()
        waiters = self._calls.setdefault(key, set())
        waiters.add(future)
        self.pump()
        try:
            return await future
        except asyncio.CancelledError:
            waiters.discard(future)
            if not waiters and self._calls.get(key) is waiters:
                del self._calls[key]
                self.book.revoke(self.now(), client_id, call_id)
                self.pump()
            raise

    async def wait_calls_ended(self, client_id: str, call_ids: Sequence[int]) -> None:
        """Returns when each of these running calls has ended; being cancelled revokes nothing."""
        futures: list[asyncio.Future[tuple[ChunkResult, ...]]] = []
        for call_id in call_ids:
            future: asyncio.Future[tuple[ChunkResult, ...]] = self._loop.create_future()
            self._calls.setdefault((client_id, call_id), set()).add(future)
            futures.append(future)
        self.pump()
        try:
            if futures:
                await asyncio.wait(futures)
        finally:
            for call_id, future in zip(call_ids, futures, strict=True):
                self._drop_waiter((client_id, call_id), future)

    def _drop_waiter(self, key: CallKey, future: asyncio.Future[tuple[ChunkResult, ...]]) -> None:
        waiters = self._calls.get(key)
        if waiters is not None:
            waiters.discard(future)
            if not waiters:
                del self._calls[key]

    async def wait_job(self, job_id: bytes, wait_ms: int) -> None:
        """Returns when the job is final or gone, or after ``wait_ms``."""
        future: asyncio.Future[None] = self._loop.create_future()
        waiters = self._jobs.setdefault(job_id, set())
        waiters.add(future)
        try:
            await asyncio.wait((future,), timeout=wait_ms / 1000)
        finally:
            waiters.discard(future)
            if not waiters and self._jobs.get(job_id) is waiters:
                del self._jobs[job_id]

    async def wait_unmapped(self, client_id: str) -> None:
        """Returns when nothing of the client's memory is open any more, but for the registration in force."""
        futures: list[asyncio.Future[None]] = []
        for mapping_id, owner in self.mapped.items():
            if owner == client_id and mapping_id != self.current.get(client_id):
                futures.append(self._loop.create_future())
                self._unmaps.setdefault(mapping_id, set()).add(futures[-1])
        self.pump()
        if futures:
            await asyncio.wait(futures)

    async def wait_pulse(self, timeout_s: float) -> None:
        """Returns when something has happened, or after the time."""
        pulse = self._pulse
        waiter = asyncio.ensure_future(pulse.wait())
        try:
            await asyncio.wait((waiter,), timeout=max(timeout_s, 0))
        finally:
            waiter.cancel()

    # ---- streams ----------------------------------------------------------------------------------------------------

    def open_stream(self, client_id: str) -> asyncio.Queue[api.AttachEvent | None]:
        """The client's event queue; an earlier one ends."""
        earlier = self._streams.get(client_id)
        if earlier is not None:
            earlier.put_nowait(None)
        queue: asyncio.Queue[api.AttachEvent | None] = asyncio.Queue()
        self._streams[client_id] = queue
        return queue

    def close_stream(self, client_id: str, queue: asyncio.Queue[api.AttachEvent | None]) -> bool:
        """True when this was the client's current stream."""
        if self._streams.get(client_id) is not queue:
            return False
        del self._streams[client_id]
        return True

    # ---- the outbox -------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Carries out what the bookkeeper wants done. Call after every call of it."""
        actions = self.book.drain()
        while actions or self._copying:  # a report may bring nothing to do but to plan behind the slice that goes on
            for action in actions:
                self._act(action)
            self._pulse.set()
            self._pulse = asyncio.Event()
            while self._copying:
                self.book.plan_ahead(self.now(), *self._copying.popitem())
            actions = self.book.drain()
        self._set_timer()

    def _act(self, action: Action) -> None:
        match action:
            case RunSlice():
                self._slices.run(action, self._slice_ended, self._slice_launched)
                if not self._slices.launches(action):  # else planning would keep its thread from launching
                    self._copying[action.client_id] = SLICES_AHEAD
            case CallEnded(client_id, call_id, results):
                for waiter in self._calls.pop((client_id, call_id), ()):
                    if not waiter.done():
                        waiter.set_result(results)
            case JobDone(job_id):
                job = self.book.jobs.jobs.get(job_id)
                self.figures.ended(job_id, job and job.status)
                self.recordings.ended(job_id, job and job.status)
                for job_waiter in self._jobs.pop(job_id, ()):
                    if not job_waiter.done():
                        job_waiter.set_result(None)
            case ProbeTiers() | ReadTier() | CancelRead() | WriteObject():
                self.below.act(action)
            case Unmap(client_id, mapping_id):
                unmapping = self.hands.affinity.submit(client_id, self.hands.mover.unmap, mapping_id)
                unmapping.add_done_callback(lambda done: self._post(self._unmapped, mapping_id, done))
            case SessionEnded(client_id):
                self.hands.affinity.release(client_id)
                self.block_sizes.pop(client_id, None)
                self.current.pop(client_id, None)
                self._slices.forget(client_id)
                ended = self._streams.pop(client_id, None)
                if ended is not None:
                    ended.put_nowait(None)
            case KeysChanged():
                self.watching.tell(action)
            case EngineDraining(client_id):
                stream = self._streams.get(client_id)
                if stream is not None:
                    stream.put_nowait(api.AttachEvent(True, reason="the engine is being drained"))

    def _post(self, callback: object, *args: object) -> None:
        """From an affinity thread onto the loop. After the loop has closed there is nobody left to tell."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)  # type: ignore[arg-type]

    def _slice_launched(self, work: RunSlice) -> None:
        self._copying[work.client_id] = SLICES_LAUNCHED
        if self._closing is None:
            self.pump()

    def _slice_ended(self, work: RunSlice, report: SliceReport) -> None:
        start, end = work.pieces[0].span  # of all pieces: one that is cut is alone in its slice
        self.copied_bytes[work.direction] += (end - start) * report.completed
        self.book.slice_done(self.now(), work.slice_id, report)
        self._copying[work.client_id] = SLICES_LAUNCHED if self._slices.launches(work) else SLICES_AHEAD
        if self._closing is None:  # else the threads that would go on are ending
            self.pump()

    def _unmapped(self, mapping_id: int, done: Future[None]) -> None:
        error = done.exception()
        if error is not None:
            log.error("unmap failed", mapping_id=mapping_id, exc_info=error)
        self.mapped.pop(mapping_id, None)
        for waiter in self._unmaps.pop(mapping_id, ()):
            if not waiter.done():
                waiter.set_result(None)

    def _set_timer(self) -> None:
        now = self.now()
        wake_ns = self.book.next_wake(now)
        if wake_ns is None or (self._timer is not None and self._timer_ns <= wake_ns):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = wake_ns
        self._timer = self._loop.call_later(max(wake_ns - now, MS) / 1e9, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self.tick()

    # ---- end --------------------------------------------------------------------------------------------------------

    @property
    def closing(self) -> bool:
        """It has begun to end."""
        return self._closing is not None

    async def close(self) -> None:
        """Ends tasks, waits for running copies, closes the mover. No call may run any more. Harmless when repeated; a
        close that was cancelled goes on, and the next one waits for it."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self.below.flush(self.hands.flush_s)
        await self.below.close()
        await self.saves.close()
        if self._timer is not None:
            self._timer.cancel()  # nothing sets it any more, and nothing changes the books
        await asyncio.to_thread(self.hands.affinity.close)
        self.hands.cpu_pool.shutdown(wait=True)
        self.hands.mover.close()
