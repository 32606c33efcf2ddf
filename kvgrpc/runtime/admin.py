# SPDX-License-Identifier: Apache-2.0
"""The operator's view in process: AdminApi over the driver."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from kvgrpc import api
from kvgrpc.core import inspection
from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.types import MS, Cleared, Direction, Held, Quota, SpaceRef, Warmed, WritePolicy
from kvgrpc.runtime.driver import Driver
from kvgrpc.tiers.base import Tier, TierFault

TIER_ANSWER_S = 1.0
"""What a tier gets to say how much it holds."""
TIER_INSPECT_S = 3.0
"""What a tier gets to say what it has of the chunks that an operator asks for."""


class DriverAdmin:
    """AdminApi of a driver. Holds no state of its own."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def get_status(self) -> api.ServerStatus:
        driver = self._driver
        counts = driver.book.counts()
        tiers = await asyncio.gather(*(self._tier_status(name, tier) for name, tier in driver.hands.tiers.items()))
        return api.ServerStatus(
            server_version=driver.facts.server_version,
            server_epoch=driver.facts.server_epoch,
            uptime_ms=(driver.now() - driver.started_ns) // MS,
            chunk_tokens=driver.limits.chunk_tokens,
            draining=False,
            arena=driver.book.arena_status(),
            chunks=counts.chunks,
            spaces=counts.spaces,
            engines=counts.engines,
            clients=counts.clients,
            jobs=counts.jobs,
            pins=counts.pins,
            calls_in_flight=counts.calls_in_flight,
            tiers=tuple(tiers),
            executors=tuple(api.ExecutorStatus(*lane) for lane in driver.hands.affinity.lanes()),
            counters={
                **driver.book.counters,
                "stored_bytes": driver.copied_bytes[Direction.STORE],
                "loaded_bytes": driver.copied_bytes[Direction.RETRIEVE],
                "write_chunks_bytes": driver.writes.bytes,
                "read_chunks_bytes": driver.reads.bytes,
            },
            restart=api.RestartStatus() if driver.recorder is None else driver.recorder.status(),
        )

    async def _tier_status(self, name: str, tier: Tier) -> api.TierStatus:
        """A tier that does not say how much it holds is shown as unhealthy; it must not take the status away."""
        below = self._driver.below
        used_bytes, healthy, counters = 0, tier.healthy, dict(tier.counters)
        try:
            used_bytes = await asyncio.wait_for(tier.usage(), TIER_ANSWER_S)
        except (TierFault, asyncio.TimeoutError):
            healthy, counters = False, {**counters, "silent": 1}
        writes, queued = below.writes(name)
        reads = below.reads_in_flight(name)
        return api.TierStatus(name, healthy, used_bytes, reads, writes, queued, counters)

    async def list_engines(self) -> tuple[api.EngineStatus, ...]:
        return tuple(
            replace(engine, clients=tuple(self._with_thread(client) for client in engine.clients))
            for engine in self._driver.book.engines()
        )

    def _with_thread(self, client: api.ClientStatus) -> api.ClientStatus:
        thread = self._driver.hands.affinity.thread_of(client.client_id)
        return replace(client, thread=thread or 0)

    async def list_spaces(self) -> tuple[api.SpaceStatus, ...]:
        return self._driver.book.spaces()

    async def clear(self, target: api.ClearTarget) -> Cleared:
        driver = self._driver
        driver.forgets += 1
        cleared = driver.book.clear(
            driver.now(), space=target.space, model=target.model, cache_salt=target.cache_salt, everything=target.all
        )
        driver.pump()
        await self._saved()
        return cleared

    async def bump_generation(self, *, model: str = "", space_base: bytes = b"") -> Cleared:
        driver = self._driver
        driver.forgets += 1
        cleared = driver.book.bump_generation(driver.now(), model=model, space_base=space_base)
        driver.pump()
        await self._saved()
        return cleared

    async def _saved(self) -> None:
        """What was cleared will stay so. Goes on, and lets no later one pass, also where nobody waits any more: kept
        behind that it would undo it."""
        saving = asyncio.ensure_future(self._driver.save_versions())
        saving.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(saving)

    async def pin(self, space: SpaceRef, content: api.Content, ttl_ms: int) -> Held:
        driver = self._driver
        keys = await driver.chunk_keys(space, content)
        held = driver.book.pin(driver.now(), space, keys, ttl_ms * MS, secrets.token_bytes(16))
        driver.pump()
        return held

    async def warm(self, space: SpaceRef, content: api.Content, wait_ms: int) -> Warmed:
        driver, job_id = self._driver, secrets.token_bytes(16)
        keys = await driver.chunk_keys(space, content)
        if keys.first_chunk:
            raise Refusal(Reason.INVALID_FIELD, "a prefix begins with the prompt", field="content.first_chunk")
        lookups = driver.book.lookups
        warmed = lookups.warm(driver.now(), space, keys.keys, wait_ms * MS, job_id)
        if warmed is None:
            waiting = asyncio.ensure_future(driver.wait_job(job_id, wait_ms + 1000))
            driver.pump()
            try:
                await waiting
            finally:
                waiting.cancel()
                warmed = lookups.warmed(job_id)
                driver.pump()
        return warmed

    async def inspect(self, space: SpaceRef, content: api.Content) -> api.Inspection:
        driver = self._driver
        if isinstance(content, api.Hashes):
            most = driver.limits.keys_per_call
            if len(content.hashes) > most:
                text = f"content has {len(content.hashes)} chunks; a call may name {most}"
                raise Refusal(Reason.INVALID_FIELD, text, field="content")
            keys: Sequence[bytes] = content.hashes
        else:
            keys = (await driver.chunk_keys(space, content)).keys
        found = inspection.inspect(driver.book, driver.now(), space, keys)
        names = [name.name for _, name in found.objects]
        ranks: list[dict[str, int]] = [{} for _ in keys]
        silent: list[str] = []
        answers = await asyncio.gather(*(_present(tier, names) for tier in driver.hands.tiers.values()))
        for tier_name, present in zip(driver.hands.tiers, answers, strict=True):
            if present is None:
                silent.append(tier_name)
                continue
            for (at, _), is_there in zip(found.objects, present, strict=True):
                if is_there:
                    ranks[at][tier_name] = ranks[at].get(tier_name, 0) + 1
        asked = len(names) if driver.hands.tiers else 0
        return api.Inspection(found.chunks, found.keepers, found.more_keepers, tuple(ranks), asked, tuple(silent))

    def record_trace(self) -> AsyncIterator[api.TracedCalls]:
        return self._driver.recordings.record()

    async def unpin(self, pin_id: bytes) -> int:
        released = self._driver.book.unpin(self._driver.now(), pin_id)
        self._driver.pump()
        return released

    async def set_quota(self, cache_salt: str, size_bytes: int | None) -> Quota:
        driver, quotas = self._driver, self._driver.book.quotas
        quotas.set(cache_salt, size_bytes)
        while quotas.shrink(cache_salt):
            driver.pump()
            await asyncio.sleep(0)
        return quotas.get(cache_salt)

    async def get_quota(self, cache_salt: str) -> Quota:
        return self._driver.book.quotas.get(cache_salt)

    async def set_write_policy(self, model: str, policy: WritePolicy | None) -> WritePolicy:
        return self._driver.book.set_write_policy(model, policy)

    async def drain_engine(self, engine: str, wait_ms: int = 0) -> bool:
        driver = self._driver
        engine_id = driver.book.drain_engine(driver.now(), engine)
        driver.pump()
        deadline_ns = driver.now() + wait_ms * MS
        while not driver.book.engine_idle(engine_id):
            left_s = (deadline_ns - driver.now()) / 1e9
            if left_s <= 0:
                return False
            await driver.wait_pulse(left_s)
        return True


async def _present(tier: Tier, names: Sequence[str]) -> list[bool] | None:
    """Which of the objects the tier has; None if it does not say in time."""
    try:
        return await asyncio.wait_for(tier.exists(names), TIER_INSPECT_S)
    except (TierFault, asyncio.TimeoutError):
        return None
