# SPDX-License-Identifier: Apache-2.0
"""What must be true between any two calls of the bookkeeper. For tests and simulations; slow on purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from kvgrpc.core.cache import Bookkeeper
from kvgrpc.core.calls import SLICES_LAUNCHED
from kvgrpc.core.index import Chunk, Table
from kvgrpc.core.parted import PartedPlan
from kvgrpc.core.plans import RetrievePlan, StorePlan
from kvgrpc.core.sessions import Client
from kvgrpc.core.slicing import PartPlan, Plan
from kvgrpc.core.slots import Slot
from kvgrpc.core.states import DOOMED, FREE, READY, SETTLING, WRITING, SlotState
from kvgrpc.core.types import Extent, Priority


def check(book: Bookkeeper) -> None:
    """Asserts everything."""
    chunks = {id(chunk): chunk for chunk in _chunks(book)}
    slots = {id(slot): slot for chunk in chunks.values() for slot in chunk.slots.values()}
    settling = {id(slot): slot for slot in _in_flight(book) if slot.state is SETTLING}
    _check_memory(book, [*slots.values(), *settling.values()])
    _check_chunks(book, list(chunks.values()))
    _check_uses(book, list(chunks.values()))
    _check_tables(book)
    _check_jobs(book)
    _check_calls(book)
    _check_writes(book)


def _tables(book: Bookkeeper) -> Iterator[Table]:
    yield from (space.table for space in book.index.spaces.values())
    yield from book.index.dead


def _chunks(book: Bookkeeper) -> Iterator[Chunk]:
    """Every chunk that has slots: in tables, in leases, in running calls, in reads."""
    for table in _tables(book):
        yield from table.chunks.values()
    for job in book.jobs.jobs.values():
        yield from job.lease.chunks
        if job.prefetch is not None:
            yield from job.prefetch.planned
    for plan in _plans(book):
        yield from _held(plan)
        yield from _pinned(plan)
    yield from (read.chunk for read in book.prefetcher.reads.values())
    yield from (write.chunk for write in book.writes.flights.values())
    yield from (sealing.chunk for sealing in book.records.unchecked)


def _clients(book: Bookkeeper) -> list[Client]:
    """Attached, in their grace, or ending."""
    return [*book.sessions.clients.values(), *book.sessions.ending.values()]


def _parts(plan: Plan) -> list[PartPlan]:
    """The plans of a call's parts."""
    plans = plan.plans if isinstance(plan, PartedPlan) else [plan]
    return [one for one in plans if isinstance(one, PartPlan)]


def _plans(book: Bookkeeper) -> Iterator[PartPlan]:
    for client in _clients(book):
        for call in client.queue:
            yield from _parts(call.plan) if call.plan is not None else ()
    for stream in book.calls.streams:
        yield from _parts(stream)


def _held(plan: Plan) -> list[Chunk]:
    return plan.held or [] if isinstance(plan, StorePlan) else []


def _pinned(plan: Plan) -> list[Chunk]:
    return plan.pinned or [] if isinstance(plan, RetrievePlan) else []


def _in_flight(book: Bookkeeper) -> Iterator[Slot]:
    for plan in _plans(book):
        yield from (slot for flight in plan.flights for slot in flight.slots)
    yield from (read.slot for read in book.prefetcher.reads.values())


def _check_memory(book: Bookkeeper, slots: list[Slot]) -> None:
    """Extents are inside the arena, nobody shares a byte, states add up to the whole."""
    table = book.index.slots
    sums = Counter(dict.fromkeys(SlotState, 0))
    taken: list[Extent] = []
    for slot in slots:
        assert slot.state is not FREE, "a free slot is still in use"
        sums[slot.state] += slot.taken_bytes
        assert sum(length for _, length in slot.extents) == slot.taken_bytes >= slot.size_bytes
        taken += slot.extents
    page = table.page_bytes
    taken += [(start * page, length * page) for start, length in table.pages.runs()]
    taken.sort()
    end = 0
    for start, length in taken:
        assert start >= end, f"two owners of the arena at {start}"
        end = start + length
    assert end <= table.total_bytes
    sums[FREE] = table.total_bytes - sum(sums.values())
    assert dict(sums) == table.bytes_by_state, f"{dict(sums)} != {table.bytes_by_state}"


def _check_chunks(book: Bookkeeper, chunks: list[Chunk]) -> None:
    for chunk in chunks:
        assert chunk.pins >= 0 <= chunk.writes
        assert chunk.holds >= 0
        for rank, slot in chunk.slots.items():
            ready, writing = chunk.ready >> rank & 1, chunk.writing >> rank & 1
            assert ready + writing == 1, "an object is either complete or being written"
            allowed = (READY,) if ready else (WRITING,)
            assert slot.state in (*allowed, DOOMED), slot.state
            assert slot.state is not DOOMED or not chunk.table.live
        assert chunk.ready | chunk.writing == sum(1 << rank for rank in chunk.slots)
        if chunk.table.live and chunk.ready:
            _check_queued(book, chunk)
        if chunk.table.live and chunk.slots:
            assert chunk.table.chunks.get(chunk.key) is chunk
    for account in book.index.accounts.values():
        assert account.used_bytes >= 0
    usage: Counter[int] = Counter()
    for chunk in chunks:
        usage[id(chunk.account)] += sum(slot.taken_bytes for slot in chunk.slots.values())
    for account in book.index.accounts.values():
        assert account.used_bytes == usage[id(account)], "a tenant's bytes add up"


