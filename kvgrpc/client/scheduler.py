# SPDX-License-Identifier: Apache-2.0
"""An engine's scheduler as a client: lookups that never stop the engine.

Everything fails open: a server that is missing, hanging, failing or draining makes every lookup a miss, within a bound.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field

from kvgrpc import api
from kvgrpc.breaker import Breaker, BreakerSettings, Permit
from kvgrpc.client.aio import AioClient, new_client_id
from kvgrpc.client.channel import ChannelOptions
from kvgrpc.client.checks import check_content, check_request_id
from kvgrpc.client.lookups import LookupBounds, LookupResult, Lookups, Query, Terms
from kvgrpc.client.loop import LoopThread
from kvgrpc.client.session import Membership, Session
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import DEFAULT_POLICY, Policy, Reader, Role, SpaceIdentity, TokenRange

ContentSource = api.Content | Callable[[], api.Content]


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """``tp_size`` is that of the engine's workers: else every lookup is a miss (TP_SIZE_MISMATCH). ``kv_ranks``: those
    that this server holds, where workers of one engine talk to several servers; empty: all. ``in_flight`` bounds the
    lookups without an answer, ``remembered`` the requests that were neither discarded nor closed. ``client_id``:
    default is a new random one."""

    tp_size: int = 1
    kv_ranks: tuple[int, ...] = ()
    in_flight: int = 256
    remembered: int = 65536
    client_id: str = ""
    bounds: LookupBounds = field(default_factory=LookupBounds)
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    channel: ChannelOptions = field(default_factory=lambda: ChannelOptions(retries=False))


class SchedulerClient:
    """Looks up prefixes for one engine. ``engine_id`` (16 to 64 random characters) and ``identity``, with its
    ``stored_form``, are those of the engine's workers.

    Thread rule: every method may be called from any thread but a future's callback; each returns at once, except
    ``lookup``, ``wait_for_answer``, ``start`` and ``close``, which wait no longer than they are told. A background
    thread owns the channel, keeps the session (attach, handshake, both again after a server restart), sends and polls.

    No method raises for anything that the server or the network does. ForkedProcessError, RuntimeError (closed), and
    TypeError or ValueError (cannot be sent, as content that is neither Tokens nor Hashes) say that the program is
    wrong.
    """

    def __init__(
        self, address: str, engine_id: str, identity: SpaceIdentity, options: SchedulerOptions | None = None
    ) -> None:
        options = options or SchedulerOptions()
        self.engine_id = engine_id
        self.client_id = options.client_id or new_client_id("scheduler")
        self._options = options
        self._api = AioClient(address, self.client_id, options.channel)
        self._member = Membership(engine_id, Role.SCHEDULER, identity=identity)
        self._member.check()
        self._loop = LoopThread("kvgrpc-scheduler")
        self._lock = threading.Lock()
        self._queries: dict[str, Query] = {}
        self._unanswered = 0
        self._news = threading.Event()
        """Since the last wait a lookup was answered."""
        self._breaker = Breaker(options.breaker)
        self._session: Session | None = None
        self._lookups: Lookups | None = None

    # ---- life -------------------------------------------------------------------------------------------------------

    def start(self, wait_s: float = 5.0) -> bool:
        """Begins to keep the session. True when it is open within ``wait_s``; otherwise it will be, once the server is
        there, and until then every lookup is a miss."""
        return self._loop.run(self._start(wait_s))

    async def _start(self, wait_s: float) -> bool:
        if self._session is None:
            self._session = Session(self._api, self._member, self._server_is_back)
            terms = Terms(self.engine_id, self._options.tp_size, self._options.kv_ranks, self._options.bounds)
            self._lookups = Lookups(self._api, self._session, terms, self._report, self._server_is_back)
            self._lookups.spawn(self._session.run())
        return await self._session.wait_attached(wait_s)

    def close(self) -> None:
        """Ends the session, and with it the engine's jobs. Harmless when repeated."""
        if self._loop.is_inherited:
            return
        self._loop.check_thread()
        if self._lookups is not None:
            try:
                self._loop.run(self._lookups.close())
            except RuntimeError:  # closed before
                pass
        self._loop.stop()

    @property
    def attached(self) -> bool:
        """Whether the session is open."""
        return self._session is not None and self._session.attachment is not None

    @property
    def problem(self) -> Refusal | None:
        """Why the session is not open, as far as known."""
        return self._session.problem if self._session is not None else None

    @property
    def chunk_tokens(self) -> int:
        """Of the last server seen; 0 before the first."""
        return self._session.chunk_tokens if self._session is not None else 0

    @property
    def space_base(self) -> bytes:
        """Names the engine's space at the server; empty while there is no session."""
        attachment = self._session.attachment if self._session is not None else None
        return attachment.space_base if attachment is not None else b""

    # ---- lookups ----------------------------------------------------------------------------------------------------

    def try_lookup(
        self,
        request_id: str,
        content: ContentSource,
        *,
        attempt: int = 0,
        lora: str = "",
        cache_salt: str = "",
        policy: Policy = DEFAULT_POLICY,
    ) -> LookupResult | None:
        """None until the answer is there; ask again at the next step, with the same request id and attempt.

        ``content`` is kept: do not change it. A function is only called by the call that starts the lookup, and later
        calls cost a dictionary lookup; else they compare it, as they do ``lora`` and ``cache_salt``, and another one is
        a ValueError. Another ``attempt`` asks afresh, and gives back what the earlier one pinned. Call ``discard`` when
        the request is finished or aborted.
        """
        found = self._find(content, request_id, attempt, lora, cache_salt)
        if found is None:
            answer_s = self._options.bounds.answer_s
            found = self._begin(content, Query(request_id, attempt, answer_s, lora, cache_salt, policy))
        if isinstance(found, Future):
            return found.result() if found.done() else None
        return found

    def lookup(
        self,
        request_id: str,
        content: ContentSource,
        *,
        timeout_s: float = 0.2,
        attempt: int = 0,
        lora: str = "",
        cache_salt: str = "",
        policy: Policy = DEFAULT_POLICY,
    ) -> LookupResult:
        """As ``try_lookup``, but waits for the answer, at most ``timeout_s``: then it is a miss, and discarded."""
        found = self._find(content, request_id, attempt, lora, cache_salt)
        if found is None:
            answer_s = min(timeout_s, self._options.bounds.answer_s)
            found = self._begin(content, Query(request_id, attempt, answer_s, lora, cache_salt, policy))
        if found is None:
            return LookupResult(reason="IN_FLIGHT_LIMIT")
        if isinstance(found, LookupResult):
            return found
        self._loop.check_thread()
        try:
            return found.result(timeout_s)
        except FutureTimeoutError:
            self.discard(request_id)
            return LookupResult(reason=Reason.DEADLINE.value)

    def discard(self, request_id: str) -> None:
        """The request is finished or aborted: its jobs end in the background, also one whose answer is still to
        come."""
        self._loop.check()
        with self._lock:
            query = self._queries.pop(request_id, None)
        if query is not None and self._lookups is not None:
            self._loop.post(self._lookups.end, query)

    def wait_for_answer(self, timeout_s: float) -> bool:
        """Returns when one of the lookups that wait for their answer may have it, after ``timeout_s`` at most; False,
        at once, when none waits. For one thread at a time, which then asks with ``try_lookup``."""
        self._loop.check()
        with self._lock:
            waiting = self._unanswered > 0
        if waiting:
            self._news.wait(timeout_s)
        self._news.clear()
        return waiting

    def free(self, request_id: str, range: TokenRange | None = None, readers: tuple[Reader, ...] = ()) -> None:
        """Gives back pins that will not be retrieved, in the background: all, or of whole chunks in ``range``, or of
        ``readers``. The request goes on: its answer is still remembered. Nothing happens where there is no hit."""
        self._loop.check()
        with self._lock:
            query = self._queries.get(request_id)
        if query is not None and self._lookups is not None:
            self._loop.post(self._lookups.free, query, range, readers)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _find(
        self, content: ContentSource, request_id: str, attempt: int, lora: str, cache_salt: str
    ) -> Future[LookupResult] | LookupResult | None:
        """What is known of a request without asking."""
        self._loop.check()
        session = self._session
        if session is None:
            return LookupResult(reason=Reason.SERVER_UNREACHABLE.value)
        if session.draining:
            return LookupResult(reason=Reason.SERVER_DRAINING.value)
        with self._lock:
            query = self._queries.get(request_id)
        if query is not None and query.is_same(attempt, session.number):
            query.check_repeat(content, lora, cache_salt)
            return query.future
        if session.attachment is None:
            return LookupResult(reason=Reason.SERVER_UNREACHABLE.value)
        return None

    def _begin(self, content: ContentSource, query: Query) -> Future[LookupResult] | LookupResult | None:
        """The answer to come; a miss; or None: too many are waiting for theirs."""
        session, lookups = self._session, self._lookups
        assert session is not None
        assert lookups is not None
        with self._lock:
            if self._unanswered >= self._options.in_flight:
                return None
            permit = self._breaker.admit(time.monotonic_ns())
            if permit is None:
                return LookupResult(reason="BREAKER_OPEN")
            self._unanswered += 1
        query.permit = permit
        query.session_number = session.number
        query.future.add_done_callback(self._answered)
        try:
            query.content = content() if callable(content) else content
            check_content(query.content)
            check_request_id(query.request_id)
            query.given = None if callable(content) else content
        except BaseException:
            self._unask(query)
            raise
        with self._lock:
            older = self._queries.pop(query.request_id, None)
            twin = older if older is not None and older.is_same(query.attempt, query.session_number) else None
            self._queries[query.request_id] = twin or query
            oldest = next(iter(self._queries)) if len(self._queries) > self._options.remembered else None
        if twin is not None:  # another thread asked meanwhile
            self._unask(query)
            twin.check_repeat(content, query.lora, query.cache_salt)
            return twin.future
        if older is not None:
            self._loop.post(lookups.supersede, older)
        self._loop.post(lookups.look, query)
        if oldest is not None:
            self.discard(oldest)
        return query.future

    def _unask(self, query: Query) -> None:
        self._report(query.permit, None)
        query.future.cancel()

    def _answered(self, _: Future[LookupResult]) -> None:
        with self._lock:
            self._unanswered -= 1
        self._news.set()

    def _report(self, permit: Permit, answered: bool | None) -> bool:
        """How a call went: answered, not answered, or None: it tells nothing. True when the breaker is now open."""
        with self._lock:
            if answered is None:
                self._breaker.give_up(permit)
            elif answered:
                self._breaker.succeed()
            else:
                self._breaker.fail(permit, time.monotonic_ns())
            return self._breaker.is_open

    def _server_is_back(self) -> None:
        with self._lock:
            self._breaker.retry_now()
