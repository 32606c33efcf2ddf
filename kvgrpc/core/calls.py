# SPDX-License-Identifier: Apache-2.0
"""Store and Retrieve calls: their records, their order, their end.

Theory of operation. From call to answer the named blocks belong to the server. A call is queued at its client; one
slice a client is in flight at a time, and one or two more of the same call, or of a Retrieve that goes before it,
planned while that one is copied; what a call has left is planned only when its turn comes. Between two slices a waiting
Retrieve goes before Stores whose blocks it does not touch. A call ends when nothing of it is left, at its first
failure, or when it is revoked: at once if no slice of it is in flight, else when its last one is reported. Its record
stays, so that a repeat joins it or gets its result; a fenced id that has not arrived is recorded, too, and refused when
it does.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.ledger import Ledger
from kvgrpc.core.types import CallEnded, ChunkResult, Direction, RunSlice, SliceReport

if TYPE_CHECKING:
    from kvgrpc.core.sessions import Client
    from kvgrpc.core.slicing import Plan

REVOKED = "REVOKED"
SLICES_AHEAD, SLICES_LAUNCHED = 2, 3
"""Most slices of a client in flight: one that is copied, and one that waits behind it, so that copies follow each other
without a gap. Where copies run by themselves, one more is being launched, which may take as long as a copy."""
PASSING_CALLS, PASSING_BLOCKS, PASSED_BLOCKS = 8, 16384, 65536
"""How many waiting Retrieves are tried at a turn; how many blocks such a one may name, and are compared at a turn; and
how many a call may name that another goes before."""


@dataclass(eq=False, slots=True)
class Call:
    """One call id of one client. ``plan`` is there while it runs, ``results`` once it has ended; a fence's record of an
    id that has not arrived has neither."""

    client: Client
    call_id: int
    fingerprint: int = 0
    plan: Plan | None = None
    number: int = 0
    """Grows along the queue."""
    apart: int = 0
    """It touches no block of the calls in front of it up to this number."""
    blocker: Call | None = None
    """A call in front of it that touches a block of it."""
    results: tuple[ChunkResult, ...] | None = None
    revoked: bool = False
    failed: bool = False
    slice_id: int = 0
    """Its last slice, while that is in flight."""
    ended_ns: int = 0


class Calls:
    """All calls of all clients."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.in_flight = 0
        self.slices: dict[int, Call] = {}
        self.streams: list[Plan] = []
        """Stores whose bytes come by themselves (``kvgrpc.core.fillings``): no calls, and without records."""

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

    def _record(self, client: Client, call: Call, now: int) -> None:
        self.forget_old(client, now)
        if len(client.calls) >= self._ledger.limits.calls_per_client:
            # the oldest ended call makes room; a fenced id never does before its time
            oldest = next((call_id for call_id, ended in client.ended.items() if ended.results is not None), None)
            if oldest is None:
                text = f"{len(client.calls)} calls of this client are running or fenced"
                raise Refusal(Reason.CALL_LIMIT, text, retry_after_ms=1000, resource="calls")
            del client.ended[oldest], client.calls[oldest]
        client.calls[call.call_id] = call

    def forget_old(self, client: Client, now: int) -> None:
        """Drops ended records whose time is over."""
        while client.ended:
            call_id, call = next(iter(client.ended.items()))
            if call.ended_ns + self._ledger.limits.call_record_ns > now:
                return
            del client.ended[call_id], client.calls[call_id]

    def begin(self, now: int, client: Client, call_id: int, plan: Plan, fingerprint: int) -> Call:
        """Records a call and runs it as far as its client's turn allows. Refuses: CALL_LIMIT."""
        call = Call(client, call_id, fingerprint, plan)
        self._record(client, call, now)
        call.number = self._ledger.next_id()
        client.queue.append(call)
        if plan.direction is Direction.RETRIEVE:
            client.retrieves.append(call)
        self.in_flight += 1
        self.advance(now, client)
        return call

    # ---- schedule ---------------------------------------------------------------------------------------------------

    def advance(self, now: int, client: Client, most: int = 1) -> None:
        """Gives the client's next slice to the hands while fewer than ``most`` are in flight; calls that need no more
        copies end."""
        while len(client.in_flight) < most and client.queue:
            call, plan = _next(client)
            if call.revoked or call.failed:
                return
            assert client.registration is not None
            pieces = plan.next_slice()
            if not pieces:
                if client.in_flight:
                    return
                self._end(call, plan, now)
                continue
            after, call.slice_id = call.slice_id, self._ledger.next_id()
            self.slices[call.slice_id] = call
            client.in_flight.append(call)
            ids = (call.slice_id, client.client_id, client.registration.mapping_id, call.call_id)
            self._ledger.outbox.append(RunSlice(*ids, plan.direction, pieces, after, plan.part))

    def slice_done(self, now: int, slice_id: int, report: SliceReport) -> Client:
        """A slice has been reported; the client whose turn goes on."""
        call = self.slices.pop(slice_id)
        plan = call.plan
        assert plan is not None
        oldest = call.client.in_flight.pop(0)
        assert oldest is call, "slices of a client are reported in their order"
        if slice_id == call.slice_id:
            call.slice_id = 0
        call.failed |= not plan.slice_done(now, report, discard=call.revoked or call.failed)
        if (call.revoked or call.failed) and call not in call.client.in_flight:
            if call.revoked:
                plan.stop(REVOKED)
            self._end(call, plan, now)
        return call.client

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _end(self, call: Call, plan: Plan, now: int) -> None:
        client = call.client
        plan.finish(now)
        call.results = plan.results
        call.plan = None
        call.ended_ns = now
        client.queue.remove(call)
        if plan.direction is Direction.RETRIEVE:
            client.retrieves.remove(call)
        call.blocker = None
        client.ended[call.call_id] = call
        self.in_flight -= 1
        self._ledger.outbox.append(CallEnded(client.client_id, call.call_id, call.results))

    def revoke(self, now: int, call: Call) -> bool:
        """Ends a running call as soon as nothing of it can touch its blocks; True when that is now."""
        if call.plan is None:
            return True
        if call in call.client.in_flight:
            if not call.revoked:
                call.revoked = True
                call.plan.abandon()
            return False
        call.plan.stop(REVOKED)
        self._end(call, call.plan, now)
        return True

    def fence(self, now: int, client: Client, call_ids: Sequence[int]) -> tuple[int, ...]:
        """Revokes calls; those that still run. Unknown ids are recorded as refused. Refuses: CALL_LIMIT."""
        running: list[int] = []
        for call_id in call_ids:
            call = client.calls.get(call_id)
            if call is None:
                self._record(client, fenced := Call(client, call_id, ended_ns=now), now)
                client.ended[call_id] = fenced
            elif not self.revoke(now, call):
                running.append(call_id)
        return tuple(running)

    def revoke_all(self, now: int, client: Client) -> None:
        """The client's memory is going: queued calls end, the running one ends with its slice."""
        for call in list(client.queue):
            self.revoke(now, call)


