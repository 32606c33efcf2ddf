# SPDX-License-Identifier: Apache-2.0
"""An engine's worker as a client: shares its KV memory once, then stores and retrieves by block ids."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from kvgrpc import api
from kvgrpc.client.aio import AioClient, new_client_id
from kvgrpc.client.channel import ChannelOptions
from kvgrpc.client.checks import check_blocks, check_content, check_range
from kvgrpc.client.copies import Copies, Copy, CopyFuture, Ready, Results
from kvgrpc.client.loop import LoopThread
from kvgrpc.client.session import Membership, Session
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import DEFAULT_POLICY, Policy, Role, SpaceRef, TokenRange
from kvgrpc.transfer import device

LEAVE_S = 0.2
"""For taking the memory back when copies took all the time there was; the end of the session does it, too."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """``calls`` bounds the copies in flight; beyond it a copy fails at once (CALL_LIMIT). ``client_id``: default is a
    new random one."""

    calls: int = 1024
    client_id: str = ""
    channel: ChannelOptions = field(default_factory=lambda: ChannelOptions(retries=False))


class WorkerClient:
    """Stores and retrieves for one worker process.

    Thread rule: every method may be called from any thread but a future's callback, and returns at once, except
    ``start`` and ``close``, which wait no longer than they are told. A background thread owns the channel and keeps the
    session: handshake, attach and register, all of it again after a server restart. Callbacks of futures run on that
    thread.

    Blocks named in a call belong to the server until its future is finished. A future ends in results also when the
    server is missing, failing or dead: then all its chunks are FAILED (blocks untouched) or TORN (blocks of a Retrieve
    whose content is undefined), with a reason. After a deadline, a cancel or a lost connection the client itself sends
    Fence, and the future stays unfinished until the server has answered that, or is seen to be dead.

    No method raises for anything that the server or the network does. ForkedProcessError, RuntimeError (closed) and, as
    a future's exception, TypeError or ValueError (cannot be encoded) say that the program is wrong.
    """

    def __init__(self, address: str, request: api.RegisterRequest, options: WorkerOptions | None = None) -> None:
        """``request.host_id`` may be empty: this host's."""
        options = options or WorkerOptions()
        self.engine_id = request.engine_id
        self.client_id = options.client_id or new_client_id("worker")
        self._options = options
        self._api = AioClient(address, self.client_id, options.channel)
        self._member = Membership(request.engine_id, Role.WORKER, register=request)
        self._member.check()
        self._loop = LoopThread("kvgrpc-worker")
        self._lock = threading.Lock()
        self._call_ids = itertools.count(1)
        self._pending: dict[int, Copy] = {}
        self._session: Session | None = None
        self._copies: Copies | None = None
        self._closing = False
        self._closed = threading.Event()
        self._kept: object = None

    def keep(self, memory: object) -> None:
        """Keeps what is registered alive for as long as this client is."""
        self._kept = memory

    # ---- life -------------------------------------------------------------------------------------------------------

    def start(self, wait_s: float = 5.0) -> bool:
        """Begins to keep the session. True when the memory is registered within ``wait_s``; otherwise it will be, once
        the server is there, and until then every copy fails at once. ``problem`` says why."""
        return self._loop.run(self._start(wait_s))

    async def _start(self, wait_s: float) -> bool:
        if self._session is None:
            self._session = Session(self._api, self._member)
            self._copies = Copies(self._api, self._session, self.engine_id)
            self._copies.spawn(self._session.run())
        return await self._session.wait_attached(wait_s)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Revokes what runs, waits for it, takes the memory back and ends the session, within ``timeout_s`` and a
        moment. Harmless when repeated.

        True when all blocks are free. False: the server may still touch blocks of the futures that are unfinished,
        until it has seen the end of the session; keep the memory mapped until it is unregistered or the server has
        ended.
        """
        if self._loop.is_inherited:
            return True
        self._loop.check_thread()
        end = time.monotonic() + timeout_s
        with self._lock:
            closing, self._closing = self._closing, True
            pending = [copy.future for copy in self._pending.values()]
        if closing:  # by another thread, or before
            self._closed.wait(timeout_s)
        else:
            try:
                self._end(pending, end)
            finally:
                self._loop.stop()
                self._closed.set()
        return all(future.done() for future in pending)

    def _end(self, pending: Sequence[CopyFuture], end: float) -> None:
        if self._copies is None:
            return
        self.fence([future.call_id for future in pending])
        if not wait(pending, end - time.monotonic()).not_done:
            self._loop.run(self._leave(max(end - time.monotonic(), LEAVE_S)))
        self._loop.run(self._copies.close())

    async def _leave(self, timeout_s: float) -> None:
        if self._session is not None and self._session.attachment is not None:
            try:
                await self._api.unregister(self.engine_id, timeout_s=timeout_s)
            except Refusal:
                pass  # the end of the session unregisters too

    @property
    def attached(self) -> bool:
        """Whether the session is open and the memory registered."""
        return self._session is not None and self._session.attachment is not None

    @property
    def registration(self) -> api.RegisterAnswer | None:
        """The server's answer to the registration in force."""
        attachment = self._session.attachment if self._session is not None else None
        return attachment.registration if attachment is not None else None

    @property
    def problem(self) -> Refusal | None:
        """Why the session is not open, as far as known."""
        return self._session.problem if self._session is not None else None

    @property
    def chunk_tokens(self) -> int:
        """Of the last server seen; 0 before the first."""
        return self._session.chunk_tokens if self._session is not None else 0

    # ---- copies -----------------------------------------------------------------------------------------------------

    def store(
        self,
        content: api.Content,
        blocks: Sequence[Sequence[int]],
        *,
        range: TokenRange | None = None,
        lora: str = "",
        cache_salt: str = "",
        policy: Policy = DEFAULT_POLICY,
        ready: Ready | bytes | None = None,
        timeout_s: float | None = None,
    ) -> CopyFuture:
        """Stores the full chunks of ``content`` inside ``range`` (None: all) from ``blocks``, one sequence of ids a KV
        group: ``blocks[g][0]`` is the block of ``range.start``. ``content`` begins with the prompt's first token.

        ``ready`` is an event of the card that was recorded behind what writes the blocks: this client waits for it, and
        then sends the call. Or it is such an event's CUDA IPC handle, as ``ipc_handle()`` of a torch event with
        ``interprocess=True``: then the call is sent at once and the server waits (see StoreRequest.ready_event). Do not
        change ``content``, the ids or the bytes until the future is finished.
        """
        call_id = next(self._call_ids)
        request = api.StoreRequest(
            engine_id=self.engine_id,
            call_id=call_id,
            space=SpaceRef(b"", lora, cache_salt),
            content=content,
            blocks=tuple(blocks),
            range=range,
            policy=policy,
            ready_event=ready if isinstance(ready, bytes) else b"",
        )
        return self._begin(request, timeout_s, None if isinstance(ready, bytes) else ready)

    def retrieve(
        self,
        job_id: bytes,
        range: TokenRange,
        blocks: Sequence[Sequence[int]],
        *,
        ready: Ready | None = None,
        timeout_s: float | None = None,
    ) -> CopyFuture:
        """Loads ``range`` of a looked-up prefix into ``blocks``; ``blocks[g][0]`` is the block of ``range.start``.

        A hit of a hybrid model is of use when it is loaded to its end: a beginning of it, though LOADED, lacks windows
        and states. Look up a shorter prompt instead.

        ``ready``: as for ``store``, behind whatever still uses the blocks.
        """
        call_id = next(self._call_ids)
        request = api.RetrieveRequest(self.engine_id, call_id, job_id, range, tuple(blocks))
        return self._begin(request, timeout_s, ready)

    def fence(self, call_ids: Sequence[int]) -> Future[None]:
        """Asks the server to stop these calls. The future is finished when the blocks of all of them are free."""
        self._loop.check()
        ended: Future[None] = Future()
        ended.set_running_or_notify_cancel()
        with self._lock:
            futures = [self._pending[call_id].future for call_id in call_ids if call_id in self._pending]
        if not futures:
            ended.set_result(None)
            return ended
        self._revoke([future.call_id for future in futures])
        _when_all(futures, ended)
        return ended

    def blocks_in_flight(self) -> frozenset[tuple[int, int]]:
        """(KV group, block id) of all blocks that belong to the server. Raises ForkedProcessError in a forked child."""
        self._loop.check_process()
        with self._lock:
            in_flight = self._in_flight()
        return frozenset(
            (group, block) for copy in in_flight for group, ids in enumerate(copy.request.blocks) for block in ids
        )

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _begin(
        self, request: api.StoreRequest | api.RetrieveRequest, timeout_s: float | None, ready: Ready | None = None
    ) -> CopyFuture:
        self._loop.check()
        future = CopyFuture(request.call_id, self._revoke)
        copy = Copy(request, timeout_s, future, ready, device.current_context() if ready is not None else 0)
        try:
            check_blocks(request.blocks)
            check_range(request.range)
            if isinstance(request, api.StoreRequest):
                check_content(request.content)
        except (TypeError, ValueError) as error:
            future.set_exception(error)
            return future
        begin = self._admit(copy)
        if isinstance(begin, Reason):
            future.set_result(copy.failed(begin.value, self.chunk_tokens))
        else:
            future.add_done_callback(lambda _: self._ended(request.call_id))
            self._loop.post(begin, copy)
        return future

    def _admit(self, copy: Copy) -> Callable[[Copy], None] | Reason:
        """Counts the copy as pending; what begins it, or why it must not."""
        with self._lock:
            if self._copies is None or self._closing:
                return Reason.SERVER_UNREACHABLE
            if len(self._in_flight()) >= self._options.calls:
                return Reason.CALL_LIMIT
            self._pending[copy.request.call_id] = copy
            return self._copies.begin

    def _in_flight(self) -> list[Copy]:
        """Under the lock. Whoever waits for a result may have it before the copy is no longer pending."""
        return [copy for copy in self._pending.values() if not copy.future.done()]

    def _ended(self, call_id: int) -> None:
        with self._lock:
            self._pending.pop(call_id, None)

    def _revoke(self, call_ids: Sequence[int]) -> None:
        if self._copies is not None:
            self._loop.post(self._copies.revoke, call_ids)


def _when_all(futures: Sequence[Future[Results]], ended: Future[None]) -> None:
    left = set(futures)
    lock = threading.Lock()

    def one(future: Future[Results]) -> None:
        with lock:
            left.discard(future)
            last = not left
        if last and not ended.done():
            ended.set_result(None)

    for future in futures:
        future.add_done_callback(one)
