# SPDX-License-Identifier: Apache-2.0
"""The state of the core as plain data, for operators."""

from __future__ import annotations

from kvgrpc.core.index import Index
from kvgrpc.core.keys import fingerprint
from kvgrpc.core.sessions import Client, Sessions
from kvgrpc.core.states import DOOMED, FREE, READY, SETTLING, WRITING
from kvgrpc.core.types import ArenaStatus, ClientStatus, Counts, EngineStatus, SpaceStatus
from kvgrpc.core.writes import WriteBehind


def arena(index: Index) -> ArenaStatus:
    """Bytes by state."""
    by_state = index.slots.bytes_by_state
    return ArenaStatus(
        total_bytes=index.slots.total_bytes,
        free_bytes=by_state[FREE],
        writing_bytes=by_state[WRITING],
        ready_bytes=by_state[READY] - index.pinned_bytes,
        pinned_bytes=index.pinned_bytes,
        doomed_bytes=by_state[DOOMED],
        settling_bytes=by_state[SETTLING],
        held_bytes=index.held_bytes,
    )


def counts(index: Index, sessions: Sessions, jobs: int, pins: int, calls_in_flight: int) -> Counts:
    """How many of what there are."""
    return Counts(
        chunks=sum(space.table.complete for space in index.spaces.values()),
        spaces=sum(1 for space in index.spaces.values() if space.table.chunks),
        engines=len(sessions.engines),
        clients=len(sessions.clients) - len(sessions.broken),
        jobs=jobs,
        pins=pins,
        calls_in_flight=calls_in_flight,
    )


def engines(sessions: Sessions) -> tuple[EngineStatus, ...]:
    """All engines with their clients."""
    return tuple(
        EngineStatus(
            engine=fingerprint(engine.engine_id),
            clients=tuple(map(_client, engine.clients.values())),
            jobs=len(engine.jobs),
            pins=sum(job.lease.pins for job in engine.jobs.values()),
            draining=engine.draining,
        )
        for engine in sessions.engines.values()
    )


def _client(client: Client) -> ClientStatus:
    r = client.registration
    return ClientStatus(
        client_id=client.client_id,
        role=client.role,
        attached=client.attached,
        registered=r is not None,
        kv_rank=r.kv_rank if r else 0,
        tp_rank=r.tp_rank if r else 0,
        memory_bytes=r.memory_bytes if r else 0,
        calls_in_flight=len(client.queue),
    )


def spaces(index: Index, writes: WriteBehind) -> tuple[SpaceStatus, ...]:
    """All spaces that hold data."""
    return tuple(
        SpaceStatus(
            space_base=space.ref.space_base,
            identity=space.facts.identity,
            lora=space.ref.lora,
            salt_fingerprint=fingerprint(space.ref.cache_salt) if space.ref.cache_salt else "",
            generation=space.facts.generation,
            chunks=space.table.complete,
            bytes=space.table.used_bytes,
            pinned_chunks=space.table.pinned,
            write_policy=writes.policy(space),
        )
        for space in index.spaces.values()
        if space.table.chunks
    )
