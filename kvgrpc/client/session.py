# SPDX-License-Identifier: Apache-2.0
"""Keeps one client attached: handshake, attach, register, and all of it again after every loss.

Thread rule: everything runs on the client's loop, but ``attachment``, ``draining``, ``number`` and ``problem`` may be
read from any thread: each is replaced as a whole.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from kvgrpc import __version__, api
from kvgrpc.client.aio import AioClient
from kvgrpc.client.life import ServerLife
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import Role, SpaceIdentity
from kvgrpc.transfer.host import host_id
from kvgrpc.wire import engine

Stream = AsyncGenerator[api.AttachEvent, None]
log = logging.getLogger("kvgrpc.client")

PAUSE_S = 0.05
"""Before a lost session is opened again, so that a server that ends every stream at once is not flooded."""

HANDSHAKE_S = 2.0
"""After so long without an answer that is noted as the problem, and the handshake is sent anew."""

_PASSING = {
    Reason.SERVER_UNREACHABLE,
    Reason.SERVER_DRAINING,
    Reason.ENGINE_DRAINING,
    Reason.DEADLINE,
    Reason.CALL_REVOKED,
    Reason.NOT_ATTACHED,
    Reason.ENGINE_UNKNOWN,
    Reason.CLIENT_EXISTS,
}
"""Time alone may change these: the server is restarting, or has not yet seen the end of an earlier stream."""

_soon = wait_random_exponential(multiplier=0.05, max=0.5)
_later = wait_random_exponential(multiplier=0.5, max=30.0)
"""For refusals that no waiting will change, such as a layout that does not fit its memory."""


@dataclass(frozen=True, slots=True)
class Membership:
    """What a session is opened for: an engine's scheduler with its identity, or a worker with its memory."""

    engine_id: str
    role: Role
    identity: SpaceIdentity | None = None
    register: api.RegisterRequest | None = None

    @property
    def hello(self) -> api.Hello:
        return api.Hello(client_version=f"kvgrpc-python {__version__}", identity=self.identity)

    def check(self) -> None:
        """Raises TypeError, ValueError or AttributeError for what could never be sent."""
        engine.encode_handshake_request(self.hello)
        engine.encode_attach_request(self.engine_id, self.role, b"")
        if self.register is not None:
            engine.encode_register_request(self.register)


@dataclass(frozen=True, slots=True)
class Attachment:
    """An open session: what the server said of itself, and the registration of a worker."""

    info: api.ServerInfo
    life: ServerLife
    registration: api.RegisterAnswer | None

    @property
    def space_base(self) -> bytes:
        return self.registration.space_base if self.registration is not None else self.info.space_base


