# SPDX-License-Identifier: Apache-2.0
"""The part of a worker client that lives on its loop: sends copies, and finds out when their blocks are free.

A copy's blocks belong to the server from the call on. They are free again when
- the server has answered: with results, or with a refusal that is given before anything runs; or
- for every server that may be running the call: a Fence was answered, or the server's process is seen to have ended
  (life.py says what counts as seen).
A deadline, a lost connection, an internal error or a cancelled call frees nothing by itself.

Thread rule: everything here runs on the client's loop; ``Copy.future`` is what other threads see.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from kvgrpc import api
from kvgrpc.client.aio import AioClient
from kvgrpc.client.life import ServerLife
from kvgrpc.client.session import Session
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import ChunkOutcome, ChunkResult, RetrieveCommand, SpaceRef, TokenRange
from kvgrpc.transfer import device

Results = tuple[ChunkResult, ...]
log = logging.getLogger("kvgrpc.client")

IN_DOUBT = {Reason.SERVER_UNREACHABLE, Reason.DEADLINE, Reason.INTERNAL, Reason.CALL_REVOKED}
"""After these the copy may still run. CALL_REVOKED is also what a call cancelled by gRPC looks like."""

FORGOTTEN = {Reason.NOT_ATTACHED, Reason.NOT_REGISTERED, Reason.ENGINE_UNKNOWN, Reason.SPACE_UNKNOWN}
"""The server no longer knows what the session told it."""

PAUSE_S = 0.1
"""Between two attempts to fence, so that a server that refuses them is not flooded."""

FENCE_MOST = 1024
"""Call ids in one Fence."""


class CopyFuture(Future[Results]):
    """The results of one Store or Retrieve; finished only when its blocks are free again.

    ``cancel`` asks the server to stop and returns False: the future ends once the server has let go of the blocks.
    """

    def __init__(self, call_id: int, revoke: Callable[[Sequence[int]], object]) -> None:
        super().__init__()
        self.call_id = call_id
        self.refusal: Refusal | None = None
        """Once finished: why the server refused the call, in its words."""
        self._revoke = revoke
        self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        if not self.done():
            self._revoke((self.call_id,))
        return False


class Ready(Protocol):
    """An event of a card, as torch.cuda.Event or cupy.cuda.Event."""

    def synchronize(self) -> object:
        """Blocks until what was launched before the event has ended."""
        ...


@dataclass(slots=True, eq=False)
class Copy:
    """One call: a StoreRequest without its space_base, or a RetrieveRequest."""

    request: api.StoreRequest | api.RetrieveRequest
    timeout_s: float | None
    future: CopyFuture
    ready: Ready | None = None
    context: int = 0
    """The caller's CUDA context, in which ``ready`` is waited for."""
    begun: bool = False

    def wait_ready(self) -> None:
        """Blocks. A thread without a context would be given one of the first card, which takes some of its memory."""
        if self.context:
            device.use_context(self.context)
        if self.ready is not None:
            self.ready.synchronize()

    @property
    def is_store(self) -> bool:
        return isinstance(self.request, api.StoreRequest)

    def failed(self, reason: str, chunk_tokens: int, *, torn: bool = False) -> Results:
        """One result for all chunks. With ``chunk_tokens`` 0 (no server was ever seen) the whole range counts as chunk
        0."""
        tokens = self.request.range
        if tokens is None:
            assert isinstance(self.request, api.StoreRequest)
            tokens = TokenRange(0, self.request.content.num_tokens)
        if not chunk_tokens:
            first, end = 0, 1
        elif self.is_store:
            first, end = -(-tokens.start // chunk_tokens), tokens.end // chunk_tokens
        else:
            first, end = tokens.start // chunk_tokens, -(-tokens.end // chunk_tokens)
        if end <= first:
            return ()
        # the content of blocks that a Retrieve may have begun to write is undefined; a Store writes none
        outcome = ChunkOutcome.TORN if torn and not self.is_store else ChunkOutcome.FAILED
        return (ChunkResult(first, end - first, outcome, reason),)


class Copies:
    """Runs the copies of one worker over its session."""

    def __init__(self, client: AioClient, session: Session, engine_id: str) -> None:
        self._client = client
        self._session = session
        self._engine_id = engine_id
        self._tasks: set[asyncio.Task[None]] = set()
        self._told: set[Reason] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs something beside, until ``close``."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancels all work. Futures whose blocks are not known to be free stay unfinished."""
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._client.close()

    def begin(self, copy: Copy) -> None:
        """Sends the call. gRPC gets calls in the order of ``begin``; they may arrive in another."""
        task = self.spawn(self._run(copy))
        task.add_done_callback(lambda _: self._let_go(copy))

    def _let_go(self, copy: Copy) -> None:
        if not copy.begun:  # cancelled before anything was sent
            reason = Reason.SERVER_UNREACHABLE.value
            copy.future.set_result(copy.failed(reason, self._session.chunk_tokens))

    def revoke(self, call_ids: Sequence[int]) -> None:
        """Asks the server to stop these calls; their own answers, or fences, then say when they have."""
        self.spawn(self._revoke(call_ids))

    # ---- one copy ---------------------------------------------------------------------------------------------------

    async def _run(self, copy: Copy) -> None:
        copy.begun = True
        try:
            if copy.ready is not None:
                await asyncio.get_running_loop().run_in_executor(None, copy.wait_ready)
            copy.future.set_result(await self._results(copy))
        except Exception as error:  # noqa: BLE001 - outermost: encoding or decoding, so not sent or answered
            copy.future.set_exception(error)

    async def _results(self, copy: Copy) -> Results:
        attachment = self._session.attachment
        if attachment is None:
            reason = (self._session.problem or Refusal(Reason.SERVER_UNREACHABLE, "")).reason
            return copy.failed(reason.value, self._session.chunk_tokens)
        try:
            return await self._send(copy, attachment.space_base)
        except Refusal as refusal:
            copy.future.refusal = refusal
            if refusal.reason not in self._told:
                self._told.add(refusal.reason)
                log.warning("a %s failed: %s (not logged again)", "store" if copy.is_store else "retrieve", refusal)
            in_doubt = refusal.reason in IN_DOUBT
            if in_doubt:
                await self._wait_free(copy, attachment.life)
            elif refusal.reason in FORGOTTEN:
                self._session.renew()
            return copy.failed(refusal.reason.value, self._session.chunk_tokens, torn=in_doubt)

    async def _send(self, copy: Copy, space_base: bytes) -> Results:
        request = copy.request
        if isinstance(request, RetrieveCommand):
            return await self._client.retrieve(request, timeout_s=copy.timeout_s)
        space = SpaceRef(space_base, request.space.lora, request.space.cache_salt)
        placed = api.StoreRequest(
            engine_id=request.engine_id,
            call_id=request.call_id,
            space=space,
            content=request.content,
            blocks=request.blocks,
            range=request.range,
            ready_event=request.ready_event,
            policy=request.policy,
        )
        return await self._client.store(placed, timeout_s=copy.timeout_s)

    # ---- giving the blocks back -------------------------------------------------------------------------------------

    async def _wait_free(self, copy: Copy, life: ServerLife) -> None:
        """Returns when no server can be running the call any more.

        The call may also have reached a server that came after ``life`` while it was being sent.
        """
        lives = self._session.lives
        doubtful = lives[lives.index(life) :] if life in lives else lives.copy()
        call_id = copy.request.call_id
        while doubtful := [server for server in doubtful if not server.ended.is_set()]:
            attachment = self._session.attachment
            if attachment is None or attachment.life not in doubtful:
                await self._wait_change(doubtful)
            elif await self._fence((call_id,)):
                doubtful.remove(attachment.life)
            else:
                await self._session.changed(PAUSE_S)

    async def _wait_change(self, lives: list[ServerLife]) -> None:
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(life.ended.wait()) for life in lives]
        waits.append(asyncio.ensure_future(self._session.wait_change()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _fence(self, call_ids: Sequence[int]) -> bool:
        """Whether the server that the session is attached to has let go of these calls."""
        before = self._session.attachment
        try:
            await self._client.fence(self._engine_id, call_ids)
        except Refusal:
            return False
        return before is not None and self._session.attachment is before

    async def _revoke(self, call_ids: Sequence[int]) -> None:
        for at in range(0, len(call_ids), FENCE_MOST):
            await self._fence(call_ids[at : at + FENCE_MOST])