def fingerprint(blocks: Sequence[Sequence[int]], *asked: Hashable) -> int:
    """Of what a call asks for: a repeat must ask for the same."""
    return hash((asked, *(ids.tobytes() if isinstance(ids, array) else tuple(ids) for ids in blocks)))


def _next(client: Client) -> tuple[Call, Plan]:
    """The first call, or one of the first Retrieves that may go before the Stores in front of it."""
    call = client.queue[0]
    assert call.plan is not None
    room = PASSING_BLOCKS
    if call.plan.direction is Direction.STORE:
        for retrieve in islice(client.retrieves, PASSING_CALLS):
            if retrieve.plan is not None:
                passes, room = _may_pass(client, retrieve, retrieve.plan, room)
                if passes:
                    return retrieve, retrieve.plan
    return call, call.plan


def _may_pass(client: Client, retrieve: Call, plan: Plan, room: int) -> tuple[bool, int]:
    """Whether it touches no block of any call in front of it, and how many blocks may still be compared at this turn.
    What was found out is kept, so that in all its turns a call is compared with each call in front of it once."""
    if plan.num_blocks > PASSING_BLOCKS or (retrieve.blocker is not None and retrieve.blocker.plan is not None):
        return False, room
    retrieve.blocker = None
    for call in client.queue:
        if call is retrieve:
            return True, room
        if call.number > retrieve.apart and call.plan is not None:
            if room <= 0 or call.plan.num_blocks > PASSED_BLOCKS:
                return False, room
            room -= call.plan.num_blocks
            if plan.touches(call.plan):
                retrieve.blocker = call
                return False, room
            retrieve.apart = call.number
    return False, room
