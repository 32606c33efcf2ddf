# SPDX-License-Identifier: Apache-2.0
"""Store and Retrieve calls: their records, their order, their end.

Theory of operation. From call to answer the named blocks belong to the server. A call is queued at its client; one slice
a client is in flight at a time; what a call has left is planned only when its turn comes. Between two slices a waiting
Retrieve goes before Stores whose blocks it does not touch. A call ends when nothing of it is left, at its first failure,
or when it is revoked: at once if no slice of it is in flight, else when that slice is reported. Its record stays, so that
a repeat joins it or gets its result; a fenced id that has not arrived is recorded, too, and refused when it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.ledger import Ledger
from kvgrpc.core.types import CallEnded, ChunkOutcome, ChunkResult, Direction, RunSlice, SliceReport

if TYPE_CHECKING:
    from kvgrpc.core.plans import RetrievePlan, StorePlan
    from kvgrpc.core.sessions import Client

REVOKED = "REVOKED"


class Results:
    """Outcomes of consecutive chunks, run-length coded as they come."""

    __slots__ = ("_runs", "next_chunk")

    def __init__(self, first_chunk: int) -> None:
        self.next_chunk = first_chunk
        self._runs: list[list[object]] = []

    def add(self, outcome: ChunkOutcome, reason: str = "", count: int = 1) -> None:
        """The outcome of the next ``count`` chunks."""
        if count <= 0:
            return
        last = self._runs[-1] if self._runs else None
        if last is not None and last[2] is outcome and last[3] == reason:
            last[1] += count  # type: ignore[operator]
        else:
            self._runs.append([self.next_chunk, count, outcome, reason])
        self.next_chunk += count

    def frozen(self) -> tuple[ChunkResult, ...]:
        return tuple(ChunkResult(*run) for run in self._runs)  # type: ignore[arg-type]


class Call:
    """One call id of one client. ``plan`` is there while it runs, ``results`` once it has ended; a fence's record of an id
    that has not arrived has neither."""

    __slots__ = ("blocks", "call_id", "client", "ended_ns", "fingerprint", "plan", "results", "revoked", "slice_id")

    def __init__(self, client: Client, call_id: int) -> None:
        self.client = client
        self.call_id = call_id
        self.fingerprint = 0
        self.plan: StorePlan | RetrievePlan | None = None
        self.blocks: frozenset[tuple[int, int]] = frozenset()
        self.results: tuple[ChunkResult, ...] | None = None
        self.revoked = False
        self.slice_id = 0
        self.ended_ns = 0

    @property
    def is_retrieve(self) -> bool:
        return self.plan is not None and self.plan.direction is Direction.RETRIEVE


class Calls:
    """All calls of all clients."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.in_flight = 0
        self.slices: dict[int, Call] = {}

    # ---- records ----------------------------------------------------------------------------------------------------

    def find_repeat(self, client: Client, call_id: int, fingerprint: int) -> Call | None:
        """The call of this id, if there was one. Refuses: CALL_REVOKED for a fenced id, CALL_ID_REUSED."""
        call = client.calls.get(call_id)
        if call is None:
            return None
        if call.plan is None and call.results is None:
            raise Refusal(Reason.CALL_REVOKED, f"call {call_id} was fenced before it arrived", field="call_id")
        if call.fingerprint != fingerprint:
            text = f"call_id {call_id} was used for another call in this session"
            raise Refusal(Reason.CALL_ID_REUSED, text, field="call_id")
        return call

    def _record(self, client: Client, call_id: int, now: int) -> Call:
        self.forget_old(client, now)
        if len(client.calls) >= self._ledger.limits.calls_per_client:
            self._forget_one(client)
        call = client.calls[call_id] = Call(client, call_id)
        return call

    def _forget_one(self, client: Client) -> None:
        """Room for one record: the oldest ended call goes; a fenced id never before its time."""
        for call_id, call in client.ended.items():
            if call.results is not None:
                del client.ended[call_id], client.calls[call_id]
                return
        text = f"{len(client.calls)} calls of this client are running or fenced"
        raise Refusal(Reason.CALL_LIMIT, text, retry_after_ms=1000, resource="calls")

    def forget_old(self, client: Client, now: int) -> None:
        """Drops ended records whose time is over."""
        oldest_ns = now - self._ledger.limits.call_record_ns
        while client.ended:
            call_id, call = next(iter(client.ended.items()))
            if call.ended_ns > oldest_ns:
                return
            del client.ended[call_id], client.calls[call_id]

    def begin(self, now: int, client: Client, call_id: int, plan: StorePlan | RetrievePlan, fingerprint: int) -> Call:
        """Records a call and runs it as far as its client's turn allows. Refuses: CALL_LIMIT."""
        call = self._record(client, call_id, now)
        call.fingerprint = fingerprint
        call.plan = plan
        call.blocks = plan.block_set()
        client.queue.append(call)
        self.in_flight += 1
        self.advance(now, client)
        return call

    # ---- schedule ---------------------------------------------------------------------------------------------------

    def advance(self, now: int, client: Client) -> None:
        """Gives the client's next slice to the hands; calls that need no more copies end."""
        while client.running is None and client.queue:
            call = self._next(client)
            plan = call.plan
            assert plan is not None and client.registration is not None
            pieces = plan.next_slice()
            if not pieces:
                self._end(call, now)
                continue
            call.slice_id = self._ledger.next_id()
            client.running = call
            self.slices[call.slice_id] = call
            self._ledger.outbox.append(
                RunSlice(
                    call.slice_id,
                    client.client_id,
                    client.registration.mapping_id,
                    call.call_id,
                    plan.direction,
                    pieces,
                )
            )

    def _next(self, client: Client) -> Call:
        """The first call, or the first Retrieve that may go before the Stores in front of it."""
        first = client.queue[0]
        if first.is_retrieve:
            return first
        passed: set[tuple[int, int]] = set()
        for call in client.queue:
            if call.is_retrieve and passed.isdisjoint(call.blocks):
                return call
            passed |= call.blocks
        return first

    def slice_done(self, now: int, slice_id: int, report: SliceReport) -> Client:
        """A slice has been reported; the client whose turn goes on."""
        call = self.slices.pop(slice_id)
        client = call.client
        client.running = None
        plan = call.plan
        assert plan is not None
        going_on = plan.slice_done(report, now, discard=call.revoked)
        if call.revoked:
            plan.stop(REVOKED)
            self._end(call, now)
        elif not going_on:
            self._end(call, now)
        return client

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _end(self, call: Call, now: int) -> None:
        plan = call.plan
        assert plan is not None
        plan.finish(now)
        call.results = plan.results.frozen()
        call.plan = None
        call.blocks = frozenset()
        client = call.client
        client.queue.remove(call)
        self.in_flight -= 1
        call.ended_ns = now
        client.ended[call.call_id] = call
        self._ledger.outbox.append(CallEnded(client.client_id, call.call_id, call.results))

    def revoke(self, now: int, call: Call) -> bool:
        """Ends a running call as soon as nothing of it can touch its blocks; True when that is now."""
        if call.plan is None:
            return True
        if call.client.running is call:
            if not call.revoked:
                call.revoked = True
                call.plan.abandon()
            return False
        call.plan.stop(REVOKED)
        self._end(call, now)
        return True

    def fence(self, now: int, client: Client, call_ids: Sequence[int]) -> tuple[int, ...]:
        """Revokes calls; those that still run. Unknown ids are recorded as refused. Refuses: CALL_LIMIT."""
        running: list[int] = []
        for call_id in call_ids:
            call = client.calls.get(call_id)
            if call is None:
                call = self._record(client, call_id, now)
                call.ended_ns = now
                client.ended[call_id] = call
            elif not self.revoke(now, call):
                running.append(call_id)
        return tuple(running)

    def revoke_all(self, now: int, client: Client) -> None:
        """The client's memory is going: queued calls end, the running one ends with its slice."""
        for call in list(client.queue):
            self.revoke(now, call)
