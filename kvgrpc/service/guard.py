# SPDX-License-Identifier: Apache-2.0
"""What stands before our services: request id, checks, default deadline, rich errors and a log line for every call.

Each check is a function of the call that raises a Refusal. Health and reflection have handlers of their own and pass
untouched. A deadline, a cancel by the peer and the peer's end all reach the servicer as ``asyncio.CancelledError``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.service.calls import (
    CLIENT_ID_KEY,
    CURRENT,
    NAME_MOST,
    REQUEST_ID_KEY,
    RULES,
    Call,
    Rule,
    is_name,
    read_call,
)
from kvgrpc.service.deadline import Deadline
from kvgrpc.service.traffic import Traffic
from kvgrpc.status import DETAILS_KEY, REASON_CODES, rich_status
from kvgrpc.telemetry.log import REQUEST_ID, logger
from kvgrpc.telemetry.rpcs import OK, RpcFigures

Check = Callable[[Call], None]
Admit = Callable[[Call, Any], None]
"""Finds out who calls, from the call and its gRPC context, and raises a Refusal for who may not."""
_Method: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

DETAILS_CHARS = 500
"""Longest error message: it travels three times in the trailers, which peers accept up to 8 KiB."""

DRAIN_RETRY_MS = 1000
LIMIT_RETRY_MS = 100


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Bounds of one call, and of all together."""

    message_bytes: int
    running_calls: int
    running_bytes: int
    deadline_s: float
    copy_deadline_s: float


def check_client_id(call: Call) -> None:
    """Methods of engines need a client id; one that is sent anyway must be well formed."""
    if (call.rule.needs_client or call.client_id) and not is_name(call.client_id):
        raise Refusal(
            Reason.CLIENT_ID_MISSING,
            f"metadata {CLIENT_ID_KEY} must name the client: 1 to {NAME_MOST} printable ASCII characters, no spaces",
            field=CLIENT_ID_KEY,
        )


def check_draining(traffic: Traffic, call: Call) -> None:
    if traffic.draining.is_set() and not call.rule.while_draining:
        raise Refusal(
            Reason.SERVER_DRAINING,
            f"the server is going away ({traffic.reason}); try again when it is back",
            retry_after_ms=DRAIN_RETRY_MS,
        )


def check_running_calls(traffic: Traffic, most: int, call: Call) -> None:
    if call.rule.limited and traffic.limited_calls >= most:
        raise Refusal(
            Reason.CALL_LIMIT,
            f"the server answers {most} calls already, its limit; try again later",
            retry_after_ms=LIMIT_RETRY_MS,
            resource="running calls",
        )


def check_running_bytes(traffic: Traffic, most: int, rule: Rule, size_bytes: int) -> None:
    """gRPC keeps a message as long as its call runs, and a call may wait behind others."""
    if rule.limited and traffic.limited_bytes and traffic.limited_bytes + size_bytes > most:
        raise Refusal(
            Reason.CALL_LIMIT,
            f"the messages of running calls have {traffic.limited_bytes} bytes, the limit is {most}; try again later",
            retry_after_ms=LIMIT_RETRY_MS,
            resource="message bytes of running calls",
        )