def _wait(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome is not None else None
    passing = isinstance(error, Refusal) and error.reason in _PASSING
    return (_soon if passing else _later)(state)


class Session:
    """``run`` keeps the session; ``attachment`` is None while there is none.

    ``lives`` are the servers, oldest first, that may still be running something of this client.
    ``number`` grows whenever the server may have forgotten this client's jobs and calls.
    """

    def __init__(self, client: AioClient, member: Membership, on_attach: Callable[[], None] | None = None) -> None:
        self._client = client
        self._member = member
        self._on_attach = on_attach
        self._session_id = secrets.token_bytes(16)
        self._changed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._stream: Stream | None = None
        self._holding: asyncio.Task[None] | None = None
        self.attachment: Attachment | None = None
        self.chunk_tokens = 0
        """Of the last server; 0 before the first."""
        self.lives: list[ServerLife] = []
        self.draining = False
        self.number = 0
        self.problem: Refusal | None = None

    async def run(self) -> None:
        """Until cancelled. Whatever fails is noted as the problem, and tried again: there is nobody else to do it."""
        retrying: Any = AsyncRetrying(retry=retry_if_exception_type(Exception), wait=_wait, before_sleep=self._note)
        try:
            while True:
                stream: Stream = await retrying(self._open)
                self._holding = asyncio.ensure_future(self._hold(stream))
                try:
                    await asyncio.wait((self._holding,))
                finally:
                    self._holding.cancel()
                    await asyncio.wait((self._holding,))
                    await stream.aclose()
                self._lost()
                await asyncio.sleep(PAUSE_S)
        finally:
            self._stop_watching()
            for life in self.lives:
                life.close()

    def renew(self) -> None:
        """The server has forgotten something of this session: open it again."""
        if self._holding is not None and self.attachment is not None:
            self._holding.cancel()

    def wait_change(self) -> Coroutine[Any, Any, Any]:
        """To be awaited: returns at the first change after this call, also one that comes before it is awaited."""
        return self._changed.wait()

    async def changed(self, timeout_s: float) -> None:
        """Returns at the next change of the session, or after the time."""
        try:
            await asyncio.wait_for(self.wait_change(), timeout_s)
        except asyncio.TimeoutError:
            pass

    async def wait_attached(self, timeout_s: float) -> bool:
        """Whether the session is open, now or within the time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while self.attachment is None and loop.time() < end:
            await self.changed(end - loop.time())
        if self.attachment is None and self.problem is None:
            self._note_problem(self._no_answer(" yet"))
        return self.attachment is not None

    # ---- inside -----------------------------------------------------------------------------------------------------

    async def _open(self) -> Stream:
        info = await self._handshake()
        known = self.lives.copy()
        life = self._life(info.server_epoch)
        stream = self._client.attach(self._member.engine_id, self._member.role, self._session_id)
        try:
            first = await asyncio.wait_for(anext(stream), self._client.options.call_s)
            if first.draining or first.server_epoch != info.server_epoch:
                if life not in known:
                    self._forget(life)
                raise Refusal(Reason.SERVER_UNREACHABLE, "the server was replaced between handshake and attach")
            registration = await self._register()
        except (StopAsyncIteration, asyncio.TimeoutError):
            await stream.aclose()
            raise Refusal(Reason.SERVER_UNREACHABLE, "the server did not confirm the session") from None
        except BaseException:
            await stream.aclose()
            raise
        self._attached(Attachment(info, life, registration), first.resumed)
        return stream

    async def _handshake(self) -> api.ServerInfo:
        """Waits for a server that answers, without a pause: the channel itself backs off, for less than a second."""
        while True:
            try:
                return await self._client.handshake(self._member.hello, timeout_s=HANDSHAKE_S, wait_for_server=True)
            except Refusal as refusal:
                if refusal.reason is not Reason.DEADLINE:
                    raise
            self._note_problem(self._no_answer())

    def _no_answer(self, yet: str = "") -> Refusal:
        address = self._client.address
        text = f"no answer from {address.target}{yet}; {self._client.options.shown().is_it_there(address)}"
        return Refusal(Reason.SERVER_UNREACHABLE, text)

    def _life(self, epoch: bytes) -> ServerLife:
        """The life of this epoch. It is known before the attach, so that its process can only be the one attached
        to."""
        if self.lives and self.lives[-1].epoch == epoch:
            return self.lives[-1]
        for older in self.lives:
            older.succeeded()
        self._drop_ended()
        life = ServerLife(epoch, self._client.address)
        self.lives.append(life)
        self._watch(self.lives)
        return life

    def _forget(self, life: ServerLife) -> None:
        """It was never attached to, so nothing of this client runs there; and its process may be mistaken."""
        life.ended.set()
        self._stop_watching()
        self._drop_ended()
        self._watch(self.lives)

    def _drop_ended(self) -> None:
        for life in self.lives:
            if life.ended.is_set():
                life.close()
        self.lives = [life for life in self.lives if not life.ended.is_set()]

    async def _register(self) -> api.RegisterAnswer | None:
        request = self._member.register
        if request is None:
            return None
        return await self._client.register(request if request.host_id else replace(request, host_id=host_id()))

    def _attached(self, attachment: Attachment, resumed: bool) -> None:
        self._stop_watching()
        self._drop_ended()
        self._watch([life for life in self.lives if life is not attachment.life])
        self.chunk_tokens = attachment.info.chunk_tokens
        told = self.number > 0 or self.problem is not None  # that there was no session: then also that there is one
        self.draining = False
        self.problem = None
        if not resumed:
            self.number += 1
        self.attachment = attachment
        level = logging.WARNING if told else logging.INFO
        log.log(level, "attached to %s as %s", self._client.address.target, self._client.client_id)
        if self._on_attach is not None:
            self._on_attach()
        self._pulse()

    async def _hold(self, stream: Stream) -> None:
        try:
            async for event in stream:
                if event.draining:
                    self.draining = True
                    log.warning("draining: %s", event.reason)
                    self._pulse()
        except Refusal as refusal:
            self.problem = refusal

    def _lost(self) -> None:
        self.attachment = None
        log.warning("lost %s: %s", self._client.address.target, self.problem or "the stream ended")
        self._watch(self.lives)
        self._pulse()

    def _note(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, Refusal):
            self._note_problem(error)
        elif error is not None:
            log.error("opening the session failed", exc_info=error)
            self._note_problem(Refusal(Reason.INTERNAL, f"this client failed: {error!r}"))

    def _note_problem(self, problem: Refusal) -> None:
        if self.problem is None or self.problem.reason is not problem.reason:
            log.warning("no session with %s: %s", self._client.address.target, problem)
        self.problem = problem
        self._pulse()

    def _watch(self, lives: list[ServerLife]) -> None:
        self._stop_watching()
        if lives:
            self._watching = asyncio.ensure_future(_watch_all(lives.copy()))

    def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    def _pulse(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _watch_all(lives: list[ServerLife]) -> None:
    await asyncio.gather(*(life.watch() for life in lives))
