# SPDX-License-Identifier: Apache-2.0
"""A tier around a tier that fails in every way on request, shipped for tests and for trying out what a server does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from kvgrpc.core.types import ObjectName
from kvgrpc.tiers.base import DAMAGED, FaultReason, Tier, TierFault


class FaultyTier:
    """Steered by: ``fault`` (raised by every call while set; for SHORT, FOREIGN and CORRUPT only by reads, after the
    buffers were filled with something else), ``delay_s`` and ``bytes_per_s`` (of reads and writes), ``hang`` /
    ``resume`` (all calls wait), ``healthy``.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.down = False
        self.fault: FaultReason | None = None
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None
        self.calls = 0

    def hang(self) -> None:
        """Makes calls wait until ``resume``."""
        self._flowing.clear()

    def resume(self) -> None:
        """Ends ``hang``."""
        self._flowing.set()

    @property
    def name(self) -> str:
        return self._tier.name

    @property
    def healthy(self) -> bool:
        return self._tier.healthy and not self.down

    @property
    def counters(self) -> Mapping[str, int]:
        return self._tier.counters

    async def exists(self, names: Sequence[str]) -> list[bool]:
        await self._flow("exists")
        return await self._tier.exists(names)

    async def read(self, object: ObjectName, into: Sequence[memoryview]) -> None:
        if self.fault in DAMAGED:
            for part in into:
                part[:] = b"\x5a" * len(part)
            raise TierFault(self.fault, f"{object.name}: damage was asked for")
        await self._flow("read", object.size_bytes)
        await self._tier.read(object, into)

    async def write(self, object: ObjectName, data: Sequence[memoryview]) -> None:
        await self._flow("write", object.size_bytes)
        await self._tier.write(object, data)

    async def remove(self, name: str) -> None:
        await self._flow("remove")
        await self._tier.remove(name)

    async def usage(self) -> int:
        await self._flow("usage")
        return await self._tier.usage()

    async def close(self) -> None:
        self.resume()
        await self._tier.close()

    async def _flow(self, what: str, size_bytes: int = 0) -> None:
        self.calls += 1
        await self._flowing.wait()
        pause_s = self.delay_s * (size_bytes > 0) + (size_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)
        if pause_s:
            await asyncio.sleep(pause_s)
        if self.fault is not None and self.fault not in DAMAGED:
            raise TierFault(self.fault, f"{what} of {self.name} was told to fail")