class CallGuard(grpc.GenericRpcHandler):
    """Finds the methods that have a rule and wraps each call of them. Used on the server's event loop only.

    Not a ``grpc.aio.ServerInterceptor``: with one, gRPC runs more coroutines for every call, those of health and
    reflection too. The generated code adds its services to this instead of to the server. ``readers`` read the requests
    of the methods that they name, and may refuse, instead of protobuf.
    """

    def __init__(
        self,
        traffic: Traffic,
        limits: CallLimits,
        checks: Sequence[Check] = (),
        readers: Mapping[str, Callable[[bytes], object]] = MappingProxyType({}),
        figures: RpcFigures | None = None,
        admit: Admit | None = None,
    ) -> None:
        self._admit = admit
        self._traffic = traffic
        self._readers = readers
        self._figures = figures or RpcFigures(RULES)
        self._limits = limits
        self._methods: dict[str, tuple[Rule, _Method, Callable[[Any], bytes]]] = {}
        self._log = logger("service").bind()  # bound once: a debug line that is not wanted then costs nothing
        self._checks: tuple[Check, ...] = (
            check_client_id,
            partial(check_draining, traffic),
            partial(check_running_calls, traffic, limits.running_calls),
            *checks,
        )

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Asked for by generated code, which names the same methods once more below."""

    def add_registered_method_handlers(self, service: str, methods: Mapping[str, _Method]) -> None:
        """Takes the methods of a service; each must have a rule."""
        for name, method in methods.items():
            path = f"/{service}/{name}"
            if path in self._readers and method.unary_unary is not None:
                method = grpc.unary_unary_rpc_method_handler(
                    method.unary_unary, self._readers[path], method.response_serializer
                )
            assert method.response_serializer is not None
            self._methods[path] = RULES[path], method, self._figures.methods[path].counted(method.response_serializer)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> _Method | None:
        """One call's handler; None for a method that is not ours."""
        found = self._methods.get(handler_call_details.method)
        if found is None:
            return None
        rule, method, serialize = found
        call = read_call(handler_call_details.method, rule, handler_call_details.invocation_metadata)
        if method.request_streaming:
            return grpc.stream_unary_rpc_method_handler(
                partial(self._answer_messages, call, method), response_serializer=serialize
            )
        if method.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                partial(self._answer_stream, call, method), response_serializer=serialize
            )
        return grpc.unary_unary_rpc_method_handler(partial(self._answer, call, method), response_serializer=serialize)

    async def _answer(self, call: Call, method: _Method, raw: bytes, context: _Context) -> Any:
        context.set_trailing_metadata(((REQUEST_ID_KEY, call.request_id),))

        async def act() -> Any:
            request = self._read(call, method, raw)
            deadline_s = self._default_deadline_s(call, request, context)
            servicer: Any = method.unary_unary
            answering: Awaitable[Any] = servicer(request, context)
            del request  # so that a call that waits keeps only what the servicer still needs
            if deadline_s is None:
                return await answering
            async with Deadline(deadline_s):
                return await answering

        return await self._run(call, context, act, len(raw))

    async def _answer_stream(self, call: Call, method: _Method, raw: bytes, context: _Context) -> None:
        trailer = ((REQUEST_ID_KEY, call.request_id),)
        context.set_trailing_metadata(trailer)
        stall_s = None if call.rule.exempt else self._limits.copy_deadline_s

        async def act() -> None:
            request = self._read(call, method, raw)
            servicer: Any = method.unary_stream
            answers: AsyncGenerator[Any, None] = servicer(request, context)
            try:
                await context.send_initial_metadata(trailer)
                async for answer in answers:
                    self._admit_again(call, context)
                    async with Deadline(stall_s):
                        await context.write(answer)
            finally:
                # not left to the garbage collector: closing is what tells the cache that the peer is gone
                await answers.aclose()

        await self._run(call, context, act, len(raw))

    async def _answer_messages(self, call: Call, method: _Method, _: object, context: _Context) -> Any:
        """A stream of messages, read one at a time; each must come before the deadline for copies."""
        context.set_trailing_metadata(((REQUEST_ID_KEY, call.request_id),))
        traffic, received_bytes = self._traffic, 0

        async def messages() -> AsyncGenerator[Any, None]:
            nonlocal received_bytes
            while True:
                async with Deadline(self._limits.copy_deadline_s):
                    raw: Any = await context.read()
                if raw is grpc.aio.EOF:
                    return
                self._admit_again(call, context)
                size_bytes = len(raw)
                received_bytes += size_bytes
                check_running_bytes(traffic, self._limits.running_bytes, call.rule, size_bytes)
                traffic.limited_bytes += size_bytes
                try:
                    yield self._read(call, method, raw)
                finally:
                    traffic.limited_bytes -= size_bytes

        async def act() -> Any:
            servicer: Any = method.stream_unary
            async with aclosing(messages()) as coming:
                return await servicer(coming, context)

        return await self._run(call, context, act, 0, lambda: received_bytes)

    def _admit_again(self, call: Call, context: _Context) -> None:
        """With each message: a stream may be older than what its peer may do now."""
        if self._admit is not None:
            self._admit(call, context)

    async def _run(
        self,
        call: Call,
        context: _Context,
        act: Callable[[], Awaitable[Any]],
        size_bytes: int,
        more_bytes: Callable[[], int] = int,
    ) -> Any:
        CURRENT.set(call)
        REQUEST_ID.set(call.request_id)
        start = time.perf_counter()
        status, figures = OK, self._figures.methods[call.method]
        figures.started += 1
        try:
            for check in self._checks:
                check(call)
            if self._admit is not None:
                self._admit(call, context)
            check_running_bytes(self._traffic, self._limits.running_bytes, call.rule, size_bytes)
            self._traffic.enter(call.rule, size_bytes)
            try:
                answer = await act()
            finally:
                self._traffic.leave(call.rule, size_bytes)
        except Refusal as refusal:
            status = REASON_CODES[refusal.reason].name
            self._figures.refusals[refusal.reason.value] += 1
            # not the message: it may name what the peer sent
            self._log.warning(
                "call refused", **_facts(call, start), code=status, reason=refusal.reason.value, field=refusal.field
            )
            await self._abort(call, context, refusal)
        except asyncio.CancelledError:
            status = "CANCELLED"
            self._log.debug("call cancelled", **_facts(call, start))
            raise
        except Exception:  # noqa: BLE001 - the outermost loop: a bug must not show its inside to the peer
            status = "INTERNAL"
            self._figures.refusals[Reason.INTERNAL.value] += 1
            self._log.error("call failed", **_facts(call, start), exc_info=True)
            await self._abort(
                call,
                context,
                Refusal(Reason.INTERNAL, f"the server failed; its log says why under request id {call.request_id}"),
            )
        else:
            self._log.debug("call", **_facts(call, start), code="OK")
            return answer
        finally:
            figures.ended(status, time.perf_counter() - start, size_bytes + more_bytes())

    async def _abort(self, call: Call, context: _Context, refusal: Refusal) -> None:
        short = Refusal(
            refusal.reason,
            refusal.message[:DETAILS_CHARS],
            field=refusal.field,
            retry_after_ms=refusal.retry_after_ms,
            resource=refusal.resource,
        )
        await context.abort(
            REASON_CODES[short.reason],
            short.message,
            ((REQUEST_ID_KEY, call.request_id), (DETAILS_KEY, rich_status(short).SerializeToString())),
        )

    def _read(self, call: Call, method: _Method, raw: bytes) -> Any:
        most = min(self._limits.message_bytes, call.rule.most_bytes)
        if len(raw) > most:
            raise Refusal(
                Reason.MESSAGE_TOO_LARGE,
                f"the message has {len(raw)} bytes; the server takes at most {most}",
                resource="message bytes",
            )
        assert method.request_deserializer is not None
        try:
            return method.request_deserializer(raw)
        except DecodeError:
            raise Refusal(Reason.INVALID_FIELD, "the request is not a message of this method") from None

    def _default_deadline_s(self, call: Call, request: Any, context: _Context) -> float | None:
        remaining_s: Any = context.time_remaining()  # None without a deadline, whatever its type says
        if call.rule.exempt or remaining_s is not None:
            return None
        default_s = self._limits.copy_deadline_s if call.rule.copies else self._limits.deadline_s
        wait_ms: int = getattr(request, "wait_ms", 0)
        return max(default_s, wait_ms / 1000 + self._limits.deadline_s) if wait_ms else default_s


def _facts(call: Call, start: float) -> dict[str, Any]:
    return {
        "method": call.method.removeprefix("/kvgrpc.v1."),
        "client_id": call.client_id if is_name(call.client_id) else "",
        "request_id": call.request_id,
        "duration_ms": round((time.perf_counter() - start) * 1000, 3),
    }
