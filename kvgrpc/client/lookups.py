# SPDX-License-Identifier: Apache-2.0
"""The part of a scheduler client that lives on its loop: asks, polls, frees and ends.

Work for one request id is done one piece after the other, in the order in which it was handed in. So a job is ended
after its lookup was answered, however late, and a new lookup under an old request id is not ended by mistake.

Thread rule: everything here runs on the client's loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from kvgrpc import api
from kvgrpc.breaker import Permit
from kvgrpc.client.aio import AioClient
from kvgrpc.client.session import Session
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import Policy, PrefetchStatus, Reader, SpaceRef, TokenRange

log = logging.getLogger("kvgrpc.client")

UNANSWERED = {Reason.SERVER_UNREACHABLE, Reason.DEADLINE, Reason.INTERNAL, Reason.CALL_REVOKED}
"""The server did not answer, or fell over doing so; it may have done what it was asked for. CALL_REVOKED: gRPC
cancelled."""

FORGOTTEN = {Reason.NOT_ATTACHED, Reason.ENGINE_UNKNOWN, Reason.SPACE_UNKNOWN}
"""The server no longer knows what the session told it."""

PERMIT = Permit(trial=False)
PROBE_S = 60.0
POLL_MS = 5_000

Report = Callable[[Permit, "bool | None"], bool]


@dataclass(frozen=True, slots=True)
class LookupBounds:
    """Bounds of one lookup in seconds: ``answer_s`` until the server has answered Lookup, ``pending_s`` until the
    prefetch that it started is final (``prefetch_wait_ms`` tells the server; 0 = its default). ``waiting_work`` bounds
    the pieces of background work; beyond it nothing is freed or ended early, and leases run out by themselves."""

    answer_s: float = 1.0
    pending_s: float = 10.0
    prefetch_wait_ms: int = 0
    waiting_work: int = 8192


@dataclass(frozen=True, slots=True)
class Terms:
    """What is the same in all lookups of an engine."""

    engine_id: str
    tp_size: int
    kv_ranks: tuple[int, ...]
    bounds: LookupBounds


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The prefix that can be retrieved under ``job_id``: ``hit_tokens`` of it, whole chunks. A miss has 0; ``reason``
    says why nobody was asked or no answer came ("" when the server did answer): BREAKER_OPEN, IN_FLIGHT_LIMIT,
    PREFETCH_TIMEOUT, DISCARDED, or a refusal's. Not ``pinned``: it may be evicted before it is retrieved.
    ``limited_by`` as in PrefetchStatus."""

    hit_tokens: int = 0
    job_id: bytes = b""
    pinned: bool = False
    hit_chunks_by_tier: dict[str, int] = field(default_factory=dict[str, int])
    limited_by: str = ""
    reason: str = ""


@dataclass(slots=True, eq=False)
class Query:
    """One lookup: what is asked, and what has become of it. ``session_number`` is the session's when it was asked."""

    request_id: str
    attempt: int
    answer_s: float
    lora: str
    cache_salt: str
    policy: Policy
    permit: Permit = PERMIT
    session_number: int = 0
    content: api.Content | None = None
    given: api.Content | None = None
    """What the caller gave, if not a function: kept as long as the query, to tell another question from a repeat."""
    future: Future[LookupResult] = field(default_factory=Future[LookupResult])
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    job_id: bytes = b""
    may_have_job: bool = False
    """The server may have recorded a job that nobody will use."""

    def is_same(self, attempt: int, session_number: int) -> bool:
        return (self.attempt, self.session_number) == (attempt, session_number)

    def check_repeat(self, content: object, lora: str, cache_salt: str) -> None:
        """ValueError for another question under this request id and attempt: its answer would be another prompt's."""
        known = self.given
        other_prompt = not (callable(content) or known is None or content is known or _plain(content) == _plain(known))
        if other_prompt or (lora, cache_salt) != (self.lora, self.cache_salt):
            what = "prompt" if other_prompt else "adapter or tenant"
            raise ValueError(
                f"request {self.request_id!r} has been looked up with another {what}: "
                "discard it first, or count attempt up"
            )


