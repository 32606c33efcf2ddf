# SPDX-License-Identifier: Apache-2.0
"""A deadline, a breaker and counters around any tier, so that one that is slow, dead or hanging is left alone soon and
asked again by itself.

A call whose time is up is cancelled, and the tier counts as failing from that moment on; but a read or write ends only
when the tier has let go of its buffers. Reads and writes have a breaker each: a full disk can still be read.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvgrpc.breaker import Breaker, BreakerSettings, Permit
from kvgrpc.core.types import ObjectName
from kvgrpc.tiers.base import DAMAGED, FaultReason, Tier, TierFault

T = TypeVar("T")
Clock = Callable[[], int]

_NO_SIGN = DAMAGED | {FaultReason.MISSING, FaultReason.FULL}
"""Faults of an object, not of the tier."""


BREAKER = BreakerSettings(failures=3, first_delay_ns=1_000_000_000, longest_delay_ns=4_000_000_000)
"""A tier that has come back is in use again within some seconds."""


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """``deadline_s`` of a call; a read that nobody waits for any more after ``patience_s`` was too slow."""

    deadline_s: float = 10.0
    patience_s: float = 1.0
    breaker: BreakerSettings = BREAKER


class _Gate:
    """One breaker, and what its calls say to it."""

    def __init__(self, settings: BreakerSettings, clock: Clock) -> None:
        self.breaker = Breaker(settings)
        self._clock = clock
        self._failed = ""
        self.opened = 0

    def admit(self) -> Permit | None:
        return self.breaker.admit(self._clock())

    def fail(self, permit: Permit, what: str) -> None:
        was_open, self._failed = self.breaker.is_open, what
        self.breaker.fail(permit, self._clock())
        self.opened += self.breaker.is_open and not was_open

    def succeed(self, permit: Permit, what: str) -> None:
        """A probe that is answered does not make up for reads that hang."""
        if what != "probe" or self._failed == "probe":
            self.breaker.succeed()
        else:
            self.breaker.give_up(permit)


class Guarded:
    """Tier around a tier. Raises SKIPPED without asking while the breaker is open.

    Counts: reads, read_bytes, writes, written_bytes, probes, and each fault as ``read_faults_REASON`` or
    ``write_faults_REASON``; ``breaker_opened``.
    """

    def __init__(self, tier: Tier, settings: GuardSettings | None = None, clock: Clock = time.monotonic_ns) -> None:
        self._tier = tier
        self._settings = settings = settings or GuardSettings()
        self._reading = _Gate(settings.breaker, clock)
        self._writing = _Gate(settings.breaker, clock)
        self._counts: Counter[str] = Counter()
        self._closed = False

    @property
    def name(self) -> str:
        return self._tier.name

    @property
    def healthy(self) -> bool:
        return self._tier.healthy and not self._reading.breaker.is_open

    @property
    def counters(self) -> Mapping[str, int]:
        opened = self._reading.opened + self._writing.opened
        now = {"writes_stopped": int(self._writing.breaker.is_open)}
        return {**self._tier.counters, **self._counts, **({"breaker_opened": opened} if opened else {}), **now}

    async def exists(self, names: Sequence[str]) -> list[bool]:
        self._counts["probes"] += len(names)
        return await self._ask(self._reading, "probe", self._tier.exists(names))

    async def read(self, object: ObjectName, into: Sequence[memoryview]) -> None:
        await self._ask(self._reading, "read", self._tier.read(object, into))
        self._counts["reads"] += 1
        self._counts["read_bytes"] += object.size_bytes

    async def write(self, object: ObjectName, data: Sequence[memoryview]) -> None:
        await self._ask(self._writing, "write", self._tier.write(object, data))
        self._counts["writes"] += 1
        self._counts["written_bytes"] += object.size_bytes

    async def remove(self, name: str) -> None:
        await self._ask(self._writing, "remove", self._tier.remove(name))

    async def usage(self) -> int:
        """Also after ``close``: the last metrics of a server that goes ask for it. Then TierFault (IO)."""
        if self._closed:
            raise TierFault(FaultReason.IO, f"{self.name} is closed")
        return await asyncio.wait_for(self._tier.usage(), self._settings.deadline_s)

    async def close(self) -> None:
        self._closed = True
        await self._tier.close()

    async def _ask(self, gate: _Gate, what: str, call: Coroutine[Any, Any, T]) -> T:
        permit = gate.admit()
        if permit is None:
            call.close()
            self._counts[f"{what}_faults_SKIPPED"] += 1
            raise TierFault(FaultReason.SKIPPED, f"{self.name} has failed lately and is left alone for a while")
        began, late = time.monotonic(), False
        asked, once = asyncio.ensure_future(call), list[bool]()

        def too_late() -> None:
            nonlocal late
            late = True
            gate.fail(permit, what)
            once.append(asked.cancel())

        timer = asyncio.get_running_loop().call_later(self._settings.deadline_s, too_late)
        try:
            answer = await _ended(asked, once)
        except TierFault as fault:
            self._told(gate, permit, what, fault.reason, late)
            raise
        except asyncio.CancelledError:
            if late:
                self._counts[f"{what}_faults_TIMEOUT"] += 1
                text = f"{what} of {self.name} took longer than {self._settings.deadline_s:g} s"
                raise TierFault(FaultReason.TIMEOUT, text) from None
            if what == "read" and time.monotonic() - began >= self._settings.patience_s:
                gate.fail(permit, what)
            else:
                gate.breaker.give_up(permit)
            raise
        except BaseException:
            if not late:
                gate.fail(permit, what)
            raise
        finally:
            timer.cancel()
        if not late:
            gate.succeed(permit, what)
            if what == "write" and self._reading.breaker.is_open:
                self._reading.breaker.retry_now()
        return answer

    def _told(self, gate: _Gate, permit: Permit, what: str, reason: FaultReason, late: bool) -> None:
        self._counts[f"{what}_faults_{reason.value}"] += 1
        if reason in _NO_SIGN:
            gate.breaker.give_up(permit)
        elif not late:
            gate.fail(permit, what)


async def _ended(asked: asyncio.Future[T], once: list[bool]) -> T:
    """Its answer; whoever is cancelled meanwhile cancels it, unless that was done, and waits until it has ended."""
    try:
        return await asyncio.shield(asked)
    except asyncio.CancelledError:
        if not once:
            asked.cancel()
        while not asked.done():
            try:
                await asyncio.wait((asked,))
            except asyncio.CancelledError:
                continue
        if not asked.cancelled():
            asked.exception()
        raise