def _check_queued(book: Bookkeeper, chunk: Chunk) -> None:
    """A chunk has one place in the order of its priority, and its tenant's if that has a quota."""
    for queues in filter(None, (book.index.eviction.queues, chunk.account.queues)):
        for priority, queue in zip(Priority, queues, strict=True):
            places = (chunk in queue.order) + (chunk in queue.parked)
            if priority is chunk.priority:
                assert places == 1 or (places == 0 and chunk.in_use), (
                    "queued once, at the latest when its first use ends"
                )
            else:
                assert places == 0, "queued by its priority"


def _check_uses(book: Bookkeeper, chunks: list[Chunk]) -> None:
    """Pins, writes and holds are exactly those that somebody accounts for."""
    pins: Counter[int] = Counter()
    writes: Counter[int] = Counter()
    for job in book.jobs.jobs.values():
        for chunk, bits in zip(job.lease.chunks, job.lease.remaining, strict=True):
            pins[id(chunk)] += bool(bits)
        if job.prefetch is not None:
            for chunk in job.prefetch.planned:
                pins[id(chunk)] += 1
    for plan in _plans(book):
        pins.update(map(id, _pinned(plan)))
        writes.update(map(id, _held(plan)))
    pins.update(map(id, book.leases.reading))
    writes.update(id(write.chunk) for write in book.writes.flights.values())
    holds = Counter(map(id, chain(book.holds.retained, *book.holds.pins.values())))
    for chunk in chunks:
        assert chunk.pins == pins[id(chunk)], "pins are those of leases, prefetches and running reads"
        assert chunk.writes == writes[id(chunk)] + chunk.writing.bit_count(), "writes are those of slots, stores, tiers"
        assert chunk.holds == holds[id(chunk)]
    index = book.index
    ready = [chunk for chunk in chunks if chunk.ready_bytes]
    assert index.pinned_bytes == sum(chunk.ready_bytes for chunk in ready if chunk.pins)
    assert index.held_bytes == sum(chunk.ready_bytes for chunk in ready if chunk.holds)
    assert book.leases.pins == sum(job.lease.pins for job in book.jobs.jobs.values())


def _check_tables(book: Bookkeeper) -> None:
    for space in book.index.spaces.values():
        assert space.table.live
    for table in _tables(book):
        chunks = table.chunks.values()
        if table.live:
            all_ranks = table.space.facts.all_ranks
            assert table.complete == sum(chunk.ready == all_ranks for chunk in chunks)
            assert table.pinned == sum(chunk.pins > 0 and chunk.complete for chunk in chunks)
            assert all(chunk.complete == (chunk.ready == all_ranks) for chunk in chunks)
            taken = sum(slot.taken_bytes for chunk in chunks for slot in chunk.slots.values())
            assert table.used_bytes == taken


def _check_jobs(book: Bookkeeper) -> None:
    jobs = book.jobs
    limits = book.limits
    assert jobs.record_bytes == sum(job.cost_bytes for job in jobs.jobs.values()) <= limits.records_bytes
    for job in jobs.jobs.values():
        assert job.engine.jobs[job.job_id] is job
        assert job in jobs.recorded
        pinned = any(job.lease.remaining)
        assert job.status.done == (job.prefetch is None)
        assert (job in jobs.leased) == (job.status.done and pinned)
        assert (job in jobs.finished) == (job in job.engine.finished) == (job.status.done and not pinned)
        assert not job.status.done or len(job.keys) * limits.chunk_tokens == job.status.hit_tokens
    for engine in book.sessions.engines.values():
        assert engine.clients, "an engine goes with its last client"
        assert len(engine.jobs) <= limits.jobs_per_engine
        assert all(jobs.jobs.get(job_id) is job for job_id, job in engine.jobs.items())
        assert {job for jobs in engine.requests.values() for job in jobs.values()} == set(engine.jobs.values())
    assert len(jobs.jobs) == sum(len(engine.jobs) for engine in (book.lookups.warming, *book.sessions.engines.values()))


def _check_calls(book: Bookkeeper) -> None:
    running = 0
    for client in _clients(book):
        running += len(client.queue)
        assert len(client.calls) <= book.limits.calls_per_client
        for call in client.queue:
            assert call.plan is not None
            assert call.results is None
        assert client.gone == (book.sessions.clients.get(client.client_id) is not client)
        assert len(client.in_flight) <= SLICES_LAUNCHED
        for call in set(client.in_flight):
            assert call in client.queue
            assert call.plan is not None
            assert client.in_flight.count(call) == sum(len(plan.flights) for plan in _parts(call.plan))
        if not client.in_flight:
            assert not client.queue, "a call waits although no slice is in flight"
            assert not client.unmaps, "memory waits to be unmapped although no slice is in flight"
        for call_id, call in client.ended.items():
            assert client.calls[call_id] is call
            assert call.plan is None
    assert book.calls.in_flight == running


def _check_writes(book: Bookkeeper) -> None:
    """What is on its way into a tier is there, whole, and bounded; what is promised to a tier is marked as such."""
    limits, total_bytes = book.limits, book.index.slots.total_bytes
    for lane in book.writes.lanes:
        flights = [write for write in book.writes.flights.values() if write.lane is lane]
        assert lane.flights == len(flights) <= limits.writes_in_flight
        assert lane.flying_bytes == sum(write.slot.taken_bytes for write in flights)
        assert len(flights) <= 1 or lane.flying_bytes <= total_bytes * limits.write_share
        assert len(lane.queue) <= limits.writes_queued
        assert len(set(lane.queue)) == len(lane.queue), "queued twice"
    for write in book.writes.flights.values():
        assert write.slot.state in (READY, DOOMED), "a slot is written from while its bytes may change"
        assert write.chunk.slots[write.kv_rank] is write.slot
    for job in book.prefetcher.blocked:
        assert job.prefetch is not None
        assert book.prefetcher.reading_bytes, "a lookup waits for reads, but there are none"