def _plain(content: object) -> object:
    """Content as it can be compared, whatever holds its hashes or tokens."""
    match content:
        case api.Hashes():
            return tuple(content.hashes), content.num_tokens, content.first_chunk
        case api.Tokens():
            return bytes(content.data)
        case _:
            return content


class Lookups:
    """Does the asking for a SchedulerClient; ``report`` tells its breaker how calls went, ``is_back`` that a hang is
    over."""

    def __init__(
        self, client: AioClient, session: Session, terms: Terms, report: Report, is_back: Callable[[], None]
    ) -> None:
        self._client = client
        self._session = session
        self._terms = terms
        self._report = report
        self._is_back = is_back
        self._tails: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._probing = False
        self._told: set[Reason] = set()

    # ---- handed in by the client ------------------------------------------------------------------------------------

    def look(self, query: Query) -> None:
        """Answers ``query.future``, within its bounds."""
        before = self._tails.get(query.request_id)
        task = self._spawn(self._look(query, before))
        self._tails[query.request_id] = task
        task.add_done_callback(lambda done: self._looked(query, done, before))

    def _looked(self, query: Query, done: asyncio.Task[None], before: asyncio.Task[None] | None) -> None:
        self._untail(query, done, before)
        if not query.future.done():  # cancelled before it had begun
            query.future.set_result(LookupResult(reason=Reason.SERVER_UNREACHABLE.value))

    def supersede(self, query: Query) -> None:
        """Another attempt of the request is coming: gives back what this one pinned."""
        query.stop.set()
        self._after(query, self._free, None, ())

    def free(self, query: Query, tokens: TokenRange | None, readers: tuple[Reader, ...]) -> None:
        self._after(query, self._free, tokens, readers)

    def end(self, query: Query) -> None:
        """The request is over: stops the polling, and ends all its jobs once it is known whether there are any."""
        query.stop.set()
        self._after(query, self._end)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs something beside, until ``close``."""
        self._spawn(work)

    async def close(self) -> None:
        """Ends all work; lookups without an answer become misses."""
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._client.close()

    # ---- one request's work, in order -------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _after(self, query: Query, work: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
        before = self._tails.get(query.request_id)
        if before is None and not (query.job_id or query.may_have_job):
            return
        if len(self._tasks) >= self._terms.bounds.waiting_work:
            return

        async def step() -> None:
            if before is not None:
                await asyncio.wait((before,))
            await work(query, *args)

        task = self._spawn(step())
        self._tails[query.request_id] = task
        task.add_done_callback(lambda done: self._untail(query, done, None))

    def _untail(self, query: Query, done: asyncio.Task[None], before: asyncio.Task[None] | None) -> None:
        if self._tails.get(query.request_id) is not done:
            return
        if before is not None and not before.done():
            self._tails[query.request_id] = before
        else:
            del self._tails[query.request_id]

    # ---- asking -----------------------------------------------------------------------------------------------------

    async def _look(self, query: Query, before: asyncio.Task[None] | None) -> None:
        result = LookupResult(reason=Reason.SERVER_UNREACHABLE.value)
        try:
            if before is not None and not (await asyncio.wait((before,), timeout=query.answer_s))[0]:
                self._report(query.permit, None)
                result = LookupResult(reason=Reason.DEADLINE.value)
            else:
                result = await self._ask(query)
        except Exception as error:  # noqa: BLE001 - outermost: not sent, or not understood; no word on the server
            self._report(query.permit, None)
            query.future.set_exception(error)
        finally:
            query.content = None
            if not query.future.done():
                query.future.set_result(result)
        if query.may_have_job:
            await self._end(query)

    async def _ask(self, query: Query) -> LookupResult:
        attachment = self._session.attachment
        if attachment is None or query.content is None or query.stop.is_set():
            self._report(query.permit, None)
            return LookupResult(reason="DISCARDED" if query.stop.is_set() else Reason.SERVER_UNREACHABLE.value)
        request = api.LookupRequest(
            engine_id=self._terms.engine_id,
            request_id=query.request_id,
            space=SpaceRef(attachment.space_base, query.lora, query.cache_salt),
            content=query.content,
            tp_size=self._terms.tp_size,
            attempt=query.attempt,
            kv_ranks=self._terms.kv_ranks,
            prefetch_wait_ms=self._terms.bounds.prefetch_wait_ms,
            policy=query.policy,
        )
        try:
            answer = await self._client.lookup(request, timeout_s=query.answer_s)
            self._report(query.permit, True)
            query.permit = PERMIT  # used up
            query.job_id = answer.job_id
            status = await self._final(query, answer.status)
        except Refusal as refusal:
            return self._missed(query, refusal)
        if not status.done:
            query.may_have_job = True
            return LookupResult(reason="DISCARDED" if query.stop.is_set() else "PREFETCH_TIMEOUT")
        return LookupResult(
            status.hit_tokens, query.job_id, status.pinned, status.hit_chunks_by_tier, status.limited_by
        )

    async def _final(self, query: Query, status: PrefetchStatus) -> PrefetchStatus:
        """The final status; one that is not done when the query was stopped or the prefetch takes too long."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._terms.bounds.pending_s
        stopped = loop.create_task(query.stop.wait())
        try:
            while not status.done and not query.stop.is_set() and loop.time() < end:
                wait_ms = min(POLL_MS, int((end - loop.time()) * 1000) + 1)
                poll = loop.create_task(self._client.query(self._terms.engine_id, query.job_id, wait_ms))
                try:
                    await asyncio.wait((poll, stopped), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    poll.cancel()
                if poll.done():
                    status = poll.result()
        finally:
            stopped.cancel()
        return status

    def _missed(self, query: Query, refusal: Refusal) -> LookupResult:
        if refusal.reason in UNANSWERED:
            if self._report(query.permit, False) and not self._probing:
                self._spawn(self._probe())
            query.may_have_job = True
        else:
            if not query.job_id:
                self._report(query.permit, True)
            if refusal.reason in FORGOTTEN:
                self._session.renew()
        if refusal.reason not in self._told:
            self._told.add(refusal.reason)
            log.warning("lookup is a miss: %s (not logged again)", refusal)
        return LookupResult(reason=refusal.reason.value)

    async def _probe(self) -> None:
        """While the breaker is open: a call that a hanging server answers as soon as it goes on again."""
        self._probing = True
        loop = asyncio.get_running_loop()
        try:
            while True:
                start = loop.time()
                try:
                    await self._client.handshake(api.Hello(), timeout_s=PROBE_S)
                except Refusal as refusal:
                    if refusal.reason is Reason.DEADLINE:
                        continue
                    return  # not there at all: the session sees when it is back
                if loop.time() - start >= self._terms.bounds.answer_s:
                    self._is_back()
                return
        finally:
            self._probing = False

    # ---- giving back ------------------------------------------------------------------------------------------------

    async def _free(self, query: Query, tokens: TokenRange | None, readers: tuple[Reader, ...]) -> None:
        if query.job_id:
            request = api.FreeRequest(self._terms.engine_id, query.job_id, self._terms.tp_size, tokens, readers)
            await self._insist(lambda: self._client.free(request))

    async def _end(self, query: Query) -> None:
        if query.job_id or query.may_have_job:
            await self._insist(lambda: self._client.end_request(self._terms.engine_id, query.request_id))
            query.job_id = b""
            query.may_have_job = False

    async def _insist(self, call: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """A few times; then leases run out by themselves. Without a session there is nothing left to give back."""

        def again(error: BaseException) -> bool:
            passing = isinstance(error, Refusal) and error.reason in UNANSWERED
            return passing and self._session.attachment is not None

        async def act() -> None:
            await call()

        attempts = AsyncRetrying(
            retry=retry_if_exception(again),
            stop=stop_after_attempt(3),
            wait=wait_random_exponential(multiplier=0.05, max=1.0),
            reraise=True,
        )
        try:
            await attempts(act)
        except Refusal as refusal:
            log.debug("not given back: %s", refusal)
